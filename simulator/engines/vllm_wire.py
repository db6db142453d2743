"""Encodes KV events in the very bytes that vLLM 0.32 publishes. Pure.

A batch is the MessagePack array [Unix time, [events], rank]; an event is a map whose first key is
its type. Fields come in vLLM's order. Fields without a default in vLLM (lora_id, medium, lora_name)
are sent even when null, the others only when they have a value.
Checked byte for byte against recorded messages in tests/simulator/test_wires.py.
"""

from collections.abc import Iterable
from typing import assert_never

import msgspec

from indexer.identity import Tier
from simulator.engines.block_pool import Cleared, PoolEvent, Removed, Stored

MEDIUM = "GPU"
HOST_MEDIUM = "CPU"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The sequence number of the message that ends a replay."""


class _BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", omit_defaults=True):
    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: tuple[tuple[str, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None


class _BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", omit_defaults=True):
    block_hashes: tuple[int, ...]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    """Event that the cache was reset, the same for vLLM and SGLang."""


def encode_batch(
    unix_s: float, events: Iterable[PoolEvent], block_size: int, dp_rank: int = 0
) -> bytes:
    """The payload of one message: all events of one step, in order."""
    wire_events = [wire for event in events for wire in _wire_events(event, block_size)]
    return msgspec.msgpack.encode((unix_s, wire_events, dp_rank))


def encode_sequence(sequence: int) -> bytes:
    """The frame of a message that has its sequence number: 8 bytes, big-endian."""
    return sequence.to_bytes(8, "big")


_Event = _BlockStored | _BlockRemoved | AllBlocksCleared


def _wire_events(event: PoolEvent, block_size: int) -> list[_Event]:
    match event:
        case Stored(tier=Tier.HOST):
            # The offloading connector's default: an event per block, with its hash only.
            return [
                _BlockStored((block_hash,), None, (), 0, None, HOST_MEDIUM, None, group_idx=0)
                for block_hash in event.hashes
            ]
        case Stored():
            stored = _BlockStored(
                block_hashes=event.hashes,
                parent_block_hash=event.parent,
                token_ids=event.token_ids,
                block_size=block_size,
                lora_id=event.lora_id,
                medium=MEDIUM,
                lora_name=event.lora_name,
                extra_keys=event.extra_keys,
                group_idx=0,
                kv_cache_spec_kind="full_attention",
                session_id=event.session_id,
            )
            return [stored]
        case Removed(tier=Tier.HOST):
            return [_BlockRemoved(event.hashes, medium=HOST_MEDIUM, group_idx=0)]
        case Removed():  # an event per block
            return [
                _BlockRemoved((block_hash,), medium=MEDIUM, group_idx=0)
                for block_hash in event.hashes
            ]
        case Cleared():
            return [AllBlocksCleared()]
        case _:
            assert_never(event)
