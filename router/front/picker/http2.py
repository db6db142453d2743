"""gRPC over HTTP/2 (RFC 9113) for one kind of client, a proxy. Pure: bytes in, calls and bytes out.

Every byte of every answer goes through an endpoint picker, and grpc.aio takes some 200 us of CPU
for a chunk; this takes a tenth. It serves unary and streaming methods alike: a stream opens with a
path, messages come and go, either side ends it. HPACK is the library's.

Laws:
- a stream gets no more credit while STREAM_WAITING_MAX bytes wait for its peer to read;
- a peer gets no more room than CONNECTION_WINDOW, STREAM_WINDOW, MESSAGE_MAX, HEADERS_MAX,
  streams_max and CONTROL_MAX frames a second of those that carry nothing; beyond it the stream, or
  the connection, ends with the RFC's error.
"""

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Protocol

from hpack import Decoder
from hpack.exceptions import HPACKError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STREAM_WINDOW = 1 << 20
CONNECTION_WINDOW = 1 << 26
MESSAGE_MAX = (64 << 20) + (1 << 16)
"""Bytes of a gRPC message: a buffered body and what is around it."""
HEADERS_MAX = 1 << 16
"""Bytes of a header block."""
FRAME_MAX = 1 << 14
"""Bytes of a frame's payload that a peer may send: HTTP/2's own default."""
STREAM_WAITING_MAX = 1 << 20
CONTROL_MAX = 1000
"""Frames a second that carry nothing: PING, SETTINGS, PRIORITY, empty DATA."""
RESETS_MAX = 10_000
"""RST_STREAM a second: clients that leave."""
_WINDOW_MAX = (1 << 31) - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20

_HEAD = struct.Struct(">IBI")
_U32 = struct.Struct(">I")
_SETTING = struct.Struct(">HI")


