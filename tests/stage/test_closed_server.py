"""A connection that comes in the turn of the loop in which its server is closed leaves nothing."""

import asyncio
import gc
import socket
import warnings

import pytest


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_of_the_last_turn_is_closed(turns: int) -> None:
    transports: list[asyncio.BaseTransport] = []

    class Keeps(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(transport)

    server = await asyncio.get_running_loop().create_server(Keeps, "127.0.0.1", 0)
    client = socket.create_connection(server.sockets[0].getsockname())
    for _ in range(turns):
        await asyncio.sleep(0)
    server.close()
    for _ in range(10):
        await asyncio.sleep(0)
    for transport in transports:
        transport.close()
    client.close()
    await asyncio.sleep(0)
    transports.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
    assert [str(one.message) for one in seen if "socket" in str(one.message)] == []
