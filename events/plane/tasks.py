"""Background tasks that can't fail unseen: a failure is logged, and the owner ends the process.

Law: only a bug of ours may fail a task. Errors of NATS, a relay, a worker or a caller are handled
where they occur, and cost a message or an attempt.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

NAMED_MAX = 300

log = logging.getLogger("kvroute.tasks")

OnFailure = Callable[[BaseException], None]


class Tasks:
    """The background tasks of one owner. on_failure: called with each task's error."""

    def __init__(self, on_failure: OnFailure) -> None:
        self._on_failure = on_failure
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Runs work in the background."""
        _ = self.spawn_task(work, name)

    def spawn_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs work in the background, for an owner that may cancel it."""
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self) -> None:
        """Cancels all tasks and waits until they have ended."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical(
                "this process ends, since its background task %r failed: %s",
                task.get_name(),
                named(error),
                exc_info=error,
            )
            self._on_failure(error)


def named(error: BaseException) -> str:
    """An error in one line of NAMED_MAX characters: its class, and the first line of its text."""
    return f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")[:NAMED_MAX]
