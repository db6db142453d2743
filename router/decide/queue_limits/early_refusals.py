"""Requests whose wait can't end in time, by the pace at which requests went lately. Pure.

    expected wait = requests that go until this one does / drain rate
    too long:       now_s + expected wait > due_s

due_s is the end of the wait (the call's deadline, queue_timeout_ms or queue.timeout_s), and with
`slo` the time at which ttft_slo_ms wants the first token, if that is earlier. A request is looked
at as it comes, and every LOOK_EACH_S while it waits.

Law: with `never` nothing is kept of any request.
"""

from collections.abc import Iterable

from router.config.settings.queue_settings import EarlyRefusal
from router.decide.queue_limits.standing import Standing
from router.decide.waiter import Waiter

LOOK_EACH_S = 1.0
"""Seconds between two looks at a request: 4,096 that wait take about a hundredth of a core."""


class EarlyRefusals:
    """The waiting requests to check for a wait that can't end in time."""

    def __init__(self, mode: EarlyRefusal, waiting: Iterable[Waiter], now_s: float) -> None:
        """waiting: requests that wait already."""
        self.mode: EarlyRefusal = mode
        self._looks = Standing()
        """When each request that waits is looked at again."""
        for waiter in waiting:
            self.add(waiter, now_s)

    def add(self, waiter: Waiter, now_s: float) -> None:
        """Adds a waiting request."""
        if self.mode != "never":
            self._looks.put(waiter, now_s + LOOK_EACH_S)

    def discard(self, waiter: Waiter) -> None:
        """Removes a request that waits no longer."""
        if self.mode != "never":
            self._looks.discard(waiter)

    def take(self, now_s: float, most: int) -> list[Waiter]:
        """Returns requests to check now, at most `most`; each is due again after LOOK_EACH_S."""
        due: list[Waiter] = []
        while len(due) < most:
            lowest = self._looks.lowest()
            if lowest is None or lowest[0] > now_s:
                break
            self.add(lowest[1], now_s)
            due.append(lowest[1])
        return due

    def short_s(self, waiter: Waiter, wait_s: float, now_s: float) -> float:
        """Seconds by which an expected wait is too long; 0 or less: the request can go in time."""
        due_s = waiter.expires_s
        if self.mode == "slo":
            due_s = min(due_s, waiter.deadline_s)
        return now_s + wait_s - due_s
