"""Decodes SGLang's KV events, of every release since 0.4.6.

The structs below are its field tables: the order is that of the array encoding (up to 0.5.19), the
names are those of the map encoding (0.5.20 and later).

Every block counts: there is one radix tree, whose pages are full attention. SGLang separates blocks
by a request's `extra_key`, and before 0.5.22 by its LoRA, without naming them in its events, so
that kvroute can't separate them. Source: sglang/srt/disaggregation/kv_events.py in the wheels of
0.4.6.post5 to 0.5.23.
"""

from typing import Any

import msgspec
from msgspec import Raw, Struct

from events.engines.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    EngineEvent,
)
from events.engines.wire import (
    Cleared,
    ClearedArray,
    Hashes,
    Removed,
    Schema,
    check_lengths,
    decode_batch,
    read_block_size,
    read_hash,
    read_hashes,
    read_token_ids,
)

_ABSENT = Raw()


class _Stored(Struct, tag="BlockStored"):
    block_hashes: Hashes
    parent_block_hash: int | bytes | None
    token_ids: Raw
    block_size: int | None  # the page size, times the DCP size
    lora_id: int | str | None = None  # last field of 0.4.6; null in every release
    medium: str | None = None  # 0.5.9
    cache_salt: str | None = None  # 0.5.20, with each event of a chain
    session_id: Raw = _ABSENT  # 0.5.20
    lora_name: str | None = None  # 0.5.22


class _StoredArray(_Stored, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(Removed, array_like=True, tag="BlockRemoved"):
    pass


_WireEvent = _Stored | Removed | Cleared


def decode(payload: bytes) -> EngineBatch:
    """Decodes a payload of SGLang's event publisher; never raises."""
    return decode_batch(payload, SCHEMA)


def _meaning(event: _WireEvent) -> EngineEvent:
    match event:
        case _Stored():
            return _stored(event)
        case Removed():
            return BlocksRemoved(hashes=read_hashes(event.block_hashes), medium=event.medium)
        case Cleared():
            return BlocksCleared()


SCHEMA: Schema[Any] = Schema(
    arrays=msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | ClearedArray),
    maps=msgspec.msgpack.Decoder(_Stored | Removed | Cleared),
    meaning=_meaning,
)


def _stored(event: _Stored) -> BlocksStored:
    hashes = read_hashes(event.block_hashes)
    parent = None if event.parent_block_hash is None else read_hash(event.parent_block_hash)
    block_size = read_block_size(event.block_size)
    token_ids = read_token_ids(event.token_ids)
    check_lengths(len(token_ids), len(hashes), block_size)
    lora_name = event.lora_name or None
    return BlocksStored(
        hashes=hashes,
        parent=parent,
        token_ids=token_ids,
        block_size=block_size,
        medium=event.medium,
        lora_name=lora_name,
        unnamed_lora=lora_name is None and bool(event.lora_id),
        cache_salt=event.cache_salt or None,
    )
