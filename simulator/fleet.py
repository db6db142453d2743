"""Stand-in engines with their sockets: what a relay and a client find on loopback."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import zmq.asyncio

from simulator.clock import Clock
from simulator.engine import Engine, EngineConfig
from simulator.http_face import HttpFace
from simulator.publisher import Publisher


@dataclass(frozen=True, slots=True)
class StandIn:
    """An engine with its faces. The fields are what a relay has to be told."""

    engine: Engine
    publisher: Publisher
    address: str
    """http://127.0.0.1:port: requests, health, metrics"""

    @property
    def engine_id(self) -> str:
        return self.engine.config.engine_id

    @property
    def events_endpoint(self) -> str:
        return self.publisher.endpoint

    @property
    def replay_endpoint(self) -> str:
        return self.publisher.replay_endpoint

    @property
    def topic(self) -> str:
        return self.publisher.topic


@asynccontextmanager
async def stand_in(
    config: EngineConfig, clock: Clock, context: zmq.asyncio.Context
) -> AsyncIterator[StandIn]:
    """Runs one engine on free loopback ports; it and its sockets end with the block."""
    publisher = Publisher(context)
    engine = Engine(config, clock, publisher.publish)
    face = HttpFace(engine, publisher)
    try:
        await face.start()
        yield StandIn(engine, publisher, face.address)
    finally:
        engine.stop()
        await face.stop()
        await publisher.close()


@asynccontextmanager
async def stand_ins(configs: Sequence[EngineConfig], clock: Clock) -> AsyncIterator[list[StandIn]]:
    """Runs several engines on one event loop and one ZMQ thread."""
    with zmq.asyncio.Context() as context:
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(stand_in(config, clock, context))
                for config in configs
            ]
