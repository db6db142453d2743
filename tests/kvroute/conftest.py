"""A scripted router on loopback for each test that asks for one."""

from collections.abc import AsyncIterator

import pytest

from tests.kvroute.scripted_router import Server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.start("127.0.0.1:0")
    yield server
    await server.stop()
