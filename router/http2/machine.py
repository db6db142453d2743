"""gRPC over HTTP/2 (RFC 9113) for one kind of client, a proxy. Pure: bytes in, calls and bytes out.

Every byte of every answer goes through an endpoint picker, and grpc.aio takes some 200 us of CPU
for a chunk; this takes a tenth. It serves unary and streaming methods alike: a stream opens with a
path, messages come and go, either side ends it. HPACK is the library's.

Law: a peer gets no more room than CONNECTION_WINDOW, STREAM_WINDOW, MESSAGE_MAX, HEADERS_MAX,
streams_max and CONTROL_MAX frames a second of those that carry nothing; beyond it the stream, or
the connection, ends with the RFC's error.
"""

from collections.abc import Mapping
from typing import Protocol

from hpack import Decoder
from hpack.exceptions import HPACKError

from router.front.picker.frames import (
    ACK,
    CONNECTION_WINDOW,
    CONTINUATION,
    CONTROL_MAX,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_MAX,
    HAS_PRIORITY,
    HEAD,
    HEADERS,
    HEADERS_MAX,
    MESSAGE_MAX,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RESETS_MAX,
    RST_STREAM,
    SETTING,
    SETTINGS,
    STREAM_WINDOW,
    U32,
    WINDOW_MAX,
    WINDOW_UPDATE,
    Code,
    ConnectionFault,
    Status,
    frame,
    unpadded,
)
from router.front.picker.sending import Sending, Stream


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


class Calm:
    """Frames that carry nothing, in the second that is under way."""

    def __init__(self) -> None:
        self._second = 0
        self._controls = 0
        self._resets = 0

    def at(self, now_s: float) -> None:
        """The time of the frames that follow."""
        if (second := int(now_s)) != self._second:
            self._second, self._controls, self._resets = second, 0, 0

    def control(self) -> None:
        """Counts a frame; raises ConnectionFault."""
        self._controls += 1
        if self._controls > CONTROL_MAX:
            about = f"over {CONTROL_MAX} frames a second that carry nothing"
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, about)

    def reset(self) -> None:
        """Counts an RST_STREAM; raises ConnectionFault."""
        self._resets += 1
        if self._resets > RESETS_MAX:
            about = f"over {RESETS_MAX} resets a second"
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, about)


class HeaderBlock:
    """Headers of one stream, whose end has not come."""

    def __init__(self, number: int, flags: int) -> None:
        self.number = number
        self.flags = flags
        """Of the first frame."""
        self.content = bytearray()

    def add(self, payload: bytes) -> None:
        """A further part; raises ConnectionFault."""
        self.content += payload
        if len(self.content) > HEADERS_MAX:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, f"headers of over {HEADERS_MAX} bytes")


