"""Four router processes on one fleet, over real NATS: a band's turn crosses processes."""

import asyncio
import random
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from kvroute.client import KvRouteClient, Pick
from kvroute.v1 import ListQueueResponse
from router.children.process import Child, end, start
from tests.stage.loopback import BLOCK_SIZE, Stage, a_stage
from tests.stage.waiting import free_port, until

SLOTS = 64
"""Of the stage's worker."""
SERVE = (
    "import router.queue.pool_share as share; share.HOLD_S = 600.0;"
    " from router.cli.main import main; main()"
)
"""A router that waits for its peers however slow this machine is."""
QUEUE = """
queue:
  order: fcfs
  timeout_s: 300
  bands_strict: true
  bands_aging: 0
  bands:
  - {name: batch, from_priority: 0}
  - {name: chat, from_priority: 10}
"""
BATCH, CHAT = 3, 6
"""Waiting requests of batch in each of three routers, and of chat in the fourth."""


def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(100_000) for _ in range(4 * BLOCK_SIZE)]


async def routers(stage: Stage, stack: AsyncExitStack, folder: Path) -> list[KvRouteClient]:
    """A client of each of four processes, all of them ready."""
    config = folder / "kvroute.yaml"
    config.write_text(QUEUE)
    clients = []
    for _ in range(4):
        address = f"127.0.0.1:{free_port()}"
        child: Child = await start(
            [
                *(sys.executable, "-c", SERVE, "serve", "--config", str(config)),
                *("--nats", stage.nats.url, "--grpc-listen", address),
                *("--metrics-listen", "", "--log-level", "error"),
            ],
            None,
        )
        stack.push_async_callback(end, child)
        client = await stack.enter_async_context(KvRouteClient(address, timeout_s=300.0))
        clients.append(client)
    for client in clients:
        await client.wait_ready(60.0)
    return clients


async def reserved(client: KvRouteClient, count: int) -> None:
    """A router knows of so many requests that other routers sent to the worker."""
    async with asyncio.timeout(60.0):
        while [one.reserved_by_peers for one in await client.list_workers()] != [count]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def all_known(clients: list[KvRouteClient], waiting: int) -> None:
    """Every router knows of every request that waits."""

    def known(answer: ListQueueResponse) -> int:
        return answer.waiting + sum(band.count for band in answer.peer_bands)

    async with asyncio.timeout(60.0):
        while {known(await client.list_queue()) for client in clients} != {waiting}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_no_request_of_a_low_band_overtakes_one_of_a_high_band_in_another_process(
    tmp_path: Path,
) -> None:
    rng = random.Random(6)
    async with a_stage(engine_count=1) as stage, AsyncExitStack() as stack:
        clients = await routers(stage, stack, tmp_path)
        chat, *batch = clients
        running = [await stage.client.route(token_ids=prompt(rng)) for _ in range(SLOTS)]
        for client in clients:
            await reserved(client, SLOTS)
        went: list[str] = []

        async def ask(client: KvRouteClient, name: str, priority: int) -> Pick:
            pick = await client.route(token_ids=prompt(rng), priority=priority)
            went.append(name)
            return pick

        calls = [
            asyncio.create_task(ask(client, "batch", 0)) for client in batch for _ in range(BATCH)
        ]
        await all_known(clients, 3 * BATCH)
        calls += [asyncio.create_task(ask(chat, "chat", 10)) for _ in range(CHAT)]
        await all_known(clients, 3 * BATCH + CHAT)
        assert went == []
        held = await batch[0].list_queue()
        assert [(band.band, band.count) for band in held.peer_bands] == [
            ("batch", 2 * BATCH),
            ("chat", CHAT),
        ]
        for number, pick in enumerate(running[: len(calls)]):
            await stage.finish(pick)
            await until(lambda: len(went) > number, f"the turn of request {number}")  # noqa: B023
        assert went == ["chat"] * CHAT + ["batch"] * (3 * BATCH)
        await asyncio.gather(*calls)
