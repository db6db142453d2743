"""HTTP/2's frames, errors and bounds (RFC 9113), and gRPC's few headers. Pure."""

import struct
from enum import IntEnum

from router.net.http2.packing import ACCEPTED

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
WINDOW_MAX = (1 << 31) - 1

TURN_WORK = 512
"""Work of one connection in one turn, in which no other connection is served: below 1 ms. A frame
is 1, what it causes is added."""
OPEN_WORK = 63
"""Work of a stream that is opened."""
UNREAD_WORK = 8
"""Work of a stream that is opened, for each answer that its peer has not read: a peer that goes on
with calls and reads nothing has one call begun in a turn."""
RESET_WORK = 16
"""Work of a call that is broken off."""
MESSAGE_WORK = 2
TURN_STREAMS = TURN_WORK // OPEN_WORK
"""Streams of one connection that are opened, or ended with it, in one turn."""
PUMP_BYTES = 1 << 18
PUMP_STREAMS = 64
"""Bytes, and streams, of what waits for room that are sent in one turn."""

CONTROL_MAX = 1000
"""Frames a second that carry nothing. See calm.Calm."""
CONTROL_PER_ANSWER = 4
"""Frames that carry nothing and that each frame of an answer allows besides CONTROL_MAX: updates of
both windows, a ping, and one to spare."""
CONTROL_SAVED_MAX = 100_000
"""Frames that carry nothing for which a connection may have saved room, at most."""
ASIDE = "/grpc."
"""Begin of the paths of health and reflection, which need no key."""
SMALL_FRAME = 1024
"""Bytes below which DATA of a stream that is over, and a part of a header block, carry nothing."""
SETTINGS_STREAMS = 64
"""Open streams for which SETTINGS of another window count as one frame more."""
RESETS_MAX = 10_000
"""RST_STREAM a second: clients that leave."""
PING_SLACK = 0.9
"""Share of the least time between two pings after which a ping is in time: clients and networks
keep that time roughly."""
PING_STRIKES = 2
"""Pings that come too soon, before their connection ends."""
FAREWELL = b"farewell"
"""Payload of a PING behind a GOAWAY: once it comes back, the peer has read the GOAWAY, and what it
sent before is here."""
LAST = b"the last"
"""Payload of a PING behind the last bytes of a connection: once it comes back, the peer has read
them."""
REMEMBERED_MAX = 4096
"""Streams that are over, of one connection, of which something is still known."""

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
    CANCEL = 8
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
    """The peer broke HTTP/2's rules or a bound; the connection ends."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    """A frame's bytes."""
    return HEAD.pack(len(payload) << 8 | kind, flags, number) + payload


def reset_frame(number: int, code: Code) -> bytes:
    """Bytes of an RST_STREAM frame."""
    return frame(RST_STREAM, 0, number, U32.pack(code))


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
"""Header fields before the trailers of an answer without a message."""
OPENING = ALONE + literal(b"grpc-accept-encoding", ACCEPTED)
CLOSING = literal(b"grpc-status", b"0")
NO_GRPC = b"\x08\x03415"
"""`:status: 415`, with which gRPC answers a content-type that is none of its own."""
MESSAGE_BYTES_MAX = 1024
"""Bytes of a status message, at most; the status details have it whole."""


def percent(message: str) -> bytes:
    """A status message in gRPC's percent encoding."""
    encoded = message.encode(errors="replace")
    if len(encoded) > MESSAGE_BYTES_MAX:  # up to a whole character
        encoded = encoded[:MESSAGE_BYTES_MAX].decode(errors="ignore").encode()
    return b"".join(
        bytes((byte,)) if 0x20 <= byte < 0x7F and byte != 0x25 else b"%%%02X" % byte
        for byte in encoded
    )


def unpadded(payload: bytes) -> bytes:
    """Payload of a padded frame without its padding; raises ConnectionFault."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame has more padding than payload")
    return payload[1 : len(payload) - payload[0]]
