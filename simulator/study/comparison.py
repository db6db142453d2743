"""Runs of one trace at several rates, with several policies and seeds, each from a cold start."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from simulator.study.progress import Watcher
from simulator.study.report import Comparison, Run, run_label
from simulator.study.series import groups_of
from simulator.traffic.callers import Callers
from simulator.traffic.results import (
    NOTHING_COUNTS,
    Integers,
    OnProgress,
    RunResult,
    Slo,
    WarmUp,
    aggregate,
)
from simulator.traffic.reuse import Ceiling, ceiling_of, reusable_blocks
from simulator.traffic.trace import Trace
from simulator.world.options import RunOptions

Play = Callable[[RunOptions, Trace, OnProgress | None], RunResult]
"""simulator.world.world.run, or a test's substitute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A trace, and the part of it that is played. Times are those of the trace's own clock."""

    trace: Trace
    """The trace as recorded."""
    tick_s: float | None = None
    """Requests of a time stamp are spread over so many seconds; None: see `Trace.spread`."""
    from_s: float = 0.0
    until_s: float = np.inf
    warm_up_s: float = 0.0
    """Seconds after `from_s` that are played but not counted."""
    warm_up_requests: int = 0
    callers: Callers = field(default_factory=Callers)
    """Tenants, priorities and SLOs that the trace doesn't have."""

    def at(self, rate: float, seed: int) -> Trace:
        """The trace to play, with its clock `rate` times faster.

        Raises ValueError for a bad rate, and when no request is left to play.
        """
        spread = self.trace.spread(self.tick_s, seed)
        played = spread.window(self.from_s, self.until_s).at_rate(rate)
        if not played.requests:
            raise ValueError("no request of the trace is left to play: see --from and --until")
        return self.callers.of(played, seed)

    def warm_up(self, rate: float) -> WarmUp:
        """The warm-up in the time of a run at this rate: the same requests at every rate."""
        return WarmUp(self.warm_up_s / rate, self.warm_up_requests)


class Reuse(NamedTuple):
    """Blocks of each prompt that one cache for all workers would have had; shape (requests,)."""

    infinite: Integers
    pooled: Integers
    """The same for one cache as large as those of the fleet together."""


def compare(
    traffic: Traffic,
    fleets: Sequence[RunOptions],
    play: Play,
    watcher: Watcher,
    *,
    rates: Sequence[float],
    seeds: Sequence[int],
    slo: Slo,
    jobs: int = 1,
) -> list[Comparison]:
    """Plays the traffic for every rate, fleet (a policy each) and seed; a Comparison for each rate.

    jobs: processes that share the work; with several, `play` must be importable there, and progress
    is shown only when a run ends. Raises ValueError as `Traffic.at` does, and when the warm-up
    leaves nothing to count.
    """
    traces = {(rate, seed): traffic.at(rate, seed) for rate in rates for seed in seeds}
    labels = {
        (rate, place): run_label(fleet.policy, fleet.queue.order)
        + (f" at {rate:g}x" if len(rates) > 1 else "")
        for rate in rates
        for place, fleet in enumerate(fleets)
    }
    tasks = [
        (label, replace(fleets[place], seed=seed), traces[rate, seed])
        for (rate, place), label in labels.items()
        for seed in seeds
    ]
    results = _play_all(tasks, play, watcher, jobs)
    runs: dict[float, list[Run]] = {rate: [] for rate in rates}
    for (rate, _), label in labels.items():
        of_seeds = list(islice(results, len(seeds)))
        runs[rate].append(_run_of(of_seeds, traffic.warm_up(rate), slo))
        watcher.end(label, runs[rate][-1].numbers)
    return [
        _comparison(traffic, fleets[0], rate, traces[rate, seeds[0]], played, slo, seeds)
        for rate, played in runs.items()
    ]


def _run_of(of_seeds: list[RunResult], warm_up: WarmUp, slo: Slo) -> Run:
    """A policy's run from its results for all seeds. Raises ValueError where a seed has no request
    after the warm-up."""
    if not all(warm_up.counted(result).any() for result in of_seeds):
        raise ValueError(NOTHING_COUNTS)
    return Run(of_seeds[0], [aggregate(result, warm_up=warm_up, slo=slo) for result in of_seeds])


def _comparison(
    traffic: Traffic,
    fleet: RunOptions,
    rate: float,
    trace: Trace,
    runs: list[Run],
    slo: Slo,
    seeds: Sequence[int],
) -> Comparison:
    """The runs at a rate. The ceilings are those of the first run. trace: as played in that run."""
    first = runs[0].first
    reuse = reuse_by_request(trace, first, fleet.cache_blocks)
    counted = traffic.warm_up(rate).counted(first)

    def ceiling(blocks: Integers) -> Ceiling:
        return ceiling_of(first.prompt_tokens[counted], blocks[counted], first.block_size)

    grouped_by, groups = groups_of(trace)
    return Comparison(
        trace=traffic.trace.name,
        workers=fleet.workers,
        engine=fleet.engine,
        rate=rate,
        ceiling=ceiling(reuse.infinite),
        pooled=ceiling(reuse.pooled),
        reusable=reuse.infinite,
        slo=slo,
        seeds=seeds,
        runs=runs,
        grouped_by=grouped_by,
        groups=groups,
    )


def _play_all(
    tasks: Sequence[tuple[str, RunOptions, Trace]], play: Play, watcher: Watcher, jobs: int
) -> Iterator[RunResult]:
    """Plays the tasks (label, options, trace); yields their results in the tasks' order."""
    if jobs == 1:
        for label, options, trace in tasks:
            yield play(options, trace, watcher.begin(label))
        return
    # Not forked: a forked child has the locks of the parent's threads, but not the threads.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        _, options_of, traces = zip(*tasks, strict=True)
        yield from pool.map(play, options_of, traces, repeat(None))


def reuse_by_request(trace: Trace, run: RunResult, cache_blocks: int) -> Reuse:
    """The blocks of each prompt that one cache would have had if requests arrive as in this run.
    cache_blocks: size of the cache for `Reuse.pooled`."""
    order = np.argsort(run.arrival_s, kind="stable")
    requests = [trace.requests[i] for i in order]
    infinite, pooled = np.empty((2, len(order)), np.int64)
    infinite[order] = reusable_blocks(requests, run.block_size)
    pooled[order] = reusable_blocks(requests, run.block_size, cache_blocks)
    return Reuse(infinite, pooled)
