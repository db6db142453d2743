"""Sends frames to an HTTP/2 peer within its flow-control windows; bytes that exceed a window wait
until the peer enlarges it. Pure: frames are collected in `Sending.out`.

Laws:
- while more than STREAM_WAITING_MAX bytes of a stream wait, its peer gets no WINDOW_UPDATE for it;
- waiting bytes count as held (held.Held); `pump` sends them, a frame of each stream in turn, at
  most PUMP_BYTES bytes of PUMP_STREAMS streams in one call, whatever the peer's windows allow;
- while the socket is full, no DATA is sent.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from router.net.http2.frames import (
    ALONE,
    CLOSING,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_MAX,
    GOAWAY,
    HEAD,
    HEADERS,
    MESSAGE,
    MESSAGE_MAX,
    NO_GRPC,
    OPENING,
    PUMP_BYTES,
    PUMP_STREAMS,
    SMALL_FRAME,
    STREAM_WAITING_MAX,
    STREAM_WINDOW,
    U32,
    WINDOW_MAX,
    WINDOW_UPDATE,
    Code,
    ConnectionFault,
    Status,
    frame,
    literal,
    percent,
    reset_frame,
)
from router.net.listener.held import Held

CREDIT_MIN = STREAM_WINDOW // 2
"""Used bytes of a stream's window above which a WINDOW_UPDATE gives them back to the peer."""


class Stream:
    """The state of one HTTP/2 stream, which carries one gRPC call."""

    __slots__ = (
        "aside", "began", "bytes_max", "call", "content_left", "credit", "encoding", "ended",
        "finished", "granted", "held", "held_bytes", "inbox", "number", "on_room", "since_s",
        "trailers", "unread", "unsent", "waiting",
    )  # fmt: skip

    def __init__(self, number: int, bytes_max: int = MESSAGE_MAX) -> None:
        self.number = number
        self.bytes_max = bytes_max
        """Most bytes of a message of the peer; a larger message ends the call."""
        self.granted = 0
        """Bytes of the peer's WINDOW_UPDATEs for this stream, less the DATA bytes sent on it; the
        stream's room is this plus `Sending.window`."""
        self.inbox = bytearray()
        """The beginning of a message of the peer that is not complete yet."""
        self.waiting = bytearray()
        """Bytes of the answer that the peer has no room for yet."""
        self.since_s = 0.0
        """Time when bytes began to wait, or some of them were last sent, by Sending's clock."""
        self.trailers: bytes | None = None
        """Encoded trailers, sent after the waiting bytes; None: not ended, or sent."""
        self.unread = 0
        """Bytes of this side's window that the peer has used and did not get back."""
        self.credit = 0
        """Bytes of `unread` that the peer may use again as soon as a WINDOW_UPDATE says so."""
        self.ended = False
        """Whether the peer has ended its side of the stream."""
        self.finished = False
        """Whether this side has ended; waiting bytes and trailers may still have to be sent."""
        self.call: Any = None
        """The service's object for the call; None: none yet, or the call is over."""
        self.aside = False
        """Whether this is a call of health or reflection, which may be cut to make room."""
        self.began = False
        """Whether the headers of this side were sent."""
        self.encoding = "identity"
        """The encoding of the peer's compressed messages."""
        self.content_left: int | None = None
        """Bytes of DATA that `content-length` says are still to come."""
        self.held = False
        """Whether the peer gets no WINDOW_UPDATE, since the handler has messages to take first."""
        self.held_bytes = 0
        """Bytes that count as held for the open stream, besides those that wait in it."""
        self.on_room: Callable[[], None] | None = None
        """Called once no byte of the stream waits any more, or the stream is over."""
        self.unsent: Callable[[], None] | None = None
        """Called if the peer does not get the answer, or resets the stream soon after it."""


