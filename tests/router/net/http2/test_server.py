"""The small gRPC server with handlers of the test's own, called by the real grpcio client."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from router.net.http2 import port, sockets
from router.net.http2.calls import Call
from router.net.http2.frames import (
    ACK,
    CLOSING,
    DATA,
    END_HEADERS,
    END_STREAM,
    FAREWELL,
    GOAWAY,
    HEADERS,
    LAST,
    PING,
    PREFACE,
    SETTING,
    SETTINGS,
    U32,
    WINDOW_UPDATE,
    frame,
)
from router.net.http2.port import ServerBounds
from router.net.http2.requests import timeout_s
from router.net.http2.server import Http2Server
from router.net.http2.sockets import Bounds
from router.net.listener import seldom
from router.net.listener.connections import PortBounds
from tests.stage.http2_frames import call_head
from tests.stage.tcp import exchanged
from tests.stage.waiting import until

GUARD_S = 60.0
"""What hangs fails; nothing waits this long."""
INITIAL_WINDOW = 4
BOUNDS = ServerBounds(
    connection=Bounds(streams_max=100, message_max=1 << 20, headers_max=4096),
    port=PortBounds(10),
    keepalive_s=60.0,
    age_s=None,
    age_grace_s=60.0,
)
Code = grpc.StatusCode


class Handlers:
    """Of one service, and what they saw."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.go = asyncio.Event()
        self.ends: list[str] = []
        self.metadata: list[tuple[str, Any]] = []
        self.on_done: Callable[[Any], object] = lambda context: None
        self.wrote = 0
        self.read = 0

    async def echo(self, content: bytes, context: Any) -> bytes:
        self.metadata = list(context.invocation_metadata())
        return content

    async def slow(self, content: bytes, context: Any) -> bytes:
        """Waits; its first step needs no task."""
        self.began.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise
        self.ends.append("done")
        self.on_done(context)
        context.when_unsent(lambda: self.ends.append("unsent"))
        return content

    async def refuse(self, content: bytes, context: Any) -> bytes:
        await context.abort(
            Code.FAILED_PRECONDITION, "50 % of é", (("x-why", "so"), ("details-bin", b"\x00\xff"))
        )
        raise AssertionError

    async def fail(self, content: bytes, context: Any) -> bytes:
        raise ValueError("a fault")

    async def flood(self, content: bytes, context: Any) -> None:
        try:
            for _ in range(int(content)):
                await written(context, bytes(10_000))
                self.wrote += 1
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise

    async def talk(self, requests: AsyncIterator[bytes], context: Any) -> None:
        await context.send_initial_metadata(())
        async for content in requests:
            await written(context, content[::-1])
        await written(context, b"bye")

    async def gather(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Ends its reading when it may go on; answers with all that it read."""
        self.began.set()
        await self.go.wait()
        context.end_reading()
        await written(context, b"|".join([content async for content in requests]))

    async def sink(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self.began.set()
        await self.go.wait()
        async for _ in requests:
            self.read += 1
        await written(context, str(self.read).encode())

    async def join(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        """Answers with all messages; with the caller's metadata in front and behind."""
        metadata = [pair for pair in context.invocation_metadata() if pair[0] != "user-agent"]
        await context.send_initial_metadata(metadata)
        return b"|".join([content async for content in requests])

    def all(self) -> dict[str, Any]:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        return {
            "Echo": unary(self.echo),
            "Slow": unary(self.slow),
            "SlowInATask": unary(self.slow),
            "Refuse": unary(self.refuse),
            "Fail": unary(self.fail),
            "Flood": grpc.unary_stream_rpc_method_handler(self.flood),
            "Talk": stream(self.talk),
            "Sink": stream(self.sink),
            "Gather": stream(self.gather),
            "Join": grpc.stream_unary_rpc_method_handler(self.join),
        }


class Stage:
    """A server, its handlers and a client."""

    def __init__(self, bounds: ServerBounds) -> None:
        self.handlers = Handlers()
        self.server = Http2Server(
            bounds, rng=random.Random(1), at_once=("/a.B/Echo", "/a.B/Slow", "/a.B/Refuse")
        )
        self.server.add("a.B", self.handlers.all())

    def call(self, name: str, content: bytes = b"hello", **about: Any) -> Any:
        return self.channel.unary_unary(f"/a.B/{name}")(content, timeout=GUARD_S, **about)

    def stream(self, name: str) -> Any:
        return self.channel.stream_stream(f"/a.B/{name}")(timeout=GUARD_S)

    def open_channel(self) -> grpc.aio.Channel:
        self.channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{self.server.port}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        return self.channel


@asynccontextmanager
async def serving(**bounds: Any) -> AsyncIterator[Stage]:
    stage = Stage(replace(BOUNDS, **bounds))
    await stage.server.start("127.0.0.1", 0)
    try:
        async with stage.open_channel():
            yield stage
    finally:
        await stage.server.stop(0)
    assert stage.server.calls == 0


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with serving() as stage:
        yield stage


async def written(context: Call, content: bytes) -> None:
    """A message, and room for the next."""
    if not context.send(content):
        await context.room()


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_calls_one_after_the_other_and_at_once(stage: Stage) -> None:
    for size in (0, 1, 16_384, 16_379, 500_000, 1 << 20):
        assert await stage.call("Echo", bytes(size)) == bytes(size)
    contents = [str(i).encode() for i in range(300)]
    assert await asyncio.gather(*(stage.call("Echo", one) for one in contents)) == contents


async def test_metadata_comes_as_it_was_sent(stage: Stage) -> None:
    sent = (("x-request-id", "7"), ("authorization", "Bearer t"), ("some-bin", b"\x00\xfe"))
    await stage.call("Echo", metadata=sent)
    found = dict(stage.handlers.metadata)
    assert all(found[name] == value for name, value in sent)
    assert "grpc-timeout" not in found
    assert not [name for name in found if name.startswith(":")]


async def test_an_abort_has_its_code_words_and_trailing_metadata(stage: Stage) -> None:
    error = await failure(stage.call("Refuse"))
    assert error.code() is Code.FAILED_PRECONDITION
    assert error.details() == "50 % of é"
    trailers = dict(error.trailing_metadata())
    assert trailers["x-why"] == "so"
    assert trailers["details-bin"] == b"\x00\xff"


async def test_a_handlers_fault_ends_its_call_alone(
    caplog: pytest.LogCaptureFixture, stage: Stage
) -> None:
    error = await failure(stage.call("Fail"))
    assert error.code() is Code.UNKNOWN
    assert "a fault" not in error.details()
    assert "a fault" in caplog.text
    assert await stage.call("Echo") == b"hello"


async def test_a_method_that_there_is_not_and_a_message_too_large(stage: Stage) -> None:
    assert (await failure(stage.call("Nothing"))).code() is Code.UNIMPLEMENTED
    error = await failure(stage.call("Echo", bytes((1 << 20) + 1)))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert await stage.call("Echo") == b"hello"


@pytest.mark.parametrize("name", ["Slow", "SlowInATask"])
async def test_a_wait_goes_on_in_a_task(name: str, stage: Stage) -> None:
    calls = [asyncio.ensure_future(stage.call(name, bytes(i))) for i in range(20)]
    await until(lambda: stage.server.calls == 20, "all calls are open")
    assert await stage.call("Echo") == b"hello"
    stage.handlers.go.set()
    assert await asyncio.gather(*calls) == [bytes(i) for i in range(20)]
    assert stage.handlers.ends == ["done"] * 20


@pytest.mark.parametrize("name", ["Slow", "SlowInATask"])
async def test_a_caller_that_leaves_cancels_its_handler(name: str, stage: Stage) -> None:
    call = stage.call(name)
    await stage.handlers.began.wait()
    call.cancel()
    await until(lambda: stage.handlers.ends, "the handler ends")
    assert stage.handlers.ends == ["cancelled"]
    assert stage.server.calls == 0


@pytest.mark.parametrize("name", ["Slow", "SlowInATask"])
async def test_a_deadline_cancels_its_handler(name: str, stage: Stage) -> None:
    call = stage.channel.unary_unary(f"/a.B/{name}")(b"", timeout=0.05)
    assert (await failure(call)).code() is Code.DEADLINE_EXCEEDED
    await until(lambda: stage.server.calls == 0, "the call is over")
    assert stage.handlers.ends in ([], ["cancelled"])  # it may be over before it began


async def test_an_answer_whose_caller_has_left_is_told_to_the_handler(stage: Stage) -> None:

    def leave(context: Any) -> None:
        """In the turn in which the handler ends."""
        context._stream.finished = True

    stage.handlers.on_done = leave
    call = stage.call("Slow")
    stage.handlers.go.set()
    await until(lambda: stage.handlers.ends == ["done", "unsent"], "it is told")
    call.cancel()


async def test_a_stream_both_ways(stage: Stage) -> None:
    call = stage.stream("Talk")
    await call.initial_metadata()
    for i in range(100):
        await call.write(f"message {i}".encode())
        assert await call.read() == f"message {i}".encode()[::-1]
    await call.done_writing()
    assert await call.read() == b"bye"
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is Code.OK


async def test_what_has_come_when_a_handler_ends_its_reading_is_read_and_nothing_after_it(
    stage: Stage,
) -> None:
    call = stage.stream("Gather")
    await stage.handlers.began.wait()
    (open_call,) = stage.server._calls
    for content in (b"1", b"2"):
        await call.write(content)
    await until(lambda: len(open_call._messages) == 2, "both have come")
    stage.handlers.go.set()
    assert await call.read() == b"1|2"
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is Code.OK


async def test_a_handler_that_waits_for_a_message_ends_as_its_reading_does(stage: Stage) -> None:
    call = stage.stream("Talk")
    await call.initial_metadata()
    (open_call,) = stage.server._calls
    open_call.end_reading()
    await call.write(b"too late")
    assert await call.read() == b"bye"
    assert await call.code() is Code.OK
    await until(lambda: not stage.server.connections.held.bytes, "nothing is held")


async def _answer(content: Any, context: Any) -> Any:
    return content


async def _yield(content: Any, context: Any) -> AsyncIterator[Any]:
    yield content


@pytest.mark.parametrize(
    "handler",
    [
        grpc.unary_stream_rpc_method_handler(_yield),
        grpc.stream_stream_rpc_method_handler(_yield),
        grpc.unary_unary_rpc_method_handler(_answer, request_deserializer=bytes),
        grpc.unary_unary_rpc_method_handler(_answer, response_serializer=bytes),
    ],
)
async def test_a_handler_that_would_fail_when_called_is_refused_when_added(handler: Any) -> None:
    server = Http2Server(BOUNDS, rng=random.Random(1))
    with pytest.raises(NotImplementedError, match="Odd"):
        server.add("a.B", {"Odd": handler})


async def test_a_stream_of_requests_has_one_answer(stage: Stage) -> None:
    call = stage.channel.stream_unary("/a.B/Join")(timeout=GUARD_S)
    for content in (b"one", b"", b"two"):
        await call.write(content)
    await call.done_writing()
    assert await call == b"one||two"
    assert await call.code() is Code.OK
    await until(lambda: not stage.server.connections.held.bytes, "nothing is held")


async def test_metadata_goes_in_front_of_an_answer(stage: Stage) -> None:
    sent = [("x-a", "1"), ("x-a", "2"), ("x-b-bin", bytes(range(256)))]
    call = stage.channel.stream_unary("/a.B/Join")(timeout=GUARD_S, metadata=sent)
    await call.done_writing()
    assert await call == b""
    assert [pair for pair in await call.initial_metadata() if pair[0].startswith("x-")] == sent


async def test_a_unix_socket_is_served_beside_the_port_and_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with serving() as stage:
        stage.server.start_unix(path, 0o600)
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            echo = channel.unary_unary("/a.B/Echo")
            assert await echo(b"here", timeout=GUARD_S) == b"here"
            assert await stage.call("Echo") == b"hello"
            assert stage.server.connections.open == 2
    assert not path.exists()


async def test_a_handler_waits_for_a_caller_that_does_not_read(stage: Stage) -> None:
    method = stage.channel.unary_stream("/a.B/Flood")
    call = method(b"100000", timeout=GUARD_S)
    assert await call.read() == bytes(10_000)
    seen = -1
    while seen != stage.handlers.wrote:  # until the peer's room and the socket are full
        seen = stage.handlers.wrote
        await asyncio.sleep(0.2)
    assert seen < 10_000
    call.cancel()
    await until(lambda: stage.handlers.ends == ["cancelled"], "the handler ends")


async def test_a_caller_waits_for_a_handler_that_does_not_read(stage: Stage) -> None:
    call = stage.stream("Sink")
    await stage.handlers.began.wait()
    sent = 0

    async def send() -> None:
        nonlocal sent
        for _ in range(2000):
            await call.write(bytes(10_000))
            sent += 1
        await call.done_writing()

    sending = asyncio.create_task(send())
    seen = -1
    while seen != sent:
        seen = sent
        await asyncio.sleep(0.2)
    assert seen < 1000
    (open_call,) = stage.server._calls
    assert sum(map(len, open_call._messages)) <= 2 << 20
    stage.handlers.go.set()
    await sending
    assert await call.read() == b"2000"


async def test_a_stop_lets_open_calls_end_and_takes_no_new_ones(stage: Stage) -> None:
    call = asyncio.ensure_future(stage.call("Slow"))
    await stage.handlers.began.wait()
    stopping = asyncio.create_task(stage.server.stop(GUARD_S))
    (connection,) = stage.server.open
    await until(lambda: connection.http2._leaving, "the client is told")
    other = asyncio.ensure_future(failure(stage.call("Echo")))
    assert (await other).code() is Code.UNAVAILABLE
    assert not stopping.done()
    stage.handlers.go.set()
    assert await call == b"hello"
    await stopping


async def test_a_call_on_its_way_when_the_server_stops_is_served() -> None:
    """Its client has not read GOAWAY yet. tonic's would get INTERNAL for it."""
    async with serving() as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.server.port)
        writer.write(PREFACE + frame(SETTINGS, 0, 0))
        await until(lambda: any(one.begun for one in stage.server.open), "a connection")
        stopping = asyncio.create_task(stage.server.stop(GUARD_S))
        farewell = frame(PING, 0, 0, FAREWELL)
        read = b""
        while not read.endswith(farewell):
            read += await reader.read(1 << 16)
        content = b"\0" + U32.pack(5) + b"hello"
        writer.write(
            frame(HEADERS, END_HEADERS, 1, call_head(b"/a.B/Echo"))
            + frame(DATA, END_STREAM, 1, content)
            + frame(PING, ACK, 0, FAREWELL)
        )
        answer = await reader.read()
        await stopping
        writer.close()
    assert frame(DATA, 0, 1, content) in answer
    away = frame(GOAWAY, 0, 0, U32.pack(1) + U32.pack(0))
    assert answer.endswith(away + frame(PING, 0, 0, LAST))


