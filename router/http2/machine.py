"""gRPC over HTTP/2 (RFC 9113), as a server. Pure: bytes in, calls and bytes out.

grpc.aio takes some 200 us of CPU for a call, or for a chunk of a stream; this takes a tenth to a
third. It serves unary and streaming methods alike: a stream opens with a path, messages come and
go, either side ends it. HPACK is the library's.

Law: a peer gets no more room than CONNECTION_WINDOW, STREAM_WINDOW, message_max, headers_max,
streams_max, UNENDED_MAX and CONTROL_MAX frames a second of those that carry nothing; beyond it the
stream, or the connection, ends with the RFC's error.
"""

from collections.abc import Sequence
from itertools import islice
from math import inf

from hpack.exceptions import HPACKError

from router.http2.frames import (
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
    PING_SLACK,
    PING_STRIKES,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RESETS_MAX,
    RST_STREAM,
    SETTING,
    SETTINGS,
    STREAM_WINDOW,
    TURN_STREAMS,
    U32,
    WINDOW_MAX,
    WINDOW_UPDATE,
    Code,
    ConnectionFault,
    Status,
    frame,
    unpadded,
)
from router.http2.known_headers import KnownHeaders
from router.http2.messages import Messages, Service
from router.http2.sending import Sending, Stream


class Calm:
    """Frames that carry nothing, in the second that is under way."""

    def __init__(self, ping_every_s: float) -> None:
        """ping_every_s: between two pings with no answer of a call between them; PING_STRIKES may
        come sooner, as gRPC's own server has it."""
        self._ping_every_s = ping_every_s
        self._pinged_s = -inf
        self._strikes = 0
        self._sent = 0
        """Frames of answers when the last ping came."""
        self._now_s = 0.0
        self._second = 0
        self._controls = 0
        self._resets = 0

    def at(self, now_s: float) -> None:
        """The time of the frames that follow."""
        self._now_s = now_s
        if (second := int(now_s)) != self._second:
            self._second, self._controls, self._resets = second, 0, 0

    def control(self) -> None:
        """Counts a frame; raises ConnectionFault."""
        self._controls += 1
        if self._controls > CONTROL_MAX:
            about = f"over {CONTROL_MAX} frames a second that carry nothing"
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, about)

    def ping(self, sent: int) -> None:
        """Counts a PING; raises ConnectionFault. sent: frames of answers so far: a PING with one
        since the last PING costs nothing, since clients measure their path by them."""
        if sent != self._sent:
            self._sent, self._strikes = sent, 0
            self._pinged_s = self._now_s
            return
        self.control()
        if self._now_s - self._pinged_s < PING_SLACK * self._ping_every_s:
            self._strikes += 1
            if self._strikes > PING_STRIKES:
                # The text has gRPC's clients ping less often from then on.
                raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too_many_pings")
        self._pinged_s = self._now_s

    def reset(self) -> None:
        """Counts an RST_STREAM; raises ConnectionFault."""
        self._resets += 1
        if self._resets > RESETS_MAX:
            about = f"over {RESETS_MAX} resets a second"
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, about)


class HeaderBlock:
    """Headers of one stream, whose end has not come."""

    def __init__(self, number: int, flags: int, bytes_max: int) -> None:
        self.number = number
        self._bytes_max = bytes_max
        self.flags = flags
        """Of the first frame."""
        self.content = bytearray()

    def add(self, payload: bytes) -> None:
        """A further part; raises ConnectionFault."""
        self.content += payload
        if len(self.content) > self._bytes_max:
            about = f"headers of over {self._bytes_max} bytes"
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, about)


