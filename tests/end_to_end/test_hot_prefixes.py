"""Hot prefixes, copied for real: router, NATS, relay, and the HTTP API of an engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest

from events.plane import subjects
from events.plane.broker import Broker
from events.plane.facts import Warm, Warmed, decode, encode
from events.plane.settings import EngineSettings, NatsSettings
from events.relay.relay import Relay
from events.relay.warmer import JOBS_MAX, completion_of
from indexer.hashing import block_hashes, pack_tokens, prefix_hashes
from indexer.identity import WorkerKey
from kvroute.client import KvRouteClient
from router.app.processes.router_process import RouterApp
from router.config.settings.routing_settings import (
    GuardSettings,
    HotPrefixSettings,
    RoutingSettings,
)
from router.decide.copies.copies import CopyFate
from router.decide.copies.hot_prefixes import HotPrefixes
from simulator.engines.scheduler import SchedulerConfig
from simulator.live.clock import ScaledClock
from simulator.live.engine import Engine, EngineConfig
from simulator.live.stand_ins import StandIn, stand_ins
from tests.stage.loopback import (
    BLOCK_SIZE,
    a_broker,
    a_nats,
    a_relay,
    all_schedulable,
    router_app,
    serve_config,
)
from tests.stage.waiting import until

TEXT = list(range(1000, 2024))
LORA = "ad"
A = WorkerKey("a", 0)
SLOW = 0.001
"""A step takes many seconds."""


@dataclass
class Engines:
    """Engines, each with a relay that lets routers warm it; and a connection to their NATS."""

    nats_url: str
    engines: dict[str, StandIn]
    relays: dict[str, Relay]
    broker: Broker

    async def ask(self, warm: Warm, worker: WorkerKey = A) -> Warmed:
        """What the relay of a worker answers."""
        subject = subjects.warm("default", worker)
        answer = await self.broker.request(subject, encode(warm), 30.0)
        assert answer is not None
        told = decode(Warmed, answer)
        assert isinstance(told, Warmed)
        return told

    async def take_back(self, number: int) -> None:
        cancel = Warm(id=str(number), cancel=True)
        await self.broker.publish(subjects.warm("default", A), encode(cancel))

    async def waiting(self, count: int) -> None:
        """Waits until the relay of `a` is at so many prefixes."""
        warmer = self.relays["a"]._shells[0].warmer
        assert warmer is not None
        await until(lambda: len(warmer._jobs) == count, f"{count} prefixes at the relay")


@asynccontextmanager
async def some_engines(
    *names: str, speed: float = 100.0, warm: bool = True, slots: int = 64
) -> AsyncIterator[Engines]:
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(a_nats())
        scheduler = SchedulerConfig(
            block_count=2048, block_size=BLOCK_SIZE, lora_names=(LORA,), max_num_seqs=slots
        )
        configs = [EngineConfig(name, scheduler) for name in names]
        engines = await stack.enter_async_context(stand_ins(configs, ScaledClock(speed)))
        broker = await stack.enter_async_context(a_broker(nats.url))
        relays = {
            engine.engine_id: await stack.enter_async_context(a_relay(engine, broker, warm=warm))
            for engine in engines
        }
        shells = [relay._shells[0] for relay in relays.values()]
        await until(lambda: all(shell.started and shell.load for shell in shells), "all relays")
        yield Engines(nats.url, {one.engine_id: one for one in engines}, relays, broker)


def soon(router: RouterApp) -> None:
    """Has few requests make a prefix hot, and a holder busy."""
    router.links.hot.hot_score, router.links.hot.busy_requests = 3.0, 0


@asynccontextmanager
async def a_router(engines: Engines) -> AsyncIterator[tuple[RouterApp, KvRouteClient]]:
    hot = HotPrefixSettings(enabled=True)
    # Without the guard, which has requests for a text spread before it is hot.
    routing = RoutingSettings(hot_prefixes=hot, guard=GuardSettings(policies=()))
    config = msgspec.structs.replace(serve_config(engines.nats_url), routing=routing)
    async with router_app(config) as (router, client):
        soon(router)
        await all_schedulable(router, len(engines.engines))
        yield router, client


def warm_text(number: int = 1, lora_name: str = "", cache_salt: str = "") -> Warm:
    """A router's word to compute the text."""
    tokens = pack_tokens(TEXT)
    return Warm(id=str(number), tokens=tokens, lora_name=lora_name, cache_salt=cache_salt)


def hot_prefixes(router: RouterApp) -> HotPrefixes:
    assert router.links.hot.enabled
    return router.links.hot


def held(router: RouterApp, worker_id: str) -> int:
    """Tokens of the text that the router was told that a worker holds."""
    (source,) = router.view.ranks(worker_id)
    hashes = prefix_hashes(block_hashes(pack_tokens(TEXT), BLOCK_SIZE))
    return int(router.view.index.match(hashes).held()[source.slot]) * BLOCK_SIZE


def requests_in(engine: Engine) -> int:
    load = engine.load()
    return load.running + load.waiting


def own(number: int) -> list[int]:
    """The end of a request, of no other."""
    return [10_000 + number] * 20


