"""A prompt's block hashes, from any common form to the bytes in a message.

Law: equal hashes make equal bytes, whatever their form.
"""

import sys
from array import array
from collections.abc import Iterable

from kvroute.client.messages.wire import head
from kvroute.v1 import BlockHashes

_U64 = "Q"
_HASHES = BlockHashes.HASHES_FIELD_NUMBER
_LITTLE = sys.byteorder == "little"


def block_hashes_of(
    hashes: Iterable[int], block_size: int, prompt_tokens: int
) -> tuple[bytes, ...]:
    """The message for hashes of full blocks, a kvroute.v1.BlockHashes, in pieces.

    bytes and bytearray are little-endian u64 already. A buffer of unsigned 64-bit integers (numpy,
    array) is packed without a Python int for each; lists, tuples and other iterables take a little
    longer. Raises TypeError for anything but a row of integers; ValueError for a hash that takes
    more than 64 bits or is negative, and for bytes that don't hold whole hashes.
    """
    rest = BlockHashes(block_size=block_size, prompt_tokens=prompt_tokens).SerializeToString()
    raw = bytes(hashes) if isinstance(hashes, (bytes, bytearray)) else _from_buffer(hashes)
    if raw is None:
        try:
            listed = array(_U64, hashes)
        except OverflowError as error:
            raise ValueError("a block hash is outside 0 .. 2^64 - 1") from error
        if not _LITTLE:
            listed.byteswap()
        raw = listed.tobytes()
    if len(raw) % 8:
        raise ValueError(f"{len(raw)} bytes of block hashes; each takes 8")
    return (head(_HASHES, len(raw)), raw, rest) if raw else (rest,)  # packed fixed64


def _from_buffer(hashes: Iterable[int]) -> bytes | None:
    """Little-endian u64 of a flat buffer of u64; None for anything else."""
    try:
        view = memoryview(hashes)  # type: ignore[arg-type]  # raises unless it is a buffer
    except (TypeError, ValueError, BufferError):
        return None
    with view:
        flat = view.ndim == 1 and view.itemsize == 8 and view.format in {"Q", "L"}
        return view.tobytes() if flat and _LITTLE else None
