"""Unpacks a request's body (RFC 9110, 8.4) in bounded steps. Pure: no sockets, no clock.

Laws:
- a step reads PIECE_BYTES at most and gives STEP_BYTES at most, whatever the packed bytes hold;
- bytes of another encoding, and bytes that end early, raise CannotUnpack, and no other error.
"""

import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from multidict import MultiMapping
from typing_extensions import override

from router.gateway.refusals import GatewayRefusal

PIECE_BYTES = 1 << 14
STEP_BYTES = 1 << 16
FRAMES_MAX = 1024
"""Frames of one body, at most: members of gzip (RFC 1952, 2.2) or frames of zstd (RFC 8878, 3.1); a
client sends one."""
WINDOW_LOG_MAX = 23
"""Logarithm to base 2 of the largest window of zstd in HTTP, 8 MiB (RFC 9659)."""


class CannotUnpack(Exception):
    """The bytes are not valid in the named encoding."""


class Frame(ABC):
    """One compressed frame, from its first byte to its end."""

    _stream: Any

    @abstractmethod
    def step(self, packed: bytes) -> tuple[bytes, bytes, bool]:
        """Unpacks a step: returns the next bytes, the packed bytes that are left, and whether more
        may follow.
        """

    @property
    def ended(self) -> bool:
        return bool(self._stream.eof)


class _Zlib(Frame):
    """A member of gzip, or deflate with or without zlib's header (RFC 9110, 8.4.1.2)."""

    def __init__(self, window_bits: int) -> None:
        self._stream = zlib.decompressobj(window_bits)

    @override
    def step(self, packed: bytes) -> tuple[bytes, bytes, bool]:
        stream = self._stream
        given = stream.decompress(packed, STEP_BYTES)
        if stream.eof:
            return given, stream.unused_data, False
        return given, stream.unconsumed_tail, len(given) == STEP_BYTES


class _Zstd(Frame):
    """A frame of zstd."""

    def __init__(self) -> None:
        library = zstd_library()
        options = {library.DecompressionParameter.window_log_max: WINDOW_LOG_MAX}
        self._stream = library.ZstdDecompressor(options=options)

    @override
    def step(self, packed: bytes) -> tuple[bytes, bytes, bool]:
        stream = self._stream
        given = stream.decompress(packed, max_length=STEP_BYTES)
        if stream.eof:
            return given, stream.unused_data, False
        return given, b"", not stream.needs_input  # it keeps the packed bytes itself


@cache
def zstd_library() -> Any:
    """Imports and returns the zstd library, at the first body that needs it."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def _deflate(packed: bytes) -> Frame:
    """A frame of deflate with zlib's header, whose first byte ends in the four bits of an 8, or
    without the header, as some clients send it."""
    return _Zlib(zlib.MAX_WBITS if packed[0] & 0x0F == 8 else -zlib.MAX_WBITS)


ENCODINGS: Mapping[str, Callable[[bytes], Frame]] = {
    "zstd": lambda _: _Zstd(),
    "gzip": lambda _: _Zlib(zlib.MAX_WBITS | 16),
    "deflate": _deflate,
}
"""Content-Encoding that is supported -> function that makes a frame from the first packed bytes."""
_ALSO = {"x-gzip": "gzip", "identity": ""}


class Unpacker:
    """Unpacks one body."""

    def __init__(self, encoding: str) -> None:
        """encoding: one of ENCODINGS."""
        self._encoding = encoding
        self._frame: Frame | None = None
        self._frames = 0

    @override
    def __repr__(self) -> str:
        return f"<Unpacker {self._encoding}, frame {self._frames}>"

    def steps(self, packed: bytes) -> Iterator[bytes]:
        """Unpacks the next bytes of the body in steps: yields the bytes of each step, perhaps none.
        Raises CannotUnpack."""
        for start in range(0, len(packed), PIECE_BYTES):
            piece = packed[start : start + PIECE_BYTES]
            more = False
            while piece or more:
                frame = self._frame or self._next(piece)
                try:
                    given, piece, more = frame.step(piece)
                except Exception as error:  # zlib and zstd have errors of their own
                    raise CannotUnpack(f"the body is not valid {self._encoding}: {error}") from None
                if frame.ended:
                    self._frame = None
                yield given

    def end(self) -> None:
        """Ends the body; raises CannotUnpack if it is not whole."""
        if self._frame is not None:
            raise CannotUnpack(f"the body ends before the end of its {self._encoding}")

    def _next(self, packed: bytes) -> Frame:
        self._frames += 1
        if self._frames > FRAMES_MAX or (self._frames > 1 and self._encoding == "deflate"):
            raise CannotUnpack(f"the body has bytes after the end of its {self._encoding}")
        self._frame = ENCODINGS[self._encoding](packed)
        return self._frame


def encoding_of(headers: MultiMapping[str]) -> str:
    """The encoding of a request's body, one of ENCODINGS; empty: not packed. Raises GatewayRefusal
    for an unsupported encoding, and for several.
    """
    named = ",".join(headers.getall("Content-Encoding", ())).strip().lower()
    named = _ALSO.get(named, named)
    if named and named not in ENCODINGS:
        taken = ", ".join(ENCODINGS)
        message = f"Content-Encoding is {named[:64]!r}; expected one of {taken}"
        raise GatewayRefusal("UNSUPPORTED_ENCODING", message)
    return named
