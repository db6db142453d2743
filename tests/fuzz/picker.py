"""The endpoint picker's readers: a connection's HTTP/2, and the messages of one ext_proc stream.

A reader takes an input and returns its outcome, a short tuple; it raises Difference. Both are pure,
so that laws can be checked after each input:
- the same bytes in other pieces give the same calls, the same answer and the same fault;
- an answer is whole frames, never more bytes than the peer has granted, and each message comes back
  as it went in;
- a stream of ext_proc asks once and ends once, and raises ValueError alone.
"""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from google.protobuf.message import DecodeError

from kvroute.ext_proc.v3 import ext_proc_pb2 as pb
from router.gateway.exchange import Outcome as ExchangeOutcome
from router.gateway.picker import messages
from router.gateway.picker.request_stream import Blind, Reading, RequestStream
from router.gateway.refusals import GatewayRefusal
from router.net.http2 import frames
from router.net.http2.frames import ConnectionFault, Status, frame, literal
from router.net.http2.machine import Connection
from router.net.http2.requests import Head
from router.net.http2.sending import Stream
from tests.fuzz.wire import Difference, same
from tests.stage.http2_frames import in_one_step

STREAMS_MAX = 8
OPENING = frames.PREFACE + frame(frames.SETTINGS, 0, 0)
HEADERS = b"".join(
    literal(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/a"),
        (b"content-type", b"application/grpc"),
    )
)
KINDS = (*(frames.DATA,) * 6, *range(10), 11)
FLAGS = (0, 0, 1, 4, 4, 5, 5, 8, 9, 0x0D, 0x20, 0x24, 0xFF)
NUMBERS = (0, 1, 1, 1, 3, 3, 5, 2, 7, 99, (1 << 31) - 1, (1 << 32) - 1)


@dataclass
class _Echo:
    """Answers each message with itself."""

    connection: Any = None
    calls: list[tuple[str, int, bytes]] = field(default_factory=list)
    echoed: dict[int, bytes] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)

    def opened(self, stream: Stream, head: Head) -> None:
        self.calls.append(("opened", stream.number, head.path.encode(errors="replace")))
        self.streams.append(stream)

    def too_large(self, stream: Stream, size: int) -> None:
        self.connection.end(stream, Status.RESOURCE_EXHAUSTED, f"{size} bytes")

    def message(self, stream: Stream, content: bytes, *, packed: bool) -> None:
        if packed:
            plain = in_one_step(self.connection.unpacking(stream, content))
            if plain is None:
                return
            content = plain
        self.calls.append(("message", stream.number, content))
        before = self.echoed.get(stream.number, b"")
        self.echoed[stream.number] = before + b"\0" + frames.U32.pack(len(content)) + content
        self.connection.send(stream, content)

    def half_closed(self, stream: Stream) -> None:
        self.calls.append(("half_closed", stream.number, b""))
        self.connection.finish(stream)

    def reset(self, stream: Stream) -> None:
        self.calls.append(("reset", stream.number, b""))


def http2(content: bytes) -> tuple[Any, ...]:
    """Bytes of a peer, after its preface."""
    echo, out, fault = _connected([OPENING + content])
    rng = random.Random(crc32(content))
    pieces = list(_pieces(OPENING + content, rng))
    other, other_out, other_fault = _connected(pieces)
    same(other.calls, echo.calls, "calls by pieces")
    same(other_out, out, "the answer by pieces")
    same(other_fault, fault, "the fault by pieces")
    sent = _checked(out, _granted(OPENING + content))
    for number, data in sent.items():
        same(data, echo.echoed.get(number, b"")[: len(data)], f"the echo of stream {number}")
    if fault is None:
        for stream in echo.streams:
            whole = sent.get(stream.number, b"") + bytes(stream.waiting)
            if stream.number in echo.connection.streams:
                same(whole, echo.echoed.get(stream.number, b""), "what was sent and what waits")
    if len(echo.connection.streams) > STREAMS_MAX:
        raise Difference(f"{len(echo.connection.streams)} streams are open")
    kinds = Counter(name for name, _, _ in echo.calls)
    made = sorted((name, min(count, 3)) for name, count in kinds.items())
    return (fault[0] if fault else None, fault[1][:24] if fault else "", *made)


