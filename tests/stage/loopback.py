"""A whole kvroute on loopback: real NATS, stand-in engines, relays, a router, in one process."""

import random
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from events.plane.broker import Broker
from events.plane.clock import unix_now
from events.plane.settings import EngineSettings, NatsSettings
from events.relay.relay import Relay
from indexer.hashing import block_hashes, pack_tokens, prefix_hashes
from kvroute.client import KvRouteClient, Pick
from kvroute.v1 import Progress, ProgressState
from router.app.processes.router_process import RouterApp
from router.cluster.children.nats_server import NatsChild
from router.cluster.children.process import Child, start
from router.config.settings.configurations import ServeConfig
from router.config.settings.serving_settings import GrpcSettings, MetricsSettings
from simulator.engines.scheduler import SchedulerConfig
from simulator.live.clock import ScaledClock
from simulator.live.engine import EngineConfig
from simulator.live.stand_ins import StandIn, stand_ins
from tests.stage.waiting import until

BLOCK_SIZE = 16


def a_prompt(rng: random.Random) -> list[int]:
    """Tokens of four blocks that no other prompt begins with."""
    return [rng.randrange(100_000) for _ in range(4 * BLOCK_SIZE)]


class TurnedClock:
    """Unix time that the test can push forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return unix_now() + self.ahead_s


@dataclass
class Stage:
    """What a test plays on."""

    nats: NatsChild
    engines: list[StandIn]
    relays: dict[str, Relay]
    router: RouterApp
    client: KvRouteClient
    clock: TurnedClock

    def engine(self, worker_id: str) -> StandIn:
        return next(one for one in self.engines if one.engine_id == worker_id)

    def held(self, worker_id: str) -> int:
        """Blocks that the router believes a worker to hold."""
        view = self.router.view
        return sum(view.index.count(source.slot) for source in view.ranks(worker_id))

    def known(self, worker_id: str, token_ids: Sequence[int]) -> int:
        """Leading tokens of a prompt that the router believes a worker to hold."""
        view = self.router.view
        (source,) = view.ranks(worker_id)
        hashes = prefix_hashes(block_hashes(pack_tokens(token_ids), BLOCK_SIZE))
        return int(view.index.match(hashes).run()[source.slot]) * BLOCK_SIZE

    async def serve(self, token_ids: Sequence[int], max_tokens: int = 1) -> str:
        """A whole request; returns the worker that served it."""
        pick = await self.client.route(token_ids=token_ids)
        engine = self.engine(pick.worker_id).engine
        done = await engine.complete(list(token_ids), max_tokens)
        await self.finish(pick, len(done.token_ids), done.cached_tokens)
        return pick.worker_id

    async def finish(self, pick: Pick, output_tokens: int = 0, cached_tokens: int = 0) -> None:
        """Reports a request as finished."""
        await self.client.report(
            Progress(
                reservation_id=pick.reservation_id,
                state=ProgressState.PROGRESS_STATE_FINISHED,
                output_tokens=output_tokens,
                cached_tokens=cached_tokens,
            )
        )

    async def idle(self) -> None:
        """Waits until the router sees that nothing runs anywhere."""
        loads = self.router.core.fleet.loads
        await until(
            lambda: all(load.active_blocks() == 0 for load in loads.values()), "an idle fleet"
        )


def engine_settings(engine: StandIn) -> EngineSettings:
    return EngineSettings(
        id=engine.engine_id,
        engine="vllm",
        address=engine.address,
        events=engine.events_endpoint,
        replay=engine.replay_endpoint,
        topic=engine.topic,
        slots=64,
    )


def serve_config(nats_url: str | None, **parts: object) -> ServeConfig:
    common: dict[str, object] = {
        "nats": NatsSettings(url=nats_url),
        "grpc": GrpcSettings(listen="127.0.0.1:0"),
        "metrics": MetricsSettings(listen="127.0.0.1:0"),
    }
    return ServeConfig(**(common | parts))  # type: ignore[arg-type]


@asynccontextmanager
async def router_app(
    config: ServeConfig, clock: Callable[[], float] = unix_now
) -> AsyncIterator[tuple[RouterApp, KvRouteClient]]:
    app = RouterApp(config, clock=clock, seed=1)
    try:
        await app.start()
        async with KvRouteClient(f"127.0.0.1:{app.listeners.grpc_port}") as client:
            yield app, client
    finally:
        await app.stop()
    assert app.failed is None


async def all_schedulable(router: RouterApp, count: int) -> None:
    """Waits until a router knows so many workers, and may pick each of them."""
    sources = router.view.sources
    await until(
        lambda: (
            len(sources) == count and not any(map(router.core.fleet.excluded, sources.values()))
        ),
        "all workers schedulable",
    )


async def router_process(
    nats_url: str, address: str, *words: str, program: Sequence[str] = ("-m", "router.app.main")
) -> Child:
    """A router in a process of its own, which may not be ready yet. words: more of its command."""
    command = [sys.executable, *program, "serve", "--nats", nats_url, "--grpc-listen", address]
    return await start([*command, "--metrics-listen", "", "--log-level", "error", *words], None)


@asynccontextmanager
async def a_nats() -> AsyncIterator[NatsChild]:
    nats = NatsChild()
    try:
        await nats.start()
        yield nats
    finally:
        await nats.stop()


@asynccontextmanager
async def a_broker(url: str, name: str = "relays", **settings: str) -> AsyncIterator[Broker]:
    broker = Broker(NatsSettings(**settings), url, name)
    try:
        await broker.connect()
        yield broker
    finally:
        await broker.close()


@asynccontextmanager
async def a_relay(
    engine: StandIn, broker: Broker, clock: Callable[[], float] = unix_now, **fields: Any
) -> AsyncIterator[Relay]:
    """The relay of an engine, in this process. fields: of its settings, those that differ."""
    settings = msgspec.structs.replace(engine_settings(engine), **fields)
    relay = Relay(settings, broker, fleet="default", clock=clock, rng=random.Random(1))
    try:
        await relay.start()
        yield relay
    finally:
        await relay.stop()
    assert not relay.failures


@asynccontextmanager
async def a_stage(
    engine_count: int = 2,
    block_count: int = 2048,
    speed: float = 100.0,
    roles: Mapping[str, Literal["prefill", "decode"]] | None = None,
    **parts: object,
) -> AsyncIterator[Stage]:
    """Everything up, every worker schedulable.

    roles: of those that don't do both, by their id. parts: sections of the router's configuration.
    """
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(a_nats())
        scheduler = SchedulerConfig(block_count=block_count, block_size=BLOCK_SIZE)
        configs = [EngineConfig(f"worker-{i}", scheduler) for i in range(engine_count)]
        engines = await stack.enter_async_context(stand_ins(configs, ScaledClock(speed)))
        clock = TurnedClock()
        config = serve_config(nats.url, **parts)
        router, client = await stack.enter_async_context(router_app(config, clock))
        broker = await stack.enter_async_context(a_broker(nats.url))
        relays = {}
        for engine in engines:
            role = (roles or {}).get(engine.engine_id)
            relays[engine.engine_id] = await stack.enter_async_context(
                a_relay(engine, broker, clock, role=role)
            )
        await all_schedulable(router, engine_count)
        yield Stage(nats, engines, relays, router, client, clock)
