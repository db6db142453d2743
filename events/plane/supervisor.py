"""Keeps the background work of one scope running: a worker's relay, a probe, one publisher.

Law: work that raises ends nothing but itself. The failure is counted, logged, shown as trouble of
its scope, and the work starts again after a back-off (`keep`) or has ended (`once`). Work whose
failure must end the process belongs to `Tasks` instead (events/plane/tasks.py).
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from events.engines.endpoints import masked

BACKOFF_S = 0.5
"""Pause after the first failure, seconds; doubles with each further failure."""
BACKOFF_MAX_S = 30.0
STEADY_S = 60.0
"""Seconds without a failure after which the next failure has the shortest pause again."""
TROUBLE_MAX = 200
"""Characters of an error's text that are kept."""

log = logging.getLogger("kvroute.supervisor")


@dataclass(slots=True)
class Trouble:
    """Failures of one background task."""

    error: str
    failures: int
    """Failures in a row, without STEADY_S between them."""
    until: float
    """Loop time until which the trouble is shown."""


class Supervisor:
    """Runs the background work of one scope, such as a worker's relay."""

    def __init__(
        self,
        scope: str,
        rng: random.Random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_trouble: Callable[[str, Exception], None] = lambda *_: None,
    ) -> None:
        """scope: the owner of the work, for logs. on_trouble: called with the name of the work and
        its error at each failure."""
        self.scope = scope
        self.failures: Counter[str] = Counter()
        """Name of the work -> failures."""
        self._rng = rng
        self._sleep = sleep
        self._on_trouble = on_trouble
        self._troubles: dict[str, Trouble] = {}
        self._running: set[asyncio.Task[None]] = set()

    @override
    def __repr__(self) -> str:
        return f"<Supervisor of {self.scope}: {len(self._running)} at work, {self.troubles()}>"

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
        """Runs work() in the background; again after each failure, until it returns."""
        return self._start(self._keep(work, name), name)

    def once(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
        """Runs work() in the background; a failure is recorded, and ends it."""
        return self._start(self._once(work, name), name)

    def failed(self, name: str, error: Exception) -> None:
        """Records a failure after which the caller goes on by itself."""
        self._record(name, error, "failed")

    def troubles(self) -> dict[str, str]:
        """Name of the work -> its last error, until it has run for STEADY_S without a failure."""
        now = asyncio.get_running_loop().time()
        return {
            name: trouble.error for name, trouble in self._troubles.items() if now < trouble.until
        }

    async def close(self) -> None:
        """Cancels all work and waits until it has ended."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{name} of {self.scope}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _once(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        try:
            await work()
        except Exception as error:  # the failure of this scope alone: see the law
            self.failed(name, error)

    async def _keep(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        while True:
            try:
                await work()
                return
            except Exception as error:  # the failure of this scope alone: see the law
                pause_s = self._record(name, error, "failed and will be retried")
            await self._sleep(pause_s)

    def _record(self, name: str, error: Exception, what: str) -> float:
        """Records a failure; returns the pause before the next attempt, seconds."""
        now = asyncio.get_running_loop().time()
        before = self._troubles.get(name)
        failures = 1 if before is None or now >= before.until else before.failures + 1
        text = masked(f"{type(error).__name__}: {error}")[:TROUBLE_MAX].rstrip(": ")
        pause_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(failures - 1, 16))
        pause_s *= self._rng.uniform(0.5, 1.0)
        self.failures[name] += 1
        if before is None or before.error != text or failures == 1:
            log.warning("%s of %s %s", name, self.scope, what, exc_info=error)
        self._troubles[name] = Trouble(text, failures, now + pause_s + STEADY_S)
        self._on_trouble(name, error)
        return pause_s
