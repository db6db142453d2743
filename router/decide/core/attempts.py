"""Bound on the time spent on failed attempts to dispatch waiting requests. Pure.

A request that waits for KV blocks, or for a few workers, may fail at each attempt while its pool
has room for others, and each report, heartbeat and message of a replica may have given it room. So
failed attempts have a budget, in workers weighed: a bucket that fills with time.

    cost of an attempt = ATTEMPT_ROWS + workers weighed
"""

from math import inf

ATTEMPT_ROWS = 100
"""Cost of an attempt beside the workers that it weighs, as a number of workers."""
ROWS_PER_S = 40_000
"""Workers weighed in vain a second: about a tenth of a core, 240 attempts a second at 64 workers,
36 at 1,000."""
ROWS_MAX = 10_000
"""Size of the bucket, in workers weighed: a quarter of a second."""


class VainAttempts:
    """Budget of failed attempts to dispatch a waiting request."""

    def __init__(self) -> None:
        self.count = 0
        self._left = float(ROWS_MAX)
        self._at_s = inf

    def may_be(self, now_s: float) -> bool:
        """Whether the budget allows a further attempt now."""
        self._left = min(ROWS_MAX, self._left + ROWS_PER_S * max(0.0, now_s - self._at_s))
        self._at_s = now_s
        return self._left > 0

    def add(self, rows: int) -> None:
        """Counts a failed attempt that weighed this many workers (rows)."""
        self.count += 1
        self._left -= ATTEMPT_ROWS + rows
