"""A good client of every face: how long each of its calls takes, and what became of it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import aiohttp
import grpc.aio
import msgspec

from kvroute.client import KvRouteClient
from kvroute.ext_proc.v3 import ext_proc_pb2 as pb
from router.front.picker.calls import PROCESS
from tests.hostile.attacks import Ports
from tests.stage.picker import picked, request_body, request_headers, response_headers

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
        ordered = sorted(self.seconds[kind])
        return 1e3 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


class GoodClient:
    """Over connections of its own, which stay open."""

    def __init__(
        self,
        ports: Ports,
        routers: Mapping[str, KvRouteClient],
        picker: grpc.aio.Channel,
        http: aiohttp.ClientSession,
    ) -> None:
        """routers: kind of call -> client of the gRPC port that it is made on."""
        self._ports = ports
        self._routers = routers
        self._process = picker.stream_stream(
            PROCESS,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )
        self._http = http
        self._first = 0

    async def calls(self, stop: asyncio.Event) -> Calls:
        """Calls each face until `stop`, and once at least."""
        calls = Calls()
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            **{name: partial(self._route, client) for name, client in self._routers.items()},
            "chat": self._chat,
            "pick": self._pick,
        }
        for name in PATHS:
            kinds[name] = self._getter(name)
        await asyncio.gather(*(_repeat(calls, name, kinds[name], stop) for name in kinds))
        return calls

    async def _route(self, client: KvRouteClient) -> None:
        self._first += 1
        tokens = range(self._first, self._first + 256)
        async with client.request(token_ids=list(tokens)) as request:
            if not request.pick.worker_id:
                raise AssertionError("a pick without a worker")

    async def _chat(self) -> None:
        url = f"http://127.0.0.1:{self._ports['gateway']}/v1/chat/completions"
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

    def _getter(self, name: str) -> Callable[[], Awaitable[None]]:
        async def get() -> None:
            url = f"http://127.0.0.1:{self._ports[name]}{PATHS[name]}"
            async with self._http.get(url) as answer:
                await _whole(answer)

        return get


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


def table(rows: Sequence[tuple[str, Calls, Calls]]) -> str:
    """A line for each attack and kind of call: calls, failures, p99 without the attack and with."""
    lines = [
        "| attack | call | answered | failed | p99 before, ms | p99 under attack, ms | ratio |"
    ]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name, usual, under in rows:
        for kind, seconds in under.seconds.items():
            failed = sum(one.startswith(f"{kind}:") for one in under.failures)
            before, during = usual.p99_ms(kind), under.p99_ms(kind) if seconds else float("nan")
            lines.append(
                f"| {name} | {kind} | {len(seconds)} | {failed} | {before:.1f} | {during:.1f}"
                f" | {during / before:.1f} |"
            )
    return "\n".join(lines)
