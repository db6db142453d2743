"""Our simulated fleet beside Dynamo's: the same trace, the same engines, each with its router.

    python -m tests.bench.dynamo_fleet CONVERSATION_TRACE

Dynamo's half was recorded by dynamo_mocker.py; ours runs now, in about two minutes. Ends with 1
when a number is further from Dynamo's median than TOLERANCE.

What Dynamo's routers don't do by default is off in ours, too: no worker is skipped for being
full (engines don't tell their capacity), and a pick's blocks count when they are stored.
"""

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from router.config.settings.routing_settings import RoutingSettings
from simulator.engines.profile import load_profile
from simulator.schedulers.options import scheduler_config
from simulator.traffic.results import RunResult
from simulator.traffic.trace import Trace
from simulator.traffic.trace_file import load_trace
from simulator.world.options import RunOptions
from simulator.world.world import run
from tests.bench.dynamo_mocker import RECORD

TOLERANCE = 0.05
POLICIES = {"round_robin": "round-robin", "kv_router": "dynamo-blocks"}
"""Dynamo's routers -> our policies"""


class Row(NamedTuple):
    """One number of one load, theirs and ours."""

    router: str
    speedup: float
    number: str
    theirs: float
    ours: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def rows(trace: Trace, record: list[dict[str, Any]]) -> Iterator[Row]:
    """Runs ours for each of Dynamo's loads. record: a list of dynamo_mocker.json's fleets."""
    by_load = groupby(record, key=lambda one: (one["router"], one["config"], one["speedup"]))
    for (router, config, speedup), group in by_load:
        theirs = list(group)
        result = ours(trace, POLICIES[router], config, theirs[0]["workers"], speedup)
        name = " ".join([router, *(f"{key} {value:g}" for key, value in config.items())])
        for number, value in numbers(result).items():
            key, _, part = number.partition(".")
            there = median(one[key][part] if part else one[key] for one in theirs)
            yield Row(name, speedup, number, there, value)


def ours(
    trace: Trace, policy: str, parameters: dict[str, float], workers: int, speedup: float
) -> RunResult:
    """Arrivals as stamped, and events at once: Dynamo spreads and delays nothing."""
    profile = load_profile("mocker")
    block_size = profile.engine.block_size
    options = RunOptions(
        policy=policy,
        workers=workers,
        predicted_ttl_s=0.0,
        routing=RoutingSettings(parameters={policy: parameters} if parameters else {}),
        scheduler=scheduler_config("vllm", profile, block_size=block_size, joined_steps_max=10_000),
        tells_capacity=False,
        event_delay_s=0.0,
    )
    return run(options, trace.at_rate(speedup))


def numbers(result: RunResult) -> dict[str, float]:
    """By the record's keys."""
    return {
        "token_hit_rate": result.cached_tokens.sum() / result.prompt_tokens.sum(),
        "ttft_ms.mean": float(np.nanmean(result.ttft_s)) * 1e3,
        "ttft_ms.p99": float(np.nanpercentile(result.ttft_s, 99)) * 1e3,
        "tpot_ms.mean": float(np.nanmean(result.itl_s)) * 1e3,
        "e2e_ms.mean": float(np.nanmean(result.e2e_s)) * 1e3,
    }


def main(path: str) -> int:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    table = Table("router", "load", "number", "Dynamo", "ours", "ours / Dynamo")
    table.columns[0].no_wrap = True
    console = Console()
    far = 0
    with console.status("running"):
        for row in rows(load_trace(path), record["fleet"]):
            is_far = abs(row.ratio - 1) > TOLERANCE
            far += is_far
            told = f"{row.ratio:.3f}"
            table.add_row(
                row.router,
                f"{row.speedup:g}x",
                row.number,
                f"{row.theirs:.4g}",
                f"{row.ours:.4g}",
                f"[red]{told}[/red]" if is_far else told,
            )
    console.print(table)
    return int(far > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
