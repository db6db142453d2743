"""gRPC's messages out of HTTP/2's bytes, stream by stream. Pure."""

from collections.abc import Callable, Generator
from typing import Protocol

from router.net.http2.frames import U32, Status
from router.net.http2.packing import TooLargeError, unpacking
from router.net.http2.requests import Head
from router.net.http2.sending import Stream
from router.net.listener.held import Held


class Service(Protocol):
    """Interface: what a connection's streams call."""

    def opened(self, stream: Stream, head: Head) -> None:
        """Called when a call begins; `Connection.finish` refuses it. Sets the stream's
        bytes_max.
        """

    def message(self, stream: Stream, content: bytes, *, packed: bool) -> None:
        """Called with a complete message. packed: whether it is compressed; `Connection.unpacked`
        or `unpacking` gives its bytes.
        """

    def too_large(self, stream: Stream, size: int) -> None:
        """Called for a message of more than the stream's bytes_max, at least `size` bytes, which
        ends its call.
        """

    def half_closed(self, stream: Stream) -> None:
        """Called when no more messages come."""

    def reset(self, stream: Stream) -> None:
        """Called when the call is over because its peer reset it, or is gone."""


class Over:
    """The service of a connection that is gone; does nothing."""

    def opened(self, stream: Stream, head: Head) -> None: ...

    def message(self, stream: Stream, content: bytes, *, packed: bool) -> None: ...

    def too_large(self, stream: Stream, size: int) -> None: ...

    def half_closed(self, stream: Stream) -> None: ...

    def reset(self, stream: Stream) -> None: ...


class Messages:
    """Messages of one connection's streams, assembled from DATA and handed to the service.

    Laws:
    - a message has its stream's bytes_max at most, unpacked or not; what would exceed that ends its
      call before more of it is kept;
    - the begin of a message is held (held.Held) until its end comes;
    - a packed message stays packed until its handler takes it.
    """

    def __init__(
        self, service: Service, end: Callable[[Stream, Status, str], None], held: Held
    ) -> None:
        """end: ends a call with a status."""
        self._service = service
        self._end = end
        self._held = held

    def let_go(self) -> None:
        """Called when the connection is gone."""
        self._service, self._end = Over(), lambda _stream, _status, _about: None

    def take(self, stream: Stream, payload: bytes) -> None:
        """Takes bytes of a stream."""
        if stream.finished:
            return  # its answer is whole, and waits for the peer's room
        inbox = stream.inbox
        if not inbox and len(payload) >= 5:
            size = 5 + U32.unpack_from(payload, 1)[0]
            if size == len(payload) <= stream.bytes_max + 5:  # as most frames are
                self._service.message(stream, payload[5:], packed=payload[0] != 0)
                return
        elif len(inbox) >= 5:
            size = 5 + U32.unpack_from(inbox, 1)[0]
            if size == len(inbox) + len(payload) <= stream.bytes_max + 5:  # as most ends are
                packed, content = inbox[0] != 0, b"".join((memoryview(inbox)[5:], payload))
                self.forget(stream)
                self._service.message(stream, content, packed=packed)
                return
        if not self._held.take(len(payload)):
            self.full(stream)
            return
        inbox += payload
        while len(inbox) >= 5 and not stream.finished:
            size = 5 + U32.unpack_from(inbox, 1)[0]
            if size > stream.bytes_max + 5:
                self._service.too_large(stream, size - 5)
                return
            if len(inbox) < size:
                return
            packed, content = inbox[0] != 0, bytes(inbox[5:size])
            del inbox[:size]
            self._held.free(size)
            self._service.message(stream, content, packed=packed)

    def full(self, stream: Stream) -> None:
        """Ends a call because the bound on held bytes is reached."""
        about = f"over {self._held.bytes_max} bytes wait on this connection"
        self._end(stream, Status.RESOURCE_EXHAUSTED, about)

    def forget(self, stream: Stream) -> None:
        """Drops an incomplete message of a call that is over."""
        if stream.inbox:
            self._held.free(len(stream.inbox))
            stream.inbox.clear()

    def unpacking(self, stream: Stream, content: bytes) -> Generator[None, None, bytes | None]:
        """A generator that unpacks a compressed message in steps; its result is the bytes, or None
        if that ended the call.
        """
        try:
            return (yield from unpacking(content, stream.encoding, stream.bytes_max))
        except TooLargeError:
            self._service.too_large(stream, stream.bytes_max + 1)
        except LookupError:
            about = f"messages of grpc-encoding {stream.encoding[:64]!r} are not read here"
            self._end(stream, Status.UNIMPLEMENTED, about)
        except ValueError as error:
            self._end(stream, Status.INTERNAL, str(error))
        return None
