"""gRPC's messages out of HTTP/2's bytes, stream by stream. Pure."""

from collections.abc import Callable, Mapping
from typing import Protocol

from router.http2.frames import U32, UNENDED_MAX, Status
from router.http2.packing import TooLargeError, unpacked
from router.http2.sending import Stream


class Service(Protocol):
    """What is served."""

    def opened(self, stream: Stream, path: str, headers: Mapping[str, str]) -> None:
        """A call begins; `Connection.finish` refuses it."""

    def message(self, stream: Stream, content: bytes) -> None:
        """A whole message."""

    def half_closed(self, stream: Stream) -> None:
        """No more messages come."""

    def reset(self, stream: Stream) -> None:
        """The call is over: its peer broke it off, or is gone."""


class Messages:
    """Of one connection.

    Laws: a message has bytes_max bytes at most, unpacked or not; UNENDED_MAX bytes of messages
    whose end has not come are kept at most. What would exceed either ends its call.
    """

    def __init__(
        self, service: Service, end: Callable[[Stream, Status, str], None], bytes_max: int
    ) -> None:
        """end: ends a call with a status."""
        self._service = service
        self._end = end
        self._bytes_max = bytes_max
        self.unended = 0
        """Bytes of messages whose end has not come, of all streams."""

    def take(self, stream: Stream, payload: bytes) -> None:
        """Bytes of a stream."""
        if stream.finished:
            return  # its answer is whole, and waits for the peer's room
        inbox = stream.inbox
        if not inbox and len(payload) >= 5:
            size = 5 + U32.unpack_from(payload, 1)[0]
            if size == len(payload) <= self._bytes_max + 5 and not payload[0]:  # as most frames are
                self._service.message(stream, payload[5:])
                return
        inbox += payload
        self.unended += len(payload)
        while len(inbox) >= 5 and not stream.finished:
            size = 5 + U32.unpack_from(inbox, 1)[0]
            if size > self._bytes_max + 5:
                self._refuse(stream, f"a message of {size - 5} bytes")
                break
            if len(inbox) < size:
                break
            packed, content = inbox[0], bytes(inbox[5:size])
            del inbox[:size]
            self.unended -= size
            if not packed:
                self._service.message(stream, content)
            elif not self._unpack(stream, content):
                break
        if self.unended > UNENDED_MAX:
            about = f"messages of over {UNENDED_MAX} bytes are unended on this connection"
            self._end(stream, Status.RESOURCE_EXHAUSTED, about)

    def forget(self, stream: Stream) -> None:
        """A call is over: what its peer had begun to send is dropped."""
        self.unended -= len(stream.inbox)
        stream.inbox.clear()

    def _unpack(self, stream: Stream, content: bytes) -> bool:
        """Takes a compressed message; False: it ends its call."""
        try:
            plain = unpacked(content, stream.encoding, self._bytes_max)
        except TooLargeError:
            self._refuse(stream, "a compressed message")
            return False
        except LookupError:
            about = f"messages of grpc-encoding {stream.encoding[:64]!r} are not read here"
            self._end(stream, Status.UNIMPLEMENTED, about)
            return False
        except ValueError as error:
            self._end(stream, Status.INTERNAL, str(error))
            return False
        self._service.message(stream, plain)
        return True

    def _refuse(self, stream: Stream, what: str) -> None:
        """Ends the call of a message that is too large."""
        self._end(
            stream, Status.RESOURCE_EXHAUSTED, f"{what}; {self._bytes_max} bytes are the most"
        )
