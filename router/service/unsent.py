"""Tells when the answer of a call that waits for one answer does not get out.

The small HTTP/2 tells it by itself (router/http2/calls.py). grpc.aio sends an answer after its
handler has returned, and tells no handler whether that worked. The task that runs the call waits
for it, so what it waits for is looked at. What was handed to the connection counts as sent: of a
client that gives up from then on gRPC tells nothing.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from router.http2.calls import Call

_KNOWN = hasattr(asyncio.Task, "_fut_waiter")
"""Whether tasks say what they wait for; every release of CPython so far has them do so."""


def when_unsent(context: Any, end: Callable[[], None]) -> None:
    """Calls end() if what the running handler returns next can't be sent: the call was cancelled,
    its deadline has passed, or the connection is lost."""
    if isinstance(context, Call):
        context.when_unsent(end)
        return
    task = asyncio.current_task()
    if task is not None and _KNOWN:
        asyncio.get_running_loop().call_soon(_look, task, end)


def _look(task: "asyncio.Task[Any]", end: Callable[[], None]) -> None:
    """The handler has returned, and its task waits until the answer is sent, unless that failed."""
    sending: asyncio.Future[Any] | None = getattr(task, "_fut_waiter")  # noqa: B009  # not typed
    if sending is not None:
        sending.add_done_callback(lambda sent: _over(sent, end))
    else:
        end()


def _over(sent: "asyncio.Future[Any]", end: Callable[[], None]) -> None:
    if sent.cancelled() or sent.exception() is not None:
        end()