def _connected(pieces: list[bytes]) -> tuple[_Echo, bytes, tuple[int, str] | None]:
    echo = _Echo()
    echo.connection = Connection(echo, clock=lambda: 0.0, streams_max=STREAMS_MAX)
    fault = None
    try:
        for piece in pieces:
            while echo.connection.receive(piece, 0.0):
                piece = b""
            while echo.connection.pump():
                pass
    except ConnectionFault as error:
        fault = (int(error.code), str(error))
    out = b"".join(echo.connection.out)
    if fault is not None:
        while echo.connection.lost():
            pass
        if echo.connection.streams:
            raise Difference("a lost connection has streams")
    return echo, out, fault


def _pieces(data: bytes, rng: random.Random) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size = rng.choice((1, 2, 8, 9, 10, 64, 1000))
        yield data[at : at + size]
        at += size


def _frames(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Whole frames; raises Difference for a rest."""
    at = 0
    while at < len(data):
        if len(data) - at < 9:
            raise Difference("the answer ends inside a frame's head")
        size_kind, flags, number = frames.HEAD.unpack_from(data, at)
        size = size_kind >> 8
        payload = data[at + 9 : at + 9 + size]
        if len(payload) != size:
            raise Difference("the answer ends inside a frame")
        yield size_kind & 0xFF, flags, number, payload
        at += 9 + size


def _granted(content: bytes) -> int:
    """Bytes of DATA that the peer takes on the connection at most."""
    room, at = 65_535, len(frames.PREFACE)
    while at + 9 <= len(content):
        size_kind, _, number = frames.HEAD.unpack_from(content, at)
        size, kind = size_kind >> 8, size_kind & 0xFF
        payload = content[at + 9 : at + 9 + size]
        if kind == frames.WINDOW_UPDATE and not number & frames.WINDOW_MAX and len(payload) == 4:
            room += frames.U32.unpack(payload)[0] & frames.WINDOW_MAX
        at += 9 + size
    return room


def _checked(out: bytes, granted: int) -> dict[int, bytes]:
    """DATA by stream; raises Difference for frames that no peer takes."""
    sent: dict[int, bytes] = {}
    over: set[int] = set()
    for kind, flags, number, payload in _frames(out):
        if kind in (frames.DATA, frames.HEADERS) and number in over:
            raise Difference(f"stream {number} goes on after its end")
        if kind == frames.DATA:
            sent[number] = sent.get(number, b"") + payload
        if kind in (frames.DATA, frames.HEADERS) and flags & frames.END_STREAM:
            over.add(number)
    if sum(map(len, sent.values())) > granted:
        raise Difference("more DATA than the peer has granted")
    return sent


def make_http2(rng: random.Random) -> bytes:
    """Frames, most of them of an orderly peer."""
    out = bytearray()
    opened, number = [1], 1
    for _ in range(rng.randrange(1, 24)):
        if rng.random() < 0.3:
            out += frame(frames.HEADERS, rng.choice((4, 4, 4, 5)), number, HEADERS)
            opened.append(number)
            number += 2
        elif rng.random() < 0.6:
            size = rng.choice((0, 1, 7, 200, 5000))
            body = b"\0" + frames.U32.pack(size) + bytes(size)
            cut = rng.randrange(len(body) + 1) if rng.random() < 0.2 else 0
            for part in (body[:cut], body[cut:]) if cut else (body,):
                out += frame(frames.DATA, rng.choice((0, 0, 0, 1)), rng.choice(opened), part)
        else:
            payload = rng.choice(
                (b"", bytes(4), bytes(8), rng.randbytes(6), HEADERS, b"\0\4\0\0\0\0")
            )
            if rng.random() < 0.3:
                payload = frames.SETTING.pack(
                    rng.randrange(8), rng.choice((0, 1, 1 << 14, 1 << 31))
                )
            if rng.random() < 0.2:
                payload = frames.U32.pack(rng.choice((0, 1, 1000, 1 << 20, (1 << 31) - 1)))
            out += frame(rng.choice(KINDS), rng.choice(FLAGS), rng.choice(NUMBERS), payload)
    return bytes(out)


class _Request(RequestStream):
    """Picks at once, or refuses, or says nothing, by the request's number of headers."""

    def __init__(self) -> None:
        self.asked = self.ends = 0
        self.sent: list[bytes] = []
        super().__init__(self.sent.append, lambda: None, body_bytes_max=4096)

    def when_room(self) -> None:
        self.flow()

    def ask(self, body: Reading | Blind) -> None:
        count = len(self.headers)
        if isinstance(body, Reading) and count % 2:
            with suppress(GatewayRefusal):
                self.read(body.make())
        self.asked += 1
        if count % 3 == 0:
            self.picked("10.0.0.1:8000", {"x-a": "b"})
        elif count % 3 == 1:
            self.unpicked()

    def ended(self, outcome: ExchangeOutcome | None, *, observed: bool) -> None:
        self.ends += 1


def ext_proc(content: bytes) -> tuple[Any, ...]:
    """Messages, each with its length in two bytes before it."""
    stream = _Request()
    said = ""
    for raw in _messages(content):
        _same_part(raw)
        try:
            stream.message(raw)
        except ValueError as error:
            said = str(error)[:20]
            break
    if said:
        stream.reset()
    else:
        stream.half_closed()
    if stream.asked > 1 or stream.ends > 1:
        raise Difference(f"asked {stream.asked} times, ended {stream.ends} times")
    kinds = Counter(
        pb.ProcessingResponse.FromString(raw).WhichOneof("response") for raw in stream.sent
    )
    answered = sorted((str(kind), min(count, 2)) for kind, count in kinds.items())
    return (said, stream.asked, stream.ends, *answered)


def _same_part(raw: bytes) -> None:
    """The quick reader of an answer's part beside protobuf."""
    part = messages.answer_part(raw)
    if part is None:
        return
    try:
        message = pb.ProcessingRequest.FromString(raw)
    except DecodeError:
        return  # bytes behind the part, which the quick reader passes over
    body = message.response_body
    if message.WhichOneof("request") == "response_body" and message.ByteSize() == len(raw):
        same((part.body, part.is_last), (body.body, body.end_of_stream), "a part")


def _messages(content: bytes) -> Iterator[bytes]:
    at = 0
    while at + 2 <= len(content):
        size = int.from_bytes(content[at : at + 2], "big")
        yield content[at + 2 : at + 2 + size]
        at += 2 + size


def make_ext_proc(rng: random.Random) -> bytes:
    """A request's messages in order, some left out, some twice."""
    headers = [(":method", "POST"), (":path", "/v1/chat/completions"), *[("a", "b")] * 3]
    named = pb.HeaderMap(
        headers=[
            pb.HeaderValue(key=name, raw_value=value.encode())
            for name, value in headers[: rng.randrange(6)]
        ]
    )
    config = pb.ProtocolConfiguration(
        request_body_mode=rng.choice((0, 1, 2, 3, 4)), response_body_mode=rng.choice((0, 1, 2, 4))
    )
    body = rng.choice((b"", b"{}", b'{"model":"m","messages":[]}', bytes(5000), b'{"prompt":"a"}'))
    steps = [
        pb.ProcessingRequest(
            request_headers=pb.HttpHeaders(headers=named, end_of_stream=rng.random() < 0.2),
            protocol_config=config if rng.random() < 0.8 else None,
        ),
        pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=rng.random() < 0.7)),
        pb.ProcessingRequest(request_trailers=pb.HttpTrailers()),
        pb.ProcessingRequest(
            response_headers=pb.HttpHeaders(
                headers=pb.HeaderMap(
                    headers=[
                        pb.HeaderValue(
                            key=":status", raw_value=rng.choice((b"200", b"503", b"\xff"))
                        )
                    ]
                )
            )
        ),
        pb.ProcessingRequest(response_body=pb.HttpBody(body=b"data: {}\n\n")),
        pb.ProcessingRequest(response_body=pb.HttpBody(body=body, end_of_stream=True)),
        pb.ProcessingRequest(response_trailers=pb.HttpTrailers()),
    ]
    out = bytearray()
    for step in steps:
        for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 2))):
            raw = step.SerializeToString()
            out += len(raw).to_bytes(2, "big") + raw
    return bytes(out)
