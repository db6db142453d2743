"""Clients that hold, flood or break connections of the gRPC port: a good client is served on."""

import asyncio
import random
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from kvroute.v1 import RouteBatch, RouteItem, RouterStub
from router.api.service.grpc_bounds import GrpcBounds
from router.net.listener.http_bounds import HttpBounds
from tests.stage.http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEAD,
    HEADERS,
    PING,
    PREFACE,
    RST,
    SETTINGS,
    frame,
    literal,
)
from tests.stage.served import Served, asked, refusal, served
from tests.stage.waiting import until

STREAMS_SETTING, HEADERS_SETTING = 3, 6
GUARD_S = 60.0
"""What hangs fails; nothing waits this long."""


class Raw:
    """A connection on which the test writes what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def write(self, *parts: bytes) -> None:
        """Writes as much as the server takes before it closes."""
        try:
            for part in parts:
                self.writer.write(part)
                await self.writer.drain()
        except ConnectionError:
            pass

    async def closed(self) -> bytes:
        """All bytes up to the connection's end."""
        try:
            return await asyncio.wait_for(self.reader.read(), GUARD_S)
        except ConnectionError:
            return b""

    async def settings(self) -> dict[int, int]:
        """The server's, which it sends first."""
        head = await self.reader.readexactly(9)
        assert head[3] == SETTINGS
        payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        return dict(struct.iter_unpack(">HI", payload))


@asynccontextmanager
async def raw(stage: Served, *, greet: bool = True) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.server.port)
    connection = Raw(reader, writer)
    if greet:
        await connection.write(PREFACE, frame(SETTINGS))
    try:
        yield connection
    finally:
        writer.transport.abort()


@asynccontextmanager
async def serving(http: HttpBounds | None = None, **bounds: Any) -> AsyncIterator[Served]:
    async with served("a", http=http, bounds=GrpcBounds(**bounds)) as stage:
        yield stage


@asynccontextmanager
async def good_client(stage: Served) -> AsyncIterator[None]:
    """A client with a connection of its own, which gets its worker and stays connected."""
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{stage.server.port}", options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        answer = await RouterStub(channel).Route(asked(), timeout=GUARD_S, wait_for_ready=True)
        assert answer.worker_id == "a"
        yield


async def is_served(stage: Served) -> None:
    async with good_client(stage):
        pass


async def test_a_connection_that_never_says_hello_is_closed() -> None:
    async with (
        serving(HttpBounds(head_timeout_s=1.0)) as stage,
        raw(stage, greet=False) as silent,
        raw(stage, greet=False) as slow,
    ):
        await slow.write(PREFACE[:5])
        await is_served(stage)
        await silent.closed()
        await slow.closed()


async def test_a_ping_flood_ends_its_connection_alone() -> None:
    async with serving() as stage, raw(stage) as flood:
        await flood.write(*[frame(PING, payload=bytes(8)) * 50] * 20)
        last = await flood.closed()
        # Pings that the server has not read when it closes reset the connection, and its last words
        # may be lost with that.
        assert not last or b"too_many_pings" in last
        await is_served(stage)


async def test_a_flood_of_opened_and_reset_streams_leaves_nothing() -> None:
    async with serving() as stage, raw(stage) as flood:
        for stream in range(1, 2000, 2):
            reset = frame(RST, 0, stream, bytes(4))
            await flood.write(frame(HEADERS, END_HEADERS, stream, HEAD) + reset)
        await is_served(stage)
    assert stage.fleet.core.endings.total() == 0


async def test_headers_without_an_end_close_their_connection() -> None:
    async with serving() as stage, raw(stage) as giant:
        await giant.write(frame(HEADERS, 0, 1, HEAD))
        filler = literal(b"x", b"y" * 120) * 100
        await giant.write(*[frame(CONTINUATION, 0, 1, filler)] * 200)
        giant.writer.close()
        await is_served(stage)


async def test_metadata_over_the_bound_is_refused_and_below_it_served() -> None:
    async with serving(metadata_kib_max=4) as stage:
        answer = await stage.router.Route(asked(), metadata=[("x", "y" * 2000)], timeout=GUARD_S)
        assert answer.worker_id == "a"
        assert (
            await refusal(
                stage.router.Route(asked(), metadata=[("x", "y" * 6000)], timeout=GUARD_S)
            )
        ).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await is_served(stage)


async def test_a_connection_may_have_so_many_streams() -> None:
    async with serving(streams_max=7, metadata_kib_max=4) as stage, raw(stage) as connection:
        pairs = await asyncio.wait_for(connection.settings(), GUARD_S)
        assert pairs[STREAMS_SETTING] == 7
        assert pairs[HEADERS_SETTING] == 4096
        for stream in range(1, 200, 2):  # what is over it is refused, one by one
            await connection.write(frame(HEADERS, END_HEADERS, stream, HEAD))
        await is_served(stage)


async def test_random_bytes_end_their_connection_alone() -> None:
    rng = random.Random(17)
    async with serving() as stage:
        for greet in (False, True) * 10:
            async with raw(stage, greet=greet) as noise:
                await noise.write(rng.randbytes(rng.choice((1, 9, 24, 4000))))
        await is_served(stage)


async def test_of_more_connections_than_the_bound_one_is_closed() -> None:
    """The last one, or one that was idle."""
    async with serving(HttpBounds(connections_max=3)) as stage, AsyncExitStack() as stack:
        taken = [await stack.enter_async_context(raw(stage)) for _ in range(2)]
        for connection in taken:
            await connection.settings()
        async with good_client(stage):  # the third connection
            taken.append(await stack.enter_async_context(raw(stage)))
            ends = [asyncio.create_task(connection.closed()) for connection in taken]
            done, others = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            assert len(done) == 1
            for end in others:
                end.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        for connection in taken:
            connection.writer.transport.abort()
        await is_served(stage)


async def test_results_that_are_never_read_end_their_stream_and_no_other() -> None:
    def unread() -> float:
        labels = {"method": "Router/RouteStream", "reason": "UNREAD"}
        return stage.metric("calls_refused_total", **labels)

    async with serving(read_timeout_s=0.2) as stage:
        items = [RouteItem(index=i, request=asked(16, request_id=str(i))) for i in range(400)]
        batch = RouteBatch(items=items).SerializeToString()
        message = b"\x00" + struct.pack(">I", len(batch)) + batch
        assert len(message) < 60_000  # the server's own window
        async with raw(stage, greet=False) as deaf:
            await deaf.write(PREFACE, frame(SETTINGS, payload=struct.pack(">HI", 4, 0)))
            await deaf.write(frame(HEADERS, END_HEADERS, 1, HEAD))
            for at in range(0, len(message), 16_384):
                await deaf.write(frame(DATA, 0, 1, message[at : at + 16_384]))
            await until(lambda: unread() == 1, "the stream's end")
            assert stage.fleet.loads() == {}, "an answer that was not sent reserves nothing"
            await is_served(stage)
