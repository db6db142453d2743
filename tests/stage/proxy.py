"""A network that fails: a TCP proxy whose connections are cut, stalled, slowed, altered, healed."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_PIECE_BYTES = 65536
_SLOW_PIECES_PER_S = 10
"""A slow connection passes a tenth of a second's bytes at once."""
_TURNS_TO_SERVE = 10
"""Turns of asyncio's event loop after which a connection that was accepted has its task."""
_GONE = (OSError, RuntimeError)
"""What a write to a connection that was aborted raises; uvloop raises RuntimeError."""


class Proxy:
    """Listens on a loopback port and passes bytes on to another one."""

    def __init__(self, target: int, source: str = "127.0.0.1") -> None:
        """source: the loopback address that the target sees connections come from."""
        self.port = 0
        self.taken = 0
        """Connections so far."""
        self.altered = 0
        """Bytes that were passed on as others."""
        self.target = target
        self._source = source
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._answering = asyncio.Event()
        self._answering.set()
        self._bytes_per_s: float | None = None
        self._altered_share = 0.0
        self._rng = random.Random(0)
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    async def heal(self) -> None:
        """Connections work, from now on or again."""
        self._bytes_per_s = None
        self._altered_share = 0.0
        self._flowing.set()
        self._answering.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._take, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    def stall(self) -> None:
        """Nothing gets through and nobody is told: new connections are taken too, and wait."""
        self._flowing.clear()

    def stall_answers(self) -> None:
        """Nothing gets back from the target, which still hears all."""
        self._answering.clear()

    def slow(self, bytes_per_s: float) -> None:
        """Each direction of each connection passes at most so many bytes a second."""
        if bytes_per_s <= 0:
            raise ValueError(f"{bytes_per_s} bytes a second is no speed; stall() stops all")
        self._bytes_per_s = bytes_per_s

    def corrupt(self, share: float, rng: random.Random) -> None:
        """One byte is altered in so many of the pieces that pass, in either direction, with
        checksums that are right: as a broken middlebox does, and no bad cable."""
        self._altered_share = share
        self._rng = rng

    def cut(self) -> None:
        """Every connection is reset, and new ones are refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.drop()

    def drop(self) -> None:
        """Every connection is reset; new ones are taken."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self.cut()
        self._bytes_per_s = None
        self._flowing.set()
        self._answering.set()
        for _ in range(_TURNS_TO_SERVE):
            await asyncio.sleep(0)
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
                onward = await asyncio.open_connection(
                    "127.0.0.1", self.target, local_addr=(self._source, 0)
                )
                self._writers.add(onward[1])
                try:
                    await asyncio.wait(
                        [
                            asyncio.create_task(self._pump(reader, onward[1], self._flowing)),
                            asyncio.create_task(self._pump(onward[0], writer, self._answering)),
                        ]
                    )
                finally:
                    self._writers.discard(onward[1])
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
            self._serving.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, open_: asyncio.Event
    ) -> None:
        """Passes bytes on until either side ends; open_: set while this direction works."""
        with suppress(*_GONE):
            while data := await reader.read(self._piece_bytes()):
                await self._flowing.wait()
                await open_.wait()
                if self._bytes_per_s is not None:
                    await asyncio.sleep(len(data) / self._bytes_per_s)
                writer.write(self._passed(data))
                await writer.drain()
            await self._flowing.wait()
        writer.transport.abort()

    def _piece_bytes(self) -> int:
        if self._bytes_per_s is None:
            return _PIECE_BYTES
        return max(1, min(_PIECE_BYTES, int(self._bytes_per_s / _SLOW_PIECES_PER_S)))

    def _passed(self, data: bytes) -> bytes:
        if not self._altered_share or self._rng.random() >= self._altered_share:
            return data
        place = self._rng.randrange(len(data))
        self.altered += 1
        other = data[place] ^ self._rng.randrange(1, 256)
        return data[:place] + bytes([other]) + data[place + 1 :]


@asynccontextmanager
async def proxy_to(target: int, source: str = "127.0.0.1") -> AsyncIterator[Proxy]:
    """A proxy that works, until told otherwise."""
    proxy = Proxy(target, source)
    await proxy.heal()
    try:
        yield proxy
    finally:
        await proxy.close()