async def read_late(stage: Stage, end: Callable[[], Awaitable[object]]) -> bytes:
    """What a peer gets that reads nothing before all is written. It gives credit as it reads: TCP
    resets a connection that is closed then. end: of the connection, by the server.
    """
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        peer.connect(("127.0.0.1", stage.server.port))
        peer.settimeout(GUARD_S)
        credit = frame(WINDOW_UPDATE, 0, 0, U32.pack(1 << 20))
        peer.sendall(
            PREFACE
            + frame(SETTINGS, 0, 0, SETTING.pack(INITIAL_WINDOW, 1 << 20))
            + credit
            + frame(HEADERS, END_HEADERS, 1, call_head(b"/a.B/Flood"))
            + frame(DATA, END_STREAM, 1, b"\0" + U32.pack(2) + b"20")
            + frame(PING, ACK, 0, FAREWELL)
        )
        await until(lambda: stage.handlers.wrote == 20, "the answer is written")
        (connection,) = stage.server.open
        ending = asyncio.ensure_future(end())
        await until(lambda: connection.http2.last_sent, "nothing more is written")
        stage.server._look_at_all(asyncio.get_running_loop().time())
        answer = b""
        while not answer.endswith(frame(PING, 0, 0, LAST)):
            answer += await asyncio.to_thread(peer.recv, 1 << 12)
            peer.sendall(credit)
        assert connection in stage.server.open
        peer.sendall(frame(PING, ACK, 0, LAST))
        assert not await asyncio.to_thread(peer.recv, 1 << 12), "the connection is closed"
        await ending
    return answer


