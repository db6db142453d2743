"""What every pick counts, in plain numbers that become metrics when they are read.

prometheus_client takes a lock for each count, and walks all buckets for each duration: as much work
as a tenth of a decision. The event loop counts alone here, and scrapes read what is there.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from time import perf_counter

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from events.facts import TIER_NAMES
from router.decision import Pick

STAGES = ("hash", "match", "cost", "total")
TIERS = (*TIER_NAMES.values(), "predicted")
_BUCKETS_S = (
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1,
)  # fmt: skip
_RATIO_DECISIONS = 1000
"""Decisions that kvroute_kv_hit_ratio looks back on."""


class Durations:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BUCKETS_S) + 1)
        self._total_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(_BUCKETS_S, seconds)] += 1
        self._total_s += seconds

    def add_to(self, family: HistogramMetricFamily, stage: str) -> None:
        names = (*map(str, _BUCKETS_S), "+Inf")
        counts = map(float, accumulate(self._counts))
        family.add_metric([stage], list(zip(names, counts, strict=True)), self._total_s)


class PickTally(Collector):
    """Picks since the start."""

    def __init__(self) -> None:
        self.stages = {stage: Durations() for stage in STAGES}
        self._prompt_tokens = 0
        self._overlap_tokens = [0] * len(TIERS)
        self._reachable_tokens = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RATIO_DECISIONS)
        """Usable overlap and prompt tokens."""

    def count(self, pick: Pick) -> None:
        """A pick was made."""
        overlap = pick.overlap
        prompt_tokens = pick.decision.rows.prompt_tokens
        self._prompt_tokens += prompt_tokens
        for i, tokens in enumerate(overlap[-len(TIERS) :]):
            self._overlap_tokens[i] += tokens
        self._reachable_tokens += pick.decision.best_overlap_tokens()
        self._recent.append((overlap.usable, prompt_tokens))

    @override
    def collect(self) -> Iterator[Metric]:
        durations = HistogramMetricFamily(
            "kvroute_decision_seconds", "Time a decision takes, by stage.", labels=["stage"]
        )
        for stage, seconds in self.stages.items():
            seconds.add_to(durations, stage)
        yield durations
        yield CounterMetricFamily(
            "kvroute_prompt_tokens", "Prompt tokens of picks.", value=self._prompt_tokens
        )
        overlap = CounterMetricFamily(
            "kvroute_overlap_tokens",
            "Usable overlap on the picked worker, by the fastest tier that holds it.",
            labels=["tier"],
        )
        for tier, tokens in zip(TIERS, self._overlap_tokens, strict=True):
            overlap.add_metric([tier], tokens)
        yield overlap
        yield CounterMetricFamily(
            "kvroute_overlap_reachable_tokens",
            "Usable overlap on the worker that held most; less what was taken: what balance cost.",
            value=self._reachable_tokens,
        )
        asked = sum(prompt_tokens for _, prompt_tokens in self._recent)
        usable = sum(usable for usable, _ in self._recent)
        yield GaugeMetricFamily(
            "kvroute_kv_hit_ratio",
            f"Usable overlap / prompt tokens over the last {_RATIO_DECISIONS} picks.",
            value=usable / asked if asked else 0.0,
        )


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
