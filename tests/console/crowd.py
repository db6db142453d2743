"""A real router with gRPC, NATS and its console, and a crowd of workers that the test plays.

Beats and heartbeats are the bytes of relays, handed to the router's view without NATS between, so
that a thousand workers cost half a core and no sockets.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from indexer.hashing import pack_tokens
from indexer.identity import WorkerKey
from kvroute.client import KvRouteClient
from kvroute.client.errors import KvRouteError
from kvroute.v1 import Progress, ProgressState
from router.app.processes.router_process import RouterApp
from router.config.settings.serving_settings import MetricsSettings
from router.request.prompt import Prompt
from tests.stage.fleet import Fleet
from tests.stage.loopback import router_app, serve_config

SYSTEM = 512
"""Tokens of each system prompt."""
OUTPUT_S = 2.0
"""Mean time of an answer after its first token."""


@dataclass
class Crowd:
    """Workers of a running router, and the traffic to them."""

    app: RouterApp
    client: KvRouteClient
    rng: random.Random
    output_s: float = OUTPUT_S
    fleet: Fleet = field(init=False)
    silent: set[WorkerKey] = field(default_factory=set)
    open: list[tuple[float, str, int]] = field(default_factory=list)
    """(when it ends, reservation, cached tokens)"""

    def __post_init__(self) -> None:
        self.fleet = Fleet()
        self.fleet.view, self.fleet.core = self.app.view, self.app.core

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.app.listeners.metrics_port}/console/"

    def add(self, worker_id: str, **about: Any) -> WorkerKey:
        self.fleet.now_s = self.app.clock()
        return self.fleet.add(worker_id, **about)

    def beat(self) -> None:
        """A beat of every worker that isn't silent, and a heartbeat with its load."""
        fleet = self.fleet
        fleet.now_s = self.app.clock()
        for key in [key for key in fleet.relays if key not in self.silent]:
            if key in fleet.view.sources:
                fleet.beat(key)
                load = self.app.core.fleet.load_of(key)
                fleet.say(key, running=load.requests, used_blocks=float(load.blocks))

    async def live(self) -> None:
        """Beats once a second, until it is cancelled."""
        while True:
            self.beat()
            await asyncio.sleep(1.0)

    async def send(self, rate: float) -> None:
        """Requests at a rate, one after the other, until it is cancelled."""
        loop = asyncio.get_running_loop()
        turn_s = loop.time()
        owed = 0.0
        while True:
            now = loop.time()
            owed += rate * (now - turn_s)
            turn_s = now
            while owed >= 1:
                owed -= 1
                with suppress(KvRouteError):  # refusals are part of the picture
                    await self.one()
            await asyncio.sleep(0.02)

    async def one(self) -> None:
        """One request: a system prompt of a few, a document of some, and words of its own."""
        rng = self.rng
        system = rng.choices((0, 1, 2, 3), (8, 4, 2, 1))[0]
        tokens = [system * 100_000 + i for i in range(SYSTEM)]
        if rng.random() < 0.6:
            document = rng.randrange(4)
            tokens += [1_000_000 + system * 10_000 + document * 1000 + i for i in range(640)]
        tokens += [rng.randrange(1 << 20) for _ in range(rng.randrange(64, 800))]
        tenant = rng.choice(("acme", "beta", "crow"))
        beats = [relay.heartbeat for relay in self.fleet.relays.values()]
        model = rng.choice([beat.model for beat in beats if beat.role == "both"])
        pick = await self.client.route(token_ids=tokens, tenant=tenant, model=model)
        # An engine reuses what its events said; what was only sent there may still be on its way.
        cached = pick.overlap_tokens.usable - pick.overlap_tokens.predicted
        key = WorkerKey(pick.worker_id, pick.dp_rank or 0)
        source = self.app.view.sources.get(key)
        if source is not None and len(tokens) % 3:
            self.hold(key, tokens)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(rng.uniform(0.0, 0.01))
        await self.client.report(
            Progress(
                reservation_id=pick.reservation_id,
                state=ProgressState.PROGRESS_STATE_PREFILL_DONE,
                cached_tokens=cached,
            )
        )
        self.open.append(
            (loop.time() + rng.expovariate(1 / self.output_s), pick.reservation_id, cached)
        )

    def hold(self, key: WorkerKey, tokens: list[int]) -> None:
        """The worker's events say that it holds a prompt."""
        self.fleet.now_s = self.app.clock()
        self.fleet.cache(key, Prompt.from_tokens(pack_tokens(tokens)))

    async def finish(self) -> None:
        """Ends requests whose answers are over, until it is cancelled: apart from `send`, which
        waits for room."""
        while True:
            now = asyncio.get_running_loop().time()
            over = [one for one in self.open if one[0] <= now]
            self.open = [one for one in self.open if one[0] > now]
            for _, reservation_id, _ in over:
                with suppress(KvRouteError):
                    await self.client.report(
                        Progress(
                            reservation_id=reservation_id,
                            state=ProgressState.PROGRESS_STATE_FINISHED,
                            output_tokens=50,
                        )
                    )
            await asyncio.sleep(0.02)


@asynccontextmanager
async def a_crowd(
    workers: Iterable[tuple[str, dict[str, Any]]],
    *,
    rate: float = 20.0,
    output_s: float = OUTPUT_S,
    **parts: Any,
) -> AsyncIterator[Crowd]:
    """A running router whose workers beat, and requests to them. parts: of its configuration."""
    parts = {"metrics": MetricsSettings(listen="127.0.0.1:0"), "ready_timeout_s": 1.0} | parts
    async with router_app(serve_config(None, **parts)) as (app, client):
        crowd = Crowd(app, client, random.Random(11), output_s)
        for worker_id, about in workers:
            crowd.add(worker_id, **({"total_slots": 64, "total_blocks": 4000} | about))
        works = (crowd.live(), crowd.send(rate), crowd.finish())
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield crowd
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task


def many(count: int, **about: Any) -> list[tuple[str, dict[str, Any]]]:
    """Workers of two models, or as `about` says."""
    return [
        (
            f"gpu-{i:04}",
            {"model": "llama-3.3-70b" if i % 4 else "qwen3-8b", "engine_version": "0.20.1"} | about,
        )
        for i in range(count)
    ]