class Sending:
    """Sends the frames of one connection."""

    def __init__(
        self,
        held: Held,
        over: Callable[[Stream, bool], object],
        refuse: Callable[[Stream], object],
        clock: Callable[[], float],
    ) -> None:
        """held: counts the connection's waiting bytes. over: called when the end of a stream was
        sent, with whether the peer's side was still open. refuse: ends a call whose bytes exceed
        the bound on held bytes. clock: monotonic seconds.
        """
        self._held = held
        self._over = over
        self._refuse = refuse
        self.out: list[bytes] = []
        """Frames to write to the socket; the caller empties the list."""
        self._clock = clock
        self.full = False
        """Whether the socket takes no bytes now."""
        self._waiting: OrderedDict[int, Stream] = OrderedDict()
        """Streams with waiting bytes, by number; the stream with the least `since_s` first."""
        self._ready: OrderedDict[int, Stream] = OrderedDict()
        """Streams of `_waiting` whose own window has room, or had; `pump` serves them in order."""
        self.waiting_bytes = 0
        """Bytes that wait in all streams."""
        self._room = 65_535
        self.window = 65_535
        """Initial window of each stream, in bytes, as the peer's SETTINGS say."""
        self._granted_most = 0
        """An upper bound of `Stream.granted` over all streams."""
        self._frame_max = FRAME_MAX
        self.sent = 0
        """Frames of answers sent so far; a part of under SMALL_FRAME bytes is not counted while
        more bytes of its stream wait."""

    def let_go(self) -> None:
        """Drops the callbacks `over` and `refuse`, since the connection is gone."""
        self._over = lambda _stream, _early: None
        self._refuse = lambda _stream: None

    def send(self, stream: Stream, message: bytes) -> None:
        """Sends a gRPC message as far as the peer has room; the rest waits. Does nothing once this
        side of the stream is over."""
        if stream.finished:
            return
        packed = MESSAGE.pack(0, len(message)) + message
        size = len(packed)
        if not stream.waiting and self._has_room(stream, size):
            stream.granted -= size
            self._room -= size
            self.out.append(self._opening(stream) + frame(DATA, 0, stream.number, packed))
        elif self._held.take(size):
            stream.waiting += packed
            self.waiting_bytes += size
            self._flush(stream, PUMP_BYTES)
        else:
            self._refuse(stream)

    def reply(self, stream: Stream, message: bytes) -> None:
        """Sends the only message of an answer, and ends the answer with status OK."""
        size = 5 + len(message)
        if stream.began or stream.finished or not stream.ended or not self._has_room(stream, size):
            self.send(stream, message)
            self.finish(stream)
            return
        number = stream.number
        stream.began = stream.finished = True
        self._room -= size
        self.sent += 1
        self.out.append(
            HEAD.pack(len(OPENING) << 8 | HEADERS, END_HEADERS, number)
            + OPENING
            + HEAD.pack(size << 8 | DATA, 0, number)
            + MESSAGE.pack(0, size - 5)
            + message
            + HEAD.pack(len(CLOSING) << 8 | HEADERS, END_HEADERS | END_STREAM, number)
            + CLOSING
        )
        self._over(stream, False)

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
        if stream.finished:
            return
        stream.finished = True
        stream.trailers = _trailers(status, message, metadata)
        if not stream.waiting:
            self._close(stream)

    def cut(self, stream: Stream, status: Status, message: str) -> None:
        """Ends this side of a stream at once, without its waiting bytes."""
        stream.finished = True
        self.forget(stream)
        stream.trailers = _trailers(status, message, ())
        self._close(stream)

    def no_grpc(self, stream: Stream) -> None:
        """Answers a request that is no gRPC call with HTTP status 415."""
        stream.began = stream.finished = True
        stream.trailers = NO_GRPC
        self._close(stream)

    def accept(self, stream: Stream, metadata: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Sends the headers of an answer with this metadata, if they were not sent before."""
        if not stream.began and not stream.finished:
            stream.began = True
            self.sent += 1
            block = OPENING + b"".join(literal(name, value) for name, value in metadata)
            self.out.append(self._headers(stream.number, 0, block))

    def go_away(self, number: int, code: Code = Code.NO_ERROR, message: str = "") -> None:
        """Sends a GOAWAY frame. number: of the last stream that is served. message: 200 bytes of it
        are sent."""
        payload = U32.pack(number) + U32.pack(code) + message.encode()[:200]
        self.out.append(frame(GOAWAY, 0, 0, payload))

    def forget(self, stream: Stream) -> None:
        """Drops the waiting bytes of a stream that is over or cut, and calls its `on_room`."""
        if size := len(stream.waiting):
            stream.waiting.clear()
            self._sent_or_dropped(size)
            del self._waiting[stream.number]
            self._ready.pop(stream.number, None)
        if stream.on_room is not None:
            stream.on_room()

    def unread(self, before_s: float) -> Iterator[Stream]:
        """Streams with waiting bytes of which nothing was sent since before_s, by the clock."""
        for stream in self._waiting.values():
            if stream.since_s > before_s:
                return
            yield stream

    @property
    def waiting(self) -> int:
        """Number of streams with bytes that wait."""
        return len(self._waiting)

    # Room

    def grant(self, stream: Stream, room: int) -> bool:
        """Adds `room` bytes to the window of a stream; False: the window exceeds 2^31 - 1."""
        stream.granted += room
        if self.window + stream.granted > WINDOW_MAX:
            return False
        self._granted_most = max(self._granted_most, stream.granted)
        if stream.waiting and self.window + stream.granted > 0:
            self._ready[stream.number] = stream
        return True

    def grant_all(self, room: int) -> None:
        """Adds `room` bytes to the connection's window. Raises ConnectionFault above 2^31 - 1."""
        self._room += room
        if self._room > WINDOW_MAX:
            raise ConnectionFault(
                Code.FLOW_CONTROL_ERROR, "the connection's window exceeds 2^31 - 1"
            )

    def resize(self, window: int, streams: Collection[Stream]) -> None:
        """Sets the initial window, in bytes, of open and later streams. streams: the open ones.
        Raises ConnectionFault where a window exceeds 2^31 - 1.
        """
        if window > WINDOW_MAX:
            raise ConnectionFault(
                Code.FLOW_CONTROL_ERROR, "the initial window in SETTINGS exceeds 2^31 - 1"
            )
        if window + self._granted_most > WINDOW_MAX:
            self._granted_most = max((stream.granted for stream in streams), default=0)
            if window + self._granted_most > WINDOW_MAX:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a stream's window exceeds 2^31 - 1")
        if window > self.window:
            self._ready.update(self._waiting)
        self.window = window

    def frames_of(self, size: int) -> None:
        """Sets the bytes of the largest frame that the peer takes. Raises ConnectionFault unless
        size is 2^14 to 2^24 - 1.
        """
        if not FRAME_MAX <= size < 1 << 24:
            raise ConnectionFault(
                Code.PROTOCOL_ERROR, f"MAX_FRAME_SIZE is {size}, not 16384 to 16777215"
            )
        self._frame_max = min(size, 1 << 16)

    def give_credit(self, stream: Stream) -> None:
        """Sends a WINDOW_UPDATE for a stream with more than CREDIT_MIN bytes of credit, unless the
        stream is held, or more than STREAM_WAITING_MAX bytes wait for its peer."""
        if (
            stream.credit > CREDIT_MIN
            and not stream.held
            and len(stream.waiting) <= STREAM_WAITING_MAX
        ):
            self.out.append(frame(WINDOW_UPDATE, 0, stream.number, U32.pack(stream.credit)))
            stream.unread -= stream.credit
            stream.credit = 0

    def pump(self) -> bool:
        """Sends some of the waiting bytes, a frame of each stream in turn; True: more could be
        sent.
        """
        ready = self._ready
        if not ready:
            return False
        bytes_left, streams_left = PUMP_BYTES, PUMP_STREAMS
        while ready and self._room > 0 and not self.full:
            if bytes_left <= 0 or not streams_left:
                return True
            _, stream = ready.popitem(last=False)
            bytes_left -= self._flush(stream, self._frame_max)
            streams_left -= 1
        return False

    def _has_room(self, stream: Stream, size: int) -> bool:
        return (
            size <= self._frame_max
            and size <= self._room
            and size <= self.window + stream.granted
            and not self.full
        )

    def _opening(self, stream: Stream) -> bytes:
        """The HEADERS frame of an answer, before its first message; empty once it was sent. Adds 1
        to `sent`, for the frame of the answer that follows."""
        self.sent += 1
        if stream.began:
            return b""
        stream.began = True
        return frame(HEADERS, END_HEADERS, stream.number, OPENING)

    def _flush(self, stream: Stream, most: int) -> int:
        """Sends waiting bytes of a stream, `most` at most; returns their number."""
        waiting, number = stream.waiting, stream.number
        if not stream.began:
            self.out.append(self._opening(stream))
        own = self.window + stream.granted
        size = 0 if self.full else max(0, min(len(waiting), own, self._room, most))
        for at in range(0, size, self._frame_max):
            part = bytes(waiting[at : min(at + self._frame_max, size)])
            self.out.append(frame(DATA, 0, number, part))
        if size:
            del waiting[:size]
            if size >= SMALL_FRAME or not waiting:
                self.sent += 1 + size // self._frame_max
            stream.granted -= size
            self._room -= size
            self._sent_or_dropped(size)
            self.give_credit(stream)
        if not waiting:
            self._waiting.pop(number, None)
            self._ready.pop(number, None)
            if stream.on_room is not None:
                stream.on_room()
            if stream.trailers is not None:
                self._close(stream)
            return size
        if size or number not in self._waiting:
            stream.since_s = self._clock()
            self._waiting[number] = stream
            self._waiting.move_to_end(number)
        if own > size:
            self._ready[number] = stream
        return size

    def _sent_or_dropped(self, size: int) -> None:
        self.waiting_bytes -= size
        self._held.free(size)

    def _close(self, stream: Stream) -> None:
        """Sends the trailers, which end this side. A peer that has not ended its own side gets an
        RST_STREAM with NO_ERROR, since what it sends is not read."""
        opening = b"" if stream.began else ALONE
        stream.began = True
        block = opening + (stream.trailers or b"")
        stream.trailers = None
        self.sent += 1
        self.out.append(self._headers(stream.number, END_STREAM, block))
        early, stream.ended = not stream.ended, True
        if early:
            self.out.append(reset_frame(stream.number, Code.NO_ERROR))
        self._over(stream, early)

    def _headers(self, number: int, end: int, block: bytes) -> bytes:
        """A header block as HEADERS and CONTINUATION frames. end: END_STREAM of trailers, or 0."""
        size = self._frame_max
        if len(block) <= size:
            return frame(HEADERS, END_HEADERS | end, number, block)
        frames = frame(HEADERS, end, number, block[:size])
        for at in range(size, len(block), size):
            flags = END_HEADERS if at + size >= len(block) else 0
            frames += frame(CONTINUATION, flags, number, block[at : at + size])
        return frames


def _trailers(status: Status, message: str, metadata: Sequence[tuple[bytes, bytes]]) -> bytes:
    trailers = CLOSING
    if status is not Status.OK:
        trailers = literal(b"grpc-status", str(int(status)).encode())
        trailers += literal(b"grpc-message", percent(message))
    for name, value in metadata:
        trailers += literal(name, value)
    return trailers
