"""Unpacks compressed gRPC messages, within a bound on their unpacked bytes. Pure."""

import zlib
from collections.abc import Generator

ACCEPTED = b"identity, deflate, gzip"
"""Encodings that a peer may use for messages: the value of the header `grpc-accept-encoding`."""
STEP_BYTES = 1 << 20
"""Most bytes that one step of unpacking makes, in about 1 ms."""
_READ_BYTES = 1 << 16
_WINDOW_BITS = {"deflate": zlib.MAX_WBITS, "gzip": zlib.MAX_WBITS | 16}


class TooLargeError(ValueError):
    """A message is larger than its bound."""


def unpacking(content: bytes, encoding: str, bytes_max: int) -> Generator[None, None, bytes]:
    """A generator that unpacks a message in steps of STEP_BYTES; its result is the bytes. encoding:
    the call's `grpc-encoding`. Raises TooLargeError, LookupError for an unsupported encoding, and
    ValueError for bytes that are not valid in the encoding.
    """
    if encoding == "identity":
        raise ValueError("a message is marked as compressed, but the call names no grpc-encoding")
    reader = zlib.decompressobj(_WINDOW_BITS[encoding])
    parts, left, at = [], STEP_BYTES, 0
    while not reader.eof:
        packed = reader.unconsumed_tail
        if not packed:
            packed = content[at : at + _READ_BYTES]
            at += len(packed)
        try:
            part = reader.decompress(packed, min(left, bytes_max + 1))
        except zlib.error as error:
            raise ValueError(f"a message is not valid {encoding}: {error}") from None
        if not part and not packed:
            break
        parts.append(part)
        left -= len(part)
        bytes_max -= len(part)
        if bytes_max < 0:
            raise TooLargeError
        if left <= 0:
            left = STEP_BYTES
            yield
    if not reader.eof or reader.unused_data or at < len(content):
        raise ValueError(f"a message's {encoding} is cut off, or more bytes follow it")
    return b"".join(parts)
