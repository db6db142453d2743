"""Relays over real sockets, beside stand-in engines: what routers get to hear of an engine."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec

from events.broker import Broker
from events.clock import unix_now
from events.relay import Relay
from events.settings import EngineSettings, NatsSettings
from events.stream import StreamState
from router.app import RouterApp
from router.nats_child import NatsChild
from simulator.clock import ScaledClock
from simulator.engine import EngineConfig
from simulator.fleet import StandIn, stand_ins
from simulator.scheduler import SchedulerConfig
from tests.end_to_end.stage import BLOCK_SIZE, engine_settings, router_app, serve_config, until


@dataclass
class Stage:
    """An engine and a router, and no relay yet."""

    nats: NatsChild
    engine: StandIn
    router: RouterApp


@asynccontextmanager
async def an_engine_and_a_router() -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        nats = NatsChild()
        stack.push_async_callback(nats.stop)
        await nats.start()
        config = EngineConfig("w", SchedulerConfig(block_count=2048, block_size=BLOCK_SIZE))
        (engine,) = await stack.enter_async_context(stand_ins([config], ScaledClock(100.0)))
        router, _ = await stack.enter_async_context(router_app(serve_config(nats.url)))
        yield Stage(nats, engine, router)


@asynccontextmanager
async def relaying(stage: Stage, settings: EngineSettings) -> AsyncIterator[Relay]:
    """A relay in this process."""
    failures: list[BaseException] = []
    broker = Broker(NatsSettings(), stage.nats.url, "relay")
    relay = Relay(
        settings,
        broker,
        fleet="default",
        clock=unix_now,
        on_failure=failures.append,
        rng=random.Random(1),
    )
    try:
        await broker.connect()
        await relay.start()
        yield relay
    finally:
        await relay.stop()
        await broker.close()
    assert failures == []


async def test_an_engine_that_publishes_no_events_is_told_of_by_its_heartbeats() -> None:
    async with an_engine_and_a_router() as stage:
        silent = msgspec.structs.replace(
            engine_settings(stage.engine), events=None, replay=None, topic=""
        )
        async with relaying(stage, silent) as relay:
            view = stage.router.view
            await until(
                lambda: any(
                    one.heartbeat and one.heartbeat.sampled_at_s for one in view.sources.values()
                ),
                "a heartbeat with a load",
            )
            (source,) = view.sources.values()
            await until(lambda: source.stream.state is StreamState.LIVE, "a live stream")
            assert not stage.router.core.excluded(source)
            heartbeat = source.heartbeat
            assert heartbeat is not None
            assert not heartbeat.events
            assert (heartbeat.model, heartbeat.block_size) == ("stand-in", BLOCK_SIZE)
            assert (heartbeat.total_blocks, heartbeat.total_slots) == (2048, 64)
            await stage.engine.engine.complete(list(range(100)), 1)
            beat_at_s = source.stream.last_beat_s
            await until(lambda: source.stream.last_beat_s > beat_at_s, "the next beat")
            ((_, rank),) = relay.ranks
            assert rank.last_event_s is None
            assert (source.stream.seq, source.stream.complete) == (0, False)
            assert view.index.count(source.slot) == 0
