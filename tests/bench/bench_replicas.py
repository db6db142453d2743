"""How evenly several `kvroute serve` processes load one fleet: told of one another, and not.

Real NATS, relays and stand-in engines (which work off what they get, so that their metrics are
true), and routers as processes of their own. Bursts of requests go to routers at random, policy
least-loaded. What is measured is max / mean over workers of the requests in flight, in the mean
over time; even is 1, and a lone router can't be more even than its bursts let it be.
"""

import asyncio
import random
import sys
from collections import Counter
from contextlib import AsyncExitStack
from statistics import fmean, median
from typing import Any

from kvroute.client import KvRouteClient
from kvroute.v1 import Progress, ProgressState
from router.children import end, start
from tests.bench.timing import row
from tests.end_to_end.stage import BLOCK_SIZE, Stage, a_stage, free_port

ENGINES = 8
REQUESTS = 600
OUTPUT_TOKENS = 60
TURN_S = 0.02
REPEATS = 3


def rows() -> list[dict[str, Any]]:
    """max / mean of requests in flight with one, two and four routers."""
    found = []
    for name, routers, tell in (
        ("replicas_1_imbalance", 1, True),
        ("replicas_2_imbalance", 2, True),
        ("replicas_4_imbalance", 4, True),
        ("replicas_4_apart_imbalance", 4, False),
    ):
        runs = [asyncio.run(_imbalance(routers, tell, seed)) for seed in range(REPEATS)]
        note = "" if tell else "four that don't tell one another"
        found.append(row(name, round(median(runs), 3), "max/mean", "less", note))
    return found


async def _imbalance(routers: int, tell: bool, seed: int) -> float:
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(a_stage(ENGINES, speed=1.0))
        clients = []
        for _ in range(routers):
            address = f"127.0.0.1:{free_port()}"
            command = [
                *(sys.executable, "-m", "router.cli", "serve", "--nats", stage.nats.url),
                *("--grpc-listen", address, "--metrics-listen", "", "--log-level", "error"),
                *("--routing-policy", "least-loaded"),
                *("--fleet-inflight", str(tell)),
            ]
            stack.push_async_callback(end, await start(command, None))
            clients.append(await stack.enter_async_context(KvRouteClient(address)))
        for client in clients:
            await client.wait_ready(30.0)
        return await _traffic(stage, clients, random.Random(seed))


async def _traffic(stage: Stage, clients: list[KvRouteClient], rng: random.Random) -> float:
    in_flight: Counter[str] = Counter()
    seen: list[float] = []

    async def serve(prompt: list[int], asked: KvRouteClient, told: KvRouteClient) -> None:
        pick = await asked.route(token_ids=prompt)
        in_flight[pick.worker_id] += 1
        await stage.engine(pick.worker_id).engine.complete(prompt, OUTPUT_TOKENS)
        in_flight[pick.worker_id] -= 1
        finished = ProgressState.PROGRESS_STATE_FINISHED
        await told.report(Progress(reservation_id=pick.reservation_id, state=finished))

    async with asyncio.TaskGroup() as tasks:
        sent = 0
        while sent < REQUESTS:
            for _ in range(rng.choice([1, 2, 4])):
                prompt = [rng.randrange(100_000) for _ in range(2 * BLOCK_SIZE)]
                tasks.create_task(serve(prompt, rng.choice(clients), rng.choice(clients)))
                sent += 1
            await asyncio.sleep(TURN_S)
            if sent > REQUESTS // 4:
                seen.append(max(in_flight.values()) / (in_flight.total() / ENGINES))
    return fmean(seen)
