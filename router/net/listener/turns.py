"""Runs long work on the event loop in steps, so that other tasks run between them."""

import asyncio
from collections.abc import Generator
from contextlib import closing
from typing import TypeVar

Result = TypeVar("Result")


async def turned(steps: Generator[None, None, Result]) -> Result:
    """Runs the steps of a generator, with other tasks between them; returns the generator's
    result.
    """
    with closing(steps):  # what they hold goes at once, should the call be cancelled
        while True:
            try:
                next(steps)
            except StopIteration as done:
                result: Result = done.value
                return result
            await asyncio.sleep(0)
