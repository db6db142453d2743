"""The rate at which waiting requests are dispatched, a second. Pure.

    rate = dispatches / time, both weighted by exp(-age / WINDOW_S)

Only time in which some request waits counts, so that an hour without requests lowers no rate.
"""

from math import exp

WINDOW_S = 5.0
"""Seconds after which a dispatch, or a second of waiting, has 37 % (1 / e) of its weight."""


class DrainRate:
    """Dispatches a second, over the time in which requests wait."""

    __slots__ = ("_at_s", "_count", "_span_s")

    def __init__(self) -> None:
        self._count = 0.0
        self._span_s = 0.0
        """Weighted seconds in which some request waited, WINDOW_S at most."""
        self._at_s: float | None = None
        """Time up to which `_count` and `_span_s` are weighted; None: no request waits."""

    def began(self, now_s: float) -> None:
        """Records that a request waits, after a time in which none did."""
        self._at_s = now_s

    def ended(self, now_s: float) -> None:
        """Records that no request waits any more."""
        self._pass(now_s)
        self._at_s = None

    def went(self, now_s: float) -> None:
        """Counts a dispatched request."""
        self._pass(now_s)
        self._count += 1.0

    def per_s(self, now_s: float) -> float:
        """Dispatches a second; 0: none yet."""
        count, span_s = self._weighted(now_s)
        return count / span_s if span_s > 0 else 0.0

    def wait_s(self, places: float, now_s: float) -> float | None:
        """Seconds in which `places` requests are dispatched; None: none was dispatched yet."""
        rate = self.per_s(now_s)
        return places / rate if rate > 0 else None

    def _pass(self, now_s: float) -> None:
        if self._at_s is not None and now_s > self._at_s:
            self._count, self._span_s = self._weighted(now_s)
            self._at_s = now_s

    def _weighted(self, now_s: float) -> tuple[float, float]:
        if self._at_s is None or now_s <= self._at_s:
            return self._count, self._span_s
        kept = exp((self._at_s - now_s) / WINDOW_S)
        return self._count * kept, self._span_s * kept + WINDOW_S * (1.0 - kept)
