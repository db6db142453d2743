"""A network that fails: a TCP proxy whose connections can be cut, stalled and healed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """Listens on a loopback port and passes bytes on to another one."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.taken = 0
        """Connections so far."""
        self.target = target
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    async def heal(self) -> None:
        """Connections work, from now on or again."""
        self._flowing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._take, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    def stall(self) -> None:
        """Nothing gets through and nobody is told: new connections are taken too, and wait."""
        self._flowing.clear()

    def cut(self) -> None:
        """Every connection is reset, and new ones are refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self.cut()
        self._flowing.set()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self._writers.add(writer)
        self.taken += 1
        try:
            await self._flowing.wait()
            with suppress(OSError):
                onward = await asyncio.open_connection("127.0.0.1", self.target)
                self._writers.add(onward[1])
                try:
                    await asyncio.wait(
                        [
                            asyncio.create_task(self._pump(reader, onward[1])),
                            asyncio.create_task(self._pump(onward[0], writer)),
                        ]
                    )
                finally:
                    self._writers.discard(onward[1])
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
            self._serving.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes bytes on until either side ends."""
        with suppress(OSError):
            while data := await reader.read(65536):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
            await self._flowing.wait()
        writer.transport.abort()


@asynccontextmanager
async def proxy_to(target: int) -> AsyncIterator[Proxy]:
    """A proxy that works, until told otherwise."""
    proxy = Proxy(target)
    await proxy.heal()
    try:
        yield proxy
    finally:
        await proxy.close()
