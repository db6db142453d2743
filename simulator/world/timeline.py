"""Virtual time: timed calls in a heap, and periodic calls (clocks). Pure.

Calls of the same instant are made in the order in which they were added, clocks before calls. A
quiet is a time without requests in flight. Every period outside it is played; the end of a long
quiet is skipped, since nothing can happen in it.

Law: time never goes back.
"""

import heapq
from collections.abc import Callable

Work = Callable[[], None]

QUIET_S = 300.0
"""Seconds of a quiet that are played before the rest is skipped: predictions and leases end in
them."""


class Timeline:
    """The clock of a run."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.quiet_since_s: float | None = 0.0
        """Time at which the last request in flight ended; None while requests are in flight."""
        self.strokes = 0
        """Periodic calls made so far."""
        self._calls: list[tuple[float, int, Work]] = []
        self._clocks: list[tuple[float, int, float, float, Work]] = []
        """(next time, order, period, lead, call)"""
        self._order = 0

    def at(self, when_s: float, work: Work) -> None:
        """Calls `work` at when_s, or at once if that has passed."""
        self._order += 1
        heapq.heappush(self._calls, (max(when_s, self.now_s), self._order, work))

    def every(self, period_s: float, first_s: float, work: Work, lead_s: float = 0.0) -> None:
        """Calls `work` at first_s and every period_s after that. lead_s: where a long time without
        other calls is skipped, these calls go on so many seconds before its end."""
        self._order += 1
        heapq.heappush(self._clocks, (first_s, self._order, period_s, lead_s, work))

    def step(self) -> None:
        """Makes the next call, at its time. A periodic call must have been added before."""
        when_s, order, period_s, lead_s, work = self._clocks[0]
        if self._calls and self._calls[0][0] < when_s:
            self.now_s, _, work = heapq.heappop(self._calls)
        elif self._skip_quiet(when_s):
            return
        else:
            heapq.heapreplace(self._clocks, (when_s + period_s, order, period_s, lead_s, work))
            self.now_s = max(when_s, self.now_s)
            self.strokes += 1
        work()

    def _skip_quiet(self, when_s: float) -> bool:
        """Moves all periodic calls to just before the next timed call if that is far away; whether
        it did."""
        if self.quiet_since_s is None or not self._calls:
            return False
        lead_s = max(clock[3] for clock in self._clocks)
        skipped_s = float(int(self._calls[0][0] - when_s - lead_s - 1.0))
        if when_s - self.quiet_since_s <= QUIET_S or skipped_s <= lead_s:
            return False
        self._clocks = [
            (at_s + skipped_s - lead_s, order, period_s, lead_s, work)
            for at_s, order, period_s, lead_s, work in self._clocks
        ]
        heapq.heapify(self._clocks)
        self.quiet_since_s = when_s + skipped_s
        return True
