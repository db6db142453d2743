"""HTTP/2 by hand, for clients that break it: frames, headers, the head of a RouteStream call."""

import struct
from collections.abc import Generator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_HEADERS = 4


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header that no table remembers; both are shorter than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_head(path: bytes) -> bytes:
    """Headers of a gRPC call."""
    return b"".join(
        literal(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path),
            (b":authority", b"router"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        )
    )


HEAD = call_head(b"/kvroute.v1.Router/RouteStream")


def in_one_step(steps: Generator[None, None, bytes | None]) -> bytes | None:
    """What `Connection.unpacking` makes of a packed message."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            plain: bytes | None = done.value
            return plain
