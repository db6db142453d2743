"""A picker on loopback, as most tests of it want it."""

from collections.abc import AsyncIterator

import pytest

from tests.stage.gateway import Worker, answering
from tests.stage.picker import Stage, a_picker


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """Before one worker."""
    async with a_picker(Worker(answering(b"{}"))) as stage:
        yield stage


@pytest.fixture
async def empty() -> AsyncIterator[Stage]:
    """Before no worker."""
    async with a_picker() as stage:
        yield stage
