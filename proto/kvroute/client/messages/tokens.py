"""Converts a prompt's token ids from any form that tokenizers return to little-endian u32 bytes,
and back, and block hashes from any form to the bytes in a message.

Law: equal numbers make equal bytes, whatever their form.
"""

import sys
from array import array
from collections.abc import Iterable

import grpc

from kvroute.client.errors import InvalidRequest
from kvroute.client.messages.wire import head
from kvroute.v1 import BlockHashes

_U32 = "I" if array("I").itemsize == 4 else "L"
_LITTLE = sys.byteorder == "little"


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """The token ids as bytes, a little-endian u32 for each.

    bytes, bytearray and a memoryview of bytes are little-endian u32 already and stay as they are. A
    buffer of integers (array, numpy) is narrowed without a Python int per token; lists, tuples and
    other iterables of ints take a little longer.
    Raises InvalidRequest for bytes that don't hold whole ids, an id outside 0 .. 2^32 - 1, and
    anything but a flat row of integers.
    """
    if isinstance(token_ids, (bytes, bytearray)):
        return _whole(bytes(token_ids))
    if isinstance(token_ids, memoryview) and token_ids.format == "B":
        return _whole(token_ids.tobytes())
    if not isinstance(token_ids, (list, tuple)):
        packed = _from_buffer(token_ids)
        if packed is not None:
            return packed
    try:
        ids = array(_U32, token_ids)
    except OverflowError as error:
        raise invalid_prompt("a token id is outside 0 .. 2^32 - 1") from error
    except TypeError as error:
        raise invalid_prompt(f"token_ids is not a flat row of integers: {error}") from error
    if not _LITTLE:
        ids.byteswap()
    return ids.tobytes()


def unpack_tokens(token_bytes: bytes) -> "array[int]":
    """The ids in little-endian u32 bytes; raises InvalidRequest for bytes that don't hold whole
    ids."""
    ids = array(_U32, _whole(token_bytes))
    if not _LITTLE:
        ids.byteswap()
    return ids


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
    raw = bytes(hashes) if isinstance(hashes, (bytes, bytearray)) else _hashes_from_buffer(hashes)
    if raw is None:
        try:
            listed = array("Q", hashes)
        except OverflowError as error:
            raise ValueError("a block hash is outside 0 .. 2^64 - 1") from error
        if not _LITTLE:
            listed.byteswap()
        raw = listed.tobytes()
    if len(raw) % 8:
        raise ValueError(f"block_hashes have {len(raw)} bytes, no multiple of 8: each hash takes 8")
    if not raw:
        return (rest,)
    return head(BlockHashes.HASHES_FIELD_NUMBER, len(raw)), raw, rest  # packed fixed64


def _from_buffer(token_ids: Iterable[int]) -> bytes | None:
    """The token ids of a buffer, as little-endian u32; None for other objects, and for buffers that
    only iteration can read."""
    try:
        view = memoryview(token_ids)  # type: ignore[arg-type]  # raises unless it is a buffer
    except (TypeError, ValueError, BufferError):
        return None
    with view:
        if view.ndim != 1:
            raise invalid_prompt(f"token_ids has {view.ndim} dimensions; a prompt has one")
        if view.format not in {"b", "B", "h", "H", "i", "I", "l", "L", "q", "Q"}:
            # Iteration reads integers of another byte order ('>i'), and rejects floats.
            return None
        if not _LITTLE or view.itemsize < 4:
            return None
        raw = view.tobytes()
        size, signed = view.itemsize, view.format.islower()
    if size == 4:
        # The highest byte of a number that isn't negative is below 128: isascii() at C speed.
        if signed and not raw[3::4].isascii():
            raise invalid_prompt("a token id is negative")
        return raw
    words = memoryview(raw).cast("I")
    high = words[1::2].tobytes()
    if high.count(0) != len(high):
        raise invalid_prompt("a token id is outside 0 .. 2^32 - 1")
    return words[::2].tobytes()


def _hashes_from_buffer(hashes: Iterable[int]) -> bytes | None:
    """Little-endian u64 of a flat buffer of u64; None for anything else."""
    try:
        view = memoryview(hashes)  # type: ignore[arg-type]  # raises unless it is a buffer
    except (TypeError, ValueError, BufferError):
        return None
    with view:
        flat = view.ndim == 1 and view.itemsize == 8 and view.format in {"Q", "L"}
        return view.tobytes() if flat and _LITTLE else None


def _whole(raw: bytes) -> bytes:
    if len(raw) % 4:
        raise invalid_prompt(f"token_ids have {len(raw)} bytes, no multiple of 4: each id takes 4")
    return raw


def invalid_prompt(message: str) -> InvalidRequest:
    """The error for a prompt that can't be sent."""
    return InvalidRequest(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_PROMPT", message)
