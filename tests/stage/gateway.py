"""A gateway on loopback, between a real router's gRPC service and workers that the test plays."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from events.plane.clock import unix_now
from kvroute.client import KvRouteClient
from router.config.settings.gateway_settings import GatewaySettings
from router.config.settings.keys_settings import EnginesSettings
from router.fleet.reservations.reservations import Ending
from router.gateway.server.gateway import Gateway
from router.net.keys.door import Door
from router.net.keys.engine_accesses import EngineAccesses
from router.observe.tracing.spans import Tracing
from router.request.tokens import ModelPrompts, Source
from tests.stage.request_settings import taken_from
from tests.stage.served import Served, served

Play = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]
GUARD_S = 60.0
"""What hangs fails; nothing waits this long."""


@dataclass
class Worker:
    """An engine's HTTP server that answers as the test says."""

    play: Play
    bodies: list[bytes] = field(default_factory=list)
    requests: list[web.Request] = field(default_factory=list)
    left: int = 0
    """Requests whose client went away before the answer's end."""
    address: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.bodies.append(body)
        self.requests.append(request)
        try:
            return await self.play(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield
        finally:
            await runner.cleanup()


@dataclass(frozen=True)
class Answer:
    """A whole answer of HTTP."""

    status: int
    headers: Mapping[str, str]
    """Their names match in any case."""
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """Of an answer in OpenAI's form."""
        return self.json()["error"]


@dataclass
class Stage:
    """What a test plays on."""

    served: Served
    gateway: Gateway
    http: aiohttp.ClientSession
    base: str

    @property
    def endings(self) -> dict[Ending, int]:
        return {ending: n for ending, n in self.served.fleet.core.endings.items() if n}

    @property
    def finish_reasons(self) -> dict[str, int]:
        return self.served.fleet.core.finish_reasons

    @property
    def open(self) -> int:
        return len(self.served.fleet.core.reservations)

    def add(self, worker_id: str, worker: Worker | str, **about: Any) -> None:
        address = worker if isinstance(worker, str) else worker.address
        self.served.fleet.add(worker_id, address=address, **about)

    def post(self, path: str, body: object = None, **about: Any) -> Any:
        if isinstance(body, bytes):
            body = io.BytesIO(body)
        content = {"json": body} if isinstance(body, dict) else {"data": body}
        return self.http.post(f"{self.base}{path}", **content, **about)

    async def ask(self, path: str, body: object = None, **about: Any) -> Answer:
        async with self.post(path, body, **about) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def get(self, path: str, **about: Any) -> Answer:
        async with self.http.get(f"{self.base}{path}", **about) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    def sample(self, family: str, **labels: str) -> float:
        return self.gateway.counters.registry.get_sample_value(family, labels) or 0.0

    def requests(self, outcome: str) -> float:
        """Chats that came to this."""
        labels = {"path": "/v1/chat/completions", "outcome": outcome}
        return self.sample("kvroute_gateway_requests_total", **labels)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(GUARD_S):
            while not condition():  # noqa: ASYNC110  # nothing to await
                await asyncio.sleep(0.001)


@asynccontextmanager
async def a_gateway(
    *workers: Worker,
    door: Door | None = None,
    router_door: Door | None = None,
    dial: Mapping[str, Any] | None = None,
    prompts: ModelPrompts | None = None,
    in_process: bool = False,
    tracing: Tracing | None = None,
    accesses: EngineAccesses | None = None,
    engines: EnginesSettings | None = None,
    **settings: Any,
) -> AsyncIterator[Stage]:
    """A gateway before a fleet of these workers, w0, w1 ...; the tests add others.

    door, router_door: keys of the gateway's clients, and of the router's. dial: see Gateway.
    prompts: of model m; None: the router makes no tokens. tracing: of both."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker.run())
        # Workers here answer each request as the test says, so that no router may ask for tokens.
        without_tokens = {"m": prompts or ModelPrompts(source=Source.OFF)}
        router = await stack.enter_async_context(
            served(models_prompts=without_tokens, door=router_door, tracing=tracing)
        )
        broken: list[BaseException] = []
        requests = taken_from(settings)
        own = GatewaySettings(listen="127.0.0.1:0", **settings)
        if engines is not None:
            accesses = EngineAccesses.of(engines, own)
        gateway = Gateway(
            own,
            router.local()
            if in_process
            else KvRouteClient(f"127.0.0.1:{router.server.port}", **(dial or {})),
            CollectorRegistry(),
            clock=unix_now,
            broke=broken.append,
            door=door,
            tracing=tracing,
            accesses=accesses,
            requests=requests,
        )
        for number, worker in enumerate(workers):
            router.fleet.add(f"w{number}", address=worker.address)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        base = f"http://127.0.0.1:{gateway.port}"
        await gateway.roster.refresh()
        yield Stage(router, gateway, http, base)
        await http.close()
        assert not broken


def answering(body: bytes, status: int = 200, **headers: str) -> Play:
    """Answers every request so."""

    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        return web.Response(
            body=body, status=status, headers={"Content-Type": "application/json", **headers}
        )

    return play


async def begun(request: web.Request, *chunks: bytes) -> web.StreamResponse:
    """A stream of events of which these chunks were sent, each by itself."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
    return response


def cut(request: web.Request, *, reset: bool = False) -> None:
    """Closes the connection of a request."""
    assert request.transport is not None
    if reset:
        request.transport.abort()
    else:
        request.transport.close()


def streaming(*chunks: bytes) -> Play:
    """Answers every request with a stream of these chunks, each sent by itself."""

    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        return await begun(request, *chunks)

    return play


async def silent(_request: web.Request, _: bytes) -> web.StreamResponse:
    """Answers no request."""
    await asyncio.Event().wait()
    raise AssertionError
