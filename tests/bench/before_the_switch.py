"""What kvroute says that a fleet would gain, before it gets its traffic, and what it then gains.

    python -m tests.bench.before_the_switch [--mixes agents,shared] [--seeds 3]
        [--todays robin,vllm-router]

The stand-ins of gateways_compared.py behind the router of today, before which a proxy sends a copy
of each request to a kvroute with `gateway.observe`, whose decision log is then replayed by the
default policy, and behind a round robin by that, too, which should take as much from caches as the
engines say that it did. Then kvroute itself stands before the same chats. A run takes a minute.
Prints shares of prompt tokens that came from caches, and mean first tokens at the engines. Not in
`make bench`.
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

from kvroute.client import KvRouteClient
from router.app.calls.gain import Gain, gains
from router.config.settings.routing_settings import RoutingSettings
from simulator.traffic.trace import Trace
from simulator.traffic.trace_file import load_trace
from simulator.world import world
from simulator.world.options import RunOptions
from tests.bench.gateways_compared import (
    ENGINES,
    MIXES,
    Cell,
    Engine,
    arriving,
    cached_share,
    capacity,
    clients,
    first_token_s,
    in_turn,
    measured,
    started_engines,
    started_router,
    vllm_router,
)
from tests.bench.gateways_compared_side import scheduler_of_engines
from tests.stage.waiting import free_port

LOAD = "60"
DEFAULT = RoutingSettings().policy
ROBIN, VLLM_ROUTER = "robin", "vllm-router"


class Seen(NamedTuple):
    """One mix and seed: shares of prompt tokens from caches, then mean first tokens in ms."""

    mix: str
    router: str
    """That of today."""
    today: float
    """As the engines counted."""
    today_told: float
    """As kvroute shows it."""
    today_replayed: float
    """By a round robin alone; else not a number."""
    at_once: float
    """On the workers of kvroute's choice, by the caches that the router of today filled."""
    replayed: float
    after: float
    """By kvroute, as the engines counted."""
    ttft_today: float
    ttft_told: float
    """Estimated."""
    ttft_error: float
    """In ms, as it is shown beside."""
    ttft_after: float


async def compared(mix: str, router: str, seed: int, rate: float) -> Seen:
    rng = random.Random(f"{seed} {mix}")
    sessions = arriving(MIXES[mix](rng), rate, rng)
    port = free_port()
    async with AsyncExitStack() as stack:
        room = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-bench-"))
        log = Path(room) / "decisions"
        engines = await started_engines(stack, 0)
        _, grpc = await started_router(
            stack,
            engines,
            gateway={"listen": f"127.0.0.1:{port}", "observe": True},
            decision_log={"file": str(log), "share": 1.0, "hashes": True},
        )
        urls = await _today(stack, router, engines)
        began_s = await first_token_s(engines)
        done = await clients(await in_turn(stack, urls, f"http://127.0.0.1:{port}"), sessions)
        ended_s = await first_token_s(engines)
        gain = await _gain(grpc)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        trace = load_trace(log)
    picked = [line for line in lines if "overlap_tokens" in line]
    usable = sum(
        line["overlap_tokens"]["usable"][line["picked"]]
        for line in picked
        if "usable" in line["overlap_tokens"]  # left out where no worker has any
    )
    after = await measured(Cell(mix, "even", LOAD), "kvroute", seed, rate)
    return Seen(
        mix,
        router,
        cached_share(done["answers"]),
        gain.share_today or 0.0,
        _replayed(trace, "round-robin") if router == ROBIN else float("nan"),
        usable / sum(line["prompt_tokens"] for line in picked),
        _replayed(trace, DEFAULT),
        after.cached_share,
        (ended_s - began_s) * 1e3 / len(done["answers"]),
        gain.ttft_ms or 0.0,
        (gain.ttft_ms or 0.0) * (gain.ttft_error or 0.0),
        after.ttft_engine_ms,
    )


async def _today(stack: AsyncExitStack, router: str, engines: list[Engine]) -> list[str]:
    """The URLs between which the proxy that makes the copies takes turns."""
    if router == ROBIN:
        return [engine.url for engine in engines]
    port = await vllm_router(stack, engines)
    return [f"http://127.0.0.1:{port.port}"]


async def _gain(grpc: int) -> Gain:
    """As `kvroute top` shows it."""
    await asyncio.sleep(2.0)  # heartbeats with the last answers
    async with KvRouteClient(f"127.0.0.1:{grpc}") as client:
        (gain,) = gains(await client.list_workers())
    return gain


def _replayed(trace: Trace, policy: str) -> float:
    """The share by a policy, on simulated engines that are like the stand-ins."""
    scheduler = scheduler_of_engines()
    result = world.run(
        RunOptions(policy=policy, seed=0, workers=ENGINES, scheduler=scheduler), trace
    )
    return float(result.cached_tokens.sum() / result.prompt_tokens.sum())


def table_of(seen: list[Seen]) -> Table:
    """A row for each mix and router: medians over its seeds."""
    title = "share of prompt tokens from caches, and mean first token at the engine in ms"
    table = Table("mix", "today by", title=title, box=None)
    for column in ("today", "as shown", "replayed", "ours at once", "ours replayed", "after"):
        table.add_column(column, justify="right")
    for column in ("first token today", "ours estimated", "+-", "after"):
        table.add_column(column, justify="right")
    for mix, router in dict.fromkeys(one[:2] for one in seen):
        columns = zip(*(one[2:] for one in seen if one[:2] == (mix, router)), strict=True)
        middles = [median(column) for column in columns]
        shares, times = middles[:6], middles[6:]
        table.add_row(
            mix, router, *(f"{share:.1%}" for share in shares), *(f"{ms:.0f}" for ms in times)
        )
    return table


async def run(mixes: list[str], routers: list[str], seeds: int, console: Console) -> None:
    seen = []
    for mix in mixes:
        rate = await capacity(mix) * int(LOAD) / 100
        for router in routers:
            for seed in range(1, seeds + 1):
                seen.append(await compared(mix, router, seed, rate))
                console.print(table_of(seen[-1:]))
    console.print(table_of(seen))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.before_the_switch")
    parser.add_argument("--mixes", default="agents,shared", help="some of " + ",".join(MIXES))
    parser.add_argument("--todays", default=f"{ROBIN},{VLLM_ROUTER}", help="some of %(default)s")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each mix and router")
    given = parser.parse_args(arguments)
    mixes, routers = given.mixes.split(","), given.todays.split(",")
    asyncio.run(run(mixes, routers, given.seeds, Console(width=160)))


if __name__ == "__main__":
    main(sys.argv[1:])
