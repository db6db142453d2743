"""What a peer may not send, and what ends then: the stream, or the connection (RFC 9113).

The names begin with the case of h2spec 2.6 that has the same input, where there is one. h2spec
itself, and its cases that are answered in another way, are in tests/interop.
"""

import struct

import pytest

from router.net.http2 import frames as http2
from router.net.http2.frames import Code, ConnectionFault, frame, literal
from tests.router.net.http2.peer import a_peer, data, message, reset, status_of

U32, SETTING = struct.Struct(">I"), struct.Struct(">HI")
CALL = {b":method": b"POST", b":scheme": b"http", b":path": b"/a/B"}
GRPC = {b"te": b"trailers", b"content-type": b"application/grpc"}
WINDOW_MAX = (1 << 31) - 1


def block(*fields: tuple[bytes, bytes], without: bytes = b"") -> bytes:
    """A call's header block, and more fields behind it."""
    known = [(name, value) for name, value in (CALL | GRPC).items() if name != without]
    return b"".join(literal(name, value) for name, value in (*known, *fields))


def headers(number: int = 1, flags: int = 4, content: bytes | None = None) -> bytes:
    return frame(http2.HEADERS, flags, number, block() if content is None else content)


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(http2.SETTINGS, 0, 0, b"".join(SETTING.pack(*pair) for pair in pairs))


def window(number: int, room: int) -> bytes:
    return frame(http2.WINDOW_UPDATE, 0, number, U32.pack(room))


OPEN = headers()
HALF_CLOSED = headers(flags=5)
"""Of a service that leaves its answer open."""
CLOSED = headers() + frame(http2.RST_STREAM, 0, 1, U32.pack(8))

