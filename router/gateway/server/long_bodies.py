"""Runs work on a body of LONG_BYTES or more in a thread, beside the event loop.

Law: no turn of the loop reads or writes a body of LONG_BYTES or more.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

LONG_BYTES = 1 << 20
"""Length from which a body is parsed in a thread: a body of this length takes some 3 ms."""

Made = TypeVar("Made")


async def made(size: int, make: Callable[[], Made]) -> Made:
    """Calls `make`, in a thread if the body of `size` bytes is long; returns its result, and raises
    what it raises.
    """
    return make() if size < LONG_BYTES else await asyncio.to_thread(make)
