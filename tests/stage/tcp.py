"""TCP servers of tests, which leave no connection behind."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.stage.waiting import DEADLINE_S

TURNS_TO_SERVE = 10
"""Turns of asyncio's event loop after which a connection that was accepted has its task."""
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def tcp_server(serve: Serve) -> AsyncIterator[int]:
    """Listens on a free port of 127.0.0.1, and yields it. Each connection is served by a task of
    its own; in the end all are aborted and their tasks are over.

    asyncio.start_server leaves a connection to its handler. One that was accepted in the loop's
    last turns, so that its handler never began, stays open until the garbage collector meets it, in
    another test.
    """
    tasks: dict[asyncio.StreamWriter, asyncio.Future[None]] = {}

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks[writer] = asyncio.ensure_future(serve(reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        for _ in range(TURNS_TO_SERVE):  # of a server that is closed, asyncio serves nobody more
            await asyncio.sleep(0)
        server.close()
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for writer in tasks:
            writer.transport.abort()
        await asyncio.sleep(0)  # the transports' own ends


async def exchanged(port: int, *sent: bytes, ends: bool = False) -> bytes:
    """What a server on 127.0.0.1 sends to a client that writes this, until it closes the
    connection. ends: the client closes its side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.writelines(sent)
        if ends:
            writer.write_eof()
        async with asyncio.timeout(DEADLINE_S):
            return await reader.read()
    finally:
        writer.close()
