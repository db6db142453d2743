"""Counts of every pick, in plain numbers that become metrics when they are read.

prometheus_client takes a lock for each count, and walks all buckets for each duration: as much work
as a tenth of a decision. The event loop counts alone here, and scrapes read what is there.
"""

from typing import NamedTuple

import numpy as np

from events.plane.facts import TIER_NAMES
from router.fleet.answers import LENGTHS, OTHER_POOL, POOLS_MAX

STAGES = ("hash", "match", "cost", "total")
TIERS = (*TIER_NAMES.values(), "predicted")
BUCKETS_S = (
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1,
)  # fmt: skip
RATIO_DECISIONS = 1000
"""Decisions that kvroute_kv_hit_ratio looks back on."""


class Durations:
    """A histogram of durations in seconds."""

    def __init__(self) -> None:
        self.counts = np.zeros(len(BUCKETS_S) + 1, np.int64)
        self.total_s = np.zeros(1)


class PoolPicks(NamedTuple):
    """Picks of workers of one model and role."""

    lengths: list[int]
    """Picks by the length of their prompts, one number for each bucket."""
    prompt_tokens: int
    overlap_tokens: list[int]
    """Usable overlap, by tier."""


class PickTally:
    """Counts of picks since the start, in arrays that native code writes (counts.pyx)."""

    def __init__(self) -> None:
        self.stages = {stage: Durations() for stage in STAGES}
        self.tokens = np.zeros(2 + len(TIERS), np.int64)
        """Sums over picks, in tokens: prompts, longest usable overlaps, picked overlaps by tier."""
        self.recent = np.zeros((RATIO_DECISIONS, 2), np.int64)
        """Usable overlap and prompt tokens of the last picks, in a ring."""
        self.by_pool = np.zeros((POOLS_MAX + 1, len(LENGTHS) + 2 + len(TIERS)), np.int64)
        """Picks by the length of their prompts, prompt tokens, and usable overlap by tier, in the
        rows of `pool_row`."""
        self.pool_rows = {OTHER_POOL: POOLS_MAX}
        self.picks = np.zeros(1, np.int64)
        self.ttfts = 0
        """Number of picks whose policy predicted a time to the first token."""
        self.ttft_s = 0.0
        """Sum of the predicted seconds to the first token of these picks."""
        self.ttft_best_s = 0.0
        """Sum of the shortest seconds predicted for any worker at these picks."""

    def pool_row(self, model: str, role: str) -> int:
        """Row of `by_pool` in which a pool's picks are counted; the last row is that of all pools
        beyond POOLS_MAX.

        model: the name that the picked worker's engine gives, never a name that a request made up.
        """
        row = self.pool_rows.get((model, role))
        if row is None:
            if len(self.pool_rows) > POOLS_MAX:
                return POOLS_MAX
            row = self.pool_rows[model, role] = len(self.pool_rows) - 1
        return row

    def pools(self) -> dict[tuple[str, str], PoolPicks]:
        """The picks of each model and role; pools beyond POOLS_MAX are OTHER_POOL."""
        counts = self.by_pool.tolist()
        return {
            pool: PoolPicks(
                lengths=counts[row][: len(LENGTHS) + 1],
                prompt_tokens=counts[row][len(LENGTHS) + 1],
                overlap_tokens=counts[row][len(LENGTHS) + 2 :],
            )
            for pool, row in self.pool_rows.items()
        }

    def predicted(self, seconds: float, best_s: float) -> None:
        """Counts a predicted time to the first token. best_s: the shortest predicted for any
        worker.
        """
        self.ttfts += 1
        self.ttft_s += seconds
        self.ttft_best_s += best_s
