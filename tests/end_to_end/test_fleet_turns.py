"""Router processes on one fleet, over real NATS: a band's turn crosses processes, and callers that
wait in a router which is killed wait on in another."""

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

from kvroute.client import KvRouteClient, Pick
from kvroute.v1 import ListQueueResponse
from router.cluster.children.process import Child, end
from tests.stage.loopback import Stage, a_prompt, a_stage, router_process
from tests.stage.waiting import free_port, until

SLOTS = 64
"""Of the stage's worker."""
SERVE = (
    "import router.decide.queue_turns.pool_share as share; share.HOLD_S = 600.0;"
    " from router.app.main import main; main()"
)
"""A router that waits for other replicas however slow this machine is."""
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
MOVED = 3
"""Requests that wait in the router that is killed, and as many in the other one."""
BATCH, CHAT = 3, 6
"""Waiting requests of batch in each of three routers, and of chat in the fourth."""


async def a_router(stage: Stage, folder: Path, address: str = "") -> tuple[Child, str]:
    """One more process, and its address; it may not be ready yet."""
    config = folder / "kvroute.yaml"
    config.write_text(QUEUE)
    address = address or f"127.0.0.1:{free_port()}"
    words = ("--config", str(config))
    child = await router_process(stage.nats.url, address, *words, program=("-c", SERVE))
    return child, address


async def routers(stage: Stage, stack: AsyncExitStack, folder: Path) -> list[KvRouteClient]:
    """A client of each of four processes, all of them ready."""
    clients = []
    for _ in range(4):
        child, address = await a_router(stage, folder)
        stack.push_async_callback(end, child)
        client = await stack.enter_async_context(KvRouteClient(address, timeout_s=300.0))
        clients.append(client)
    for client in clients:
        await client.wait_ready(60.0)
    return clients


async def reserved(client: KvRouteClient, count: int) -> None:
    """A router knows of so many requests that other replicas sent to the worker."""
    async with asyncio.timeout(60.0):
        while [one.reserved_by_replicas for one in await client.list_workers()] != [count]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def all_known(clients: list[KvRouteClient], waiting: int) -> None:
    """Every router knows of every request that waits."""

    def known(answer: ListQueueResponse) -> int:
        return answer.waiting + sum(band.count for band in answer.replica_bands)

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
        running = [await stage.client.route(token_ids=a_prompt(rng)) for _ in range(SLOTS)]
        for client in clients:
            await reserved(client, SLOTS)
        went: list[str] = []

        async def ask(client: KvRouteClient, name: str, priority: int) -> Pick:
            pick = await client.route(token_ids=a_prompt(rng), priority=priority)
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
        assert [(band.band, band.count) for band in held.replica_bands] == [
            ("batch", 2 * BATCH),
            ("chat", CHAT),
        ]
        for number, pick in enumerate(running[: len(calls)]):
            await stage.finish(pick)
            await until(lambda: len(went) > number, f"the turn of request {number}")  # noqa: B023
        assert went == ["chat"] * CHAT + ["batch"] * (3 * BATCH)
        await asyncio.gather(*calls)


async def waits(client: KvRouteClient, count: int, oldest_s: float = 0.0) -> None:
    """So many requests wait in a router, the first one for at least so long."""
    async with asyncio.timeout(60.0):
        while True:
            queue = await client.list_queue()
            if queue.waiting == count and queue.bands[0].oldest_s >= oldest_s:
                return
            await asyncio.sleep(0.01)


async def answers(client: KvRouteClient, replica: str) -> None:
    """A router answers calls of a client of several."""
    async with asyncio.timeout(60.0):
        while (await client.explain(token_ids=[1])).receipt.replica != replica:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_callers_of_a_killed_router_wait_on_in_another_as_long_as_they_have(
    tmp_path: Path,
) -> None:
    rng = random.Random(7)
    async with a_stage(engine_count=1) as stage, AsyncExitStack() as stack:

        async def client_of(*addresses: str) -> KvRouteClient:
            client = KvRouteClient(addresses, timeout_s=300.0, silent_s=300.0, fallback=False)
            return await stack.enter_async_context(client)

        killed, first = await a_router(stage, tmp_path)
        stack.push_async_callback(end, killed)
        here = await client_of(first)
        await here.wait_ready(120.0)
        running = [AsyncExitStack() for _ in range(SLOTS)]
        for one in running:
            stack.push_async_callback(one.aclose)
            await one.enter_async_context(stage.client.request(token_ids=a_prompt(rng)))
        await reserved(here, SLOTS)
        second = f"127.0.0.1:{free_port()}"
        both = await client_of(first, second)
        went: list[str] = []

        async def ask(client: KvRouteClient, name: str) -> Pick:
            pick = await client.route(token_ids=a_prompt(rng), request_id=name)
            went.append(name)
            return pick

        moved = [f"moved-{number}" for number in range(MOVED)]
        calls = [asyncio.create_task(ask(both, name)) for name in moved]
        await waits(here, MOVED, oldest_s=1.0)

        left, _ = await a_router(stage, tmp_path, second)
        stack.push_async_callback(end, left)
        there = await client_of(second)
        await there.wait_ready(120.0)
        await reserved(there, SLOTS)
        replica = (await there.explain(token_ids=[1])).receipt.replica
        await answers(both, replica)
        late = [f"late-{number}" for number in range(MOVED)]
        calls += [asyncio.create_task(ask(there, name)) for name in late]
        await waits(there, MOVED)
        await all_known([here, there], 2 * MOVED)

        killed.kill()
        await waits(there, 2 * MOVED)
        async with asyncio.timeout(60.0):
            while (await there.list_queue()).replica_bands:  # noqa: ASYNC110  # of the killed router
                await asyncio.sleep(0.01)
        assert went == []
        for number, one in enumerate(running[: 2 * MOVED]):
            await one.aclose()
            await until(lambda: len(went) > number, f"the turn of request {number}")  # noqa: B023
        assert {*went[:MOVED]} == {*moved}, "they came first, if the router believes that"
        assert {*went[MOVED:]} == {*late}
        picks = await asyncio.gather(*calls)
        assert {pick.receipt.replica for pick in picks} == {replica}
        (worker,) = await there.list_workers()
        assert (worker.reserved, worker.reserved_by_replicas) == (2 * MOVED, SLOTS - 2 * MOVED)
