"""Clients of C-core, Go, Java, Node and Rust are served by `kvroute serve`, with real processes."""

import asyncio
import json
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo

from kvroute.v1 import (
    Progress,
    ProgressState,
    ReportRequest,
    RouteBatch,
    RouteItem,
    RouteRequest,
    RouteResponse,
    RouteResults,
)
from tests.interop.fleet import BOTH_FAMILIES, TOKENS_MAX, Router, Secured, router
from tests.interop.languages import CLIENTS
from tests.interop.shell import Outcome, Shell, a_shell
from tests.interop.stage import serving
from tests.stage.served import asked
from tests.stage.waiting import until

ROUTE, STREAM = "/kvroute.v1.Router/Route", "/kvroute.v1.Router/RouteStream"
REPORT = "/kvroute.v1.Router/Report"
HEALTH = "/grpc.health.v1.Health/Check"
Code = grpc.StatusCode
BATCHES = 10_000
CALLERS, STREAMS = 16, 2
LOAD_S = 8.0
UNSENT_BY_TONIC = (Code.CANCELLED, "operation was canceled")
"""A call that tonic had handed to a connection that gets GOAWAY before it is sent: tonic gives it
back, whatever the server (of 34,203 calls with grpcio's: 11). For each connection that is one or
none, on a busy machine some more: one of each caller at most."""
KEEPALIVE_S = 10
"""The most aggressive that the server permits."""
IDLE_S = 45.0
PING_BYTES = 17

pytestmark = pytest.mark.parametrize("language", CLIENTS)


def request(model: str = "m", tokens: int = 64, **about: Any) -> bytes:
    """Of Route. The same id has the same answer, and reserves once."""
    return asked(tokens, model=model, **about).SerializeToString()


def batch(name: str) -> bytes:
    """Of one item."""
    item = RouteItem(request=RouteRequest.FromString(request(request_id=name)))
    return RouteBatch(items=[item]).SerializeToString()


async def is_served(shell: Shell) -> None:
    """A call and a stream are answered."""
    one = await shell.call(ROUTE, request())
    assert (one.code, one.words) == (Code.OK, "")
    assert RouteResponse.FromString(one.answer).worker_id.startswith("m-")
    many = await shell.stream(STREAM, batch("served"), 10)
    assert (many.code, many.answers) == (Code.OK, 10)
    (result,) = RouteResults.FromString(many.answer).results
    assert result.response.worker_id.startswith("m-")


async def test_calls_by_every_address_of_a_name(language: str, plain: Router) -> None:
    for host in ("localhost", "127.0.0.1", *(["[::1]"] if BOTH_FAMILIES else [])):
        async with a_shell(language, f"{host}:{plain.port}") as shell:
            await is_served(shell)


async def test_a_refusal_comes_with_its_details(language: str, plain: Router) -> None:
    async with a_shell(language, f"localhost:{plain.port}") as shell:
        refused = await shell.call(ROUTE, request("nobody"))
        unknown = await shell.call("/kvroute.v1.Router/Nothing")
    assert refused.code is Code.NOT_FOUND
    assert refused.details is not None
    info = ErrorInfo()
    assert refused.details.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("kvroute", "UNKNOWN_MODEL")
    assert unknown.code is Code.UNIMPLEMENTED


async def test_a_stream_of_many_batches(language: str, plain: Router) -> None:
    """With windows as they are by default: grpc-go pings between answers to measure its path."""
    async with a_shell(language, f"localhost:{plain.port}") as shell:
        for _ in range(3):
            stream = await shell.stream(STREAM, batch("many"), BATCHES)
            assert (stream.code, stream.answers) == (Code.OK, BATCHES), stream.words


async def test_a_thousand_calls_at_once(language: str, plain: Router) -> None:
    async with a_shell(language, f"localhost:{plain.port}") as shell:
        calls = (shell.call(ROUTE, request(request_id=f"one of {i}")) for i in range(1000))
        assert Counter(one.code for one in await asyncio.gather(*calls)) == {Code.OK: 1000}


async def test_a_message_of_16_mib_plain_and_packed(language: str, plain: Router) -> None:
    content = request(tokens=TOKENS_MAX)
    assert len(content) > 16 << 20
    async with a_shell(language, f"localhost:{plain.port}") as shell:
        for gzip in (False, True):
            one = await shell.call(ROUTE, content, gzip=gzip)
            assert one.code is Code.OK, one.words


async def test_packed_messages(language: str, plain: Router) -> None:
    async with a_shell(language, f"localhost:{plain.port}") as shell:
        assert (await shell.call(ROUTE, request(tokens=8192), gzip=True)).code is Code.OK
        stream = await shell.stream(STREAM, batch("packed"), 100, gzip=True)
        assert (stream.code, stream.answers) == (Code.OK, 100)


