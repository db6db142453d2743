"""The failing network that other tests use."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop

from tests.stage.proxy import Proxy, proxy_to
from tests.stage.tcp import tcp_server


@asynccontextmanager
async def an_echo() -> AsyncIterator[Proxy]:
    """A proxy to a server that sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        finally:
            writer.transport.abort()

    async with tcp_server(echo) as port, proxy_to(port) as proxy:
        yield proxy


async def through(proxy: Proxy, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(data)
    answer = await reader.readexactly(len(data))
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_corrupt_connection_alters_single_bytes_until_it_is_healed() -> None:
    async with an_echo() as proxy:
        assert await through(proxy, b"a" * 1000) == b"a" * 1000
        proxy.corrupt(1.0, random.Random(1))
        answer = await through(proxy, b"a" * 1000)
        assert 1 <= sum(byte != ord("a") for byte in answer) <= proxy.altered
        await proxy.heal()
        altered = proxy.altered
        assert await through(proxy, b"a" * 1000) == b"a" * 1000
        assert proxy.altered == altered


async def test_a_slow_connection_passes_all_in_small_pieces() -> None:
    async with an_echo() as proxy:
        proxy.slow(1e6)
        data = random.Random(2).randbytes(200_000)
        began_s = asyncio.get_running_loop().time()
        assert await through(proxy, data) == data
        assert asyncio.get_running_loop().time() - began_s > 0.1
        with pytest.raises(ValueError, match="no speed"):
            proxy.slow(0)


async def test_dropped_connections_are_reset_and_new_ones_are_taken() -> None:
    async with an_echo() as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        proxy.drop()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        assert await through(proxy, b"y") == b"y"


def test_bytes_for_a_connection_that_was_reset_end_the_pump_under_uvloop() -> None:
    async def passed_on_after_the_reset() -> None:
        source, flowing = asyncio.StreamReader(), asyncio.Event()
        source.feed_data(b"x")
        flowing.set()
        async with an_echo() as proxy:
            _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.transport.abort()
            await writer.wait_closed()
            await proxy._pump(source, writer, flowing)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(passed_on_after_the_reset())
