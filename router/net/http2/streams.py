"""The open streams of one HTTP/2 connection, and how they end. Pure.

Laws:
- an error of a stream ends that stream with RST_STREAM, and no other;
- an answer that its peer does not get, or that it gives up by an RST_STREAM soon after, is unsent;
- of streams that are over, REMEMBERED_MAX are known: those whose peers may send on, and those whose
  answers may be given up.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

from router.net.http2.frames import (
    END_STREAM,
    REMEMBERED_MAX,
    TURN_STREAMS,
    Code,
    Status,
    reset_frame,
)
from router.net.http2.messages import Messages, Over, Service
from router.net.http2.sending import Sending, Stream
from router.net.listener.held import STREAM_BYTES, Held

_Known = TypeVar("_Known")


class Streams:
    """The open streams of one connection, and the last REMEMBERED_MAX that ended."""

    def __init__(self, service: Service, held: Held) -> None:
        """held: counts the bytes that this connection holds."""
        self._service = service
        self.held = held
        self._messages = messages = Messages(service, self.end, held)
        self.unpacking, self.full = messages.unpacking, messages.full
        self.streams: dict[int, Stream] = {}
        self._sending = sending = Sending(held, self._over, messages.full)
        self.out = sending.out
        """Bytes to write; the caller empties it."""
        self.send, self.reply, self.accept = sending.send, sending.reply, sending.accept
        self.pump = sending.pump
        self.aside = 0
        """Open streams that are aside."""
        self._early: OrderedDict[int, None] = OrderedDict()
        """Streams that were over here before the peer's side was: it may not know yet."""
        self._answered: OrderedDict[int, Callable[[], None]] = OrderedDict()
        """Streams whose answers were sent lately -> what to do if their peers give them up."""
        self._work = 0
        """Work in this turn. See frames.TURN_WORK."""
        self.trouble = ""
        """What was wrong with the last stream that was reset from here."""

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
        self._messages.forget(stream)
        self._sending.finish(stream, status, message, metadata)

    def end(self, stream: Stream, status: Status, message: str) -> None:
        """Ends a call from this side, and informs its service."""
        self._service.reset(stream)
        _give_up(stream)
        self.finish(stream, status, message)

    def hold(self, stream: Stream, *, held: bool) -> None:
        """Sets whether a stream's peer may send more only once earlier messages are taken."""
        stream.held = held
        if not held:
            self._sending.give_credit(stream)

    def stuff(self, *, full: bool) -> None:
        """Sets whether the socket is full."""
        self._sending.full = full

    def end_unread(self, now_s: float, read_s: float) -> int:
        """Ends streams of which the peer has taken nothing for read_s, though bytes wait; returns
        their number, at most REMEMBERED_MAX.
        """
        self._sending.now_s = now_s
        unread = list(islice(self._sending.unread(now_s - read_s), REMEMBERED_MAX))
        for stream in unread:
            if not stream.finished:
                self._service.reset(stream)
            _give_up(stream)
            self._messages.forget(stream)
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
        """Nothing of a connection that is gone refers to itself: see listener.py."""
        self._service = Over()
        self._messages.let_go()
        self._sending.let_go()
        self._answered.clear()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait because the peer has no room for them."""
        return self._sending.waiting_bytes

    # Ends of streams

    def _refuse(self, number: int, flags: int, code: Code) -> None:
        """A stream that is not opened."""
        self.out.append(reset_frame(number, code))
        if not flags & END_STREAM:
            _remember(self._early, number, None)

    def _reset(self, stream: Stream, code: Code, about: str) -> None:
        """Ends a stream that its peer has broken."""
        self.trouble = f"stream {stream.number}: {about}"
        self._refuse(stream.number, END_STREAM if stream.ended else 0, code)
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        """A stream is over, and nothing more goes to its peer."""
        self._leave(stream)
        was_open = not stream.finished
        stream.finished = stream.ended = True
        self._sending.forget(stream)
        self._messages.forget(stream)
        if was_open:
            self._service.reset(stream)
        _give_up(stream)

    def _over(self, stream: Stream, early: bool) -> None:
        """Called when the end of a stream's answer was sent."""
        self._leave(stream)
        if early:
            _remember(self._early, stream.number, None)
        if stream.unsent is not None:
            _remember(self._answered, stream.number, stream.unsent)
            stream.unsent = None

    def _leave(self, stream: Stream) -> None:
        del self.streams[stream.number]
        self.aside -= stream.aside
        self.held.free(STREAM_BYTES)


def _give_up(stream: Stream) -> None:
    """The peer does not get a stream's answer."""
    unsent, stream.unsent = stream.unsent, None
    if unsent is not None:
        unsent()


def _remember(streams: "OrderedDict[int, _Known]", number: int, known: _Known) -> None:
    """Adds a stream to the remembered ones; past REMEMBERED_MAX the oldest is forgotten."""
    streams[number] = known
    if len(streams) > REMEMBERED_MAX:
        streams.popitem(last=False)
