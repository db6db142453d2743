"""An engine's clock: engine seconds, which may pass faster than wall seconds.

The clock is an argument of the engine: scaled in the demo, virtual in tests, where time passes only
between timers and no test sleeps.
"""

import asyncio
import heapq
import time
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")

_TURNS = 10
"""Turns of the event loop at one instant of virtual time: more than any chain of awaits needs."""


class Timer(Protocol):
    """A scheduled call, which can be cancelled."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Engine seconds since the clock's start, and calls at a later time."""

    def now_s(self) -> float: ...

    def unix_s(self) -> float:
        """Wall time for published values, such as a batch's timestamp."""

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        """Calls back at engine time `when_s`, or at once if that has passed."""


async def sleep_until(clock: Clock, when_s: float) -> None:
    """Returns at engine time `when_s`."""
    reached = asyncio.Event()
    timer = clock.call_at(when_s, reached.set)
    try:
        await reached.wait()
    finally:
        timer.cancel()


class ScaledClock:
    """The event loop's time, `speed` engine seconds to a wall second. Needs a running loop."""

    def __init__(self, speed: float = 1.0) -> None:
        if speed <= 0:
            raise ValueError(f"speed must be positive, got {speed}")
        self.speed = speed
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()

    def now_s(self) -> float:
        return (self._loop.time() - self._start_s) * self.speed

    def unix_s(self) -> float:
        return time.time()

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        return self._loop.call_at(self._start_s + when_s / self.speed, callback)


class _VirtualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Time that passes only in `run`, from one timer to the next."""

    def __init__(self, unix_start_s: float = 1_700_000_000.0) -> None:
        self._now_s = 0.0
        self._unix_start_s = unix_start_s
        self._timers: list[tuple[float, int, _VirtualTimer]] = []
        self._order = count()

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._unix_start_s + self._now_s

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        timer = _VirtualTimer(callback)
        heapq.heappush(self._timers, (max(when_s, self._now_s), next(self._order), timer))
        return timer

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Passes time from timer to timer until `work` is done; returns its result.

        Tasks get a few turns of the event loop at each instant; they may wait for this clock's
        timers and for each other, not for sockets. Raises RuntimeError, and cancels `work`, when no
        timer is left that could continue it.
        """
        task = asyncio.ensure_future(work)
        while True:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if task.done():
                return task.result()
            if not self._timers:
                task.cancel()
                raise RuntimeError("no timer is left, and the work is not done")
            self._now_s, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()
