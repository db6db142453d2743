"""What has come of a call's request and its handler has not taken.

Law: messages are held (held.Held) as they came until they are taken, and unpacked then.
"""

import asyncio
from collections import deque
from typing import Any

import grpc.aio

from router.http2.sending import Stream
from router.http2.sockets import Http2Protocol
from router.listener.held import HANDLER_BYTES, MESSAGE_BYTES


class Received:
    """Of one call."""

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
        """Bytes of the account that the one message, or the handler of a stream, takes: none of a
        message that is taken at once."""
        self._came: asyncio.Event | None = None
        """Set at a message or the end of a request that is a stream."""
        if streams:
            self._came = asyncio.Event()
            self._messages: deque[tuple[bytes, bool]] = deque()
            """With whether they are packed."""
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
        http2.held.free(len(content) + MESSAGE_BYTES)
        if not self._messages:
            http2.hold(self._stream, held=False)
            self._protocol.flush()
        plain = self._unpacked(content) if packed else content
        if plain is None:
            raise asyncio.CancelledError  # the call has ended, and its task is being cancelled
        return plain

    def keep(self, content: bytes, *, packed: bool) -> None:
        """A message has come."""
        stream = self._stream
        if self._came is None and stream.ended:
            self._content, self._packed = content, packed
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
        """The handler of a streaming request begins; False: there is no room for it."""
        held = self._protocol.http2.held.take(HANDLER_BYTES)
        self._held = HANDLER_BYTES if held else 0
        return held

    def take(self) -> bytes | None:
        """The message of a unary request, held no longer; None: there is none, or it has ended the
        call."""
        content, self._content = self._content, None
        if content is None:
            return None
        self._free()
        return self._unpacked(content) if self._packed else content

    def drop(self) -> None:
        """The call is over."""
        self._content = None
        self._free()
        if self._came is not None and self._messages:
            size = sum(len(content) + MESSAGE_BYTES for content, _ in self._messages)
            self._protocol.http2.held.free(size)
            self._messages.clear()

    def _free(self) -> None:
        if self._held:
            self._protocol.http2.held.free(self._held)
            self._held = 0

    def _unpacked(self, content: bytes) -> bytes | None:
        """The bytes of a packed message; None: it has ended the call."""
        plain = self._protocol.http2.unpacked(self._stream, content)
        if plain is None:
            self._protocol.flush()
        return plain
