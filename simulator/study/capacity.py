"""The smallest fleet that keeps a promise: a statistic of the time to first token is in a bound.

    try 1, 2, 4, ... workers until a fleet keeps the promise, or doubling the fleet changes nothing;
    bisect between this size and the last size that failed;
    try the next larger size, which must keep the promise, too

More workers need not mean less waiting: each has a cache of its own, and a larger fleet spreads
prefixes thinner. So a size counts only if the next larger size keeps the promise as well; if it
doesn't, the search continues upwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from simulator.traffic.results import NOTHING_COUNTS, Outcome, RunResult, WarmUp

ALIKE = 0.001
"""Share of the time to first token by which two fleets may differ and still count as alike."""
Percentile = Literal["mean", "p50", "p90", "p99"]


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one size of the fleet."""

    workers: int
    ttft_s: float
    """The promised statistic of the time to first token, in s; inf when it includes failed
    requests."""
    kept: bool


@dataclass(frozen=True, slots=True)
class Capacity:
    """The smallest fleet, and all trials."""

    workers: int | None
    """None: not even the largest allowed fleet keeps the promise."""
    trials: Sequence[Trial]
    """All trials, in order of size."""
    alone_s: float | None = None
    """The promised statistic, in s, of a fleet so large that no request waits for another, if even
    that fleet misses the promise; else None."""

    @property
    def is_monotone(self) -> bool:
        """Whether every tried size above a size that keeps the promise keeps it, too."""
        kept = [trial.kept for trial in self.trials]
        return kept == sorted(kept)

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, in which an infinite time is null."""
        trials = [
            {"workers": trial.workers, "ttft_ms": 1e3 * trial.ttft_s, "kept": trial.kept}
            for trial in self.trials
        ]
        return {"workers": self.workers, "trials": trials}


def smallest_fleet(
    measure: Callable[[int], float], ttft_s: float, *, least: int = 1, most: int = 256
) -> Capacity:
    """The smallest number of workers in [least, most] whose `measure` is at most `ttft_s`.

    measure(workers) -> seconds; called once for each size, at most about 2 log2(most) times if more
    workers mean less waiting. For the size `most`, the next larger size is not tried. Raises
    ValueError for an empty range.
    """
    if not 1 <= least <= most:
        raise ValueError(
            f"there is no fleet of {least} to {most} workers: give 1 or more, the smaller first"
        )
    trials: dict[int, Trial] = {}

    def keeps(workers: int) -> bool:
        if workers not in trials:
            measured_s = measure(workers)
            trials[workers] = Trial(workers, measured_s, measured_s <= ttft_s)
        return trials[workers].kept

    def capacity(workers: int | None, alone_s: float | None = None) -> Capacity:
        return Capacity(workers, [trials[size] for size in sorted(trials)], alone_s)

    failed, size = least - 1, least
    while not keeps(size):
        if failed in trials and _alike(trials[failed].ttft_s, trials[size].ttft_s):
            return capacity(None, trials[size].ttft_s)
        if size == most:
            return capacity(None)
        failed, size = size, min(2 * size, most)
    while size - failed > 1:
        middle = (failed + size) // 2
        if keeps(middle):
            size = middle
        else:
            failed = middle
    while size < most and not (keeps(size) and keeps(size + 1)):
        size += 1
    return capacity(size if keeps(size) else None)


def _alike(before_s: float, after_s: float) -> bool:
    """Whether twice the workers made no difference: no request waits for another any more. Times in
    s."""
    return np.isfinite(after_s) and abs(before_s - after_s) <= ALIKE * after_s


def promised_ttft_s(run: RunResult, percentile: Percentile, warm_up: WarmUp) -> float:
    """The statistic `percentile` of a run's times to first token, in s.

    A failed or shed request counts as infinitely late. A percentile is the time of one request, not
    interpolated. Raises ValueError when no request counts, since any promise would be kept.
    """
    ttft_s = np.where(run.outcome == Outcome.SERVED, run.ttft_s, np.inf)[warm_up.counted(run)]
    if not len(ttft_s):
        raise ValueError(NOTHING_COUNTS)
    if percentile == "mean":
        return float(ttft_s.mean())
    return float(np.percentile(ttft_s, int(percentile[1:]), method="inverted_cdf"))


def capacity_table(capacity: Capacity, percentile: Percentile, ttft_s: float) -> Table:
    """A table of all trials."""
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
