"""A good client of every port: how long each of its calls takes, and what became of it."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import aiohttp
import grpc.aio
import msgspec

from kvroute.client import KvRouteClient
from tests.stage.picker import picked, process_of, request_body, request_headers, response_headers

GOOD, HOSTILE = "good", "hostile"
"""Identities of the server; the token of each is `NAME-token`."""
CALL_S = 60.0
"""What takes longer has failed."""
EVERY_S = 0.05
"""Between two calls of one kind."""
CHAT = msgspec.json.encode(
    {"model": "stand-in", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
)
JSON = {"Content-Type": "application/json"}
PATHS = {"gateway": "/v1/models", "metrics": "/metrics", "probes": "/readyz"}


@dataclass
class Calls:
    """Those of one time span."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By kind: of calls that were answered."""
    failures: list[str] = field(default_factory=list)

    def p99_ms(self, kind: str) -> float:
        """Infinite if no call of a kind was answered."""
        if not self.seconds[kind]:
            return inf
        ordered = sorted(self.seconds[kind])
        return 1e3 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


class GoodClient:
    """Over connections of its own, which stay open."""

    def __init__(
        self,
        ports: Mapping[str, int],
        router: KvRouteClient,
        picker: grpc.aio.Channel,
        http: aiohttp.ClientSession,
        scheme: str,
    ) -> None:
        """scheme: of every port but that of the probes."""
        self._urls = {name: f"{scheme}://127.0.0.1:{ports[name]}" for name in PATHS}
        self._urls["probes"] = f"http://127.0.0.1:{ports['probes']}"
        self._router = router
        self._process = process_of(picker)
        self._http = http
        self._first = 0

    async def calls(self, stop: asyncio.Event) -> Calls:
        """Calls each port until `stop`, and once at least."""
        calls = Calls()
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "route": self._route,
            "chat": self._chat,
            "pick": self._pick,
            "connect": self._getter("gateway", connection="close"),
        }
        for name in PATHS:
            kinds[name] = self._getter(name)
        await asyncio.gather(*(_repeat(calls, name, kinds[name], stop) for name in kinds))
        return calls

    async def _route(self) -> None:
        self._first += 1
        tokens = range(self._first, self._first + 256)
        async with self._router.request(token_ids=list(tokens)) as request:
            if not request.pick.worker_id:
                raise AssertionError("a pick without a worker")

    async def _chat(self) -> None:
        url = self._urls["gateway"] + "/v1/chat/completions"
        async with self._http.post(url, data=CHAT, headers=JSON) as answer:
            await _whole(answer)

    async def _pick(self) -> None:
        """A request as Envoy sends it, up to the head of its answer."""
        call = self._process()
        await call.write(request_headers("/v1/chat/completions"))
        await call.write(request_body(CHAT))
        endpoint = picked(await call.read())
        if not endpoint:
            raise AssertionError("a pick without an endpoint")
        await call.read()
        await call.write(response_headers(last=True, served=endpoint))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass

    def _getter(self, name: str, connection: str = "keep-alive") -> Callable[[], Awaitable[None]]:
        """connection: `close` opens a connection for each call."""

        async def get() -> None:
            url, headers = self._urls[name] + PATHS[name], {"Connection": connection}
            async with self._http.get(url, headers=headers) as answer:
                await _whole(answer)

        return get


def a_client(port: int, folder: Path | None) -> KvRouteClient:
    """A client of a gRPC port. folder: with the server's certificate authority; None: the server
    has neither TLS nor keys."""
    target = f"127.0.0.1:{port}"
    if folder is None:
        return KvRouteClient(target)
    return KvRouteClient(target, credentials=_credentials(folder), token=f"{GOOD}-token")


def _credentials(folder: Path) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials((folder / "authority.pem").read_bytes())


@asynccontextmanager
async def a_good_client(ports: Mapping[str, int], folder: Path | None) -> AsyncIterator[GoodClient]:
    """A client of a server's ports. folder: see a_client."""
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{ports['picker']}")
    connector = aiohttp.TCPConnector()
    headers: dict[str, str] = {}
    if folder is not None:
        channel = grpc.aio.secure_channel(f"127.0.0.1:{ports['picker']}", _credentials(folder))
        context = ssl.create_default_context(cafile=str(folder / "authority.pem"))
        connector = aiohttp.TCPConnector(ssl=context)
        headers = {"Authorization": f"Bearer {GOOD}-token"}
    async with (
        a_client(ports["grpc"], folder) as router,
        channel as picker,
        aiohttp.ClientSession(connector=connector, headers=headers) as http,
    ):
        yield GoodClient(ports, router, picker, http, "http" if folder is None else "https")


async def _whole(answer: aiohttp.ClientResponse) -> None:
    content = await answer.read()
    if answer.status != 200:
        raise ConnectionError(f"status {answer.status}: {content[:200]!r}")


async def _repeat(
    calls: Calls, name: str, call: Callable[[], Awaitable[None]], stop: asyncio.Event
) -> None:
    seconds = calls.seconds.setdefault(name, [])
    while True:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(CALL_S):
                await call()
            seconds.append(time.monotonic() - began_s)
        except Exception as error:  # each is a failure of the server
            calls.failures.append(f"{name}: {type(error).__name__}: {error}")
        if stop.is_set():
            return
        await asyncio.sleep(EVERY_S)
