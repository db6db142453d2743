"""Calls from their headers to the last byte of their answers, by a peer that writes frames."""

import asyncio
import gzip
import random
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import grpc
import grpc.aio
import pytest

from router.net.http2 import frames as http2
from router.net.http2 import sockets
from router.net.http2.calls import Call
from router.net.http2.frames import Code, Status, frame, literal
from router.net.http2.gate import Open, RefusedError
from router.net.http2.port import ServerBounds
from router.net.http2.server import Http2Server
from router.net.http2.sockets import Bounds
from router.net.listener.connections import PortBounds
from tests.router.net.http2.peer import Frame, data, message, reset, status_of
from tests.stage.http2_frames import call_head
from tests.stage.waiting import until

GUARD_S = 60.0
"""What hangs fails; nothing waits this long."""
BOUNDS = ServerBounds(
    connection=Bounds(streams_max=100), port=PortBounds(10), keepalive_s=60.0, age_s=None
)
U32, SETTING = struct.Struct(">I"), struct.Struct(">HI")
ANSWER = bytes(200_000)
NO_WINDOW = frame(http2.SETTINGS, 0, 0, SETTING.pack(4, 0))


class Gate(Open):
    """Lets calls in, or not, as the test has it."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.refuses = self.waits = False
        self.go = asyncio.Event()
        self.entered: list[str] = []

    def enter(self, call: Any, method: str) -> Any:
        self.entered.append(method)
        if self.waits:
            return self._later()
        if self.refuses:
            raise RefusedError(Status.UNAUTHENTICATED, "who is it?", (("x-why", "so"),))
        return None

    async def _later(self) -> None:
        await self.go.wait()
        if self.refuses:
            raise RefusedError(Status.UNAUTHENTICATED, "who is it?")


class Raw:
    """A connection by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def until(self, *kinds: int, number: int, flags: int = 0) -> list[Frame]:
        """The frames of a stream up to one of some kinds with some flags."""
        seen = []
        async with asyncio.timeout(GUARD_S):
            while True:
                size_kind, set_, of = struct.unpack(">IBI", await self.reader.readexactly(9))
                payload = await self.reader.readexactly(size_kind >> 8)
                if of == number:
                    seen.append((size_kind & 0xFF, set_, of, payload))
                    if size_kind & 0xFF in kinds and set_ & flags == flags:
                        return seen

    async def ended(self, number: int) -> list[Frame]:
        return await self.until(http2.HEADERS, number=number, flags=http2.END_STREAM)


class Stage:
    """A server, its handlers and what they saw."""

    def __init__(self, bounds: ServerBounds) -> None:
        self.gate = Gate()
        self.seen: list[bytes] = []
        self.unsent = 0
        self.go = asyncio.Event()
        self.server = Http2Server(
            bounds, rng=random.Random(1), at_once=("/a.B/Large", "/a.B/Small"), gate=self.gate
        )
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        handlers = {
            "Large": unary(self.large),
            "Small": unary(self.small),
            "Waits": unary(self.waits),
            "Read": stream(self.read),
        }
        self.server.add("a.B", handlers)

    @property
    def held(self) -> int:
        held = self.server.connections.held
        assert held is not None
        return held.bytes

    async def large(self, content: bytes, context: Call) -> bytes:
        context.when_unsent(self._unsent)
        return ANSWER

    async def small(self, content: bytes, context: Call) -> bytes:
        self.seen.append(content)
        context.when_unsent(self._unsent)
        return b""

    async def waits(self, content: bytes, context: Call) -> bytes:
        self.seen.append(content)
        await self.go.wait()
        return content

    async def read(self, requests: AsyncIterator[bytes], context: Call) -> None:
        await context.send_initial_metadata(())
        await self.go.wait()
        async for content in requests:
            self.seen.append(content)

    def _unsent(self) -> None:
        self.unsent += 1


@asynccontextmanager
async def serving(**bounds: Any) -> AsyncIterator[tuple[Stage, Raw]]:
    stage = Stage(replace(BOUNDS, connection=replace(BOUNDS.connection, **bounds)))
    await stage.server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.server.port)
    raw = Raw(reader, writer)
    raw.send(http2.PREFACE, frame(http2.SETTINGS, 0, 0))
    try:
        yield stage, raw
    finally:
        writer.transport.abort()
        await until(lambda: stage.held == 0, "nothing is held for a connection that is gone")
        await stage.server.stop(0)
    assert stage.server.calls == 0


