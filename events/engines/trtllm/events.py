"""Decodes the KV events that TensorRT-LLM streams over ZMQ (`kv_events_config`, publisher `zmq`).

Batches are arrays and events maps, with vLLM's names. There is one event stream a rank, of the
layer group with the largest attention window, so every block counts. Blocks depend on the LoRA and
the cache salt, and the events name neither: of a LoRA they have a number alone.
Source: tensorrt_llm/_torch/pyexecutor/kv_cache_events.py of NVIDIA/TensorRT-LLM, main branch, read
2026-11-28.
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
    Hashes,
    Removed,
    Schema,
    Unreadable,
    check_lengths,
    decode_batch,
    read_block_size,
    read_hash,
    read_hashes,
    read_token_ids,
)


class _Item(Struct):
    """A part of an image or the like in a block."""

    hash: str
    uuid: str | None = None
    """The request's own name of the item."""


class _Stored(Struct, tag="BlockStored"):
    block_hashes: Hashes
    parent_block_hash: int | bytes | None
    token_ids: Raw
    block_size: int | None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    mm_keys: list[list[_Item]] | None = None


_DECODER = msgspec.msgpack.Decoder(_Stored | Removed | Cleared)


def decode(payload: bytes) -> EngineBatch:
    """Decodes a payload of TensorRT-LLM's event publisher; never raises."""
    return decode_batch(payload, _SCHEMA)


def _meaning(event: _Stored | Removed | Cleared) -> EngineEvent:
    match event:
        case _Stored():
            return _stored(event)
        case Removed():
            return BlocksRemoved(hashes=read_hashes(event.block_hashes), medium=event.medium)
        case Cleared():
            return BlocksCleared()


_SCHEMA: Schema[Any] = Schema(arrays=_DECODER, maps=_DECODER, meaning=_meaning)


def _stored(event: _Stored) -> BlocksStored:
    hashes = read_hashes(event.block_hashes)
    block_size = read_block_size(event.block_size)
    token_ids = read_token_ids(event.token_ids)
    check_lengths(len(token_ids), len(hashes), block_size)
    items = event.mm_keys or []
    if items and len(items) != len(hashes):
        raise Unreadable(f"mm_keys has {len(items)} entries for {len(hashes)} blocks")
    lora_name = event.lora_name or None
    return BlocksStored(
        hashes=hashes,
        parent=None if event.parent_block_hash is None else read_hash(event.parent_block_hash),
        token_ids=token_ids,
        block_size=block_size,
        medium=event.medium,
        lora_name=lora_name,
        unnamed_lora=lora_name is None and event.lora_id is not None,
        item_ids=tuple(tuple(item.uuid or item.hash for item in block) for block in items)
        if any(items)
        else None,
    )
