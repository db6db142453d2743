"""What objectives in the pick are worth: python -m tests.results.objectives TRACE [--rate 6]

A share of the requests is sheddable (priority -1), and all want a first token and a time between
tokens. The same arrivals are played twice by a policy: without objectives in the requests, and
with them. Both runs are judged by the same objectives. Also printed: how far times between tokens
are off from the router's numbers, with the load that came (model), and from what it said at the
pick.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from simulator.study.comparison import Traffic
from simulator.traffic.callers import Callers, Priorities
from simulator.traffic.results import Mask, Outcome, RunResult, Slo, is_good
from simulator.traffic.trace import Trace
from simulator.traffic.trace_file import load_trace
from simulator.world.world import World
from tests.results.fleets import SEED, WORKERS, fleet

SLO = Slo(2.0, 0.05)
SHEDDABLE = 0.3


@dataclass(frozen=True, slots=True)
class Played:
    """One run, and the errors of the router's times between tokens, as shares of their sum."""

    trace: Trace
    result: RunResult
    model_error: float
    pick_error: float

    def good(self, slo: Slo) -> Mask:
        """Which requests had both times."""
        return is_good(self.result, slo)

    @property
    def sheddable(self) -> Mask:
        return np.array([(request.priority or 0) < 0 for request in self.trace.requests], np.bool_)


def traffic(
    trace: Trace, rate: float, share: float, slo: Slo | None = None, seed: int = SEED
) -> Trace:
    """A trace at a rate, a share of its requests sheddable. slo: what they want; None: nothing."""
    bands = Priorities.parse(f"random:0,-1:{share}") if share else Priorities()
    slo = slo or Slo()
    callers = Callers(priorities=bands, ttft_slo_s=slo.ttft_s, tpot_slo_s=slo.itl_s)
    return Traffic(trace=trace, callers=callers).at(rate, seed)


def play(trace: Trace, workers: int = WORKERS, policy: str = "ttft", seed: int = SEED) -> Played:
    world = World(replace(fleet(policy, workers=workers), seed=seed), trace)
    result = world.run()
    (router,) = world.fleet.routers
    times, check = router.core.fleet.token_times, router.core.tpot_check
    return Played(
        trace,
        result,
        times.off_s / max(times.measured_s, 1e-9),
        check.wrong_s / max(check.measured_s, 1e-9),
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.results.objectives")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rate", type=float, nargs="+", default=[6.0, 8.0])
    parser.add_argument("--sheddable", type=float, nargs="+", default=[0.0, SHEDDABLE])
    parser.add_argument("--requests", type=int, default=1 << 30)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--policy", default="ttft")
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args(arguments)
    trace = load_trace(given.trace)
    trace = replace(trace, requests=trace.requests[: given.requests])
    for rate in given.rate:
        for share in given.sheddable:
            for slo in (None, SLO):
                made = traffic(trace, rate, share, slo, given.seed)
                one = play(made, given.workers, given.policy, given.seed)
                good = one.good(SLO)
                served = one.result.outcome == Outcome.SERVED
                kept = ~one.sheddable
                sys.stdout.write(
                    f"{rate:g}x, {share:.0%} sheddable, objectives {'in' if slo else 'not in'}"
                    f" the pick: within {good.mean():.1%}, of those that are not sheddable"
                    f" {good[kept].mean():.1%}; served {served.mean():.1%};"
                    f" errors: model {one.model_error:.1%}, pick {one.pick_error:.1%}\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
