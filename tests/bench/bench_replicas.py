"""How evenly several `kvroute serve` processes load one fleet: told of one another, and not; and
what it costs a router to tell and to listen.

Evenness: real NATS, relays and stand-in engines (which work off what they get, so that their
metrics are true), and routers as processes of their own. Bursts of requests go to routers at
random, policy least-loaded. What is measured is max / mean over workers of the requests in flight,
in the mean over time; even is 1, and a lone router can't be more even than its bursts let it be.

Cost: CPU of one router's exchange in a second of 5,000 picks by all four together, in turned time:
messages written and read, loads fused, of replicas' messages and of heartbeats; without NATS. A
lone router says once a second that it is there.
"""

import asyncio
import random
import time
from collections import Counter, deque
from contextlib import AsyncExitStack
from statistics import fmean, median
from typing import Any

import msgspec

from events.feed.replicas import Teller
from events.plane.facts import Epoch, encode
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from kvroute.client import KvRouteClient
from kvroute.v1 import Progress, ProgressState
from router.cluster.children.process import end
from router.cluster.replicas.replica_link import HEARD_PER_S
from router.fleet.reservations.load import WorkerLoad
from tests.bench.timing import row
from tests.stage.fleet import START_S, Fleet, hashes
from tests.stage.loopback import BLOCK_SIZE, Stage, a_stage, router_process
from tests.stage.waiting import free_port

SILENT = """
from functools import partial
from router.app.processes import nats_links
nats_links.ReplicaLink = partial(nats_links.ReplicaLink, tells=False)
from router.app.main import main
main()
"""
"""A router that neither publishes nor reads reserved load."""
ENGINES = 8
REQUESTS = 600
OUTPUT_TOKENS = 60
TURN_S = 0.02
REPEATS = 3
PICKS_PER_S = 5000
OTHERS = 3
HELD_S = 1.0


def rows() -> list[dict[str, Any]]:
    """max / mean of requests in flight with one, two and four routers; CPU of the exchange."""
    found = []
    for name, routers, tell in (
        ("replicas_1_imbalance", 1, True),
        ("replicas_2_imbalance", 2, True),
        ("replicas_4_imbalance", 4, True),
        ("replicas_4_apart_imbalance", 4, False),
    ):
        runs = [asyncio.run(_imbalance(routers, tell, seed)) for seed in range(REPEATS)]
        note = f"{min(runs):.3f} to {max(runs):.3f}"
        if not tell:
            note += "; four that don't tell one another"
        found.append(row(name, round(median(runs), 3), "max/mean", "less", note))
    for workers in (8, 1000):
        runs = [_exchange_ms(workers, seed) for seed in range(REPEATS)]
        name = f"replicas_4_exchange_w{workers}_ms"
        found.append(row(name, round(median(runs), 2), "ms/s", "less"))
    return found


class _Replica:
    """What one router has reserved, and will tell."""

    def __init__(self, name: str, loads: dict[WorkerKey, WorkerLoad]) -> None:
        self.loads = loads
        self.teller = Teller(name, Epoch(1, 0))
        self._open: deque[tuple[float, WorkerLoad]] = deque()

    def pick(self, worker: WorkerKey, now_s: float) -> None:
        """Reserves on a worker, and ends what is over."""
        load = self.loads.setdefault(worker, WorkerLoad())
        load.open(_NO_BLOCKS, True, 100, now_s)
        self._open.append((now_s + HELD_S, load))
        while self._open[0][0] <= now_s:
            _, load = self._open.popleft()
            load.prefill_done(100)
            load.close(_NO_BLOCKS, True, now_s)


_NO_BLOCKS = hashes([])


def _exchange_ms(workers: int, seed: int) -> float:
    """Of one router of four: milliseconds of CPU in the last of three seconds."""
    rng = random.Random(seed)
    fleet = Fleet(replica="us", index=NativeIndex())
    keys = [fleet.add(f"w{i}", total_slots=None, total_blocks=None) for i in range(workers)]
    replicas = [_Replica("us", fleet.core.fleet.loads)]
    replicas += [_Replica(f"replica-{i}", {}) for i in range(OTHERS)]
    pause_s = OTHERS / HEARD_PER_S
    turns = round(1 / pause_s)
    picks = round(PICKS_PER_S * pause_s)
    spent_s, now_s = 0.0, START_S
    for turn in range(3 * turns):
        for i in range(picks):
            rng.choice(replicas).pick(rng.choice(keys), now_s + pause_s * i / picks)
        now_s += pause_s
        beating = keys[turn % turns :: turns]
        for key in beating:
            heartbeat = fleet.relays[key].heartbeat
            heartbeat = msgspec.structs.replace(
                heartbeat, sent_at_s=now_s, sampled_at_s=now_s - 0.3, running=5
            )
            fleet.view.on_heartbeat(key, encode(heartbeat), now_s)
        told = [replica.teller.message(replica.loads, now_s) for replica in replicas[1:]]
        began_s = time.thread_time()
        replicas[0].teller.message(fleet.core.fleet.loads, now_s)
        for message in told:
            if message is not None:
                fleet.core.on_inflight(message, now_s)
        for key in beating:
            fleet.core.on_heartbeat(key, now_s)
        if turn >= 2 * turns:
            spent_s += time.thread_time() - began_s
    return spent_s * 1e3


async def _imbalance(routers: int, tell: bool, seed: int) -> float:
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(a_stage(ENGINES, speed=1.0))
        clients = []
        for _ in range(routers):
            address = f"127.0.0.1:{free_port()}"
            program = ("-m", "router.app.main") if tell else ("-c", SILENT)
            words = ("--routing-policy", "least-loaded")
            router = await router_process(stage.nats.url, address, *words, program=program)
            stack.push_async_callback(end, router)
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
                seen.append(max(in_flight.values()) / max(1, in_flight.total() / ENGINES))
    return fmean(seen)
