"""The other side of a connection, and a service that answers each message with itself."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpack import Decoder, Encoder

from router.net.http2 import frames as http2
from router.net.http2.frames import Code, Status, frame
from router.net.http2.machine import Connection
from router.net.http2.requests import Head
from router.net.http2.sending import Stream
from tests.stage.http2_frames import in_one_step

Frame = tuple[int, int, int, bytes]
U32 = struct.Struct(">I")
HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a/B"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


@dataclass
class Echo:
    """The service."""

    connection: Connection | None = None
    opens: list[tuple[str, Head]] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    answers: bool = True
    finishes: bool = True
    """Whether a call ends with its request."""

    def opened(self, stream: Stream, head: Head) -> None:
        self.opens.append((head.path, head))

    def too_large(self, stream: Stream, size: int) -> None:
        assert self.connection is not None
        self.connection.end(stream, Status.RESOURCE_EXHAUSTED, f"{size} bytes")

    def message(self, stream: Stream, content: bytes, *, packed: bool) -> None:
        assert self.connection is not None
        plain: bytes | None = content
        if packed:
            plain = in_one_step(self.connection.unpacking(stream, content))
        if plain is None:
            return
        self.messages.append(plain)
        if self.answers:
            self.connection.send(stream, plain)

    def half_closed(self, stream: Stream) -> None:
        self.ends.append("half_closed")
        assert self.connection is not None
        if self.finishes:
            self.connection.finish(stream)

    def reset(self, stream: Stream) -> None:
        self.ends.append("reset")


@dataclass
class Peer:
    """The other side of a connection."""

    echo: Echo
    connection: Connection
    encoder: Encoder = field(default_factory=Encoder)
    now_s: float = 0.0

    def send(self, *frames: bytes) -> list[Frame]:
        """Bytes to the connection; the frames that come back."""
        sent = b"".join(frames)
        while self.connection.receive(sent, self.now_s):
            sent = b""
        return list(self.back())

    def back(self) -> Iterator[Frame]:
        while self.connection.pump():
            pass
        data = b"".join(self.connection.out)
        self.connection.out.clear()
        at = 0
        while at < len(data):
            size_kind, flags, number = struct.unpack_from(">IBI", data, at)
            size = size_kind >> 8
            yield size_kind & 0xFF, flags, number, data[at + 9 : at + 9 + size]
            at += 9 + size

    def headers(
        self, number: int, flags: int = http2.END_HEADERS, more: Sequence[tuple[str, str]] = ()
    ) -> bytes:
        return frame(http2.HEADERS, flags, number, self.encoder.encode([*HEADERS, *more]))


def a_peer(
    streams_max: int = 100,
    *,
    answers: bool = True,
    finishes: bool = True,
    greets: bool = True,
    **bounds: Any,
) -> Peer:
    """greets: the preface and the settings have been exchanged."""
    echo = Echo(answers=answers, finishes=finishes)
    connection = Connection(echo, clock=lambda: peer.now_s, streams_max=streams_max, **bounds)
    echo.connection = connection
    peer = Peer(echo, connection)
    if greets:
        first = peer.send(http2.PREFACE, frame(http2.SETTINGS, 0, 0))
        assert first[0][0] == http2.SETTINGS
        assert first[-1] == (http2.SETTINGS, http2.ACK, 0, b"")
    return peer


def message(content: bytes) -> bytes:
    return b"\0" + U32.pack(len(content)) + content


def data(number: int, content: bytes, flags: int = 0) -> bytes:
    return frame(http2.DATA, flags, number, content)


def reset(number: int, code: Code) -> Frame:
    return http2.RST_STREAM, 0, number, U32.pack(code)


def status_of(back: Sequence[Frame]) -> int | None:
    """grpc-status of the trailers in some frames."""
    for kind, flags, _, payload in back:
        if kind == http2.HEADERS and flags & http2.END_STREAM:
            return int(dict(Decoder().decode(payload))["grpc-status"])
    return None
