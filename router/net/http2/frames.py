"""HTTP/2's frames, errors and bounds (RFC 9113), and gRPC's few headers. Pure."""

import struct
from enum import IntEnum

from router.net.http2.packing import ACCEPTED

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STREAM_WINDOW = 1 << 20
CONNECTION_WINDOW = 1 << 26
MESSAGE_MAX = (64 << 20) + (1 << 16)
"""Most bytes of a gRPC message: a request body of 64 MiB, and 64 KiB for the fields around it."""
HEADERS_MAX = 1 << 16
"""Most bytes of a call's decoded headers, where no other bound is set."""
FRAME_MAX = 1 << 14
"""Bytes of a frame's payload that a peer may send: HTTP/2's own default."""
STREAM_WAITING_MAX = 1 << 20
WINDOW_MAX = (1 << 31) - 1

TURN_WORK = 512
"""Units of work that one connection gets in one turn of the event loop, before others are served:
below 1 ms in all. A frame is 1 unit; what it causes is added."""
OPEN_WORK = 63
"""Units of TURN_WORK for a stream that is opened."""
UNREAD_WORK = 8
"""Further units for a stream that is opened, for each answer that its peer has not read: a peer
that opens calls and reads no answers has one call begun in a turn."""
RESET_WORK = 16
"""Units of TURN_WORK for an RST_STREAM of the peer."""
MESSAGE_WORK = 2
"""Further units for a DATA frame, and for each message of a frame that has several."""
TURN_STREAMS = TURN_WORK // OPEN_WORK
"""Streams of one connection that are opened, or ended with it, in one turn."""
PUMP_BYTES = 1 << 18
PUMP_STREAMS = 64
"""Most waiting bytes, and most streams with such bytes, that are sent in one turn."""

CONTROL_MAX = 1000
"""Most frames in a second that carry nothing, such as PING or WINDOW_UPDATE: see calm.Calm."""
CONTROL_PER_ANSWER = 4
"""Further frames that carry nothing, allowed for each frame of an answer: updates of both windows,
a ping, and one to spare."""
CONTROL_SAVED_MAX = 100_000
"""Most frames that carry nothing which a connection may save up by the answers sent to it."""
ASIDE = "/grpc."
"""Beginning of the paths of health and reflection; calls of health need no key."""
SMALL_FRAME = 1024
"""Bytes below which DATA of a stream that is over, or a CONTINUATION, counts as if it carried
nothing."""
SETTINGS_STREAMS = 64
"""A SETTINGS frame with another initial window counts as one frame more, that carries nothing, for
each so many open streams."""
RESETS_MAX = 10_000
"""Most RST_STREAM frames in a second: clients send them to cancel calls."""
PING_SLACK = 0.9
"""Share of the least time between two pings after which a ping is in time: clients and networks
keep that time roughly."""
PING_STRIKES = 2
"""Pings that may come too soon; one more ends the connection."""
FAREWELL = b"farewell"
"""Payload of a PING behind a GOAWAY: once it is acknowledged, the peer has read the GOAWAY, and the
calls that it opened before have arrived."""
LAST = b"the last"
"""Payload of a PING behind the last bytes of a connection: once it is acknowledged, the peer has
read them."""
REMEMBERED_MAX = 4096
"""Most streams that are over which one connection remembers, in each of two lists (streams.py)."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20

HEAD = struct.Struct(">IBI")
U32 = struct.Struct(">I")
MESSAGE = struct.Struct(">BI")
"""Prefix of a gRPC message: a byte, 1 if it is compressed, and the number of its bytes."""
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
    """Bytes of a frame. kind: its type. number: its stream, 0 for the connection."""
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
"""`:status: 415`, encoded: gRPC's answer to a content-type that is not gRPC's."""
MESSAGE_BYTES_MAX = 1024
"""Most bytes of a status message, which is cut there; the status details have it whole."""


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
