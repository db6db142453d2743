"""HTTP/2's frames, errors and bounds (RFC 9113), and gRPC's few headers. Pure."""

import struct
from enum import IntEnum

from router.http2.packing import ACCEPTED

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STREAM_WINDOW = 1 << 20
CONNECTION_WINDOW = 1 << 26
MESSAGE_MAX = (64 << 20) + (1 << 16)
"""Bytes of a gRPC message: a buffered body and what is around it."""
UNENDED_MAX = 128 << 20
"""Bytes of messages on one connection whose end has not come."""
HEADERS_MAX = 1 << 16
"""Bytes of a header block."""
FRAME_MAX = 1 << 14
"""Bytes of a frame's payload that a peer may send: HTTP/2's own default."""
STREAM_WAITING_MAX = 1 << 20
TURN_STREAMS = 8
"""Streams of one connection that are opened, or ended with it, in one turn: below 1 ms, in which no
other connection is served."""
CONTROL_MAX = 1000
"""Frames a second that carry nothing: PING, SETTINGS, PRIORITY, empty DATA."""
RESETS_MAX = 10_000
"""RST_STREAM a second: clients that leave."""
PING_SLACK = 0.9
"""Of the time between two pings, which clients and networks keep roughly."""
PING_STRIKES = 2
"""Pings that come too soon, before their connection ends."""
WINDOW_MAX = (1 << 31) - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20

HEAD = struct.Struct(">IBI")
U32 = struct.Struct(">I")
MESSAGE = struct.Struct(">BI")
"""What stands before a gRPC message: whether it is compressed, and its bytes."""
SETTING = struct.Struct(">HI")


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
    """Statuses of gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class ConnectionFault(Exception):
    """The peer broke HTTP/2, or a bound; the connection ends."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    """A frame's bytes."""
    return HEAD.pack(len(payload) << 8 | kind, flags, number) + payload


def literal(name: bytes, value: bytes) -> bytes:
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


ALONE = b"\x88" + literal(b"content-type", b"application/grpc")  # 0x88: `:status: 200`
"""Before the trailers of an answer without a message."""
OPENING = ALONE + literal(b"grpc-accept-encoding", ACCEPTED)
CLOSING = literal(b"grpc-status", b"0")


def percent(message: str) -> bytes:
    """gRPC's form of a status message."""
    return b"".join(
        bytes((byte,)) if 0x20 <= byte < 0x7F and byte != 0x25 else b"%%%02X" % byte
        for byte in message.encode(errors="replace")[:1024]
    )


def unpadded(payload: bytes) -> bytes:
    """The payload of a frame with padding; raises ConnectionFault."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]
