"""How much memory a router settles at when nothing repeats: python -m tests.bench.plateau

A real `kvroute serve` before eight stand-in engines behind relays gets prompts of PROMPT_TOKENS,
each of its own and of its own session, at --rate a second for --seconds. Engines store and evict
their blocks, and every request is reported to its end. Printed: resident memory of the router and
its children by minute, and a line through the least of each half minute from FROM_S on.
"""

import argparse
import asyncio
import random
import sys
import time

from kvroute.client import KvRouteClient
from simulator.live.stand_ins import StandIn
from tests.bench.bench_stream import served
from tests.bench.processes import rss_mib
from tests.stage.slope import FLOOR_S, growth

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 8
UNDER_WAY_MAX = 200
LOOK_S = 5.0
FROM_S = 600.0
"""Growth counts from then on: what is kept for some minutes is complete."""


async def _request(
    client: KvRouteClient, engines: dict[str, StandIn], rng: random.Random, number: int
) -> None:
    tokens = [rng.randrange(100_000) for _ in range(PROMPT_TOKENS)]
    async with client.request(token_ids=tokens, session_id=f"session-{number}") as request:
        engine = engines[request.pick.address].engine
        first = asyncio.Event()
        answer = asyncio.create_task(
            engine.complete(tokens, OUTPUT_TOKENS, on_first_token=first.set)
        )
        begun = asyncio.create_task(first.wait())
        await asyncio.wait({answer, begun}, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        await request.prefill_done()
        await answer
        await request.finished(output_tokens=OUTPUT_TOKENS, cached_tokens=0)


async def _send(
    client: KvRouteClient, engines: dict[str, StandIn], rate: float, end_s: float, seed: int
) -> int:
    """Sends until end_s; returns the number of requests, all of which were answered."""
    rng, number, under_way = random.Random(seed), 0, set[asyncio.Task[None]]()
    next_s = time.monotonic()
    while next_s < end_s:
        next_s += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        if len(under_way) >= UNDER_WAY_MAX:
            done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        under_way.add(asyncio.create_task(_request(client, engines, rng, number)))
        number += 1
    await asyncio.gather(*under_way)
    return number


async def _watch(pid: int, began_s: float, floors: dict[int, int]) -> None:
    """Notes the least resident memory of each FLOOR_S, in bytes."""
    while True:
        piece = int((time.monotonic() - began_s) // FLOOR_S)
        resident = int(rss_mib(pid) * 2**20)
        floors[piece] = min(resident, floors.get(piece, resident))
        await asyncio.sleep(LOOK_S)


async def run(rate: float, seconds: float, seed: int) -> None:
    floors: dict[int, int] = {}
    async with served() as router, KvRouteClient(router.target) as client:
        began_s = time.monotonic()
        watching = asyncio.create_task(_watch(router.pid, began_s, floors))
        number = await _send(client, router.engines, rate, began_s + seconds, seed)
        if watching.done():
            watching.result()
        watching.cancel()
    minutes = [round(floors[piece] / 2**20) for piece in sorted(floors)[:: round(60 / FLOOR_S)]]
    sys.stdout.write(f"{number} requests, seed {seed}; MiB by minute: {minutes}\n")
    late = {piece: size for piece, size in floors.items() if piece * FLOOR_S >= FROM_S}
    if len(late) > 2:
        slope, error = (each / 2**20 for each in growth(late))
        sys.stdout.write(f"after ten minutes {slope:.3f} MiB a minute, error {error:.3f}\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.plateau")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    asyncio.run(run(given.rate, given.seconds, given.seed))


if __name__ == "__main__":
    main()
