"""Counts of every pick, in plain numbers that become metrics when they are read.

prometheus_client takes a lock for each count, and walks all buckets for each duration: as much work
as a tenth of a decision. The event loop counts alone here, and scrapes read what is there.
"""

import numpy as np

from events.plane.facts import TIER_NAMES

STAGES = ("hash", "match", "cost", "total")
TIERS = (*TIER_NAMES.values(), "predicted")
BUCKETS_S = (
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1,
)  # fmt: skip
RATIO_DECISIONS = 1000
"""Decisions that kvroute_kv_hit_ratio looks back on."""
MODELS_MAX = 64
"""Models whose picks are counted apart: the first that get any. Later ones count together."""
OTHER_MODEL = "other"
"""Name in metrics of all later models together."""


class Durations:
    """A histogram of durations in seconds."""

    def __init__(self) -> None:
        self.counts = np.zeros(len(BUCKETS_S) + 1, np.int64)
        self.total_s = np.zeros(1)


class PickTally:
    """Counts of picks since the start, in arrays that native code writes (counts.pyx)."""

    def __init__(self) -> None:
        self.stages = {stage: Durations() for stage in STAGES}
        self.tokens = np.zeros(2 + len(TIERS), np.int64)
        """Tokens of prompts, of the longest usable overlaps, and by tier of those taken."""
        self.recent = np.zeros((RATIO_DECISIONS, 2), np.int64)
        """Usable overlap and prompt tokens of the last picks, in a ring."""
        self.by_model = np.zeros((MODELS_MAX + 1, 3), np.int64)
        """Picks, prompt tokens and usable overlap of each model, in the rows of `model_row`."""
        self.model_rows: dict[str, int] = {}
        self.picks = np.zeros(1, np.int64)
        self.ttfts = 0
        """Picks of policies that predict the time to the first token,"""
        self.ttft_s = 0.0
        """those times, in sum,"""
        self.ttft_best_s = 0.0
        """and the shortest that each of them could have had."""

    def model_row(self, model: str) -> int:
        """Row of `by_model` in which a model's picks are counted; the last row is that of all
        models beyond MODELS_MAX.

        model: the name that the picked worker's engine gives, never a name that a request made up.
        """
        row = self.model_rows.get(model, MODELS_MAX)
        if row == MODELS_MAX and len(self.model_rows) < MODELS_MAX:
            row = self.model_rows[model] = len(self.model_rows)
        return row

    def models(self) -> dict[str, list[int]]:
        """Picks, prompt tokens and usable overlap tokens, by model; models beyond MODELS_MAX are
        OTHER_MODEL.
        """
        counts = self.by_model.tolist()
        picks = {model: counts[row] for model, row in self.model_rows.items()}
        if counts[MODELS_MAX][0]:
            mine = picks.get(OTHER_MODEL, [0, 0, 0])  # a model may have that very name
            picks[OTHER_MODEL] = [a + b for a, b in zip(mine, counts[MODELS_MAX], strict=True)]
        return picks

    def predicted(self, seconds: float, best_s: float) -> None:
        """Counts a predicted time to the first token. best_s: the shortest predicted for any
        worker.
        """
        self.ttfts += 1
        self.ttft_s += seconds
        self.ttft_best_s += best_s
