"""One run of a study: what is run, and the numbers that came of it."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

from rich.console import Console

from simulator import world
from simulator.comparison import Traffic, reusable_by_request
from simulator.options import RunOptions
from simulator.report import Comparison, Run
from simulator.results import Aggregates, Integers, RunResult, Slo, aggregate
from simulator.reuse import Ceiling, ceiling_of


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
    reusable: Integers
    """Blocks that one infinite cache would have had of each prompt."""

    @property
    def ceiling(self) -> Ceiling:
        result = self.result
        return ceiling_of(result.prompt_tokens, self.reusable, result.block_size)

    @property
    def overrated_share(self) -> float:
        """Cached tokens that the router expected, and that weren't there / those that were."""
        expected, found = self.result.predicted_tokens, self.result.cached_tokens
        return float((expected - found).clip(min=0).sum() / max(1, found.sum()))


Results = dict[tuple[str, str, str, float], Done]


def run_all(cases: Sequence[Case], jobs: int, console: Console) -> Results:
    """All cases, longest first as far as one can guess; each in one of `jobs` processes."""
    if len({case.key for case in cases}) < len(cases):
        raise AssertionError("two cases have the same key")
    longest_first = sorted(cases, key=_guess, reverse=True)
    done: Results = {}
    with (
        console.status("running") as status,
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
    ):
        futures = [pool.submit(_run, case) for case in longest_first]
        for future in as_completed(futures):
            one = future.result()
            done[one.case.key] = one
            status.update(f"{len(done)} of {len(cases)} runs")
            name = " ".join(filter(None, one.case.key[:3]))
            console.print(
                f"{name} {one.case.rate:g}x: {one.numbers.wall_s:.0f} s,"
                f" hit rate {one.numbers.block_hit_rate:.1%},"
                f" TTFT {one.numbers.ttft_ms.mean:.0f} ms",
                highlight=False,
            )
    return done


def comparison(done: Sequence[Done]) -> Comparison:
    """Runs of one traffic at one rate, as the plots want them."""
    first = done[0]
    return Comparison(
        trace=first.case.traffic.trace.name,
        workers=first.case.options.workers,
        engine=first.case.options.engine,
        rate=first.case.rate,
        ceiling=first.ceiling,
        reusable=first.reusable,
        slo=Slo(),
        seeds=[first.case.options.seed],
        runs=[Run(one.result, [one.numbers]) for one in done],
    )


def _run(case: Case) -> Done:
    trace = case.traffic.at(case.rate, case.options.seed)
    result = world.run(case.options, trace)
    return Done(case, result, aggregate(result), reusable_by_request(trace, result))


def _guess(case: Case) -> int:
    """Work grows with the prompts."""
    return sum(request.prompt_tokens for request in case.traffic.trace.requests)
