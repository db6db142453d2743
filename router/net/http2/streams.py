"""The open streams of one HTTP/2 connection: their messages, and how they end. Pure.

Laws:
- a message has its stream's bytes_max at most, unpacked or not; what would exceed that ends its
  call before more of it is kept;
- the bytes of an incomplete message count as held (held.Held) until its end comes;
- a compressed message stays compressed until its handler takes it;
- a peer's error on a stream ends that stream with RST_STREAM, and no other stream;
- where the peer does not get an answer, or resets its stream soon after, `Stream.unsent` is called;
- of streams that are over, the last REMEMBERED_MAX are known whose peer may still send, and as many
  whose answers were sent and may be given up.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from router.net.http2.frames import (
    END_STREAM,
    MESSAGE_WORK,
    REMEMBERED_MAX,
    TURN_STREAMS,
    U32,
    Code,
    Status,
    reset_frame,
)
from router.net.http2.packing import TooLargeError, unpacking
from router.net.http2.requests import Head
from router.net.http2.sending import Sending, Stream
from router.net.listener.held import Held

_Known = TypeVar("_Known")


class Service(Protocol):
    """Interface: gets the calls, messages and ends of one connection's streams."""

    def opened(self, stream: Stream, head: Head) -> None:
        """Called when a call begins, with its headers. Sets stream.bytes_max, or refuses the call
        by `Connection.finish`.
        """

    def message(self, stream: Stream, content: bytes, *, packed: bool) -> None:
        """Called with a complete message. packed: whether it is compressed; `Connection.unpacking`
        gives its bytes.
        """

    def too_large(self, stream: Stream, size: int) -> None:
        """Called for a message of at least `size` bytes, which are more than stream.bytes_max; has
        to end the call.
        """

    def half_closed(self, stream: Stream) -> None:
        """Called when the request is complete: no more messages come."""

    def reset(self, stream: Stream) -> None:
        """Called when the call is over because its peer reset it, or is gone."""


class Over:
    """The service of a connection that is gone; does nothing."""

    def opened(self, stream: Stream, head: Head) -> None: ...

    def message(self, stream: Stream, content: bytes, *, packed: bool) -> None: ...

    def too_large(self, stream: Stream, size: int) -> None: ...

    def half_closed(self, stream: Stream) -> None: ...

    def reset(self, stream: Stream) -> None: ...