def head(name: str, number: int = 1, more: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
    block = call_head(f"/a.B/{name}".encode()) + b"".join(literal(*field) for field in more)
    return frame(http2.HEADERS, http2.END_HEADERS, number, block)


def whole(name: str, number: int = 1, content: bytes = b"hello", **about: Any) -> bytes:
    return head(name, number, **about) + data(number, message(content), http2.END_STREAM)


@pytest.mark.parametrize("name", ["Small", "Waits", "Read"])
async def test_a_call_that_the_gate_refuses_ends_at_its_headers(name: str) -> None:
    async with serving() as (stage, raw):
        stage.gate.refuses = True
        raw.send(head(name))
        back = await raw.until(http2.RST_STREAM, number=1)
        assert back[-1] == reset(1, Code.NO_ERROR)
        assert status_of(back) == Status.UNAUTHENTICATED
        raw.send(*[data(1, b"\0\0\x0f\0\0" + bytes(16_000))] * 20)  # of a client that sends on
        raw.send(frame(http2.PING, 0, 0, bytes(8)))
        await raw.until(http2.PING, number=0)
        assert stage.held == 0
        assert stage.gate.entered == [f"/a.B/{name}"]
        assert stage.seen == []


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("name", ["Small", "Waits", "Read"])
async def test_a_call_may_wait_at_the_gate(name: str, refuses: bool) -> None:
    async with serving() as (stage, raw):
        stage.gate.waits, stage.gate.refuses = True, refuses
        stage.go.set()
        raw.send(whole(name))
        await until(lambda: stage.gate.entered, "it has come")
        raw.send(frame(http2.PING, 0, 0, bytes(8)))
        await raw.until(http2.PING, number=0)
        assert stage.seen == []
        stage.gate.go.set()
        back = await raw.ended(1)
        assert status_of(back) == (Status.UNAUTHENTICATED if refuses else Status.OK)
        assert stage.seen == ([] if refuses else [b"hello"])
        assert stage.held == 0


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("name", ["Small", "Waits", "Read"])
async def test_a_deadline_ends_a_request_that_is_not_whole(name: str, waits: bool) -> None:
    """It counts from the headers, also at the gate."""
    async with serving() as (stage, raw):
        stage.gate.waits = waits
        raw.send(head(name, more=((b"grpc-timeout", b"20m"),)), data(1, message(b"x" * 100)))
        assert status_of(await raw.ended(1)) == Status.DEADLINE_EXCEEDED
        assert stage.held == 0
        assert stage.seen == []


async def test_packed_messages_are_held_as_they_came() -> None:
    """60 of them, of 0.5 MiB each, that never end."""
    packed = gzip.compress(bytes(1 << 19), 9)
    async with serving() as (stage, raw):
        for number in range(1, 121, 2):
            raw.send(head("Small", number, more=((b"grpc-encoding", b"gzip"),)))
            raw.send(data(number, b"\1" + U32.pack(len(packed)) + packed))
        raw.send(frame(http2.PING, 0, 0, bytes(8)))
        await raw.until(http2.PING, number=0)
        assert 60 * len(packed) < stage.held < 60 * (len(packed) + 4096)
        raw.send(data(1, b"", http2.END_STREAM))
        assert status_of(await raw.ended(1)) == Status.OK
        assert stage.seen == [bytes(1 << 19)]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (gzip.compress(b"hello", mtime=0), Status.OK),
        (gzip.compress(bytes((1 << 20) + 1), mtime=0), Status.RESOURCE_EXHAUSTED),
        (b"no gzip", Status.INTERNAL),
    ],
)
@pytest.mark.parametrize("name", ["Small", "Waits", "Read"])
async def test_a_packed_message_is_read_or_ends_its_call(
    name: str, content: bytes, status: Status
) -> None:
    async with serving() as (stage, raw):
        stage.go.set()
        raw.send(head(name, more=((b"grpc-encoding", b"gzip"),)))
        raw.send(data(1, b"\1" + U32.pack(len(content)) + content, http2.END_STREAM))
        assert status_of(await raw.ended(1)) == status
        assert stage.seen == ([b"hello"] if status is Status.OK else [])
        assert stage.held == 0


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("name", ["Small", "Waits", "Read"])
async def test_one_packed_message_of_a_port_is_unpacked_in_a_turn(name: str, waits: bool) -> None:
    """Of 40 on two connections, and of those none before the gate lets their calls in."""
    packed = gzip.compress(bytes(1 << 20), 9)
    one = b"\1" + U32.pack(len(packed)) + packed
    seen: list[int] = []

    async def look() -> None:
        while True:
            seen.append(len(stage.seen))
            await asyncio.sleep(0)

    async with serving() as (stage, raw):
        stage.gate.waits = waits
        stage.go.set()
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.server.port)
        other = Raw(reader, writer)
        other.send(http2.PREFACE, frame(http2.SETTINGS, 0, 0))
        looking = asyncio.create_task(look())
        for number in range(1, 41, 2):
            for peer in (raw, other):
                peer.send(head(name, number, more=((b"grpc-encoding", b"gzip"),)))
                peer.send(data(number, one, http2.END_STREAM))
        if waits:
            await until(lambda: stage.held > 40 * len(packed), "messages wait, and are held")
            stage.gate.go.set()
        await until(lambda: len(stage.seen) == 40, "all messages are read")
        looking.cancel()
        assert max(after - before for before, after in pairwise(seen)) == 1
        writer.transport.abort()


