"""What every pick counts, in plain numbers that become metrics when they are read.

prometheus_client takes a lock for each count, and walks all buckets for each duration: as much work
as a tenth of a decision. The event loop counts alone here, and scrapes read what is there.
"""

from bisect import bisect_left
from time import perf_counter

import numpy as np

from events.facts import TIER_NAMES
from router.candidates import Column
from router.decision import Decision, Pick

STAGES = ("hash", "match", "cost", "total")
TIERS = (*TIER_NAMES.values(), "predicted")
BUCKETS_S = (
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1,
)  # fmt: skip
RATIO_DECISIONS = 1000
"""Decisions that kvroute_kv_hit_ratio looks back on."""


class Durations:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self.counts = np.zeros(len(BUCKETS_S) + 1, np.int64)
        self.total_s = np.zeros(1)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s[0] += seconds


class PickTally:
    """Picks since the start. Arrays, so that the lane (router/lane.pyx) counts in them, too."""

    def __init__(self) -> None:
        self.stages = {stage: Durations() for stage in STAGES}
        self.tokens = np.zeros(2 + len(TIERS), np.int64)
        """Of prompts, of the longest usable overlaps, and of those taken, by tier."""
        self.recent = np.zeros((RATIO_DECISIONS, 2), np.int64)
        """Usable overlap and prompt tokens of the last picks, in a ring."""
        self.picks = np.zeros(1, np.int64)
        self.ttfts = 0
        """Picks of policies that predict the time to the first token,"""
        self.ttft_s = 0.0
        """those times, in sum,"""
        self.ttft_best_s = 0.0
        """and the shortest that each of them could have had."""

    def count(self, pick: Pick) -> None:
        """A pick was made."""
        overlap = pick.overlap
        decision = pick.decision.computing
        prompt_tokens = decision.rows.prompt_tokens
        reachable = decision.best_overlap_tokens()
        self.tokens += (prompt_tokens, reachable, *overlap[-len(TIERS) :])
        self.recent[self.picks[0] % RATIO_DECISIONS] = overlap.usable, prompt_tokens
        self.picks += 1
        if (seconds := decision.scores.ttft_s) is not None:
            self._predicted(decision, seconds)

    def _predicted(self, decision: Decision, seconds: Column) -> None:
        can = [not reason for reason in decision.excluded]
        self.ttfts += 1
        self.ttft_s += seconds.item(decision.order[0])
        self.ttft_best_s += float(seconds[can].min())


class StageClock:
    """Measures the stages of one decision: `core.route` calls it at the end of each."""

    def __init__(self, stages: dict[str, Durations]) -> None:
        self._stages = stages
        self._started = self._last = perf_counter()

    def __call__(self, stage: str) -> None:
        now = perf_counter()
        self._stages[stage].add(now - self._last)
        self._last = now

    def total(self) -> float:
        """Ends the measurement; seconds since it began."""
        seconds = perf_counter() - self._started
        self._stages["total"].add(seconds)
        return seconds
