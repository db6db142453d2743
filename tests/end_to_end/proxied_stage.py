"""A kvroute whose connections can fail: real NATS, a relay process, and proxies in between.

The victim's relay and the router reach NATS, and that relay its engine, through proxies. A second
worker, the bystander, has its relay in this process and nothing in between.
"""

import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import zmq.asyncio

from events.feed.fleet_view import Source
from events.feed.stream import StreamState
from indexer.hashing import block_hashes, pack_tokens, prefix_hashes
from router.app.processes.router_process import RouterApp
from router.cluster.children.nats_server import NatsChild
from router.cluster.children.process import Child, end, start
from simulator.engines.scheduler import SchedulerConfig
from simulator.live.clock import ScaledClock
from simulator.live.engine import EngineConfig
from simulator.live.stand_ins import StandIn, stand_in
from tests.stage.loopback import BLOCK_SIZE, a_broker, a_relay, router_app, serve_config
from tests.stage.proxy import Proxy, proxy_to
from tests.stage.waiting import until

VICTIM, BYSTANDER = "victim", "bystander"
PROMPT_TOKENS = 10 * BLOCK_SIZE + 3
CACHE_BLOCKS = 64
"""Room for five prompts: the sixth evicts the first."""


class ProxiedStage:
    """What a fault can be played on. Exits of `stack` run when the stage ends."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.nats = NatsChild()
        self.router_nats: Proxy
        self.relay_nats: Proxy
        self.relay_engine: list[Proxy] = []
        """To the victim's events, replays and HTTP."""
        self.engine: StandIn
        self.router: RouterApp
        self._relay: Child
        self._prompts: list[list[int]] = []
        self._rng = random.Random(1)
        self._stack = stack
        self._context = stack.enter_context(zmq.asyncio.Context())
        self._engine_life = AsyncExitStack()

    async def start(self) -> None:
        """Both workers at full trust, the victim's cache full and in the index."""
        enter, at_end = self._stack.enter_async_context, self._stack.push_async_callback
        await self.nats.start()
        at_end(lambda: self.nats.stop())
        nats_port = port_of(self.nats.url)
        self.router_nats = await enter(proxy_to(nats_port))
        self.relay_nats = await enter(proxy_to(nats_port))
        at_end(lambda: self._engine_life.aclose())
        await self._start_engine()
        self.relay_engine = [await enter(proxy_to(port)) for port in self._engine_ports()]
        config = serve_config(f"nats://127.0.0.1:{self.router_nats.port}")
        self.router, _ = await enter(router_app(config))
        await self._start_bystander()
        await self.start_relay()
        at_end(lambda: end(self._relay))
        await until(
            lambda: len(self.router.view.sources) == 2 and self.counts() and self.counts(BYSTANDER),
            "both workers at full trust",
        )
        await self.work(6)
        await until(self.exact, "the engine's blocks in the index")

    # --- what happens to it ---

    async def kill_nats(self) -> None:
        assert self.nats.pid is not None
        os.kill(self.nats.pid, signal.SIGKILL)
        await self.nats.wait()

    async def restart_nats(self) -> None:
        port = port_of(self.nats.url)
        await self.nats.stop()
        self.nats = NatsChild()
        await self.nats.start(port)

    async def kill_relay(self) -> None:
        self._relay.kill()
        await self._relay.wait()

    async def start_relay(self) -> None:
        events, replay, http = self.relay_engine
        command = [
            *(sys.executable, "-m", "router.app.main", "relay", "--worker-id", VICTIM),
            *("--nats", f"nats://127.0.0.1:{self.relay_nats.port}"),
            *("--address", f"http://127.0.0.1:{http.port}", "--topic", self.engine.topic),
            *("--events", f"tcp://127.0.0.1:{events.port}"),
            *("--replay", f"tcp://127.0.0.1:{replay.port}"),
            *("--metrics-listen", "", "--log-level", "error"),
        ]
        self._relay = await start(command, None)

    async def kill_engine(self) -> None:
        for proxy in self.relay_engine:
            proxy.cut()
        await self._engine_life.aclose()
        self._prompts.clear()

    async def restart_engine(self) -> None:
        """Another life of it, where the relay found the last one."""
        await self._start_engine()
        for proxy, port in zip(self.relay_engine, self._engine_ports(), strict=True):
            proxy.target = port
            await proxy.heal()

    async def work(self, prompts: int) -> None:
        """The engine serves so many new prompts, and evicts old ones."""
        for _ in range(prompts):
            self._prompts.append([self._rng.randrange(1000) for _ in range(PROMPT_TOKENS)])
            await self.engine.engine.complete(self._prompts[-1], 1)

    # --- what is known of it ---

    def source(self, worker_id: str = VICTIM) -> Source:
        (source,) = self.router.view.ranks(worker_id)
        return source

    def counts(self, worker_id: str = VICTIM) -> bool:
        """Whether a worker may get requests for what the index says that it holds."""
        source = self.source(worker_id)
        return source.stream.state is StreamState.LIVE and not self.router.core.fleet.excluded(
            source
        )

    def routing(self) -> bool:
        """Whether every worker may get requests, whatever is known of its blocks."""
        core = self.router.core
        return not any(core.fleet.excluded(source) for source in self.router.view.sources.values())

    def exact(self) -> bool:
        """Whether the index has the very blocks that the victim's engine holds.

        Its prompts have nothing in common, and it evicts a chain from the end.
        """
        index, slot = self.router.view.index, self.source().slot
        held = [self.engine.engine.cached_tokens(tokens) for tokens in self._prompts]
        known = [
            int(
                index.match(prefix_hashes(block_hashes(pack_tokens(tokens), BLOCK_SIZE))).run()[
                    slot
                ]
            )
            for tokens in self._prompts
        ]
        return known == [tokens // BLOCK_SIZE for tokens in held] and sum(known) == index.told(slot)

    async def _start_engine(self) -> None:
        self._engine_life = AsyncExitStack()
        self.engine = await self._engine_life.enter_async_context(self._an_engine(VICTIM))

    def _an_engine(self, name: str) -> AbstractAsyncContextManager[StandIn]:
        scheduler = SchedulerConfig(block_count=CACHE_BLOCKS, block_size=BLOCK_SIZE)
        return stand_in(EngineConfig(name, scheduler), ScaledClock(100.0), self._context)

    def _engine_ports(self) -> list[int]:
        engine = self.engine
        return [
            port_of(one) for one in (engine.events_endpoint, engine.replay_endpoint, engine.address)
        ]

    async def _start_bystander(self) -> None:
        enter = self._stack.enter_async_context
        engine = await enter(self._an_engine(BYSTANDER))
        broker = await enter(a_broker(self.nats.url, BYSTANDER))
        await enter(a_relay(engine, broker))


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@asynccontextmanager
async def a_proxied_stage() -> AsyncIterator[ProxiedStage]:
    """Everything up; `ProxiedStage.start` says how."""
    async with AsyncExitStack() as stack:
        stage = ProxiedStage(stack)
        await stage.start()
        yield stage
