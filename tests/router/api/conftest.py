"""Routers on loopback, as most tests of the API want them."""

from collections.abc import AsyncIterator

import pytest

from tests.stage.served import Served, served


@pytest.fixture
async def stage() -> AsyncIterator[Served]:
    """With one worker, w0."""
    async with served("w0") as stage:
        yield stage


@pytest.fixture
async def empty() -> AsyncIterator[Served]:
    """Without a worker."""
    async with served() as stage:
        yield stage
