"""Every version's schema of events is read as far as it goes."""

from array import array
from typing import Any

import msgspec
import pytest

from events.engines.events import BlocksCleared, BlocksRemoved, BlocksStored, EngineBatch
from events.engines.table import READINGS
from tests.events.engines.encoded import (
    ENGINE_FIELDS,
    ITEM,
    SGLANG_REMOVED,
    SGLANG_STORED,
    U64,
    VLLM_REMOVED,
    VLLM_STORED,
    Decode,
    complaint,
    encode,
    only,
    stored,
)

# Every version's schema

FULL_VLLM: dict[str, Any] = {
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
    "block_size": 4,
    "lora_id": 3,
    "medium": "CPU",
    "lora_name": "adapter",
    "extra_keys": [["adapter"], ["adapter", [ITEM, -2]]],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 512,
    "locality": "REMOTE",
    "ownership": "tier-2",
    "session_id": "session",
}
FULL_SGLANG: dict[str, Any] = {
    "block_hashes": [-1, 12],
    "parent_block_hash": -10,
    "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
    "block_size": 4,
    "lora_id": None,
    "medium": "CPU_PINNED",
    "cache_salt": "tenant",
    "session_id": "session",
    "lora_name": "adapter",
}
FULL_TRTLLM: dict[str, Any] = {
    **{name: FULL_SGLANG[name] for name in ("block_hashes", "parent_block_hash", "token_ids")},
    "block_size": 4,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": "adapter",
    "mm_keys": [[{"type": "mm_key", "hash": ITEM, "start_offset": 1}], []],
}
FULL = {"vllm": FULL_VLLM, "sglang": FULL_SGLANG, "trtllm": FULL_TRTLLM}


def versions(fields: list[tuple[str, str]]) -> list[tuple[str, int]]:
    """Each version that added fields, and how many it sends."""
    return [
        (version, i + 1)
        for i, (_, version) in enumerate(fields)
        if i + 1 == len(fields) or fields[i + 1][1] != version
    ]


def encodings(kind: str, fields: dict[str, Any]) -> list[Any]:
    return [[kind, *fields.values()], {"type": kind} | fields]


@pytest.mark.parametrize(("version", "count"), versions(VLLM_STORED))
def test_vllm_stores_of_each_version_are_read_as_far_as_they_tell(version: str, count: int) -> None:
    fields = dict(list(FULL_VLLM.items())[:count])
    for event in encodings("BlockStored", fields):
        read = only(READINGS["vllm"].decode(encode(event)))
        full_attention = "kv_cache_spec_kind" not in fields
        assert read.hashes == (11, 12)
        assert read.parent == 10
        assert read.block_size == 4
        assert list(read.token_ids) == ([1, 2, 3, 4, 5, 6, 7, 8] if full_attention else [])
        assert read.medium == fields.get("medium")
        assert read.lora_name == fields.get("lora_name")
        assert read.unnamed_lora == ("lora_name" not in fields)
        assert read.cache_salt is None
        has_items = "extra_keys" in fields and full_attention
        assert read.item_ids == (((), (ITEM,)) if has_items else None)
        assert read.group == fields.get("group_idx")
        assert read.full_attention == full_attention
        assert read.remote == ("locality" in fields)
        assert not read.unhashable


@pytest.mark.parametrize(("version", "count"), versions(VLLM_REMOVED))
def test_vllm_removals_of_each_version_are_read_as_far_as_they_tell(
    version: str, count: int
) -> None:
    fields = dict(list(({n: FULL_VLLM[n] for n, _ in VLLM_REMOVED}).items())[:count])
    for event in encodings("BlockRemoved", fields):
        read = only(READINGS["vllm"].decode(encode(event)))
        assert read == BlocksRemoved(
            (11, 12), fields.get("medium"), fields.get("group_idx"), "locality" in fields
        )


@pytest.mark.parametrize(("version", "count"), versions(SGLANG_STORED))
def test_sglang_stores_of_each_version_are_read_as_far_as_they_tell(
    version: str, count: int
) -> None:
    fields = dict(list(FULL_SGLANG.items())[:count])
    for event in encodings("BlockStored", fields):
        assert only(READINGS["sglang"].decode(encode(event))) == BlocksStored(
            hashes=(U64, 12),
            parent=(1 << 64) - 10,
            token_ids=array("I", range(1, 9)),
            block_size=4,
            medium=fields.get("medium"),
            lora_name=fields.get("lora_name"),
            cache_salt=fields.get("cache_salt"),
        )


@pytest.mark.parametrize(("version", "count"), versions(SGLANG_REMOVED))
def test_sglang_removals_of_each_version_are_read_as_far_as_they_tell(
    version: str, count: int
) -> None:
    fields = dict(list(({n: FULL_SGLANG[n] for n, _ in SGLANG_REMOVED}).items())[:count])
    for event in encodings("BlockRemoved", fields):
        read = only(READINGS["sglang"].decode(encode(event)))
        assert read == BlocksRemoved((U64, 12), fields.get("medium"))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])  # the others never sent arrays
def test_arrays_longer_than_any_known_version_are_read(engine: str) -> None:
    kinds = ENGINE_FIELDS[engine]
    full = FULL[engine]
    for kind, fields in kinds.items():
        longer = [kind, *(full[name] for name, _ in fields), "newest", {"and": [1, 2]}, None]
        assert len(READINGS[engine].decode(encode(longer)).events) == 1
    assert only(READINGS[engine].decode(encode(["AllBlocksCleared", "GPU"]))) == BlocksCleared()


@pytest.mark.parametrize("count", range(4))
def test_arrays_shorter_than_the_first_version_are_dropped(decode: Decode, count: int) -> None:
    values = [[1], None, [1, 2], 2][:count]
    assert "BlockStored" in complaint(decode(encode(["BlockStored", *values])))
    assert "BlockRemoved" in complaint(decode(encode(["BlockRemoved"])))


@pytest.mark.parametrize("name", ["block_hashes", "parent_block_hash", "token_ids", "block_size"])
def test_maps_without_a_field_that_every_version_sends_are_dropped(
    decode: Decode, name: str
) -> None:
    event = stored()
    del event[name]
    # A missing parent above all must not pass for the start of a chain.
    assert name in complaint(decode(encode(event)))


def test_unknown_fields_of_maps_are_ignored(decode: Decode) -> None:
    event = stored(newest={"deep": [1, {"er": None}]}, other=b"\xff")
    assert only(decode(encode(event))).hashes == (11, 12)


@pytest.mark.parametrize(
    ("batch", "rank"),
    [
        ([1.5, [], 3], 3),
        ([1.5, [], None], None),
        ([1.5, []], None),
        ([1.5, [], 3, "newest"], 3),
        ({"ts": 1.5, "events": [], "data_parallel_rank": 3}, 3),
        ({"ts": 1.5, "events": [], "attn_dp_rank": 2, "newest": 1}, 2),
        ({"ts": 1.5, "events": []}, None),
        ([2, [], 0], 0),
    ],
)
def test_batches_come_as_array_or_map_with_or_without_a_rank(
    decode: Decode, batch: Any, rank: int | None
) -> None:
    decoded = decode(msgspec.msgpack.encode(batch))
    assert decoded == EngineBatch(decoded.time_s, rank, ())
    assert decoded.time_s in (1.5, 2.0)
