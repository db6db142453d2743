"""Messages of a call's request that have come, and that its handler has not taken.

Laws:
- messages count as held (held.Held), as they came, until they are taken, and are unpacked then;
- of a port's packed (compressed) messages one is unpacked at a time, packing.STEP_BYTES in a turn.
"""

import asyncio
from collections import deque
from typing import Any

import grpc.aio

from router.net.http2.sending import Stream
from router.net.http2.sockets import Http2Protocol
from router.net.listener.held import HANDLER_BYTES, MESSAGE_BYTES


class Received:
    """Messages of one call's request that its handler has not taken."""

    __slots__ = (
        "_came", "_content", "_ended", "_held", "_messages", "_packed", "_protocol", "_stream",
    )  # fmt: skip

    def __init__(self, protocol: Http2Protocol, stream: Stream, *, streams: bool) -> None:
        """streams: whether the request is a stream of messages."""
        self._protocol = protocol
        self._stream = stream
        self._content: bytes | None = None
        """The one message of a unary request."""
        self._packed = False
        self._held = 0
        """Bytes that count as held for the message of a unary request, or for the handler of a
        stream; 0 for a message that is taken at once."""
        self._came: asyncio.Event | None = None
        """Set when a message or the end of a streaming request comes; None: a unary request."""
        if streams:
            self._came = asyncio.Event()
            self._messages: deque[tuple[bytes, bool]] = deque()
            """Messages that the handler has not taken, each with whether it is packed."""
        self._ended = False
        """Whether no more messages come."""

    async def read(self) -> Any:
        """The next message of a streaming request, or grpc.aio.EOF."""
        assert self._came is not None
        while not self._messages:
            if self._ended:
                return grpc.aio.EOF
            self._came.clear()
            await self._came.wait()
        http2 = self._protocol.http2
        content, packed = self._messages.popleft()
        try:
            plain = await self._unpacked(content) if packed else content
        finally:
            http2.held.free(len(content) + MESSAGE_BYTES)
        if not self._messages:
            http2.hold(self._stream, held=False)
            self._protocol.flush()
        if plain is None:
            raise asyncio.CancelledError  # the call has ended, and its task is being cancelled
        return plain

    def end_reading(self) -> None:
        """Has a streaming request end after the messages that have come by now."""
        assert self._came is not None
        self._ended = True
        self._came.set()

    def keep(self, content: bytes, *, packed: bool, waits: bool) -> None:
        """Stores a message of the request. waits: whether the handler takes the message later even
        if the request is complete.
        """
        stream = self._stream
        if self._came is None and stream.ended and not waits:
            self._content, self._packed = content, packed
            return
        if self._came is not None and self._ended:
            return
        http2, size = self._protocol.http2, len(content) + MESSAGE_BYTES
        if not http2.held.take(size):
            http2.full(stream)
            self._protocol.flush()
        elif self._came is None:
            self._content, self._packed, self._held = content, packed, size
        else:
            self._messages.append((content, packed))
            http2.hold(stream, held=True)
            self._came.set()

    def keep_handler(self) -> bool:
        """Counts HANDLER_BYTES as held for a streaming call's handler that begins; False: they
        would exceed the bound, and are not counted.
        """
        held = self._protocol.http2.held.take(HANDLER_BYTES)
        self._held = HANDLER_BYTES if held else 0
        return held

    def take(self) -> bytes | None:
        """Takes the message of a unary request that is not compressed; None: there is none."""
        content, self._content = self._content, None
        if self._held:
            self._free()
        return content

    async def take_packed(self) -> bytes | None:
        """Takes and unpacks the compressed message of a unary request; None: it was invalid or too
        large, which has ended the call.
        """
        assert self._content is not None
        plain = await self._unpacked(self._content)
        self.take()
        return plain

    def drop(self) -> None:
        """Drops all messages, since the call is over."""
        self._content = None
        if self._held:
            self._free()
        if self._came is not None and self._messages:
            size = sum(len(content) + MESSAGE_BYTES for content, _ in self._messages)
            self._protocol.http2.held.free(size)
            self._messages.clear()

    def _free(self) -> None:
        self._protocol.http2.held.free(self._held)
        self._held = 0

    async def _unpacked(self, content: bytes) -> bytes | None:
        """Unpacks a message; None: it was invalid or too large, which has ended the call."""
        protocol = self._protocol
        plain: bytes | None = None
        async with protocol.unpacking, protocol.port_unpacking:
            steps = protocol.http2.unpacking(self._stream, content)
            while True:
                await asyncio.sleep(0)
                try:
                    next(steps)
                except StopIteration as done:
                    plain = done.value
                    break
        if plain is None:
            protocol.flush()
        return plain
