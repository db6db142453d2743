"""Last reports, delivered in tasks of their own after their requests have ended.

Law: a last report is delivered, or counted in `lost`; pending reports never exceed their bound.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from typing_extensions import override

from kvroute.client.messages.pick import Pick
from kvroute.v1 import FailureReason, Progress, ProgressOutcome


class Send(Protocol):
    """Reports a step to the router; raises KvRouteError."""

    async def __call__(
        self, progress: Progress, *, timeout_s: float, attempts: int | None
    ) -> ProgressOutcome: ...


class Reports:
    """One client's reports: how they are sent, those under way, and the number lost."""

    def __init__(
        self,
        send: Send,
        *,
        timeout_s: float,
        wait_s: float,
        pending_max: int,
        began: Callable[[Pick], None] = lambda _: None,
        ended: Callable[[Pick, FailureReason.ValueType | None, bool], None] = lambda *_: None,
        silent: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """send: reports a step. timeout_s: seconds for a last report with its retries. wait_s:
        longest that the end of a request waits for its last report, seconds. pending_max: last
        reports under way.
        began, ended: called for each request; `ended` with the failure's reason (None: success) and
        whether the connection was refused.
        silent: whether the router that made a reservation is silent now.
        """
        self.send = send
        self.began = began
        self.ended = ended
        self.silent = silent
        self.timeout_s = timeout_s
        self.wait_s = wait_s
        self.lost = 0
        self._pending: set[asyncio.Task[None]] = set()
        self._pending_max = pending_max

    @override
    def __repr__(self) -> str:
        return f"<Reports {len(self._pending)} pending, {self.lost} lost>"

    @property
    def pending(self) -> int:
        """Number of last reports under way."""
        return len(self._pending)

    def start(self, deliver: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None] | None:
        """Delivers a last report in a task of its own; with pending_max under way, counts the
        report as lost and returns None."""
        if len(self._pending) >= self._pending_max:
            self.lost += 1
            return None
        task = asyncio.create_task(deliver())
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        return task

    async def flush(self) -> None:
        """Waits until no last report is under way; each has its own deadline."""
        while self._pending:
            await asyncio.wait(self._pending)
