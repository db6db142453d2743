"""Long work on the event loop, with turns for other calls."""

import asyncio
from collections.abc import Generator
from contextlib import closing
from typing import TypeVar

Result = TypeVar("Result")


async def turned(steps: Generator[None, None, Result]) -> Result:
    """Runs steps with a turn for other calls between them."""
    with closing(steps):  # what they hold goes at once, should the call be cancelled
        while True:
            try:
                next(steps)
            except StopIteration as done:
                result: Result = done.value
                return result
            await asyncio.sleep(0)
