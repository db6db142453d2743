"""Stand-in engines with their sockets on loopback, for a relay and a client."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import zmq.asyncio

from simulator.engines.content import Answer, greedy_answer
from simulator.live.clock import Clock
from simulator.live.engine import Engine, EngineConfig
from simulator.live.http_face import HttpFace
from simulator.live.publisher import ANY_PORT, Publisher


@dataclass(frozen=True, slots=True)
class StandIn:
    """An engine with its sockets, and the settings for its relay."""

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

    def relay_settings(self) -> dict[str, object]:
        """The engine as an entry of `workers:` in the configuration of a relay."""
        return {
            "id": self.engine_id,
            "engine": "vllm",
            "address": self.address,
            "events": self.events_endpoint,
            "replay": self.replay_endpoint,
            "topic": self.topic,
            "slots": self.engine.config.scheduler.max_num_seqs,
        }


PORTS = 3
"""Ports of an engine: HTTP, events, replay."""


@asynccontextmanager
async def stand_in(
    config: EngineConfig,
    clock: Clock,
    context: zmq.asyncio.Context,
    *,
    port: int = 0,
    answer: Answer = greedy_answer,
) -> AsyncIterator[StandIn]:
    """Runs one engine on loopback; it and its sockets end with the block.

    port: of HTTP; events and replay have the next two; 0: any free ports. answer: makes the tokens
    of its answers. Raises OSError or zmq.ZMQError when a port is taken.
    """
    endpoints = (
        [f"tcp://127.0.0.1:{number}" for number in (port + 1, port + 2)] if port else [ANY_PORT] * 2
    )
    publisher = Publisher(context, endpoint=endpoints[0], replay_endpoint=endpoints[1])
    engine = Engine(config, clock, publisher.publish, answer)
    face = HttpFace(engine, publisher)
    try:
        await face.start(port)
        yield StandIn(engine, publisher, face.address)
    finally:
        engine.stop()
        await face.stop()
        await publisher.close()


@asynccontextmanager
async def stand_ins(
    configs: Sequence[EngineConfig],
    clock: Clock,
    *,
    port: int = 0,
    answer: Answer = greedy_answer,
) -> AsyncIterator[list[StandIn]]:
    """Runs several engines on one event loop and one ZMQ thread; each has PORTS ports from `port`
    on, or any free ports."""
    with zmq.asyncio.Context() as context:
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(
                    stand_in(
                        *(config, clock, context),
                        port=port and port + PORTS * place,
                        answer=answer,
                    )
                )
                for place, config in enumerate(configs)
            ]