class Connection:
    """One HTTP/2 connection."""

    def __init__(self, service: Service, *, streams_max: int) -> None:
        self._service = service
        self._streams_max = streams_max
        self.streams: dict[int, Stream] = {}
        self._sending = Sending(lambda stream: self.streams.pop(stream.number, None))
        self.out = self._sending.out
        """Bytes to write; the caller empties it."""
        self.send = self._sending.send
        self.finish = self._sending.finish
        self._unread = bytearray()
        self._began = False
        self._decoder = Decoder(max_header_list_size=HEADERS_MAX)
        self._received = 0
        """Bytes of the connection's window that are not given back yet."""
        self._last = 0
        """Number of the last stream of the peer."""
        self._block: HeaderBlock | None = None
        self._leaving = False
        self._calm = Calm()
        settings = ((3, streams_max), (4, STREAM_WINDOW), (6, HEADERS_MAX))
        opening = frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*each) for each in settings))
        grant = U32.pack(CONNECTION_WINDOW - 65_535)
        self.out.append(opening + frame(WINDOW_UPDATE, 0, 0, grant))

    def receive(self, data: bytes, now_s: float) -> None:
        """Bytes of the peer. Raises ConnectionFault, after which `out` has the last bytes."""
        try:
            self._receive(data, now_s)
        except ConnectionFault as fault:
            self._sending.go_away(self._last, fault.code, str(fault))
            raise

    def go_away(self, *, last: bool) -> None:
        """Tells the peer to open no more streams. last: new ones are refused from now on."""
        self._leaving = last
        self._sending.go_away(self._last if last else WINDOW_MAX)

    def lost(self) -> None:
        """The connection is gone, with all its calls."""
        for stream in list(self.streams.values()):
            self._forget(stream)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the peer has no room for yet."""
        return self._sending.waiting_bytes

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
        self._calm.at(now_s)
        at, end = 0, len(unread)
        while end - at >= 9:
            size_kind, flags, number = HEAD.unpack_from(unread, at)
            size = size_kind >> 8
            if size > FRAME_MAX:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            if end - at < 9 + size:
                break
            payload = bytes(unread[at + 9 : at + 9 + size])
            at += 9 + size
            self._frame(size_kind & 0xFF, flags, number & WINDOW_MAX, payload)
        del unread[:at]

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and (kind != CONTINUATION or number != self._block.number):
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
            self._calm.control()

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        if not number or number > self._last:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "DATA outside a stream")
        size = len(payload)
        self._received += size
        if self._received > CONNECTION_WINDOW // 4:
            self.out.append(frame(WINDOW_UPDATE, 0, 0, U32.pack(self._received)))
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
            payload = unpadded(payload)
        if not payload and not flags & END_STREAM:
            self._calm.control()
        stream.credit += size
        self._sending.give_credit(stream)
        self._messages(stream, payload)
        if flags & END_STREAM and number in self.streams:
            self._half_close(stream)

    def _messages(self, stream: Stream, payload: bytes) -> None:
        inbox = stream.inbox
        if not inbox and len(payload) >= 5:
            size = 5 + U32.unpack_from(payload, 1)[0]
            if size == len(payload) and not payload[0]:  # as most frames are
                self._service.message(stream, payload[5:])
                return
        inbox += payload
        while len(inbox) >= 5 and not stream.finished:
            if inbox[0]:
                self._service.reset(stream)
                self.finish(stream, Status.UNIMPLEMENTED, "compressed messages are not read here")
                return
            size = 5 + U32.unpack_from(inbox, 1)[0]
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
            payload = unpadded(payload)
        if flags & HAS_PRIORITY:
            payload = payload[5:]
        self._block = HeaderBlock(number, flags)
        self._continuation(flags, payload)

    def _continuation(self, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION without headers")
        if not payload and not flags & END_HEADERS:
            self._calm.control()
        block.add(payload)
        if flags & END_HEADERS:
            self._block = None
            self._decoded(block.number, block.flags, bytes(block.content))

    def _decoded(self, number: int, flags: int, block: bytes) -> None:
        try:
            fields = self._decoder.decode(block)
        except (HPACKError, UnicodeDecodeError) as error:
            # The library's text may hold an address of this process's memory.
            about = f"headers can't be decoded ({type(error).__name__})"
            raise ConnectionFault(Code.COMPRESSION_ERROR, about) from None
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
            self.out.append(frame(RST_STREAM, 0, number, U32.pack(Code.REFUSED_STREAM)))
            return
        stream = self.streams[number] = Stream(number, self._sending.window)
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
        self._calm.reset()
        if (stream := self.streams.get(number)) is not None:
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self.streams.pop(stream.number, None)
        self._sending.forget(stream)
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
        self._calm.control()
        for key, value in SETTING.iter_unpack(payload):
            if key == 4:
                if value > WINDOW_MAX:
                    raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window of over 2^31 - 1")
                for stream in self.streams.values():
                    stream.room += value - self._sending.window
                self._sending.window = value
            elif key == 5:
                self._sending.frames_of(value)
        self.out.append(frame(SETTINGS, ACK, 0))
        self._sending.flush_all()

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "PING has 8 bytes, and no stream")
        if not flags & ACK:
            self._calm.control()
            self.out.append(frame(PING, ACK, 0, payload))

    def _window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "WINDOW_UPDATE has 4 bytes")
        room = U32.unpack(payload)[0] & WINDOW_MAX
        if not room:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
        if not number:
            self._sending.grant(None, room)
        elif (stream := self.streams.get(number)) is not None:
            self._sending.grant(stream, room)
        elif number > self._last:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of no stream")


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
