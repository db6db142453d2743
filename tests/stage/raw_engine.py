"""An engine of raw bytes: what it sends in answer to a request is the test's, HTTP or not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.stage.tcp import tcp_server

Answer = Callable[["Asked"], Awaitable[bool]]
"""Plays one request; whether the connection stays for another one."""


@dataclass
class Asked:
    """One request, and its connection."""

    head: bytes
    body: bytes
    number: int
    """Of the request on its connection, from 0."""
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader

    async def gone(self) -> None:
        """Until the other side closes; raises ConnectionError then."""
        await self.reader.read()
        raise ConnectionError("the other side closed")

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


@dataclass
class RawEngine:
    """Listens on loopback."""

    answer: Answer
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    left: int = 0
    """Connections that the other side closed in the middle of an answer."""
    address: str = ""

    @asynccontextmanager
    async def run(self) -> AsyncIterator[str]:
        async with tcp_server(self._serve) as port:
            self.address = f"http://127.0.0.1:{port}"
            yield self.address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            number = 0
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                length = [int(x.split(b":")[1]) for x in lines if x.startswith(b"content-length")]
                asked = Asked(head, await reader.readexactly(sum(length)), number, writer, reader)
                self.asked.append(asked)
                number += 1
                if not await self.answer(asked):
                    break
        except asyncio.IncompleteReadError:
            pass
        except (ConnectionError, asyncio.CancelledError):
            self.left += 1
        finally:
            writer.close()


def sends(data: bytes, *, stays: bool = False) -> Answer:
    """Answers every request with these bytes, and closes unless it stays."""

    async def answer(asked: Asked) -> bool:
        await asked.send(data)
        return stays

    return answer


def whole(body: bytes, status: bytes = b"200 OK", *headers: bytes) -> bytes:
    """An answer of HTTP."""
    head = [b"HTTP/1.1 " + status, b"Content-Type: application/json", *headers]
    return b"\r\n".join([*head, b"Content-Length: %d" % len(body), b"", body])