class Code(IntEnum):
    """Error codes of HTTP/2."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Status(IntEnum):
    """Statuses of gRPC that are sent here."""

    OK = 0
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class ConnectionFault(Exception):
    """The peer broke HTTP/2, or a bound; the connection ends."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class Stream:
    """One call."""

    __slots__ = (
        "_began", "call", "credit", "ended", "finished", "inbox", "number", "room", "trailers",
        "unread", "waiting",
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
        """Of these, bytes that it may use again, and was not told so yet."""
        self.ended = False
        """Whether the peer's side is over."""
        self.finished = False
        """Whether this side is over, or about to be."""
        self.call: Any = None
        """The service's own."""
        self._began = False


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


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    """A frame's bytes."""
    return _HEAD.pack(len(payload) << 8 | kind, flags, number) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field without indexing (RFC 7541, 6.2.2), not Huffman-coded."""
    return b"\0" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    size = len(text)
    if size < 0x7F:
        return bytes((size,)) + text
    size -= 0x7F
    head = bytearray((0x7F,))
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + text


_OPENING = b"\x88" + _literal(b"content-type", b"application/grpc")  # 0x88: `:status: 200`
_CLOSING = _literal(b"grpc-status", b"0")
_OPENING_SETTINGS = b"".join(
    (
        _SETTING.pack(3, 0),  # replaced by streams_max
        _SETTING.pack(4, STREAM_WINDOW),
        _SETTING.pack(6, HEADERS_MAX),
    )
)


class Connection:
    """One HTTP/2 connection."""

    def __init__(self, service: Service, *, streams_max: int) -> None:
        self._service = service
        self._streams_max = streams_max
        self.streams: dict[int, Stream] = {}
        self.out: list[bytes] = []
        """Bytes to write; the caller empties it."""
        self._blocked: dict[int, Stream] = {}
        """Streams with bytes that wait for room, the one that waits longest in front."""
        self._unread = bytearray()
        self._began = False
        self._decoder = Decoder(max_header_list_size=HEADERS_MAX)
        self._room = 65_535
        self._peer_window = 65_535
        self._frame_max = FRAME_MAX
        self._received = 0
        """Bytes of the connection's window that are not given back yet."""
        self._last = 0
        """Number of the last stream of the peer."""
        self._block: bytearray | None = None
        """Of headers whose end has not come."""
        self._block_flags = 0
        self._block_stream = 0
        self._leaving = False
        self._second = 0
        self._controls = 0
        self._resets = 0
        settings = _SETTING.pack(3, streams_max) + _OPENING_SETTINGS[6:]
        grant = _U32.pack(CONNECTION_WINDOW - 65_535)
        self.out.append(frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, grant))

    def receive(self, data: bytes, now_s: float) -> None:
        """Bytes of the peer. Raises ConnectionFault, after which `out` has the last bytes."""
        try:
            self._receive(data, now_s)
        except ConnectionFault as fault:
            self.out.append(self._goaway(fault.code, str(fault)))
            raise

    def send(self, stream: Stream, message: bytes) -> None:
        """A message; dropped if this side of the stream is over."""
        if stream.finished:
            return
        packed = b"\0" + _U32.pack(len(message)) + message
        size = len(packed)
        if not stream.waiting and size <= min(stream.room, self._room, self._frame_max):
            stream.room -= size
            self._room -= size
            self.out.append(self._opening(stream) + frame(DATA, 0, stream.number, packed))
        else:
            stream.waiting += packed
            self._flush(stream)

    def finish(self, stream: Stream, status: Status = Status.OK, message: str = "") -> None:
        """Ends this side of a stream, after what waits."""
        if stream.finished:
            return
        stream.finished = True
        trailers = _CLOSING
        if status is not Status.OK:
            trailers = _literal(b"grpc-status", str(int(status)).encode())
            trailers += _literal(b"grpc-message", _percent(message))
        stream.trailers = trailers
        self._flush(stream)

    def go_away(self, *, last: bool) -> None:
        """Tells the peer to open no more streams. last: new ones are refused from now on."""
        self._leaving = last
        number = self._last if last else _WINDOW_MAX
        self.out.append(frame(GOAWAY, 0, 0, _U32.pack(number) + _U32.pack(0)))

    def lost(self) -> None:
        """The connection is gone, with all its calls."""
        for stream in list(self.streams.values()):
            self._forget(stream)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the peer has no room for yet."""
        return sum(len(stream.waiting) for stream in self._blocked.values())

    # What the peer sends

    def _receive(self, data: bytes, now_s: float) -> None:
        unread = self._unread
        unread += data
        if not self._began:
            if not PREFACE.startswith(unread[: len(PREFACE)]):
                raise ConnectionFault(Code.PROTOCOL_ERROR, "no HTTP/2")
            if len(unread) < len(PREFACE):
                return
            del unread[: len(PREFACE)]
            self._began = True
        if (second := int(now_s)) != self._second:
            self._second, self._controls, self._resets = second, 0, 0
        at, end = 0, len(unread)
        while end - at >= 9:
            size_kind, flags, number = _HEAD.unpack_from(unread, at)
            size = size_kind >> 8
            if size > FRAME_MAX:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            if end - at < 9 + size:
                break
            payload = bytes(unread[at + 9 : at + 9 + size])
            at += 9 + size
            self._frame(size_kind & 0xFF, flags, number & _WINDOW_MAX, payload)
        del unread[:at]

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and (kind != CONTINUATION or number != self._block_stream):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a header block was not ended")
        if kind == DATA:
            self._data(flags, number, payload)
        elif kind == WINDOW_UPDATE:
            self._window_update(number, payload)
        elif kind == HEADERS:
            self._headers(flags, number, payload)
        elif kind == CONTINUATION:
            self._continuation(flags, payload)
        elif kind == RST_STREAM:
            self._rst_stream(number, payload)
        elif kind == SETTINGS:
            self._settings(flags, number, payload)
        elif kind == PING:
            self._ping(flags, number, payload)
        elif kind == PUSH_PROMISE:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a client can't push")
        elif kind == PRIORITY:
            self._control()

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        if not number or number > self._last:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "DATA outside a stream")
        size = len(payload)
        self._received += size
        if self._received > CONNECTION_WINDOW // 4:
            self.out.append(frame(WINDOW_UPDATE, 0, 0, _U32.pack(self._received)))
            self._received = 0
        stream = self.streams.get(number)
        if stream is None:
            return  # it is over here, and the peer doesn't know yet
        if stream.ended:
            raise ConnectionFault(Code.STREAM_CLOSED, "DATA after the end of a stream")
        stream.unread += size
        if stream.unread > STREAM_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more bytes than there is room for")
        if flags & PADDED:
            payload = _unpadded(payload)
        if not payload and not flags & END_STREAM:
            self._control()
        stream.credit += size
        self._give_credit(stream)
        self._messages(stream, payload)
        if flags & END_STREAM and number in self.streams:
            self._half_close(stream)

    def _messages(self, stream: Stream, payload: bytes) -> None:
        inbox = stream.inbox
        if not inbox and len(payload) >= 5:
            size = 5 + _U32.unpack_from(payload, 1)[0]
            if size == len(payload) and not payload[0]:  # as most frames are
                self._service.message(stream, payload[5:])
                return
        inbox += payload
        while len(inbox) >= 5 and not stream.finished:
            if inbox[0]:
                self._service.reset(stream)
                self.finish(stream, Status.UNIMPLEMENTED, "compressed messages are not read here")
                return
            size = 5 + _U32.unpack_from(inbox, 1)[0]
            if size > MESSAGE_MAX:
                self._service.reset(stream)
                about = f"a message of {size - 5} bytes; {MESSAGE_MAX} are the most"
                self.finish(stream, Status.RESOURCE_EXHAUSTED, about)
                return
            if len(inbox) < size:
                return
            content = bytes(inbox[5:size])
            del inbox[:size]
            self._service.message(stream, content)

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & PADDED:
            payload = _unpadded(payload)
        if flags & HAS_PRIORITY:
            payload = payload[5:]
        self._block, self._block_flags, self._block_stream = bytearray(), flags, number
        self._continuation(flags, payload)

    def _continuation(self, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION without headers")
        if not payload and not flags & END_HEADERS:
            self._control()
        block += payload
        if len(block) > HEADERS_MAX:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, f"headers of over {HEADERS_MAX} bytes")
        if flags & END_HEADERS:
            self._block = None
            self._decoded(self._block_stream, self._block_flags, bytes(block))

    def _decoded(self, number: int, flags: int, block: bytes) -> None:
        try:
            fields = self._decoder.decode(block)
        except (HPACKError, UnicodeDecodeError) as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, f"headers: {error}") from None
        if (stream := self.streams.get(number)) is not None:  # trailers
            if stream.ended or not flags & END_STREAM:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "headers inside a stream")
            self._half_close(stream)
            return
        if number % 2 == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"stream {number} is no client's")
        if number <= self._last:
            return  # of a stream that is over here
        self._last = number
        if self._leaving or len(self.streams) >= self._streams_max:
            self.out.append(frame(RST_STREAM, 0, number, _U32.pack(Code.REFUSED_STREAM)))
            return
        stream = self.streams[number] = Stream(number, self._peer_window)
        headers = {_text(name): _text(value) for name, value in fields}
        self._service.opened(stream, headers.get(":path", ""), headers)
        if flags & END_STREAM and number in self.streams:
            self._half_close(stream)

    def _half_close(self, stream: Stream) -> None:
        stream.ended = True
        if not stream.finished:
            self._service.half_closed(stream)
        elif stream.trailers is None:
            self.streams.pop(stream.number, None)

    def _rst_stream(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "RST_STREAM has 4 bytes")
        if not number or number > self._last:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "RST_STREAM of no stream")
        self._resets += 1
        if self._resets > RESETS_MAX:
            about = f"over {RESETS_MAX} resets a second"
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, about)
        if (stream := self.streams.get(number)) is not None:
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self.streams.pop(stream.number, None)
        self._blocked.pop(stream.number, None)
        was_open = not stream.finished
        stream.finished = stream.ended = True
        stream.waiting.clear()
        stream.inbox.clear()
        if was_open:
            self._service.reset(stream)

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & ACK:
            return
        if len(payload) % 6:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS of a broken length")
        self._control()
        for key, value in _SETTING.iter_unpack(payload):
            if key == 4:
                if value > _WINDOW_MAX:
                    raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window of over 2^31 - 1")
                for stream in self.streams.values():
                    stream.room += value - self._peer_window
                self._peer_window = value
            elif key == 5:
                if not FRAME_MAX <= value < 1 << 24:
                    raise ConnectionFault(Code.PROTOCOL_ERROR, f"frames of {value} bytes")
                self._frame_max = min(value, 1 << 16)
        self.out.append(frame(SETTINGS, ACK, 0))
        self._flush_all()

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "PING has 8 bytes, and no stream")
        if not flags & ACK:
            self._control()
            self.out.append(frame(PING, ACK, 0, payload))

    def _control(self) -> None:
        self._controls += 1
        if self._controls > CONTROL_MAX:
            about = f"over {CONTROL_MAX} frames a second that carry nothing"
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, about)

    def _window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "WINDOW_UPDATE has 4 bytes")
        grant = _U32.unpack(payload)[0] & _WINDOW_MAX
        if not grant:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
        if not number:
            self._room += grant
            if self._room > _WINDOW_MAX:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window of over 2^31 - 1")
            self._flush_all()
        elif (stream := self.streams.get(number)) is not None:
            stream.room += grant
            if stream.room > _WINDOW_MAX:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window of over 2^31 - 1")
            self._flush(stream)
        elif number > self._last:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of no stream")

    # What goes to the peer

    def _opening(self, stream: Stream) -> bytes:
        """The headers of this side, before its first message; empty after that."""
        if stream._began:
            return b""
        stream._began = True
        return frame(HEADERS, END_HEADERS, stream.number, _OPENING)

    def _flush_all(self) -> None:
        for stream in list(self._blocked.values()):
            if self._room <= 0:
                return
            self._flush(stream)

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
            self._give_credit(stream)
        if waiting:
            self._blocked[stream.number] = stream
        else:
            self._blocked.pop(stream.number, None)
        if stream.trailers is not None and not waiting:
            opening = b"" if stream._began else _OPENING
            stream._began = True
            block = opening + stream.trailers
            stream.trailers = None
            flags = END_HEADERS | END_STREAM
            self.out.append(frame(HEADERS, flags, stream.number, block))
            self.streams.pop(stream.number, None)
            stream.ended = True

    def _give_credit(self, stream: Stream) -> None:
        if stream.credit > STREAM_WINDOW // 2 and len(stream.waiting) <= STREAM_WAITING_MAX:
            self.out.append(frame(WINDOW_UPDATE, 0, stream.number, _U32.pack(stream.credit)))
            stream.unread -= stream.credit
            stream.credit = 0

    def _goaway(self, code: Code, message: str) -> bytes:
        payload = _U32.pack(self._last) + _U32.pack(code) + message.encode()[:200]
        return frame(GOAWAY, 0, 0, payload)


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


def _percent(message: str) -> bytes:
    """gRPC's form of a status message."""
    return b"".join(
        bytes((byte,)) if 0x20 <= byte < 0x7F and byte != 0x25 else b"%%%02X" % byte
        for byte in message.encode(errors="replace")[:1024]
    )