class Streams:
    """The open streams of one connection, and the last REMEMBERED_MAX that ended."""

    def __init__(self, service: Service, held: Held, clock: Callable[[], float]) -> None:
        """held: counts the bytes that this connection holds. clock: monotonic seconds."""
        self._service = service
        self.held = held
        self.streams: dict[int, Stream] = {}
        self._sending = sending = Sending(held, self._over, self.full, clock)
        self.out = sending.out
        """Frames to write to the socket; the caller empties the list."""
        self.send, self.reply, self.accept = sending.send, sending.reply, sending.accept
        self.pump = sending.pump
        self.aside = 0
        """Number of open streams of health and reflection (Stream.aside)."""
        self._early: OrderedDict[int, None] = OrderedDict()
        """Numbers of streams that this side ended before the peer ended its own: the peer may not
        know yet, and send on."""
        self._answered: OrderedDict[int, Callable[[], None]] = OrderedDict()
        """Numbers of streams that were answered lately -> function to call if the peer resets the
        stream after all."""
        self._work = 0
        """Work of the connection in this turn, in the units of frames.TURN_WORK."""
        self.trouble = ""
        """Sentence about the last stream that this side reset for its peer's error, for the log."""

    def finish(
        self,
        stream: Stream,
        status: Status = Status.OK,
        message: str = "",
        metadata: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Ends this side of a stream after its waiting bytes. metadata: trailers beside the
        status.
        """
        self._forget_message(stream)
        self._sending.finish(stream, status, message, metadata)

    def end(self, stream: Stream, status: Status, message: str) -> None:
        """Ends a call with a status, after its waiting bytes, and calls the service's `reset`."""
        self._service.reset(stream)
        _give_up(stream)
        self.finish(stream, status, message)

    def hold(self, stream: Stream, *, held: bool) -> None:
        """Sets whether a stream's peer gets no further window until its messages are taken."""
        stream.held = held
        if not held:
            self._sending.give_credit(stream)

    def stuff(self, *, full: bool) -> None:
        """Sets whether the socket is full: takes no bytes now."""
        self._sending.full = full

    def end_unread(self, now_s: float, read_s: float) -> int:
        """Ends streams of which the peer has taken nothing for read_s, though bytes wait; returns
        their number, at most REMEMBERED_MAX. now_s: by the clock.
        """
        unread = list(islice(self._sending.unread(now_s - read_s), REMEMBERED_MAX))
        for stream in unread:
            if not stream.finished:
                self._service.reset(stream)
            _give_up(stream)
            self._forget_message(stream)
            about = f"results were not read for {read_s:g} s"
            self._sending.cut(stream, Status.DEADLINE_EXCEEDED, about)
        return len(unread)

    def lost(self) -> bool:
        """Called when the connection is gone: ends at most TURN_STREAMS of its streams. Returns
        whether open streams are left, which further calls of this function end.
        """
        for stream in list(islice(self.streams.values(), TURN_STREAMS)):
            self._forget(stream)
        if not self.streams:
            self.held.close()
            self._let_go()
        return bool(self.streams)

    def _let_go(self) -> None:
        """Breaks the reference cycles of a connection that is gone: see listener.py."""
        self._service = Over()
        self._sending.let_go()
        self._answered.clear()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait because the peer has no room for them."""
        return self._sending.waiting_bytes

    # Messages

    def _take(self, stream: Stream, payload: bytes) -> None:
        """Takes the payload of a DATA frame; gives complete messages to the service."""
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
                self._forget_message(stream)
                self._service.message(stream, content, packed=packed)
                return
        if not self.held.take(len(payload)):
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
            self.held.free(size)
            self._work += MESSAGE_WORK
            self._service.message(stream, content, packed=packed)

    def full(self, stream: Stream) -> None:
        """Ends a call because the bound on held bytes is reached."""
        about = f"over {self.held.bytes_max} bytes wait on this connection"
        self.end(stream, Status.RESOURCE_EXHAUSTED, about)

    def _forget_message(self, stream: Stream) -> None:
        """Drops an incomplete message of a call that is over."""
        if stream.inbox:
            self.held.free(len(stream.inbox))
            stream.inbox.clear()

    def unpacking(self, stream: Stream, content: bytes) -> Generator[None, None, bytes | None]:
        """A generator that unpacks a compressed message in steps; its result is the bytes, or None
        if the message was invalid or too large, which has ended the call.
        """
        try:
            return (yield from unpacking(content, stream.encoding, stream.bytes_max))
        except TooLargeError:
            self._service.too_large(stream, stream.bytes_max + 1)
        except LookupError:
            about = f"grpc-encoding {stream.encoding[:64]!r} is not one of identity, deflate, gzip"
            self.end(stream, Status.UNIMPLEMENTED, about)
        except ValueError as error:
            self.end(stream, Status.INTERNAL, str(error))
        return None

    # Ends of streams

    def _refuse(self, number: int, flags: int, code: Code) -> None:
        """Resets a stream that is not opened, or broken. flags: END_STREAM if the peer's side is
        over; else the peer may still send on it."""
        self.out.append(reset_frame(number, code))
        if not flags & END_STREAM:
            _remember(self._early, number, None)

    def _reset(self, stream: Stream, code: Code, about: str) -> None:
        """Resets a stream on which its peer broke a rule. about: which one, for `trouble`."""
        self.trouble = f"stream {stream.number}: {about}"
        self._refuse(stream.number, END_STREAM if stream.ended else 0, code)
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        """Removes a stream on which nothing more is sent, and calls the service's `reset` if its
        answer had not ended."""
        self._leave(stream)
        was_open = not stream.finished
        stream.finished = stream.ended = True
        self._sending.forget(stream)
        self._forget_message(stream)
        if was_open:
            self._service.reset(stream)
        _give_up(stream)

    def _over(self, stream: Stream, early: bool) -> None:
        """Called when the end of a stream's answer was sent. early: whether the peer's side was
        still open then."""
        self._leave(stream)
        if early:
            _remember(self._early, stream.number, None)
        if stream.unsent is not None:
            _remember(self._answered, stream.number, stream.unsent)
            stream.unsent = None

    def _leave(self, stream: Stream) -> None:
        del self.streams[stream.number]
        self.aside -= stream.aside
        self.held.free(stream.held_bytes)


def _give_up(stream: Stream) -> None:
    """Calls `unsent` of a stream whose answer the peer does not get."""
    unsent, stream.unsent = stream.unsent, None
    if unsent is not None:
        unsent()


def _remember(streams: "OrderedDict[int, _Known]", number: int, known: _Known) -> None:
    """Adds a stream's number to those remembered; past REMEMBERED_MAX the oldest is forgotten."""
    streams[number] = known
    if len(streams) > REMEMBERED_MAX:
        streams.popitem(last=False)
