"""Work that takes as long as a body has bytes: a long body's is done beside the loop.

Law: no turn of the loop reads or writes a body of LONG_BYTES or more.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

LONG_BYTES = 1 << 20
"""A body of this length takes some 3 ms to read."""

Made = TypeVar("Made")


async def made(size: int, make: Callable[[], Made]) -> Made:
    """What is made of a body of so many bytes; raises what `make` raises."""
    return make() if size < LONG_BYTES else await asyncio.to_thread(make)
