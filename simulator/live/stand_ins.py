"""Stand-in engines with their sockets, for a relay and a client; on loopback by default."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import zmq.asyncio

from simulator.engines.content import Answer, greedy_answer
from simulator.live.addresses import FREE, LOOPBACK, Ports, authority, endpoint
from simulator.live.clock import Clock
from simulator.live.engine import Engine, EngineConfig
from simulator.live.http_api import HttpApi
from simulator.live.publisher import Publisher


@dataclass(frozen=True, slots=True)
class StandIn:
    """An engine with its sockets, and the settings for its relay."""

    engine: Engine
    publisher: Publisher
    address: str
    """http://host:port: requests, health, metrics"""
    api: HttpApi
    host: str = LOOPBACK
    """The IP address that the engine listens on."""

    @property
    def engine_id(self) -> str:
        return self.engine.config.engine_id

    @property
    def events_endpoint(self) -> str:
        return self._reached(self.publisher.endpoint)

    @property
    def replay_endpoint(self) -> str:
        return self._reached(self.publisher.replay_endpoint)

    def _reached(self, bound: str) -> str:
        """The endpoint at which programs of this machine reach the port of a bound endpoint."""
        return f"tcp://{authority(self.host, bound.rpartition(':')[2])}"

    @property
    def topic(self) -> str:
        return self.publisher.topic

    def relay_settings(self) -> dict[str, object]:
        """The engine as an entry of `workers:` in the configuration of a relay."""
        return {
            "id": self.engine_id,
            "engine": self.engine.config.what.engine.name,
            "address": self.address,
            "events": self.events_endpoint,
            "replay": self.replay_endpoint,
            "topic": self.topic,
            "slots": self.engine.config.scheduler.max_num_seqs,
        }


@asynccontextmanager
async def stand_in(
    config: EngineConfig,
    clock: Clock,
    context: zmq.asyncio.Context,
    *,
    host: str = LOOPBACK,
    ports: Ports = FREE,
    answer: Answer = greedy_answer,
) -> AsyncIterator[StandIn]:
    """Runs one engine; it and its sockets end with the block.

    host: the IP address that it listens on. answer: makes the tokens of its answers. Raises OSError
    or zmq.ZMQError when a port can't be bound.
    """
    publisher = Publisher(
        context,
        endpoint=endpoint(host, ports.events),
        replay_endpoint=endpoint(host, ports.replay),
    )
    engine = Engine(config, clock, publisher.publish, answer)
    api = HttpApi(engine, publisher)
    try:
        await api.start(ports.http, host, ports.bootstrap)
        yield StandIn(engine, publisher, api.address, api, host)
    finally:
        engine.stop()
        await api.stop()
        await publisher.close()


@asynccontextmanager
async def stand_ins(
    configs: Sequence[EngineConfig],
    clock: Clock,
    *,
    host: str = LOOPBACK,
    ports: Sequence[Ports] = (),
    answer: Answer = greedy_answer,
) -> AsyncIterator[list[StandIn]]:
    """Runs several engines within the block, on one event loop and one ZMQ thread. ports: those of
    each engine; empty: any free ports. host, answer: as for stand_in."""
    with zmq.asyncio.Context() as context:
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(
                    stand_in(config, clock, context, host=host, ports=own, answer=answer)
                )
                for config, own in zip(configs, ports or [FREE] * len(configs), strict=True)
            ]