async def test_a_peer_that_reads_late_has_the_last_answer_of_a_server_that_stops() -> None:
    async with serving() as stage:
        answer = await read_late(stage, lambda: stage.server.stop(GUARD_S))
    assert answer.count(bytes(10_000)) == 20
    assert CLOSING in answer


async def test_a_peer_that_reads_late_has_the_last_answer_of_an_old_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port, "LOOK_S", 0.01)
    async with serving(age_s=0.5) as stage:
        answer = await read_late(stage, lambda: asyncio.sleep(0))
    assert answer.count(bytes(10_000)) == 20
    assert CLOSING in answer


async def test_a_stop_cancels_what_outlasts_its_grace(stage: Stage) -> None:
    call = asyncio.ensure_future(failure(stage.call("Slow")))
    await stage.handlers.began.wait()
    await stage.server.stop(0.01)
    assert (await call).code() in (Code.UNAVAILABLE, Code.CANCELLED)
    await until(lambda: stage.handlers.ends == ["cancelled"], "the handler ends")


async def test_an_old_connection_is_left_by_its_client_without_a_failed_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port, "LOOK_S", 0.01)
    monkeypatch.setattr(port, "FAREWELL_S", 0.05)
    made = 0
    async with serving(age_s=0.1) as stage:
        make = stage.server._service

        def counted(protocol: Any) -> Any:
            nonlocal made
            made += 1
            return make(protocol)

        stage.server._service = counted
        slow = asyncio.ensure_future(stage.call("Slow"))
        async with asyncio.timeout(GUARD_S):
            while made < 4:
                assert await stage.call("Echo") == b"hello"
        stage.handlers.go.set()
        assert await slow == b"hello"
        await until(lambda: stage.server.connections.open <= 2, "old connections are closed")


