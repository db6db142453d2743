"""Compressed messages of gRPC, unpacked within a bound. Pure."""

import zlib

ACCEPTED = b"identity, deflate, gzip"
"""What a peer may send, as `grpc-accept-encoding` has it."""
_WINDOW_BITS = {"deflate": zlib.MAX_WBITS, "gzip": zlib.MAX_WBITS | 16}


class TooLargeError(ValueError):
    """A message of more bytes than the bound."""


def unpacked(content: bytes, encoding: str, bytes_max: int) -> bytes:
    """A message's bytes. encoding: the call's `grpc-encoding`. Raises TooLargeError, LookupError
    for an encoding that is not read here, and ValueError for bytes that are not of it."""
    if encoding == "identity":
        raise ValueError("a message that says it is compressed, in a call without compression")
    reader = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        plain = reader.decompress(content, bytes_max + 1)
    except zlib.error as error:
        raise ValueError(f"no {encoding}: {error}") from None
    if len(plain) > bytes_max:
        raise TooLargeError
    if not reader.eof or reader.unused_data:
        raise ValueError(f"no whole {encoding}")
    return plain
