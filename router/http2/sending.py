"""What goes to an HTTP/2 peer: as far as it has room, and the rest when it has. Pure.

Law: a stream gets no more credit while STREAM_WAITING_MAX bytes wait for its peer to read.
"""

from collections.abc import Callable, Sequence
from typing import Any

from router.http2.frames import (
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
    OPENING,
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
)


class Stream:
    """One call."""

    __slots__ = (
        "began", "call", "credit", "encoding", "ended", "finished", "held", "inbox", "number",
        "on_room", "room", "trailers", "unread", "waiting",
    )  # fmt: skip

    def __init__(self, number: int, room: int) -> None:
        self.number = number
        self.room = room
        """Bytes that the peer takes."""
        self.inbox = bytearray()
        """The beginning of a message."""
        self.waiting = bytearray()
        """Bytes that the peer has no room for yet."""
        self.trailers: bytes | None = None
        """Sent after what waits."""
        self.unread = 0
        """Bytes of the window that the peer has used."""
        self.credit = 0
        """Of these, bytes that it may use again as soon as a WINDOW_UPDATE says so."""
        self.ended = False
        """Whether the peer's side is over."""
        self.finished = False
        """Whether this side is over, or about to be."""
        self.call: Any = None
        """The service's own."""
        self.began = False
        """Whether the headers of this side were sent."""
        self.encoding = "identity"
        """Of the peer's compressed messages."""
        self.held = False
        """Whether its bytes are not given back to the peer yet."""
        self.on_room: Callable[[], None] | None = None
        """Called once no byte of the stream waits any more, or it is over."""


class Sending:
    """One connection's way to the peer."""

    def __init__(self, over: Callable[[Stream], object]) -> None:
        """over: is called when both sides of a stream need nothing more from here."""
        self._over = over
        self.out: list[bytes] = []
        """Bytes to write; the caller empties it."""
        self._blocked: dict[int, Stream] = {}
        """Streams with bytes that wait for room, the one that waits longest in front."""
        self._room = 65_535
        self.window = 65_535
        """Room of a stream that begins."""
        self._frame_max = FRAME_MAX
        self.sent = 0
        """Frames of answers."""

    def send(self, stream: Stream, message: bytes) -> None:
        """A message; dropped if this side of the stream is over."""
        if stream.finished:
            return
        packed = MESSAGE.pack(0, len(message)) + message
        size = len(packed)
        if not stream.waiting and size <= min(stream.room, self._room, self._frame_max):
            stream.room -= size
            self._room -= size
            self.out.append(self._opening(stream) + frame(DATA, 0, stream.number, packed))
        else:
            stream.waiting += packed
            self._flush(stream)

    def reply(self, stream: Stream, message: bytes) -> None:
        """The only message of an answer, and its end with OK."""
        size = 5 + len(message)
        if (
            stream.began
            or stream.finished
            or not stream.ended
            or size > min(stream.room, self._room, self._frame_max)
        ):
            self.send(stream, message)
            self.finish(stream)
            return
        number = stream.number
        stream.began = stream.finished = True
        stream.room -= size
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
        self._over(stream)

    def finish(
        self,
        stream: Stream,
        status: Status = Status.OK,
        message: str = "",
        metadata: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Ends this side of a stream, after what waits. metadata: trailers beside the status."""
        if stream.finished:
            return
        stream.finished = True
        trailers = CLOSING
        if status is not Status.OK:
            trailers = literal(b"grpc-status", str(int(status)).encode())
            trailers += literal(b"grpc-message", percent(message))
        for name, value in metadata:
            trailers += literal(name, value)
        stream.trailers = trailers
        self._flush(stream)

    def accept(self, stream: Stream) -> None:
        """Sends the headers of this side, if they were not sent."""
        if not stream.began and not stream.finished:
            self.out.append(self._opening(stream))

    def go_away(self, number: int, code: Code = Code.NO_ERROR, message: str = "") -> None:
        """GOAWAY. number: of the last stream that is served."""
        payload = U32.pack(number) + U32.pack(code) + message.encode()[:200]
        self.out.append(frame(GOAWAY, 0, 0, payload))

    def forget(self, stream: Stream) -> None:
        """A stream is over."""
        self._blocked.pop(stream.number, None)
        if stream.on_room is not None:
            stream.on_room()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the peer has no room for yet."""
        return sum(len(stream.waiting) for stream in self._blocked.values())

    def grant(self, stream: Stream | None, room: int) -> None:
        """The peer has more room: of a stream, or of the connection. Raises ConnectionFault."""
        if stream is None:
            self._room += room
        else:
            stream.room += room
        if (self._room if stream is None else stream.room) > WINDOW_MAX:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window of over 2^31 - 1")
        if stream is None:
            self.flush_all()
        else:
            self._flush(stream)

    def frames_of(self, size: int) -> None:
        """The largest frame that the peer takes. Raises ConnectionFault."""
        if not FRAME_MAX <= size < 1 << 24:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"frames of {size} bytes")
        self._frame_max = min(size, 1 << 16)

    def give_credit(self, stream: Stream) -> None:
        """Lets the peer of a stream send more, if it reads what it gets."""
        if (
            stream.credit > STREAM_WINDOW // 2
            and not stream.held
            and len(stream.waiting) <= STREAM_WAITING_MAX
        ):
            self.out.append(frame(WINDOW_UPDATE, 0, stream.number, U32.pack(stream.credit)))
            stream.unread -= stream.credit
            stream.credit = 0

    def flush_all(self) -> None:
        """Sends what waits, as far as there is room."""
        for stream in list(self._blocked.values()):
            if self._room <= 0:
                return
            self._flush(stream)

    def _opening(self, stream: Stream) -> bytes:
        """The headers of this side, before its first message; empty after that. Called with each
        frame of an answer."""
        self.sent += 1
        if stream.began:
            return b""
        stream.began = True
        return frame(HEADERS, END_HEADERS, stream.number, OPENING)

    def _flush(self, stream: Stream) -> None:
        waiting = stream.waiting
        at = 0
        while (size := min(len(waiting) - at, stream.room, self._room, self._frame_max)) > 0:
            part = bytes(waiting[at : at + size])
            at += size
            self.out.append(self._opening(stream) + frame(DATA, 0, stream.number, part))
            stream.room -= size
            self._room -= size
        if at:
            del waiting[:at]
            self.give_credit(stream)
        if waiting:
            self._blocked[stream.number] = stream
        else:
            self._blocked.pop(stream.number, None)
            if stream.on_room is not None:
                stream.on_room()
        if stream.trailers is not None and not waiting:
            opening = b"" if stream.began else ALONE
            stream.began = True
            block = opening + stream.trailers
            stream.trailers = None
            self.sent += 1
            self.out.append(self._headers(stream.number, block))
            self._over(stream)
            stream.ended = True

    def _headers(self, number: int, block: bytes) -> bytes:
        """The last headers of a stream, in as many frames as they need."""
        size = self._frame_max
        if len(block) <= size:
            return frame(HEADERS, END_HEADERS | END_STREAM, number, block)
        frames = frame(HEADERS, END_STREAM, number, block[:size])
        for at in range(size, len(block), size):
            flags = END_HEADERS if at + size >= len(block) else 0
            frames += frame(CONTINUATION, flags, number, block[at : at + size])
        return frames
