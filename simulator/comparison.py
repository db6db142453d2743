"""Runs of one trace at several rates, with several policies and seeds, each from a cold start."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from simulator.options import RunOptions
from simulator.report import Comparison, Run, Watcher, run_label
from simulator.results import OnProgress, RunResult, Slo, WarmUp, aggregate
from simulator.reuse import Ceiling, reuse_ceiling
from simulator.trace import Trace

Play = Callable[[RunOptions, Trace, OnProgress | None], RunResult]
"""simulator.world.run, or whatever stands for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A trace, and what of it is played how. Times are those of the trace's own clock."""

    trace: Trace
    """As recorded."""
    tick_s: float | None = None
    """Stamps are spread over so many seconds; None: as `Trace.spread` finds."""
    from_s: float = 0.0
    until_s: float = np.inf
    warm_up_s: float = 0.0
    """After `from_s`: played, but not counted."""
    warm_up_requests: int = 0

    def at(self, rate: float, seed: int) -> Trace:
        """What is played: its clock goes `rate` times faster. Raises ValueError for a bad rate."""
        spread = self.trace.spread(self.tick_s, seed)
        return spread.window(self.from_s, self.until_s).at_rate(rate)

    def warm_up(self, rate: float) -> WarmUp:
        """The same requests at every rate."""
        return WarmUp(self.warm_up_s / rate, self.warm_up_requests)


def compare(
    traffic: Traffic,
    fleets: Sequence[RunOptions],
    play: Play,
    watcher: Watcher,
    *,
    rates: Sequence[float],
    seeds: Sequence[int],
    slo: Slo,
) -> list[Comparison]:
    """Plays the traffic for every rate, fleet (a policy each) and seed; one Comparison a rate.

    Raises ValueError for traffic without requests, and for what `Traffic.at` refuses.
    """
    comparisons = []
    for rate in rates:
        traces = [traffic.at(rate, seed) for seed in seeds]
        if not traces[0].requests:
            raise ValueError("no request of the trace is left to play")
        runs = []
        warm_up = traffic.warm_up(rate)
        for fleet in fleets:
            label = run_label(fleet.policy, fleet.order)
            if len(rates) > 1:
                label += f" at {rate:g}x"
            results = []
            for seed, trace in zip(seeds, traces, strict=True):
                on_progress = watcher.begin(label)
                results.append(play(replace(fleet, seed=seed), trace, on_progress))
            run = Run(results[0], [aggregate(one, warm_up=warm_up, slo=slo) for one in results])
            watcher.end(label, run.numbers)
            runs.append(run)
        fleet = fleets[0]
        comparisons.append(
            Comparison(
                trace=traffic.trace.name,
                workers=fleet.workers,
                engine=fleet.engine,
                rate=rate,
                ceiling=ceiling_of(traces[0], runs[0].first, warm_up),
                slo=slo,
                seeds=seeds,
                runs=runs,
            )
        )
    return comparisons


def ceiling_of(trace: Trace, run: RunResult, warm_up: WarmUp) -> Ceiling:
    """What one infinite cache would have reached, of the requests that count, as they came."""
    order = np.argsort(run.arrival_s, kind="stable")
    requests = [trace.requests[i] for i in order]
    return reuse_ceiling(requests, run.block_size, counted=warm_up.counted(run)[order])
