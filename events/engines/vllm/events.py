"""Decodes vLLM's KV events, of every release since 0.9.

The structs below are its field tables: the order is that of the array encoding (up to 0.23), the
names are those of the map encoding (0.24 and later). Both leave trailing or default fields out.

Groups that count: vLLM sends an event for each KV cache group, and a group holds a prefix only if
it keeps *every* block of the prefix. So full attention, its MLA form and its form with attention
sinks count; sliding windows, chunked-local, Mamba, cross-attention and mixtures that vLLM calls
"unknown" do not. An event without a kind (before 0.22) is full attention.
Source: vllm/v1/kv_cache_interface.py, KVCacheSpecKind and get_kv_cache_spec_kind, and the wheels of
0.9.2 to 0.32.0 for the fields.
"""

from typing import Any, NamedTuple

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
    NO_TOKENS,
    READ_ERRORS,
    Cleared,
    ClearedArray,
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

FULL_ATTENTION_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})

_ABSENT = Raw()


class _Stored(Struct, tag="BlockStored"):
    block_hashes: Hashes
    parent_block_hash: int | bytes | None
    token_ids: Raw
    block_size: int | None
    lora_id: int | None = None  # last field of 0.9
    medium: str | None = None  # 0.10.2
    lora_name: str | None = None  # 0.14
    extra_keys: Raw = _ABSENT  # 0.17
    group_idx: int | None = None  # 0.20
    kv_cache_spec_kind: str | None = None  # 0.22
    kv_cache_spec_sliding_window: Raw = _ABSENT  # 0.22
    locality: str | None = None  # 0.26
    # 0.29 adds `ownership`, 0.30 `session_id`: the owner of a block changes nothing for a router.


class _Removed(Removed, tag="BlockRemoved"):
    # `medium` since 0.10.2
    group_idx: int | None = None  # 0.20
    locality: str | None = None  # 0.26
    # 0.29 adds `ownership`.


class _StoredArray(_Stored, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(_Removed, array_like=True, tag="BlockRemoved"):
    pass


_WireEvent = _Stored | _Removed | Cleared

_EXTRA_KEYS: msgspec.msgpack.Decoder[list[list[Any] | None] | None] = msgspec.msgpack.Decoder(
    list[list[Any] | None] | None
)


def decode(payload: bytes) -> EngineBatch:
    """Decodes a payload of vLLM's event publisher; never raises."""
    return decode_batch(payload, SCHEMA)


def _meaning(event: _WireEvent) -> EngineEvent:
    match event:
        case _Stored():
            return _stored(event)
        case _Removed():
            return BlocksRemoved(
                hashes=read_hashes(event.block_hashes),
                medium=event.medium,
                group=_group(event.group_idx),
                remote=_remote(event.locality),
            )
        case Cleared():
            return BlocksCleared()


SCHEMA: Schema[Any] = Schema(
    arrays=msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | ClearedArray),
    maps=msgspec.msgpack.Decoder(_Stored | _Removed | Cleared),
    meaning=_meaning,
)


def _stored(event: _Stored) -> BlocksStored:
    hashes = read_hashes(event.block_hashes)
    parent = None if event.parent_block_hash is None else read_hash(event.parent_block_hash)
    block_size = read_block_size(event.block_size)
    kind = event.kv_cache_spec_kind
    full_attention = kind is None or kind in FULL_ATTENTION_KINDS
    lora_name = event.lora_name or None
    token_ids = NO_TOKENS
    keys = _NO_KEYS
    if full_attention:
        token_ids = read_token_ids(event.token_ids)
        check_lengths(len(token_ids), len(hashes), block_size)
        keys = _read_extra_keys(event, len(hashes))
    # Other groups skip blocks, so their tokens don't match their hashes; and no request needs them.
    return BlocksStored(
        hashes=hashes,
        parent=parent,
        token_ids=token_ids,
        block_size=block_size,
        medium=event.medium,
        lora_name=lora_name,
        # LoRA ids count from 1, and belong to one process: the next process assigns them again.
        unnamed_lora=lora_name is None and bool(event.lora_id),
        cache_salt=keys.cache_salt,
        item_ids=keys.item_ids,
        unhashable=keys.unhashable,
        group=_group(event.group_idx),
        full_attention=full_attention,
        remote=_remote(event.locality),
    )


class _ExtraKeys(NamedTuple):
    cache_salt: str | None = None
    item_ids: tuple[tuple[str, ...], ...] | None = None
    unhashable: bool = False


_NO_KEYS = _ExtraKeys()


def _read_extra_keys(event: _Stored, block_count: int) -> _ExtraKeys:
    """The content of blocks besides their tokens, from vLLM's untagged values.

    extra_keys has an entry for each block: null, or LoRA name, multimodal items, salt, embedding
    digests, in this order (generate_block_hash_extra_keys in vllm/v1/core/kv_cache_utils.py).

    - The LoRA's name is on every block: the first string that equals `lora_name`. (A salt of the
      same text comes after it.)
    - An item is a pair (id, offset). Before vllm#36708 it was the id alone; releases with
      `group_idx`, or with the map encoding, all send pairs.
    - The salt is on block 0 of a chain without a parent only: any other string there. Where ids
      may stand alone, 64 hex digits are read as an id, which is vLLM's form for an image; ids of
      the user's own choice are read as a salt, which costs hits on that chain.
    - A string elsewhere, bytes (a digest of prompt embeddings), or any other value is content that
      only the engine has: unhashable.
    """
    raw = event.extra_keys
    if not len(raw):
        return _NO_KEYS
    try:
        entries = _EXTRA_KEYS.decode(raw)
    except READ_ERRORS as error:
        raise Unreadable(f"extra_keys can't be read: {error}") from None
    if entries is None:
        return _NO_KEYS
    if len(entries) != block_count:
        raise Unreadable(f"extra_keys has {len(entries)} entries for {block_count} blocks")
    if not any(entries):
        return _NO_KEYS

    ids_are_pairs = event.group_idx is not None or not isinstance(event, _StoredArray)
    cache_salt: str | None = None
    unhashable = False
    item_ids: list[tuple[str, ...]] = []
    for i, entry in enumerate(entries):
        first_in_chain = i == 0 and event.parent_block_hash is None
        lora_name = event.lora_name
        block_items: list[str] = []
        for key in entry or ():
            match key:
                case str() if key == lora_name:
                    lora_name = None
                case str() if not ids_are_pairs and (not first_in_chain or _is_digest(key)):
                    block_items.append(_item_id(key, event.lora_name))
                case str() if first_in_chain and cache_salt is None:
                    cache_salt = key
                case [str() as item_id, int()]:
                    block_items.append(_item_id(item_id, event.lora_name))
                case _:
                    unhashable = True
        item_ids.append(tuple(block_items))
    return _ExtraKeys(cache_salt or None, tuple(item_ids) if any(item_ids) else None, unhashable)


def _item_id(identifier: str, lora_name: str | None) -> str:
    """An item's id without the "<lora>:" that vLLM puts before it when the LoRA reaches into the
    vision tower (enable_tower_connector_lora): the LoRA is in the block's seed already."""
    return identifier.removeprefix(f"{lora_name}:") if lora_name else identifier


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(c in "0123456789abcdefABCDEF" for c in text)


def _group(value: int | None) -> int | None:
    if value is not None and value < 0:
        raise Unreadable(f"group_idx is {value}, which is out of range")
    return value


def _remote(locality: str | None) -> bool:
    """Whether blocks are not the publisher's own: its locality is set and is not LOCAL."""
    return locality is not None and locality != "LOCAL"
