"""gRPC over HTTP/2 (RFC 9113), as a server. Pure: bytes in, calls and bytes out.

It serves unary and streaming methods alike: a stream opens with a path, messages come and go,
either side ends it. The library `hpack` does header compression.

Laws:
- a peer gets no more room than CONNECTION_WINDOW, STREAM_WINDOW, its stream's bytes_max, held.Held,
  headers_max, streams_max and calm.Calm allow; beyond it the stream, or the connection, ends with
  the RFC's error;
- the connection ends at the RFC's connection errors, at headers without which HPACK's table would
  be lost, and past the bounds of calm.Calm; all other errors end a stream (streams.py);
- each frame that carries nothing counts (calm.Calm); where a SETTINGS frame has a setting several
  times, only the last value is applied: its cost depends on its bytes and the open streams alone;
- one call of `receive` does TURN_WORK at most and what its last frame causes, whatever frames came;
- the more answers wait for their peer to read them, the fewer calls it may open in a turn, down to
  one.
"""

from collections.abc import Callable

from hpack.exceptions import HPACKError

from router.net.http2.calm import Calm
from router.net.http2.frames import (
    ACK,
    ASIDE,
    CONNECTION_WINDOW,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FAREWELL,
    FRAME_MAX,
    GOAWAY,
    HAS_PRIORITY,
    HEAD,
    HEADERS,
    HEADERS_MAX,
    LAST,
    MESSAGE_MAX,
    MESSAGE_WORK,
    OPEN_WORK,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RESET_WORK,
    RST_STREAM,
    SETTING,
    SETTINGS,
    SETTINGS_STREAMS,
    SMALL_FRAME,
    STREAM_WINDOW,
    TURN_WORK,
    U32,
    UNREAD_WORK,
    WINDOW_MAX,
    WINDOW_UPDATE,
    Code,
    ConnectionFault,
    Status,
    frame,
    reset_frame,
    unpadded,
)
from router.net.http2.known_headers import KnownHeaders
from router.net.http2.requests import Head, trailers_fault
from router.net.http2.sending import CREDIT_MIN, Stream
from router.net.http2.streams import Service, Streams
from router.net.listener.held import STREAM_BYTES, Held, PortHeld

_GIVEN_BACK = CONNECTION_WINDOW // 4
"""Received bytes above which a WINDOW_UPDATE gives them back to the connection's window."""


class HeaderBlock:
    """Header block of one stream that is not complete."""

    def __init__(self, number: int, flags: int, trouble: str, bytes_max: int) -> None:
        """trouble: what is wrong with the block already; empty: nothing."""
        self.number = number
        self.trouble = trouble
        self._bytes_max = bytes_max
        self.flags = flags
        """Flags of the first frame."""
        self.content = bytearray()

    def add(self, payload: bytes) -> None:
        """Adds a further part; raises ConnectionFault."""
        self.content += payload
        if len(self.content) > self._bytes_max:
            about = f"a header block has over {self._bytes_max} bytes"
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, about)