async def test_a_call_that_outlasts_the_grace_of_its_connections_age_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port, "LOOK_S", 0.01)
    async with serving(age_s=0.05, age_grace_s=0.05) as stage:
        error = await failure(stage.call("Slow"))
        assert error.code() is Code.UNAVAILABLE
        assert stage.server.connections.closed["age"] == 1
        await until(lambda: stage.handlers.ends == ["cancelled"], "the handler ends")


async def test_a_silent_connection_is_pinged_then_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "LOOK_S", 0.01)
    monkeypatch.setattr(port, "KEEPALIVE_TIMEOUT_S", 0.3)
    async with serving(keepalive_s=0.05) as stage:
        last = await exchanged(stage.server.port, PREFACE, frame(SETTINGS, 0, 0))
        assert frame(PING, 0, 0, bytes(8)) in last
        assert stage.server.connections.closed["keepalive"] == 1


async def test_broken_connections_are_counted_each_and_logged_once_in_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_faults", seldom.Seldom(sockets.log))
    async with serving() as stage:
        for _ in range(5):
            await exchanged(stage.server.port, b"GET / HTTP/1.1\r\n\r\n")
        await until(lambda: stage.server.connections.closed["malformed"] == 5, "each is counted")
        assert caplog.text.count("the connection is closed: the connection does not begin") == 1
        assert "127.0.0.1:" in caplog.text
        sockets._faults.log(asyncio.get_running_loop().time() + seldom.LOG_S, "%s", "another")
        assert "another (4 more since the last such line)" in caplog.text