@pytest.mark.parametrize("name", ["Small", "Waits", "Read"])
async def test_a_message_too_large_ends_its_call_at_its_begin(name: str) -> None:
    async with serving() as (stage, raw):
        raw.send(head(name), data(1, b"\0" + U32.pack((1 << 20) + 1)))
        assert status_of(await raw.ended(1)) == Status.RESOURCE_EXHAUSTED
        assert stage.held == 0


async def test_a_request_that_ends_inside_a_message_is_refused() -> None:
    async with serving() as (_, raw):
        raw.send(head("Read"), data(1, message(b"hello")[:-1], http2.END_STREAM))
        assert status_of(await raw.ended(1)) == Status.INTERNAL


@pytest.mark.parametrize(("path", "served"), [("grpc.health.v1.Health", True), ("a.B", False)])
async def test_calls_of_health_alone_keep_no_place_on_a_full_port(path: str, served: bool) -> None:
    async with serving() as (stage, raw):
        read = grpc.stream_stream_rpc_method_handler(stage.read)
        stage.server.add("grpc.health.v1.Health", {"Read": read})
        block = call_head(f"/{path}/Read".encode())
        peers = [raw]
        for _ in range(8):  # of ten places one address has nine
            peers.append(Raw(*await asyncio.open_connection("127.0.0.1", stage.server.port)))
            peers[-1].send(http2.PREFACE, frame(http2.SETTINGS, 0, 0))
        for peer in peers:
            peer.send(frame(http2.HEADERS, http2.END_HEADERS, 1, block))
        await until(lambda: stage.server.calls == 9, "all calls are open")
        peers.append(Raw(*await asyncio.open_connection("127.0.0.1", stage.server.port)))
        last = peers[-1]
        if served:
            last.send(http2.PREFACE, frame(http2.SETTINGS, 0, 0), whole("Small"))
            assert status_of(await last.ended(1)) == Status.OK
            await until(lambda: stage.server.calls == 8, "one has made room")
        else:
            assert await last.reader.read() == b""
            assert stage.server.calls == 9
        assert stage.server.connections.closed["address"] == 1
        for peer in peers:
            peer.writer.transport.abort()


def size_of(back: list[Frame]) -> int:
    return sum(len(one[3]) for one in back if one[0] == http2.DATA)