class Connection(Streams):
    """The state of one HTTP/2 connection."""

    def __init__(
        self,
        service: Service,
        *,
        clock: Callable[[], float],
        streams_max: int,
        message_max: int = MESSAGE_MAX,
        headers_max: int = HEADERS_MAX,
        ping_every_s: float = 0.0,
        held: Held | None = None,
    ) -> None:
        """clock: monotonic seconds. message_max: bytes of a gRPC message, where the service sets no
        bound for a stream. headers_max: bytes of a call's headers (Head.size), past which the call
        is refused. ping_every_s: least seconds between two pings of the peer while no answer is
        sent. held: counts the bytes that this connection holds; None: a new counter.
        """
        if held is None:
            held = Held(PortHeld(), lambda: None)
            held.open()
        super().__init__(service, held, clock)
        sending = self._sending
        self._calm = Calm(ping_every_s, lambda: sending.sent)
        self._last = 0
        """Number of the last stream that the peer opened; 0: none."""
        self.acknowledged = False
        """Whether the peer has read a GOAWAY, and opens no more streams."""
        self.last_sent = False
        """Whether a PING was sent behind the last bytes."""
        self.read_all = False
        """Whether the PING of `send_last` was acknowledged: the peer has read all bytes."""
        self._streams_max = streams_max
        self._message_max = message_max
        self._headers_max = headers_max
        self._unread = b""
        """Bytes that the last call of `receive` left: an incomplete frame, or frames for the next
        turn."""
        self.began = False
        """Whether HTTP/2's preface has come."""
        self._greeted = False
        """Whether the SETTINGS frame behind the preface has begun to come."""
        self._blocks_max = max(HEADERS_MAX, 2 * headers_max)
        """Bytes of a header block, encoded or not, past which the connection ends."""
        self._known = KnownHeaders(headers_max, self._blocks_max)
        self._received = 0
        """Bytes of the connection's window that are not given back yet."""
        self._block: HeaderBlock | None = None
        self._leaving = False
        settings = ((3, streams_max), (4, STREAM_WINDOW), (6, headers_max))
        opening = frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*each) for each in settings))
        grant = U32.pack(CONNECTION_WINDOW - 65_535)
        self.out.append(opening + frame(WINDOW_UPDATE, 0, 0, grant))

    def receive(self, data: bytes, now_s: float) -> bool:
        """Takes bytes of the peer. Returns whether whole frames are left for the next call, since
        this call has done TURN_WORK. now_s: monotonic seconds. Raises ConnectionFault, after which
        `out` has the last bytes.
        """
        try:
            return self._receive(data, now_s)
        except ConnectionFault as fault:
            self._sending.go_away(self._last, fault.code, str(fault))
            raise

    def ping(self) -> None:
        """Sends a PING, to see whether the peer is alive."""
        self.out.append(frame(PING, 0, 0, bytes(8)))

    def go_away(self, *, last: bool) -> None:
        """Sends a GOAWAY, so that the peer opens no more streams. last: whether new streams are
        refused from now on; else `acknowledged` says when no more will come.
        """
        if self._leaving:
            return  # the number of the last stream was named, and may not rise again
        self._leaving = last
        self._sending.go_away(self._last if last else WINDOW_MAX)
        if not last:
            self.out.append(frame(PING, 0, 0, FAREWELL))

    def send_last(self) -> None:
        """Sends a PING behind the last bytes; `read_all` says when the peer has read them."""
        self.last_sent = True
        self.out.append(frame(PING, 0, 0, LAST))

    # What the peer sends

    def _receive(self, data: bytes, now_s: float) -> bool:
        if self._unread:
            data = self._unread + data
        if not self._greeted:
            self._unread = data
            if not self._greet():
                return False
            data = self._unread
        self._calm.now_s = now_s
        at, end = 0, len(data)
        self._work = 0
        while end - at >= 9 and self._work < TURN_WORK:
            size_kind, flags, number = HEAD.unpack_from(data, at)
            size = size_kind >> 8
            if size > FRAME_MAX:
                raise ConnectionFault(
                    Code.FRAME_SIZE_ERROR, f"a frame has {size} bytes, and {FRAME_MAX} are the most"
                )
            begin, after = at + 9, at + 9 + size
            if after > end:
                break
            at = after
            self._work += 1
            if size_kind & 0xFF == DATA and self._block is None:
                self._data(flags, number & WINDOW_MAX, data[begin:after])
            else:
                self._frame(size_kind & 0xFF, flags, number & WINDOW_MAX, data[begin:after])
        self._unread = data[at:]
        return self._work >= TURN_WORK and end - at >= 9

    def _greet(self) -> bool:
        """Takes HTTP/2's preface from `_unread`; returns whether the head of the SETTINGS frame
        behind it has come, too. Raises ConnectionFault for other bytes."""
        unread = self._unread
        if not self.began:
            if not PREFACE.startswith(unread[: len(PREFACE)]):
                raise ConnectionFault(
                    Code.PROTOCOL_ERROR, "the connection does not begin with HTTP/2's preface"
                )
            if len(unread) < len(PREFACE):
                return False
            unread = self._unread = unread[len(PREFACE) :]
            self.began = True
        if len(unread) < 9:
            return False
        if unread[3] != SETTINGS or unread[4] & ACK:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        self._greeted = True
        return True

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Takes a frame; DATA comes here only inside a header block, where it is an error."""
        if self._block is not None and (kind != CONTINUATION or number != self._block.number):
            raise ConnectionFault(
                Code.PROTOCOL_ERROR, "another frame came before the end of a header block"
            )
        if kind == WINDOW_UPDATE:
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
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PUSH_PROMISE came from a client")
        elif kind == PRIORITY:
            self._priority(number, payload)
        else:
            self._other(kind, number, payload)

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        stream = self.streams.get(number)
        if stream is None and self._is_idle(number):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "DATA came on a stream that was not opened")
        size = len(payload)
        self._received += size
        if self._received > _GIVEN_BACK:
            self.out.append(frame(WINDOW_UPDATE, 0, 0, U32.pack(self._received)))
            self._received = 0
        if flags & PADDED:
            payload = unpadded(payload)
        if stream is None:
            self._late(number, flags, size)
            return
        if stream.ended:
            self._reset(stream, Code.STREAM_CLOSED, "DATA after its end")
            return
        stream.unread += size
        if stream.unread > STREAM_WINDOW:
            self._reset(stream, Code.FLOW_CONTROL_ERROR, "more bytes than its window allows")
            return
        if not payload and not flags & END_STREAM:
            self._calm.control()
        if stream.content_left is not None:
            stream.content_left -= len(payload)
            if stream.content_left < 0:
                self._reset(stream, Code.PROTOCOL_ERROR, "more bytes than its content-length")
                return
        stream.credit += size
        if stream.credit > CREDIT_MIN:
            self._sending.give_credit(stream)
        self._work += MESSAGE_WORK
        if flags & END_STREAM:
            stream.ended = True
        self._take(stream, payload)
        if stream.ended and number in self.streams:
            self._half_close(stream)

    def _late(self, number: int, flags: int, size: int) -> None:
        """Takes DATA or HEADERS of a stream that this side has ended. It answers with RST_STREAM,
        unless the peer may not know of the end yet (`_early`)."""
        if size < SMALL_FRAME:
            self._calm.control()
        if number not in self._early:
            self.out.append(reset_frame(number, Code.STREAM_CLOSED))
        elif flags & END_STREAM:
            del self._early[number]

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & PADDED:
            payload = unpadded(payload)
        trouble = ""
        if flags & HAS_PRIORITY:
            if len(payload) < 5:
                raise ConnectionFault(
                    Code.FRAME_SIZE_ERROR, "the priority in HEADERS must have 5 bytes"
                )
            if U32.unpack_from(payload)[0] & WINDOW_MAX == number:
                trouble = "it depends on itself"
            payload = payload[5:]
        if flags & END_HEADERS:
            self._decoded(number, flags, trouble, payload)
        else:
            self._block = HeaderBlock(number, flags, trouble, self._blocks_max)
            self._block.add(payload)

    def _continuation(self, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise ConnectionFault(
                Code.PROTOCOL_ERROR, "CONTINUATION came without HEADERS before it"
            )
        if len(payload) < SMALL_FRAME:
            self._calm.control()
        block.add(payload)
        if flags & END_HEADERS:
            self._block = None
            self._decoded(block.number, block.flags, block.trouble, bytes(block.content))

    def _decoded(self, number: int, flags: int, trouble: str, block: bytes) -> None:
        """Takes a whole header block, of a new stream or of trailers. trouble: why its stream can't
        be opened; empty: it can."""
        try:
            head = self._known.read(block)
        except HPACKError as error:
            # The library's text may hold an address of this process's memory.
            about = f"headers can't be decoded ({type(error).__name__})"
            raise ConnectionFault(Code.COMPRESSION_ERROR, about) from None
        self._work += self._known.work
        if (stream := self.streams.get(number)) is not None:
            self._trailers(stream, flags, head)
        elif not number & 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"stream {number} of a client is not odd")
        elif number <= self._last:
            self._late(number, flags, 0)
        else:
            self._last = number
            self._work += OPEN_WORK + UNREAD_WORK * self._sending.waiting
            self._open(number, flags, head, trouble)

    def _open(self, number: int, flags: int, head: Head | None, trouble: str) -> None:
        if self._leaving:
            self._refuse(number, flags, Code.REFUSED_STREAM)
            return
        if trouble or (head is not None and head.fault):
            self.trouble = f"stream {number} is no request: {trouble or (head and head.fault)}"
            self._refuse(number, flags, Code.PROTOCOL_ERROR)
            return
        size = STREAM_BYTES if head is None else max(STREAM_BYTES, head.size)
        if len(self.streams) >= self._streams_max or not self.held.take(size):
            self._calm.control()
            self._refuse(number, flags, Code.REFUSED_STREAM)
            return
        stream = self.streams[number] = Stream(number, self._message_max)
        stream.held_bytes = size
        stream.ended = bool(flags & END_STREAM)
        if head is not None and head.path.startswith(ASIDE):
            stream.aside = True
            self.aside += 1
        if head is None:
            about = f"the call has metadata of over {self._headers_max} bytes"
            self.finish(stream, Status.RESOURCE_EXHAUSTED, about)
        elif not head.is_grpc:
            self._sending.no_grpc(stream)
        else:
            stream.encoding = head.encoding
            stream.content_left = head.content_length
            self._service.opened(stream, head)
            if stream.ended and number in self.streams:
                self._half_close(stream)

    def _trailers(self, stream: Stream, flags: int, head: Head | None) -> None:
        if stream.ended:
            self._reset(stream, Code.STREAM_CLOSED, "HEADERS after its end")
        elif not flags & END_STREAM:
            self._reset(stream, Code.PROTOCOL_ERROR, "HEADERS without END_STREAM inside it")
        elif trouble := "trailers are too long" if head is None else trailers_fault(head.fields):
            self._reset(stream, Code.PROTOCOL_ERROR, trouble)
        else:
            self._half_close(stream)

    def _half_close(self, stream: Stream) -> None:
        stream.ended = True
        if stream.content_left:
            self._reset(stream, Code.PROTOCOL_ERROR, "fewer bytes than its content-length")
        elif stream.inbox:
            self.end(stream, Status.INTERNAL, "the request ends inside a message")
        elif not stream.finished:
            self._service.half_closed(stream)

    # Frames that carry nothing but steer the connection or its streams

    def _is_idle(self, number: int) -> bool:
        """Whether the peer has opened no stream of this number."""
        return number > self._last or not number & 1

    def _rst_stream(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "RST_STREAM must have 4 bytes")
        if self._is_idle(number):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "RST_STREAM names a stream never opened")
        self._calm.reset()
        self._work += RESET_WORK
        if (stream := self.streams.get(number)) is not None:
            self._forget(stream)
            return
        self._calm.control()
        self._early.pop(number, None)
        unsent = self._answered.pop(number, None)
        if unsent is not None and U32.unpack(payload)[0] != Code.NO_ERROR:
            unsent()

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS must be on stream 0")
        if len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionFault(
                Code.FRAME_SIZE_ERROR, "SETTINGS must have a multiple of 6 bytes, and none with ACK"
            )
        self._calm.control()
        if flags & ACK:
            return
        self._work += len(payload) >> 5
        sending = self._sending
        last = dict(SETTING.iter_unpack(payload))
        if last.get(2, 0) > 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "ENABLE_PUSH must be 0 or 1")
        window = last.get(4, sending.window)
        if window != sending.window:
            streams = len(self.streams)
            self._calm.control(streams // SETTINGS_STREAMS)
            self._work += streams // 8
            sending.resize(window, self.streams.values())
        if 5 in last:
            sending.frames_of(last[5])
        self.out.append(frame(SETTINGS, ACK, 0))

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PING must be on stream 0")
        if len(payload) != 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "PING must have 8 bytes")
        if flags & ACK:
            self._calm.control()
            self.acknowledged |= payload == FAREWELL
            self.read_all |= payload == LAST
            return
        self._calm.ping()
        self.out.append(frame(PING, ACK, 0, payload))

    def _priority(self, number: int, payload: bytes) -> None:
        self._calm.control()
        if not number:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PRIORITY must not be on stream 0")
        if len(payload) == 5:
            if U32.unpack_from(payload)[0] & WINDOW_MAX != number:
                return
            code, about = Code.PROTOCOL_ERROR, "the stream depends on itself"
        else:
            code, about = Code.FRAME_SIZE_ERROR, "PRIORITY must have 5 bytes"
        if (stream := self.streams.get(number)) is not None:
            self._reset(stream, code, about)
        elif self._is_idle(number):  # which RST_STREAM can't name
            raise ConnectionFault(code, about)
        else:
            self._refuse(number, END_STREAM, code)

    def _window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "WINDOW_UPDATE must have 4 bytes")
        self._calm.control()
        room = U32.unpack(payload)[0] & WINDOW_MAX
        if not number:
            if not room:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE must add more than 0")
            self._sending.grant_all(room)
        elif self._is_idle(number):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE names a stream never opened")
        elif (stream := self.streams.get(number)) is not None:
            if not room:
                self._reset(stream, Code.PROTOCOL_ERROR, "WINDOW_UPDATE must add more than 0")
            elif not self._sending.grant(stream, room):
                self._reset(stream, Code.FLOW_CONTROL_ERROR, "a stream's window exceeds 2^31 - 1")

    def _other(self, kind: int, number: int, payload: bytes) -> None:
        self._calm.control()
        if kind == GOAWAY and number:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "GOAWAY must be on stream 0")
        if kind == GOAWAY and len(payload) < 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "GOAWAY must have 8 bytes or more")
