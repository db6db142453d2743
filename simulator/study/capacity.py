"""The smallest fleet that keeps a promise about the time to first token.

    sizes 1, 2, 4, ... until one keeps it; then halving between the last that failed and that one;
    then the next larger one, which must keep it too

More workers need not mean less waiting: each has a cache of its own, and a larger fleet spreads
prefixes thinner. So a size counts only if its neighbour above keeps the promise as well, and the
search goes on upwards when that one doesn't.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from simulator.traffic.results import NOTHING_COUNTS, Outcome, RunResult, WarmUp

Percentile = Literal["mean", "p50", "p90", "p99"]


@dataclass(frozen=True, slots=True)
class Trial:
    """What one size came to."""

    workers: int
    ttft_s: float
    """The number that was promised; inf when requests that failed are among it."""
    kept: bool


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer, and how it was found."""

    workers: int | None
    """None: not even the largest fleet that was allowed keeps the promise."""
    trials: Sequence[Trial]
    """In order of size."""

    @property
    def is_monotone(self) -> bool:
        """Whether, of all sizes tried, every one above a good one is good."""
        kept = [trial.kept for trial in self.trials]
        return kept == sorted(kept)


def smallest_fleet(
    measure: Callable[[int], float], ttft_s: float, *, least: int = 1, most: int = 256
) -> Capacity:
    """The smallest number of workers in [least, most] whose `measure` is at most `ttft_s`.

    measure(workers) -> seconds; called once a size, at most about 2 log2(most) times where more
    workers do mean less waiting. A size at `most` has no neighbour that could speak against it.
    Raises ValueError for an empty range.
    """
    if not 1 <= least <= most:
        raise ValueError(f"a fleet of {least} to {most} workers is none")
    trials: dict[int, Trial] = {}

    def keeps(workers: int) -> bool:
        if workers not in trials:
            measured_s = measure(workers)
            trials[workers] = Trial(workers, measured_s, measured_s <= ttft_s)
        return trials[workers].kept

    def found(workers: int | None) -> Capacity:
        return Capacity(workers, [trials[size] for size in sorted(trials)])

    failed, size = least - 1, least
    while not keeps(size):
        if size == most:
            return found(None)
        failed, size = size, min(2 * size, most)
    while size - failed > 1:
        middle = (failed + size) // 2
        if keeps(middle):
            size = middle
        else:
            failed = middle
    while size < most and not (keeps(size) and keeps(size + 1)):
        size += 1
    return found(size if keeps(size) else None)


def promised_ttft_s(run: RunResult, percentile: Percentile, warm_up: WarmUp) -> float:
    """A run's time to first token in the form that was promised, in s.

    A request that failed or was shed waits for ever. Percentiles are values that a request had.
    Raises ValueError when no request counts: any promise would be kept.
    """
    ttft_s = np.where(run.outcome == Outcome.SERVED, run.ttft_s, np.inf)[warm_up.counted(run)]
    if not len(ttft_s):
        raise ValueError(NOTHING_COUNTS)
    if percentile == "mean":
        return float(ttft_s.mean())
    return float(np.percentile(ttft_s, int(percentile[1:]), method="inverted_cdf"))


def capacity_table(capacity: Capacity, percentile: Percentile, ttft_s: float) -> Table:
    """All sizes that were tried."""
    title = f"time to first token, {percentile} <= {1e3 * ttft_s:g} ms"
    shown = Table(box=SIMPLE, title=title, min_width=len(title) + 1)
    for name in ("workers", percentile, ""):
        shown.add_column(name, justify="right")
    for trial in capacity.trials:
        ttft = f"{1e3 * trial.ttft_s:,.0f} ms" if np.isfinite(trial.ttft_s) else "failed requests"
        verdict = "kept" if trial.kept else "missed"
        answer = " <- smallest" if trial.workers == capacity.workers else ""
        shown.add_row(f"{trial.workers}", ttft, verdict + answer)
    return shown