CONNECTION = {
    "4.2/2 a frame of over 16,384 bytes": (OPEN + data(1, bytes(16_385)), Code.FRAME_SIZE_ERROR),
    "4.3/1 a block that can't be decoded": (
        headers(content=b"\xff" * 20), Code.COMPRESSION_ERROR),
    "4.3/2 PRIORITY inside a block": (
        headers(flags=0) + frame(http2.PRIORITY, 0, 1, bytes(5)), Code.PROTOCOL_ERROR),
    "4.3/3 HEADERS inside a block": (headers(flags=0) + headers(3), Code.PROTOCOL_ERROR),
    "5.1/1 DATA of an idle stream": (data(1, b"x"), Code.PROTOCOL_ERROR),
    "5.1/2 RST_STREAM of an idle stream": (
        frame(http2.RST_STREAM, 0, 1, bytes(4)), Code.PROTOCOL_ERROR),
    "5.1/3 WINDOW_UPDATE of an idle stream": (window(1, 1), Code.PROTOCOL_ERROR),
    "5.1/4 CONTINUATION of an idle stream": (
        frame(http2.CONTINUATION, 4, 1, block()), Code.PROTOCOL_ERROR),
    "5.1.1/1 an even number": (headers(2), Code.PROTOCOL_ERROR),
    "6.1/1 DATA of no stream": (data(0, b"x"), Code.PROTOCOL_ERROR),
    "6.1/3 more padding than payload": (
        OPEN + frame(http2.DATA, 8, 1, b"\x05abcd"), Code.PROTOCOL_ERROR),
    "6.1/3 the same of a closed stream": (
        CLOSED + frame(http2.DATA, 8, 1, b"\x05abcd"), Code.PROTOCOL_ERROR),
    "6.2/1 HEADERS of no stream": (headers(0), Code.PROTOCOL_ERROR),
    "6.2 a priority of 3 bytes": (headers(flags=0x24, content=b"abc"), Code.FRAME_SIZE_ERROR),
    "6.3/1 PRIORITY of no stream": (frame(http2.PRIORITY, 0, 0, bytes(5)), Code.PROTOCOL_ERROR),
    "6.3 PRIORITY of 4 bytes, idle": (
        frame(http2.PRIORITY, 0, 1, bytes(4)), Code.FRAME_SIZE_ERROR),
    "6.4/3 RST_STREAM of 3 bytes": (
        OPEN + frame(http2.RST_STREAM, 0, 1, bytes(3)), Code.FRAME_SIZE_ERROR),
    "6.5/1 SETTINGS ACK with a payload": (
        frame(http2.SETTINGS, 1, 0, bytes(6)), Code.FRAME_SIZE_ERROR),
    "6.5/2 SETTINGS of a stream": (frame(http2.SETTINGS, 0, 1), Code.PROTOCOL_ERROR),
    "6.5/3 SETTINGS of 5 bytes": (frame(http2.SETTINGS, 0, 0, bytes(5)), Code.FRAME_SIZE_ERROR),
    "6.5.2/1 ENABLE_PUSH of 2": (settings((2, 2)), Code.PROTOCOL_ERROR),
    "6.5.2/2 a window of 2^31": (settings((4, 1 << 31)), Code.FLOW_CONTROL_ERROR),
    "6.5.2/3 frames of 16,383 bytes": (settings((5, 16_383)), Code.PROTOCOL_ERROR),
    "6.5.2/4 frames of 2^24 bytes": (settings((5, 1 << 24)), Code.PROTOCOL_ERROR),
    "6.6 PUSH_PROMISE": (frame(http2.PUSH_PROMISE, 4, 1, bytes(9)), Code.PROTOCOL_ERROR),
    "6.7/3 PING of a stream": (frame(http2.PING, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
    "6.7/4 PING of 7 bytes": (frame(http2.PING, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
    "6.8/1 GOAWAY of a stream": (frame(http2.GOAWAY, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
    "6.8 GOAWAY of 7 bytes": (frame(http2.GOAWAY, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
    "6.9/1 WINDOW_UPDATE of 0": (window(0, 0), Code.PROTOCOL_ERROR),
    "6.9/3 WINDOW_UPDATE of 3 bytes": (
        frame(http2.WINDOW_UPDATE, 0, 0, bytes(3)), Code.FRAME_SIZE_ERROR),
    "6.9.1/2 a window past 2^31 - 1": (window(0, WINDOW_MAX), Code.FLOW_CONTROL_ERROR),
    "6.9.2 a stream's window past that by SETTINGS": (
        OPEN + window(1, WINDOW_MAX - 65_535) + settings((4, 70_000)), Code.FLOW_CONTROL_ERROR),
    "6.10/2 CONTINUATION of another stream": (
        headers(flags=0) + frame(http2.CONTINUATION, 4, 3), Code.PROTOCOL_ERROR),
    "6.10/4 CONTINUATION behind a whole block": (
        OPEN + frame(http2.CONTINUATION, 4, 1, block()), Code.PROTOCOL_ERROR),
}  # fmt: skip
STREAM = {
    "5.1/5 half closed: DATA": (HALF_CLOSED + data(1, b"x"), Code.STREAM_CLOSED),
    "5.1/6 half closed: HEADERS": (HALF_CLOSED + headers(), Code.STREAM_CLOSED),
    "5.1/8 reset: DATA": (CLOSED + data(1, b"x"), Code.STREAM_CLOSED),
    "5.1/9 reset: HEADERS": (CLOSED + headers(), Code.STREAM_CLOSED),
    "5.1/11 closed: DATA": (data(1, b"x"), Code.STREAM_CLOSED),
    "5.1/12 closed: HEADERS": (headers(), Code.STREAM_CLOSED),
    "5.3.1/1 HEADERS that depend on themselves": (
        headers(flags=0x24, content=U32.pack(1) + b"\0" + block()), Code.PROTOCOL_ERROR),
    "5.3.1/2 PRIORITY that depends on itself": (
        OPEN + frame(http2.PRIORITY, 0, 1, U32.pack(1) + b"\0"), Code.PROTOCOL_ERROR),
    "6.1/2 DATA behind its end": (HALF_CLOSED + data(1, b"", 1), Code.STREAM_CLOSED),
    "6.3/2 PRIORITY of 4 bytes": (
        OPEN + frame(http2.PRIORITY, 0, 1, bytes(4)), Code.FRAME_SIZE_ERROR),
    "6.3/2 PRIORITY of 4 bytes, closed": (
        frame(http2.PRIORITY, 0, 1, bytes(4)), Code.FRAME_SIZE_ERROR),
    "6.9/2 WINDOW_UPDATE of 0": (OPEN + window(1, 0), Code.PROTOCOL_ERROR),
    "6.9.1/3 a window past 2^31 - 1": (OPEN + window(1, WINDOW_MAX), Code.FLOW_CONTROL_ERROR),
    "8.1/1 a second block without an end": (OPEN + headers(), Code.PROTOCOL_ERROR),
    "8.1.2/1 a name in capitals": (headers(content=block((b"X-A", b"b"))), Code.PROTOCOL_ERROR),
    "8.1.2 a name with a NUL": (headers(content=block((b"x\0a", b"b"))), Code.PROTOCOL_ERROR),
    "8.1.2 an empty name": (headers(content=block((b"", b"b"))), Code.PROTOCOL_ERROR),
    "8.1.2 a line break in a value": (
        headers(content=block((b"x-a", b"b\r\nc: d"))), Code.PROTOCOL_ERROR),
    "8.1.2.1/1 an unknown pseudo-header": (
        headers(content=literal(b":evil", b"a") + block()), Code.PROTOCOL_ERROR),
    "8.1.2.1/2 a pseudo-header of answers": (
        headers(content=literal(b":status", b"200") + block()), Code.PROTOCOL_ERROR),
    "8.1.2.1/3 a pseudo-header in trailers": (
        OPEN + headers(flags=5, content=literal(b":path", b"/")), Code.PROTOCOL_ERROR),
    "8.1.2.1/4 a pseudo-header behind others": (
        headers(content=block((b":authority", b"a"))), Code.PROTOCOL_ERROR),
    "8.1.2.2/1 a header of connections": (
        headers(content=block((b"connection", b"close"))), Code.PROTOCOL_ERROR),
    "8.1.2.2/2 te other than trailers": (
        headers(content=block((b"te", b"gzip"))), Code.PROTOCOL_ERROR),
    "8.1.2.3/1 an empty :path": (
        headers(content=literal(b":path", b"") + block(without=b":path")), Code.PROTOCOL_ERROR),
    "8.1.2.3/2 no :method": (headers(content=block(without=b":method")), Code.PROTOCOL_ERROR),
    "8.1.2.3/3 no :scheme": (headers(content=block(without=b":scheme")), Code.PROTOCOL_ERROR),
    "8.1.2.3/4 no :path": (headers(content=block(without=b":path")), Code.PROTOCOL_ERROR),
    "8.1.2.3/5 :method twice": (
        headers(content=literal(b":method", b"POST") + block()), Code.PROTOCOL_ERROR),
    "8.1.2.3/6 :scheme twice": (
        headers(content=literal(b":scheme", b"http") + block()), Code.PROTOCOL_ERROR),
    "8.1.2.3/7 :path twice": (
        headers(content=literal(b":path", b"/a/B") + block()), Code.PROTOCOL_ERROR),
    "8.1.2.3 GET": (
        headers(content=literal(b":method", b"GET") + block(without=b":method")),
        Code.PROTOCOL_ERROR),
    "8.1.2.6/1 fewer bytes than content-length": (
        headers(content=block((b"content-length", b"9"))) + data(1, message(b"abc"), 1),
        Code.PROTOCOL_ERROR),
    "8.1.2.6/2 more bytes than content-length": (
        headers(content=block((b"content-length", b"7"))) + data(1, message(b"abc")),
        Code.PROTOCOL_ERROR),
    "8.1.2.6 content-length of headers alone": (
        headers(flags=5, content=block((b"content-length", b"1"))), Code.PROTOCOL_ERROR),
    "8.1.2.6 no content-length": (
        headers(content=block((b"content-length", b"-1"))), Code.PROTOCOL_ERROR),
    "8.1.2.6 two content-lengths": (
        headers(content=block((b"content-length", b"1"), (b"content-length", b"2"))),
        Code.PROTOCOL_ERROR),
    "5.1.2/1 more streams than allowed": (
        b"".join(headers(number) for number in range(1, 13, 2)), Code.REFUSED_STREAM),
}  # fmt: skip
ANSWERED = ("5.1/11 closed: DATA", "5.1/12 closed: HEADERS", "6.3/2 PRIORITY of 4 bytes, closed")
"""Of these, those of a call that has had its answer."""


@pytest.mark.parametrize("name", CONNECTION)
def test_an_error_of_the_connection_ends_it(name: str) -> None:
    sent, code = CONNECTION[name]
    peer = a_peer(answers=False, finishes=False)
    with pytest.raises(ConnectionFault) as raised:
        peer.send(sent)
    assert raised.value.code is code
    *_, (kind, _, number, payload) = peer.back()
    assert (kind, number) == (http2.GOAWAY, 0)
    assert U32.unpack_from(payload, 4)[0] == code


@pytest.mark.parametrize("name", STREAM)
def test_an_error_of_a_stream_ends_that_stream_alone(name: str) -> None:
    sent, code = STREAM[name]
    peer = a_peer(streams_max=5, answers=False, finishes=False)
    if name in ANSWERED:
        peer.echo.finishes = True
        peer.send(headers(flags=5))
    number = 1 if code is not Code.REFUSED_STREAM else 11
    back = peer.send(sent)
    assert peer.connection.trouble or name in ANSWERED or code is not Code.PROTOCOL_ERROR
    assert reset(number, code) in back
    assert number not in peer.connection.streams
    peer.echo.answers = peer.echo.finishes = True
    if len(peer.connection.streams) == 5:
        peer.send(frame(http2.RST_STREAM, 0, 3, U32.pack(8)))
    back = peer.send(headers(21), data(21, message(b"good"), 1))
    assert status_of(back) == 0


@pytest.mark.parametrize(
    "sent", [b"", settings((4, 1000))[:3], frame(http2.PING, 0, 0, bytes(8)), OPEN]
)
def test_the_first_frame_is_of_settings(sent: bytes) -> None:
    peer = a_peer(greets=False)
    if len(sent) < 9:
        assert peer.send(http2.PREFACE, sent)[0][0] == http2.SETTINGS
        return
    with pytest.raises(ConnectionFault, match="SETTINGS") as raised:
        peer.send(http2.PREFACE, sent)
    assert raised.value.code is Code.PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("value", "served"),
    [
        (b"application/grpc", True),
        (b"application/grpc+proto", True),
        (b"application/grpc;charset=utf-8", True),
        (b"application/grpcx", False),
        (b"application/grpc-web", False),
        (b"application/json", False),
        (b"", False),
    ],
)
@pytest.mark.parametrize("flags", [4, 5])
def test_a_content_type_that_is_not_grpc_gets_http_415(
    value: bytes, served: bool, flags: int
) -> None:
    peer = a_peer(answers=False, finishes=False)
    fields = literal(b"content-type", value) if value else b""
    back = peer.send(headers(flags=flags, content=block(without=b"content-type") + fields))
    if served:
        assert list(peer.connection.streams) == [1]
        return
    assert back[0] == (http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1, b"\x08\x03415")
    assert back[1:] == ([] if flags == 5 else [reset(1, Code.NO_ERROR)])
    assert peer.connection.streams == {}
