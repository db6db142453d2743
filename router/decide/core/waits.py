"""Histogram of the waits of requests that got a worker. Pure."""

from bisect import bisect_left
from itertools import accumulate

BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Waits:
    """Counts waits by their length in seconds."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._counts = [0] * (len(BUCKETS_S) + 1)

    def add(self, waited_s: float) -> None:
        """Counts a wait that has ended."""
        self.total_s += waited_s
        self._counts[bisect_left(BUCKETS_S, waited_s)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Pairs of (upper bound in s, number of waits up to it), as Prometheus wants them."""
        bounds = (*map(str, BUCKETS_S), "+Inf")
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
