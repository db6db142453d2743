"""How the stage talks with the processes that it starts: JSON lines on standard input and output.

Law: a process whose input ends, ends; so none outlives the stage, however that died.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec

_LINE_BYTES = 1 << 20


async def lines() -> AsyncIterator[dict[str, Any]]:
    """Commands, one JSON object a line, until standard input ends."""
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield msgspec.json.decode(line)


def say(**fields: object) -> None:
    """Answers with one line on standard output."""
    sys.stdout.write(msgspec.json.encode(fields).decode() + "\n")
    sys.stdout.flush()
