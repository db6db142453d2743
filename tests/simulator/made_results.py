"""Results of runs and comparisons of them, made without a run, and what is printed of them."""

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console, RenderableType

from simulator.study.report import Comparison, Run
from simulator.traffic.results import (
    NO_WORKER,
    Columns,
    Outcome,
    RunResult,
    ShadowResult,
    Slo,
    aggregate,
)
from simulator.traffic.reuse import Ceiling

SLO = Slo(ttft_s=0.5, itl_s=0.05)


def printed(*shown: RenderableType, width: int = 160) -> str:
    """Texts and tables as a console has them."""
    file = io.StringIO()
    Console(file=file, width=width).print(*shown)
    return file.getvalue()


def run_of(count: int, policy: str = "p", order: str = "priority", **about: Any) -> RunResult:
    """A run of `count` served requests, one a second, with some fields changed."""
    default: dict[str, Any] = {
        **vars(Columns.unknown(count)),
        "workers": ["w0"],
        "block_size": 16,
        "arrival_s": np.arange(count, dtype=float),
        "queue_s": np.full(count, 0.1),
        "ttft_s": np.full(count, 0.2),
        "itl_s": np.full(count, 0.01),
        "e2e_s": np.full(count, 1.0),
        "prompt_tokens": np.full(count, 100),
        "cached_tokens": np.full(count, 32),
        "output_tokens": np.full(count, 9),
        "worker": np.zeros(count, np.int64),
        "outcome": np.full(count, Outcome.SERVED),
        **dict.fromkeys(("in_flight", "waiting", "used_blocks"), np.empty((0, 1), np.int64)),
        "wall_s": 1.0,
    }
    made = default | about
    made.setdefault("sampled_s", np.arange(len(made["in_flight"])))
    return RunResult(policy, order, **made)


def result(
    policy: str,
    count: int = 40,
    *,
    failed: bool = False,
    seed: int = 0,
    shadows: dict[str, ShadowResult] | None = None,
) -> RunResult:
    """Two workers, a request a second; cached and quick in the second half."""
    rng = np.random.default_rng(seed)
    arrival_s = np.arange(count, dtype=float)
    ttft_s = np.full(count, np.nan) if failed else rng.uniform(0.1, 0.9, count)
    return run_of(
        count,
        policy,
        workers=["w0", "w1"],
        block_size=64,
        queue_s=ttft_s / 2,
        wait_s=ttft_s / 4,
        ttft_s=ttft_s,
        itl_s=np.full(count, np.nan if failed else 0.02),
        e2e_s=ttft_s + 2.0,
        prompt_tokens=np.full(count, 640),
        cached_tokens=np.where(arrival_s >= count / 2, 320, 0),
        worker=np.full(count, NO_WORKER) if failed else np.arange(count) % 2,
        outcome=np.full(count, Outcome.FAILED if failed else Outcome.SERVED),
        in_flight=np.tile([2, 1], (count + 3, 1)),
        wall_s=1.5,
        counters={"copies": 3, "messages_lost": 12, "gaps": 0, "streams_live": 2},
        shadows=shadows or {},
    )


def comparison(
    *policies: str, rate: float = 1.0, seeds: Sequence[int] = (0,), **about: Any
) -> Comparison:
    """Of policies by name, each run with each seed."""
    of_seeds = [[result(policy, seed=seed, **about) for seed in seeds] for policy in policies]
    runs = [Run(of[0], [aggregate(one, slo=SLO) for one in of]) for of in of_seeds]
    return _of(runs, rate, seeds)


def compared(*results: RunResult, trace: str = "trace", groups: Sequence[str] = ()) -> Comparison:
    """Of these results."""
    runs = [Run(one, [aggregate(one, slo=SLO)]) for one in results]
    return replace(_of(runs, 1.0, (0,)), trace=trace, groups=groups)


def _of(runs: list[Run], rate: float, seeds: Sequence[int]) -> Comparison:
    reusable = np.full(runs[0].first.request_count, 4)
    return Comparison(
        "trace", 2, "vllm", rate, Ceiling(0.4, 0.39), Ceiling(0.3, 0.29), reusable, SLO, seeds, runs
    )