async def computed_at_a(engines: Engines, router: RouterApp) -> None:
    """Has `a` hold the text, as the router knows then."""
    await engines.engines["a"].engine.complete(TEXT + own(99), 1)
    await until(lambda: held(router, "a") == len(TEXT), "the text at a")


async def ask_for_text(client: KvRouteClient, holder: str, others: Sequence[str]) -> None:
    """Requests for the text that go to its holder, and stay there."""
    for i in range(4):
        pick = await client.route(token_ids=TEXT + own(i), excluded_worker_ids=others)
        assert pick.worker_id == holder


async def test_a_hot_text_is_computed_by_a_worker_that_has_time() -> None:
    async with some_engines("a", "b") as engines, a_router(engines) as (router, client):
        await computed_at_a(engines, router)
        assert held(router, "b") == 0
        await ask_for_text(client, "a", ["b"])
        fates = hot_prefixes(router).copies.fates
        await until(lambda: fates[CopyFate.DONE] == 1, "a copy")
        await until(lambda: held(router, "b") == len(TEXT), "the text at b")
        pick = await client.route(token_ids=TEXT + own(5))
        assert pick.worker_id == "b"  # as much of it as at a, and nothing else to do
        assert fates == {CopyFate.BEGUN: 1, CopyFate.DONE: 1, CopyFate.USED: 1}


@pytest.mark.parametrize("batching", [False, True])
async def test_picks_of_calls_and_of_streams_count(batching: bool) -> None:
    async with some_engines("a", "b") as engines, a_router(engines) as (router, _):
        await computed_at_a(engines, router)
        async with KvRouteClient(
            f"127.0.0.1:{router.listeners.grpc_port}", batching=batching
        ) as client:
            if batching:
                for _ in range(2):  # one by one, until there is a stream
                    await client.route(token_ids=own(98))
                assert client._transport.lines is not None
                lines = client._transport.lines._lines
                await until(
                    lambda: all(one.stream and one.stream.takes(1) for one in lines), "a stream"
                )
            calls = [client.route(token_ids=TEXT + own(i)) for i in range(4)]
            assert {pick.worker_id for pick in await asyncio.gather(*calls)} == {"a"}
        fates = hot_prefixes(router).copies.fates
        await until(lambda: fates[CopyFate.DONE] == 1, "a copy")
        await until(lambda: held(router, "b") == len(TEXT), "the text at b")


async def test_a_relay_that_does_not_allow_it_is_not_asked() -> None:
    async with some_engines("a", "b", warm=False) as engines, a_router(engines) as (router, client):
        await computed_at_a(engines, router)
        await ask_for_text(client, "a", ["b"])
        hot = hot_prefixes(router)
        await until(lambda: hot.reasons["no_target"] > 0, "a refusal")
        assert hot.copies.fates == {}


async def test_a_copy_whose_relay_is_gone_has_failed() -> None:
    async with some_engines("a", "b") as engines, a_router(engines) as (router, client):
        await computed_at_a(engines, router)
        await engines.relays["b"]._listening.close()
        await ask_for_text(client, "a", ["b"])
        fates = hot_prefixes(router).copies.fates
        await until(lambda: fates[CopyFate.FAILED] == 1, "a failure")


async def test_a_copy_that_is_cancelled_ends_in_the_engine() -> None:
    async with some_engines("a", "b", speed=SLOW) as engines, a_router(engines) as (router, client):
        await ask_for_text(client, "a", ["b"])
        engine = engines.engines["b"].engine
        await until(lambda: requests_in(engine) == 1, "a prefix at the engine")
        router.core.drain("b")
        fates = hot_prefixes(router).copies.fates
        await until(lambda: fates[CopyFate.CANCELLED] == 1, "a copy that is given up")
        await until(lambda: requests_in(engine) == 0, "an engine that lets go of it")
        assert router.links.copies is not None
        tasks = router.links.copies._tasks
        await until(lambda: not tasks._running, "nobody who waits for it")


async def test_copies_are_switched_on_and_off_while_a_router_runs() -> None:
    off = serve_config(None)
    on = msgspec.structs.replace(
        off,
        routing=RoutingSettings(hot_prefixes=HotPrefixSettings(enabled=True)),
    )
    async with some_engines("a", "b", speed=SLOW) as engines:
        config = msgspec.structs.replace(off, nats=NatsSettings(url=engines.nats_url))
        async with router_app(config) as (router, client):
            soon(router)
            await all_schedulable(router, 2)
            await ask_for_text(client, "a", ["b"])
            assert (router.links.hot.enabled, router.links.copies) == (False, None)
            router._read_again = lambda: on
            await router.reload()
            await ask_for_text(client, "a", ["b"])
            engine = engines.engines["b"].engine
            await until(lambda: requests_in(engine) == 1, "a prefix at the engine")
            fates = hot_prefixes(router).copies.fates
            router._read_again = lambda: off
            await router.reload()
            assert not router.links.hot.enabled
            assert fates == {CopyFate.BEGUN: 1, CopyFate.CANCELLED: 1}
            await until(lambda: requests_in(engine) == 0, "an engine that lets go of it")
            router._read_again = lambda: on
            await router.reload()
            assert hot_prefixes(router).copies.fates is fates


