"""What kvroute says that a fleet would gain, before it gets its traffic, and what it then gains.

    python -m tests.bench.before_the_switch [--mixes agents,shared] [--seeds 3]

The stand-ins of gateways_compared.py behind a plain round robin that sends a copy of each request
to a kvroute with `gateway.observe`, whose decision log is then replayed: by round robin, which
should take as much from caches as the engines say that it did, and by the default policy. Then
kvroute itself stands before the same chats. A run takes a minute. Prints a table of shares of
prompt tokens that came from caches. Not in `make bench`.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from router.config.settings.routing_settings import RoutingSettings
from simulator.traffic.trace import Trace
from simulator.traffic.trace_file import load_trace
from simulator.world import world
from simulator.world.options import RunOptions
from tests.bench.gateways_compared import (
    ENGINES,
    MIXES,
    Cell,
    arriving,
    cached_share,
    capacity,
    clients,
    measured,
    robin,
    started_engines,
    started_router,
)
from tests.bench.gateways_compared_side import scheduler_of_engines
from tests.stage.waiting import free_port

LOAD = "60"
DEFAULT = RoutingSettings().policy


class Shares(NamedTuple):
    """Shares of prompt tokens from caches: of one mix and seed."""

    mix: str
    today: float
    """By round robin, as the engines counted."""
    today_replayed: float
    at_once: float
    """On the workers of kvroute's choice, by the caches that round robin filled."""
    replayed: float
    after: float
    """By kvroute, as the engines counted."""


async def compared(mix: str, seed: int, rate: float) -> Shares:
    rng = random.Random(f"{seed} {mix}")
    sessions = arriving(MIXES[mix](rng), rate, rng)
    port = free_port()
    async with AsyncExitStack() as stack:
        room = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-bench-"))
        log = Path(room) / "decisions"
        engines = await started_engines(stack, 0)
        await started_router(
            stack,
            engines,
            gateway={"listen": f"127.0.0.1:{port}", "observe": True},
            decision_log={"file": str(log), "share": 1.0, "hashes": True},
        )
        before = await clients(await robin(stack, engines, f"http://127.0.0.1:{port}"), sessions)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        trace = load_trace(log)
    picked = [line for line in lines if "overlap_tokens" in line]
    usable = sum(
        line["overlap_tokens"]["usable"][line["picked"]]
        for line in picked
        if "usable" in line["overlap_tokens"]  # left out where no worker has any
    )
    after = await measured(Cell(mix, "even", LOAD), "kvroute", seed, rate)
    return Shares(
        mix,
        cached_share(before["answers"]),
        _replayed(trace, "round-robin"),
        usable / sum(line["prompt_tokens"] for line in picked),
        _replayed(trace, DEFAULT),
        after.cached_share,
    )


def _replayed(trace: Trace, policy: str) -> float:
    """The share by a policy, on simulated engines that are like the stand-ins."""
    scheduler = scheduler_of_engines()
    result = world.run(
        RunOptions(policy=policy, seed=0, workers=ENGINES, scheduler=scheduler), trace
    )
    return float(result.cached_tokens.sum() / result.prompt_tokens.sum())


def table_of(shares: list[Shares]) -> Table:
    """A row for each mix: medians over its seeds."""
    table = Table("mix", title="share of prompt tokens from caches", box=None)
    for column in ("today", "replayed", "ours at once", "ours replayed", "after the switch"):
        table.add_column(column, justify="right")
    for mix in dict.fromkeys(one.mix for one in shares):
        columns = zip(*(one[1:] for one in shares if one.mix == mix), strict=True)
        table.add_row(mix, *(f"{median(column):.1%}" for column in columns))
    return table


async def run(mixes: list[str], seeds: int, console: Console) -> None:
    shares = []
    for mix in mixes:
        rate = await capacity(mix) * int(LOAD) / 100
        for seed in range(1, seeds + 1):
            shares.append(await compared(mix, seed, rate))
            console.print(table_of(shares[-1:]))
    console.print(table_of(shares))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.before_the_switch")
    parser.add_argument("--mixes", default="agents,shared", help="some of " + ",".join(MIXES))
    parser.add_argument("--seeds", type=int, default=1, help="runs of each mix")
    given = parser.parse_args(arguments)
    asyncio.run(run(given.mixes.split(","), given.seeds, Console(width=140)))


if __name__ == "__main__":
    main(sys.argv[1:])