async def test_a_preface_that_does_not_end_closes_its_connection() -> None:
    async with serving(port=PortBounds(10, begin_s=0.05)) as stage:
        await exchanged(stage.server.port, PREFACE[:10])
        await until(lambda: stage.server.connections.closed["slow_head"], "it is counted")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1S", 1.0), ("5000m", 5.0), ("2M", 120.0), ("1H", 3600.0), ("250000u", 0.25),
        ("99999999n", 0.099999999), ("", None), ("S", None), ("1", None), ("-1S", None),
        ("1.5S", None), ("1s", None), ("123456789S", None), ("٣S", None),
    ],
)  # fmt: skip
def test_a_timeout_is_read_or_refused(text: str, seconds: float | None) -> None:
    found = timeout_s(text)
    assert (found is None) if seconds is None else found == pytest.approx(seconds)


async def test_a_unary_call_of_two_messages_or_none_is_refused(stage: Stage) -> None:
    two = stage.channel.stream_unary("/a.B/Echo")(timeout=GUARD_S)
    await two.write(b"1")
    await two.write(b"2")
    assert (await failure(two)).code() is Code.INTERNAL
    none = stage.channel.stream_unary("/a.B/Echo")(timeout=GUARD_S)
    await none.done_writing()
    assert (await failure(none)).code() is Code.INTERNAL
    assert await stage.call("Echo") == b"hello"
