"""One run of a study: what is run, and the numbers that came of it."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
from rich.console import Console

from simulator.study.comparison import Reuse, Traffic, reuse_by_request
from simulator.study.report import Comparison, Run
from simulator.traffic.results import Aggregates, Outcome, RunResult, Slo, aggregate
from simulator.traffic.reuse import Ceiling, ceiling_of
from simulator.world import world
from simulator.world.options import RunOptions
from tests.results.kept import Finished, Kept


@dataclass(frozen=True, slots=True)
class Case:
    """One run: traffic at a rate on a fleet."""

    section: str
    name: str
    """Of its row; with the policy and the rate it is unique in its section."""
    traffic: Traffic
    rate: float
    options: RunOptions

    @property
    def key(self) -> tuple[str, str, str, float]:
        return self.section, self.name, self.options.policy, self.rate


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a case."""

    case: Case
    result: RunResult
    numbers: Aggregates
    reuse: Reuse

    @property
    def ceiling(self) -> Ceiling:
        return ceiling_of(self.result.prompt_tokens, self.reuse.infinite, self.result.block_size)

    @property
    def pooled(self) -> Ceiling:
        return ceiling_of(self.result.prompt_tokens, self.reuse.pooled, self.result.block_size)

    @property
    def overrated_share(self) -> float:
        """Cached tokens that the router expected, and that weren't there / those that were."""
        expected, found = self.result.predicted_tokens, self.result.cached_tokens
        return float((expected - found).clip(min=0).sum() / max(1, found.sum()))

    @property
    def moved_share(self) -> float:
        """Picks that the guard moved / requests."""
        return self.result.counters.get("moved_by_guard", 0) / self.result.request_count

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens that were served / seconds from first arrival to last end."""
        run = self.result
        served = run.outcome == Outcome.SERVED
        tokens = run.prompt_tokens[served].sum() + run.output_tokens[served].sum()
        return float(tokens / (np.nanmax(run.arrival_s + run.e2e_s) - run.arrival_s.min()))


Results = dict[tuple[str, str, str, float], Done]


def run_all(cases: Sequence[Case], jobs: int, console: Console, kept: Kept) -> Results:
    """All cases, longest first as far as one can guess; each in one of `jobs` processes.

    A run is kept as soon as it ends, and not played again; cases that must come out the same share
    one run.
    """
    if len({case.key for case in cases}) < len(cases):
        raise AssertionError("two cases have the same key")
    alike: dict[str, list[Case]] = {}
    for case in sorted(cases, key=_guess, reverse=True):
        alike.setdefault(kept.name(case.traffic, case.rate, case.options), []).append(case)
    done: Results = {}

    def add(name: str, one: Finished, how: str) -> None:
        numbers = aggregate(one.result)
        for case in alike[name]:
            done[case.key] = Done(case, one.result, numbers, one.reuse)
        case = alike[name][0]
        console.print(
            f"{' '.join(filter(None, case.key[:3]))} {case.rate:g}x: {how},"
            f" hit rate {numbers.block_hit_rate:.1%}, TTFT {numbers.ttft_ms.mean:.0f} ms",
            highlight=False,
            soft_wrap=True,
        )

    missing = []
    for name in alike:
        finished = kept.read(name)
        if finished is None:
            missing.append(name)
        else:
            add(name, finished, "kept")
    with (
        console.status("running") as status,
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
    ):
        futures = {pool.submit(_run, alike[name][0]): name for name in missing}
        for future in as_completed(futures):
            name, finished = futures[future], future.result()
            kept.write(name, finished)
            add(name, finished, f"{finished.result.wall_s:.0f} s")
            status.update(f"{len(done)} of {len(cases)} runs")
    return done


def comparison(done: Sequence[Done]) -> Comparison:
    """Runs of one traffic at one rate, as pictures want them."""
    first = done[0]
    return Comparison(
        trace=first.case.traffic.trace.name,
        workers=first.case.options.workers,
        engine=first.case.options.engine,
        rate=first.case.rate,
        ceiling=first.ceiling,
        pooled=first.pooled,
        reusable=first.reuse.infinite,
        slo=Slo(),
        seeds=[first.case.options.seed],
        runs=[Run(one.result, [one.numbers]) for one in done],
    )


def _run(case: Case) -> Finished:
    trace = case.traffic.at(case.rate, case.options.seed)
    result = world.run(case.options, trace)
    return Finished(result, reuse_by_request(trace, result, case.options.cache_blocks))


def _guess(case: Case) -> int:
    """Work grows with the prompts."""
    return sum(request.prompt_tokens for request in case.traffic.trace.requests)