async def test_a_prefix_is_computed_with_its_lora_and_its_salt() -> None:
    async with some_engines("a") as engines:
        told = await engines.ask(warm_text(lora_name=LORA, cache_salt="tenant"))
        assert told == Warmed(id="1", done=True)
        engine = engines.engines["a"].engine
        cached = [
            (await engine.complete(TEXT + own(i), 1, lora_name=lora, cache_salt=salt)).cached_tokens
            for i, (lora, salt) in enumerate([(LORA, "tenant"), (LORA, ""), ("", "tenant")])
        ]
        assert cached == [len(TEXT), 0, 0]


async def test_what_the_engine_refuses_has_failed() -> None:
    async with some_engines("a") as engines:
        told = await engines.ask(warm_text(lora_name="nobody's"))
        assert not told.done
        assert "status 404" in told.detail
        assert engines.relays["a"].counts["warm_failed"] == 1


async def test_an_engine_that_is_gone_has_failed() -> None:
    async with some_engines("a") as engines:
        engines.engines["a"].engine.stop()
        told = await engines.ask(warm_text())
        assert not told.done
        assert engines.relays["a"].counts["warm_failed"] == 1


async def test_what_can_not_be_read_is_counted() -> None:
    async with some_engines("a") as engines:
        bad = [b"", b"\xc1", encode(Warm(id="1")), encode(Warm(id="1", tokens=b"12345"))]
        for payload in bad:
            await engines.broker.publish(subjects.warm("default", A), payload)
        counts = engines.relays["a"].counts
        await until(lambda: counts["warm_malformed"] == len(bad), "all of them")


async def test_prefixes_that_wait_at_a_relay_are_bounded() -> None:
    async with some_engines("a", speed=SLOW) as engines:
        asked = [
            asyncio.create_task(engines.ask(Warm(id=str(i), tokens=pack_tokens(TEXT[i:]))))
            for i in range(JOBS_MAX)
        ]
        await engines.waiting(JOBS_MAX)
        told = await engines.ask(Warm(id="more", tokens=pack_tokens(own(1))))
        assert (told.done, told.detail) == (False, "busy with other prefixes")
        assert engines.relays["a"].counts["warm_busy"] == 1
        engine = engines.engines["a"].engine
        await until(lambda: requests_in(engine) == 1, "one at a time in the engine")
        for i in range(JOBS_MAX):
            await engines.take_back(i)
        await engines.waiting(0)
        for task in asked:
            task.cancel()


async def test_two_routers_that_ask_for_the_same_share_it() -> None:
    async with some_engines("a", speed=1.0) as engines:
        told = await asyncio.gather(*(engines.ask(warm_text(i)) for i in range(2)))
        assert [one.done for one in told] == [True, True]


async def test_what_two_routers_share_goes_on_until_both_take_it_back() -> None:
    async with some_engines("a", speed=SLOW) as engines:
        asked = [asyncio.create_task(engines.ask(warm_text(i))) for i in range(2)]
        await engines.waiting(1)
        engine = engines.engines["a"].engine
        warmer = engines.relays["a"]._shells[0].warmer
        assert warmer is not None
        (job,) = warmer._jobs.values()
        await until(lambda: len(job.replies) == 2 and requests_in(engine) == 1, "one for both")
        await engines.take_back(0)
        await until(lambda: len(job.replies) == 1, "one that is left")
        assert requests_in(engine) == 1
        await engines.take_back(1)
        await until(lambda: requests_in(engine) == 0, "an engine that lets go of it")
        for task in asked:
            task.cancel()


async def test_an_engine_in_which_requests_wait_is_left_alone() -> None:
    async with some_engines("a", speed=SLOW, slots=1) as engines:
        engine = engines.engines["a"].engine
        requests = [asyncio.create_task(engine.complete(own(i), 1)) for i in range(2)]
        shell = engines.relays["a"]._shells[0]
        await until(lambda: shell.load is not None and shell.load.waiting, "a request that waits")
        told = await engines.ask(warm_text())
        assert (told.done, told.detail) == (False, "requests wait in the engine")
        for request in requests:
            request.cancel()


def test_each_engine_is_asked_in_its_own_way() -> None:
    warm = Warm(id="1", tokens=pack_tokens([1, 2]), lora_name=LORA, cache_salt="s")
    common = {"prompt": [1, 2], "max_tokens": 1, "temperature": 0, "cache_salt": "s"}
    assert completion_of(warm, "vllm", "m") == common | {"model": LORA}
    assert completion_of(warm, "sglang", "m") == common | {"model": "m", "lora_path": LORA}
    assert "model" not in completion_of(Warm(id="1", tokens=bytes(8)), "vllm", "")


def test_an_engine_without_http_can_not_be_warmed() -> None:
    with pytest.raises(ValueError, match="no HTTP base"):
        EngineSettings(id="a", engine="vllm", address="grpc://a:1", warm=True)