async def test_a_stop_waits_for_the_bytes_of_answers() -> None:
    async with serving() as (stage, raw):
        raw.send(whole("Large"))
        back: list[Frame] = []
        while size_of(back) < 65_535:  # the client's window
            back += await raw.until(http2.DATA, number=1)
        stopping = asyncio.create_task(stage.server.stop(GUARD_S))
        await raw.until(http2.GOAWAY, number=0)
        raw.send(*(frame(http2.WINDOW_UPDATE, 0, at, U32.pack(1 << 20)) for at in (0, 1)))
        back += await raw.ended(1)
        assert size_of(back) == 5 + len(ANSWER)
        assert status_of(back) == Status.OK
        await stopping
        assert stage.unsent == 0


async def test_a_stop_ends_after_its_grace_though_bytes_wait() -> None:
    async with serving() as (stage, raw):
        raw.send(NO_WINDOW, whole("Large"))
        await raw.until(http2.HEADERS, number=1)  # the answer's own need no window
        await stage.server.stop(0.01)
        await asyncio.wait_for(raw.reader.read(), GUARD_S)
        await until(lambda: stage.unsent == 1, "the answer is unsent")


@pytest.mark.parametrize("code", [Code.CANCEL, Code.NO_ERROR])
async def test_a_call_that_is_given_up_as_its_answer_comes_has_it_unsent(code: Code) -> None:
    async with serving() as (stage, raw):
        raw.send(whole("Small"))
        assert status_of(await raw.ended(1)) == Status.OK
        assert stage.unsent == 0
        raw.send(http2.reset_frame(1, code), whole("Small", 3))
        await raw.ended(3)
        assert stage.unsent == (code is Code.CANCEL)


@pytest.mark.parametrize("sent", [http2.reset_frame(1, Code.CANCEL), None])
async def test_an_answer_that_waits_is_unsent_if_its_peer_leaves(sent: bytes | None) -> None:
    async with serving() as (stage, raw):
        raw.send(NO_WINDOW, whole("Large"))
        await raw.until(http2.HEADERS, number=1)
        assert stage.held > len(ANSWER)
        if sent is None:
            raw.writer.transport.abort()
        else:
            raw.send(sent)
        await until(lambda: stage.unsent == 1, "the answer is unsent")
        await until(lambda: stage.held == 0, "its bytes are gone")


async def test_answers_that_are_not_read_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "LOOK_S", 0.01)
    async with serving(read_s=0.05) as (stage, raw):
        raw.send(NO_WINDOW, *(whole("Large", number) for number in range(1, 21, 2)))
        for number in range(1, 21, 2):
            assert status_of(await raw.ended(number)) == Status.DEADLINE_EXCEEDED
        assert stage.unsent == 10
        assert stage.held == 0


async def test_a_connection_that_closes_is_not_written_to(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (stage, raw):
        raw.send(*(whole("Waits", number) for number in range(1, 41, 2)))
        await until(lambda: len(stage.seen) == 20, "all wait")
        raw.writer.transport.abort()
        stage.go.set()
        await until(lambda: stage.server.calls == 0, "all are over")
    assert caplog.text == ""


async def test_metadata_that_comes_twice_has_an_entry_for_each() -> None:
    sent = (("x-a", "1"), ("x-b-bin", b"n\n"), ("x-a", "2"), ("x-b-bin", b"\xff\xfe"))
    got: list[Any] = []

    async def note(content: bytes, context: Any) -> bytes:
        got.extend(one for one in context.invocation_metadata() if one[0].startswith("x-"))
        return b""

    async with serving() as (stage, _):
        handlers = {"Note": grpc.unary_unary_rpc_method_handler(note)}
        stage.server.add("a.C", handlers)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stage.server.port}") as channel:
            await channel.unary_unary("/a.C/Note")(b"", metadata=sent, timeout=GUARD_S)
    assert sorted(got, key=str) == sorted(sent, key=str)


async def test_a_bin_value_that_is_no_base64_is_refused() -> None:
    async with serving() as (stage, raw):
        raw.send(head("Small", more=((b"x-bin", b"@@@"),)))
        assert status_of(await raw.ended(1)) == Status.INTERNAL
        raw.send(whole("Small", 3, more=((b"x-bin", b"AG9uZQ, /3R3bw=="),)))
        assert status_of(await raw.ended(3)) == Status.OK
        assert stage.gate.entered == ["/a.B/Small"]