async def test_metadata_that_comes_twice_and_that_is_binary(language: str) -> None:
    sent = [
        ("x-a", "1"),
        ("x-a", "2"),
        ("x-b-bin", bytes(range(256))),
        ("x-b-bin", b"\0"),
    ]
    async with (
        serving() as server,
        a_shell(language, f"localhost:{server.port}") as shell,
    ):
        one = await shell.call("/kvroute.interop.Seen/Metadata", metadata=sent)
    seen = [tuple(pair) for pair in json.loads(one.answer) if pair[0].startswith("x-")]
    assert sorted(seen) == [
        (name, value.hex() if isinstance(value, bytes) else value) for name, value in sorted(sent)
    ]


@asynccontextmanager
async def full(shell: Shell) -> AsyncIterator[None]:
    """The only slot of model `full` is taken."""
    taken = await shell.call(ROUTE, request("full"))
    assert taken.code is Code.OK, taken.words
    try:
        yield
    finally:
        reservation = RouteResponse.FromString(taken.answer).reservation_id
        finished = Progress(reservation_id=reservation, state=ProgressState.PROGRESS_STATE_FINISHED)
        report = ReportRequest(progress=[finished])
        assert (await shell.call(REPORT, report.SerializeToString())).code is Code.OK


def reason_of(outcome: Outcome) -> bytes:
    """The details of a refusal, as bytes; empty: the call ended without any."""
    return b"" if outcome.details is None else outcome.details.SerializeToString()


def waiting(serving: Router) -> float:
    return serving.metric("kvroute_queue_depth", 'where="here"')


async def test_a_deadline_ends_a_call_that_waits(language: str, plain: Router) -> None:
    async with a_shell(language, f"localhost:{plain.port}") as shell, full(shell):
        late = await shell.call(ROUTE, request("full"), timeout_s=0.5)
        # A wait ends 10 ms before its call's deadline, so that callers read why: most are too late.
        in_time = late.code is Code.RESOURCE_EXHAUSTED and b"QUEUE_TIMEOUT" in reason_of(late)
        by_tonic = (late.code, late.words) == (Code.CANCELLED, "Timeout expired")
        assert in_time or late.code is Code.DEADLINE_EXCEEDED or (language == "rust" and by_tonic)
        await until(lambda: not waiting(plain), "nothing waits")


async def test_a_call_that_is_cancelled_leaves_the_queue(language: str, plain: Router) -> None:
    async with a_shell(language, f"localhost:{plain.port}") as shell, full(shell):
        call = asyncio.create_task(shell.call(ROUTE, request("full"), cancel_s=2.0))
        await until(lambda: waiting(plain), "the call waits")
        assert (await call).code is Code.CANCELLED
        await until(lambda: not waiting(plain), "nothing waits")


async def test_a_stream_is_cancelled_after_its_first_answer(language: str, plain: Router) -> None:
    async with a_shell(language, f"localhost:{plain.port}") as shell:
        stream = await shell.stream(STREAM, batch("cancelled"), 1_000_000, cancel_after=1)
        assert stream.code is Code.CANCELLED
        await is_served(shell)


async def test_tls(language: str, tls: Secured) -> None:
    async with a_shell(language, f"localhost:{tls.router.port}", ca=tls.ca) as shell:
        await is_served(shell)
        stream = await shell.stream(STREAM, batch("tls"), BATCHES)
        assert (stream.code, stream.answers) == (Code.OK, BATCHES), stream.words


async def test_mutual_tls(language: str, mutual: Secured) -> None:
    target = f"localhost:{mutual.router.port}"
    keys = {"ca": mutual.ca, "certificate": mutual.certificate, "key": mutual.key}
    async with a_shell(language, target, **keys) as shell:
        await is_served(shell)
    async with a_shell(language, target, ca=mutual.ca) as shell:
        refused = await shell.call(ROUTE, request())
    # With TLS 1.3 a client learns it after its side of the handshake; tonic has no code for that.
    by_tonic = (Code.UNKNOWN, Code.CANCELLED)
    assert refused.code in (by_tonic if language == "rust" else (Code.UNAVAILABLE,))


async def test_health_and_reflection(language: str, plain: Router) -> None:
    list_services = b"\x3a\x00"
    async with a_shell(language, f"localhost:{plain.port}") as shell:
        assert (await shell.call(HEALTH)).answer == b"\x08\x01"  # SERVING
        for version in ("v1", "v1alpha"):
            method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            stream = await shell.stream(method, list_services)
            assert (stream.code, stream.answers) == (Code.OK, 1)
            for name in (b"kvroute.v1.Router", b"grpc.reflection.v1.ServerReflection"):
                assert name in stream.answer


