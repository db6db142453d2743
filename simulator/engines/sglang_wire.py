"""Encodes KV events in the very bytes that SGLang 0.5.23 publishes. Pure.

The form of a batch is vLLM's (vllm_wire.py); an event's hashes are signed, and it lacks fields that
only vLLM has. A prompt's cache salt is in the first event of its blocks only; SGLang repeats it.
Checked byte for byte against recorded messages in tests/simulator/test_wires.py.
"""

from collections.abc import Iterable
from typing import assert_never

import msgspec

from simulator.engines.block_pool import Cleared, PoolEvent, Removed, Stored
from simulator.engines.vllm_wire import AllBlocksCleared

MEDIUM = "GPU"


class _BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", omit_defaults=True):
    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: None
    medium: str
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class _BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", omit_defaults=True):
    block_hashes: tuple[int, ...]
    medium: str


_Event = _BlockStored | _BlockRemoved | AllBlocksCleared


def encode_batch(
    unix_s: float, events: Iterable[PoolEvent], block_size: int, dp_rank: int = 0
) -> bytes:
    """The payload of one message: all events of one step, in order."""
    wire_events = [_wire_event(event, block_size) for event in events]
    return msgspec.msgpack.encode((unix_s, wire_events, dp_rank))


def _wire_event(event: PoolEvent, block_size: int) -> _Event:
    match event:
        case Stored():
            return _BlockStored(
                block_hashes=tuple(map(_signed, event.hashes)),
                parent_block_hash=None if event.parent is None else _signed(event.parent),
                token_ids=event.token_ids,
                block_size=block_size,
                lora_id=None,
                medium=MEDIUM,
                cache_salt=_salt(event),
                session_id=event.session_id,
                lora_name=event.lora_name,
            )
        case Removed():
            return _BlockRemoved(tuple(map(_signed, event.hashes)), MEDIUM)
        case Cleared():
            return AllBlocksCleared()
        case _:
            assert_never(event)


def _signed(block_hash: int) -> int:
    return block_hash - (1 << 64) if block_hash >> 63 else block_hash


def _salt(event: Stored) -> str | None:
    """The cache salt: the extra key of the first block that is not the LoRA's name; None: none."""
    keys = event.extra_keys[0] if event.extra_keys else None
    return next((key for key in keys or () if key != event.lora_name), None)