class Connection:
    """One HTTP/2 connection."""

    def __init__(
        self,
        service: Service,
        *,
        streams_max: int,
        message_max: int = MESSAGE_MAX,
        headers_max: int = HEADERS_MAX,
        ping_every_s: float = 0.0,
    ) -> None:
        """message_max: bytes of a gRPC message. headers_max: bytes of a call's headers, past which
        the call is refused. ping_every_s: see Calm."""
        self._service = service
        self._streams_max = streams_max
        self._messages = Messages(service, self._end, message_max)
        self._headers_max = headers_max
        self.streams: dict[int, Stream] = {}
        self._sending = Sending(lambda stream: self.streams.pop(stream.number, None))
        self.out = self._sending.out
        """Bytes to write; the caller empties it."""
        self.send = self._sending.send
        self.reply = self._sending.reply
        self._unread = bytearray()
        self.began = False
        """Whether HTTP/2's preface has come."""
        self._blocks_max = max(HEADERS_MAX, 2 * headers_max)
        """Bytes of a header block, encoded or not, past which the connection ends."""
        self._known = KnownHeaders(headers_max, self._blocks_max)
        self._received = 0
        """Bytes of the connection's window that are not given back yet."""
        self._last = 0
        """Number of the last stream of the peer."""
        self._opened = 0
        """Streams that the peer has opened in this turn."""
        self._block: HeaderBlock | None = None
        self._leaving = False
        self._calm = Calm(ping_every_s)
        settings = ((3, streams_max), (4, STREAM_WINDOW), (6, headers_max))
        opening = frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*each) for each in settings))
        grant = U32.pack(CONNECTION_WINDOW - 65_535)
        self.out.append(opening + frame(WINDOW_UPDATE, 0, 0, grant))

    def receive(self, data: bytes, now_s: float) -> bool:
        """Bytes of the peer. Returns whether some of them wait for the next call, since this one
        has opened TURN_STREAMS streams. Raises ConnectionFault, after which `out` has the last
        bytes."""
        try:
            return self._receive(data, now_s)
        except ConnectionFault as fault:
            self._sending.go_away(self._last, fault.code, str(fault))
            raise

    def finish(
        self,
        stream: Stream,
        status: Status = Status.OK,
        message: str = "",
        metadata: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Ends this side of a stream, after what waits. metadata: trailers beside the status."""
        self._messages.forget(stream)
        self._sending.finish(stream, status, message, metadata)

    def accept(self, stream: Stream) -> None:
        """Sends the headers of this side, if they were not sent."""
        self._sending.accept(stream)

    def hold(self, stream: Stream, *, held: bool) -> None:
        """Whether a stream's peer may send more only once what it sent is taken."""
        stream.held = held
        if not held:
            self._sending.give_credit(stream)

    def ping(self) -> None:
        """Asks the peer for a sign of life."""
        self.out.append(frame(PING, 0, 0, bytes(8)))

    def go_away(self, *, last: bool) -> None:
        """Tells the peer to open no more streams. last: new ones are refused from now on."""
        self._leaving = last
        self._sending.go_away(self._last if last else WINDOW_MAX)

    def lost(self) -> bool:
        """The connection is gone, with TURN_STREAMS of its calls. Returns whether others are left,
        for the next calls."""
        for stream in list(islice(self.streams.values(), TURN_STREAMS)):
            self._forget(stream)
        return bool(self.streams)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the peer has no room for yet."""
        return self._sending.waiting_bytes

    # What the peer sends

    def _receive(self, data: bytes, now_s: float) -> bool:
        unread = self._unread
        unread += data
        if not self.began:
            if not PREFACE.startswith(unread[: len(PREFACE)]):
                raise ConnectionFault(Code.PROTOCOL_ERROR, "no HTTP/2")
            if len(unread) < len(PREFACE):
                return False
            del unread[: len(PREFACE)]
            self.began = True
        self._calm.at(now_s)
        at, end = 0, len(unread)
        self._opened = 0
        while end - at >= 9 and self._opened < TURN_STREAMS:
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
        return self._opened == TURN_STREAMS and len(unread) >= 9

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
        self._messages.take(stream, payload)
        if flags & END_STREAM and number in self.streams:
            self._half_close(stream)

    def _end(self, stream: Stream, status: Status, message: str) -> None:
        """Ends a call from here: its service learns that it is over."""
        self._service.reset(stream)
        self.finish(stream, status, message)

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & PADDED:
            payload = unpadded(payload)
        if flags & HAS_PRIORITY:
            payload = payload[5:]
        self._block = HeaderBlock(number, flags, self._blocks_max)
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
            headers = self._known.read(block)
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
        self._opened += 1
        if self._leaving or len(self.streams) >= self._streams_max:
            self.out.append(frame(RST_STREAM, 0, number, U32.pack(Code.REFUSED_STREAM)))
            return
        stream = self.streams[number] = Stream(number, self._sending.window)
        if headers is None:
            about = f"metadata of over {self._headers_max} bytes"
            self.finish(stream, Status.RESOURCE_EXHAUSTED, about)
            return
        stream.encoding = headers.get("grpc-encoding", "identity")
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
        self._messages.forget(stream)
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
            self._calm.ping(self._sending.sent)
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