async def test_a_unix_socket(
    language: str, workers: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("u")  # a socket's path has 107 bytes at most
    with router(folder, workers, grpc={"unix_socket": str(folder / "s")}):
        async with a_shell(language, f"unix:{folder / 's'}") as shell:
            await is_served(shell)


class Relay:
    """Passes a client's bytes on, and counts them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.connections = 0
        self.bytes = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        from_router, to_router = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, to_router}
        for source, sink in ((reader, to_router), (from_router, writer)):
            task = asyncio.create_task(self._pass(source, sink, counts=source is reader))
            self._tasks.add(task)

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, counts: bool
    ) -> None:
        with suppress(OSError):
            while content := await source.read(1 << 16):
                self.bytes += len(content) if counts else 0
                sink.write(content)
        sink.close()

    async def end(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks)
        closed = (writer.wait_closed() for writer in self._writers)
        await asyncio.gather(*closed, return_exceptions=True)


async def test_pings_without_calls_as_often_as_they_may_come(language: str, plain: Router) -> None:
    relay = Relay(plain.port)
    listening = await asyncio.start_server(relay.take, "127.0.0.1", 0, family=socket.AF_INET)
    port = listening.sockets[0].getsockname()[1]
    try:
        async with a_shell(language, f"127.0.0.1:{port}", keepalive_s=KEEPALIVE_S) as shell:
            await is_served(shell)
            sent = relay.bytes
            await asyncio.sleep(IDLE_S)  # what is tested is time without calls
            assert relay.bytes - sent >= (IDLE_S // KEEPALIVE_S - 1) * PING_BYTES
            await is_served(shell)
            assert relay.connections == 1
    finally:
        listening.close()
        await relay.end()


async def load(shell: Shell, until_s: float, codes: Counter[Code]) -> None:
    """Callers that call again until a call fails; until_s: or until then, by the loop's clock."""
    now_s = asyncio.get_running_loop().time

    async def caller(number: int) -> None:
        code = Code.OK
        while code is Code.OK and now_s() < until_s:
            outcome = await shell.call(ROUTE, request(request_id=f"caller {number}"))
            if (outcome.code, outcome.words) == UNSENT_BY_TONIC:
                codes[outcome.code] += 1
                continue  # the caller sends it again
            code = outcome.code
            codes[code] += 1

    await asyncio.gather(*map(caller, range(CALLERS)))


def lost(language: str, codes: Counter[Code]) -> int:
    """Removes the calls that tonic gives back; how many there were."""
    unsent = codes.pop(Code.CANCELLED, 0)
    assert language == "rust" or not unsent
    return unsent


async def test_a_drain_under_load(
    language: str, workers: list[dict[str, Any]], tmp_path: Path
) -> None:
    """GOAWAY, and the end of the process: what was begun is answered, and streams end with OK."""
    codes: Counter[Code] = Counter()
    with router(tmp_path, workers) as draining:
        async with a_shell(language, f"localhost:{draining.port}") as shell:
            endless = [
                asyncio.create_task(shell.stream(STREAM, batch(f"stream {i}"), 10_000_000))
                for i in range(STREAMS)
            ]
            calls = asyncio.create_task(load(shell, float("inf"), codes))
            await until(lambda: codes[Code.OK] > 200, "the load has begun")
            draining.process.send_signal(signal.SIGTERM)
            await calls
            streams = await asyncio.gather(*endless)
            assert await asyncio.to_thread(draining.process.wait) == 0
    assert lost(language, codes) <= CALLERS
    assert set(codes) == {Code.OK, Code.UNAVAILABLE}
    assert codes[Code.UNAVAILABLE] == CALLERS
    assert {stream.code for stream in streams} == {Code.OK}, streams
    assert all(stream.answers for stream in streams)


async def test_no_call_is_lost_to_the_age_of_connections(
    language: str, workers: list[dict[str, Any]], tmp_path: Path
) -> None:
    codes: Counter[Code] = Counter()
    with router(tmp_path, workers, age_s=1.0) as aging:
        async with a_shell(language, f"localhost:{aging.port}") as shell:
            await load(shell, asyncio.get_running_loop().time() + LOAD_S, codes)
        came = aging.metric("kvroute_requests_total")
    lost(language, codes)
    assert set(codes) == {Code.OK}
    assert codes[Code.OK] == came > 500, "the others were not sent"
