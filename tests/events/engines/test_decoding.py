"""Engine bytes against what they say: real captures, every version's schema, and hostile input."""

import base64
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from events.engines.decoding import DECODERS
from events.engines.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    EngineEvent,
)
from events.engines.wire import (
    BLOCK_SIZE_MAX,
    EVENTS_MAX,
    PAYLOAD_BYTES_MAX,
    UNKNOWN_KIND_CHARS,
)

GOLDEN = Path(__file__).parents[2] / "golden"
REWRITE = os.environ.get("KVROUTE_REWRITE_GOLDEN") == "1"
CAPTURES = sorted(str(path.parent.relative_to(GOLDEN)) for path in GOLDEN.glob("**/frames.jsonl"))

# ENGINE_FIELDS is a second writing-down of the engines' structs, so that a slip in
# the decoders' tables shows: (field, first version that sends it).
VLLM_STORED = [
    ("block_hashes", "0.9"),
    ("parent_block_hash", "0.9"),
    ("token_ids", "0.9"),
    ("block_size", "0.9"),
    ("lora_id", "0.9"),
    ("medium", "0.10.2"),
    ("lora_name", "0.14"),
    ("extra_keys", "0.17"),
    ("group_idx", "0.20"),
    ("kv_cache_spec_kind", "0.22"),
    ("kv_cache_spec_sliding_window", "0.22"),
    ("locality", "0.26"),
    ("ownership", "0.29"),
    ("session_id", "0.30"),
]
VLLM_REMOVED = [
    ("block_hashes", "0.9"),
    ("medium", "0.10.2"),
    ("group_idx", "0.20"),
    ("locality", "0.26"),
    ("ownership", "0.29"),
]
SGLANG_STORED = [
    ("block_hashes", "0.4.6"),
    ("parent_block_hash", "0.4.6"),
    ("token_ids", "0.4.6"),
    ("block_size", "0.4.6"),
    ("lora_id", "0.4.6"),
    ("medium", "0.5.9"),
    ("cache_salt", "0.5.20"),
    ("session_id", "0.5.20"),
    ("lora_name", "0.5.22"),
]
SGLANG_REMOVED = [("block_hashes", "0.4.6"), ("medium", "0.5.9")]
ENGINE_FIELDS = {
    "vllm": {"BlockStored": VLLM_STORED, "BlockRemoved": VLLM_REMOVED},
    "sglang": {"BlockStored": SGLANG_STORED, "BlockRemoved": SGLANG_REMOVED},
}

ITEM = "0123456789abcdef" * 4
U64 = (1 << 64) - 1


def engine_of(capture: str) -> str:
    return "sglang" if capture.startswith("sglang") else "vllm"


def frames(capture: str) -> list[dict[str, Any]]:
    with (GOLDEN / capture / "frames.jsonl").open() as lines:
        return [json.loads(line) for line in lines]


def payload_of(frame: dict[str, Any]) -> bytes:
    return base64.b64decode(frame["payload_b64"])


def encode(*events: Any, rank: int | None = 0, time_s: float = 1.5) -> bytes:
    return msgspec.msgpack.encode([time_s, list(events), rank])


def stored(**changes: Any) -> dict[str, Any]:
    """One map-tagged store of two blocks of four tokens, as vLLM 0.32 sends it."""
    return {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | changes


def removed(**changes: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [11, 12], "medium": "GPU"} | changes


def only(batch: EngineBatch) -> Any:
    """The one event of a batch that has nothing to complain of."""
    assert batch.malformed == ()
    assert batch.unknown_kinds == ()
    (event,) = batch.events
    return event


def vllm_stored(**changes: Any) -> BlocksStored:
    event = only(DECODERS["vllm"](encode(stored(**changes))))
    assert isinstance(event, BlocksStored)
    return event


def complaint(batch: EngineBatch) -> str:
    """Why the one event of a batch was dropped."""
    assert batch.events == ()
    assert batch.unknown_kinds == ()
    (reason,) = batch.malformed
    return reason


# A readable rendering, for the *.decoded.jsonl beside the frames.


def shown_hash(value: int | bytes | None) -> Any:
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


def shown_tokens(token_ids: Any) -> str:
    """How many, the ends, and a hash of them all: whole lists would be most of the file."""
    if not token_ids:
        return "0"
    ends = (
        " ".join(map(str, token_ids))
        if len(token_ids) < 8
        else f"{token_ids[0]} {token_ids[1]} .. {token_ids[-1]}"
    )
    whole = b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)
    return f"{len(token_ids)}: {ends} xxh3 {xxh3_64_hexdigest(whole)}"


def shown_event(event: EngineEvent) -> dict[str, Any]:
    """An event without what is absent or ordinary; the ordinary medium is GPU."""
    shown: dict[str, Any]
    told: dict[str, Any]
    match event:
        case BlocksCleared():
            return {"cleared": True}
        case BlocksRemoved():
            shown = {"removed": [shown_hash(h) for h in event.hashes]}
            told = {"group": event.group, "remote": event.remote}
        case _:
            shown = {
                "stored": [shown_hash(h) for h in event.hashes],
                "parent": shown_hash(event.parent),
                "tokens": shown_tokens(event.token_ids),
                "block_size": event.block_size,
            }
            told = {
                "lora_name": event.lora_name,
                "unnamed_lora": event.unnamed_lora,
                "cache_salt": event.cache_salt,
                "item_ids": event.item_ids,
                "unhashable": event.unhashable,
                "group": event.group,
                "not_full_attention": not event.full_attention,
                "remote": event.remote,
            }
    if event.medium != "GPU":
        shown["medium"] = event.medium
    return shown | {
        n: value for n, value in told.items() if value is not None and value is not False
    }


def shown_batch(frame: dict[str, Any], batch: EngineBatch) -> dict[str, Any]:
    shown = {
        "ep": frame["ep"],
        "seq": frame["seq"],
        "time_s": batch.time_s,
        "rank": batch.dp_rank,
        "events": [shown_event(event) for event in batch.events],
    }
    if batch.unknown_kinds or batch.malformed:
        shown |= {"unknown_kinds": batch.unknown_kinds, "malformed": batch.malformed}
    return shown


# What real engines sent


def test_there_are_captures_of_both_engines_and_both_encodings() -> None:
    assert len(CAPTURES) >= 21
    encodings = {
        (engine_of(capture), type(msgspec.msgpack.decode(payload_of(frame))[1][0]))
        for capture in CAPTURES
        for frame in frames(capture)
    }
    assert encodings == {("vllm", list), ("vllm", dict), ("sglang", list), ("sglang", dict)}


@pytest.mark.parametrize("capture", CAPTURES)
def test_captured_frames_decode_to_their_rendering(capture: str) -> None:
    decode = DECODERS[engine_of(capture)]
    lines = [
        json.dumps(shown_batch(frame, decode(payload_of(frame))), separators=(",", ":"))
        for frame in frames(capture)
    ]
    path = GOLDEN / capture / "frames.decoded.jsonl"
    if REWRITE:
        path.write_text("\n".join(lines) + "\n")
    assert lines == path.read_text().splitlines()


@pytest.mark.parametrize("capture", CAPTURES)
def test_captured_frames_say_what_a_generic_decoder_reads(capture: str) -> None:
    engine = engine_of(capture)
    for frame in frames(capture):
        payload = payload_of(frame)
        time_s, events, *rank = msgspec.msgpack.decode(payload)
        batch = DECODERS[engine](payload)
        assert batch.malformed == ()
        assert batch.unknown_kinds == ()
        assert batch.time_s == time_s
        assert [batch.dp_rank] == (rank or [None])
        assert [generic(event) for event in batch.events] == [
            generic_of_wire(engine, event) for event in events
        ]


def generic(event: Any) -> tuple[Any, ...]:
    match event:
        case BlocksCleared():
            return ("AllBlocksCleared",)
        case BlocksRemoved():
            return ("BlockRemoved", list(event.hashes), event.medium, event.group)
        case _:
            return (
                "BlockStored",
                list(event.hashes),
                event.parent,
                list(event.token_ids),
                event.block_size,
                event.medium,
                event.lora_name,
                event.group,
                event.cache_salt,
            )


def generic_of_wire(engine: str, event: Any) -> tuple[Any, ...]:
    """The same from a generic decode, without a thought for anything rare."""
    if isinstance(event, list):
        kind, values = event[0], event[1:]
        fields = dict(
            zip((n for n, _ in ENGINE_FIELDS[engine].get(kind, [])), values, strict=False)
        )
    else:
        kind, fields = event["type"], event

    def unsigned(value: Any) -> Any:
        return value % (1 << 64) if isinstance(value, int) else value

    hashes = [unsigned(value) for value in fields.get("block_hashes", ())]
    if kind == "AllBlocksCleared":
        return (kind,)
    if kind == "BlockRemoved":
        return (kind, hashes, fields.get("medium"), fields.get("group_idx"))
    salt = fields.get("cache_salt")
    if keys := fields.get("extra_keys"):
        rest = [key for key in keys[0] or [] if key != fields.get("lora_name")]
        salt = rest[0] if rest else None
    return (
        kind,
        hashes,
        unsigned(fields["parent_block_hash"]),
        fields["token_ids"],
        fields["block_size"],
        fields.get("medium"),
        fields.get("lora_name"),
        fields.get("group_idx"),
        salt,
    )


def test_salt_and_lora_of_a_real_engine_are_told_apart() -> None:
    decode = DECODERS["vllm"]
    found = {
        (event.lora_name, event.cache_salt, event.unnamed_lora)
        for frame in frames("vllm-0.32.0/bytes-lora-priority")
        for event in decode(payload_of(frame)).events
        if isinstance(event, BlocksStored)
    }
    assert found == {
        (None, None, False),
        (None, "tenant-a", False),
        ("tiny-lora", None, False),
        ("tiny-lora", "s2", False),
    }


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
        read = only(DECODERS["vllm"](encode(event)))
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
        read = only(DECODERS["vllm"](encode(event)))
        assert read == BlocksRemoved(
            (11, 12), fields.get("medium"), fields.get("group_idx"), "locality" in fields
        )


@pytest.mark.parametrize(("version", "count"), versions(SGLANG_STORED))
def test_sglang_stores_of_each_version_are_read_as_far_as_they_tell(
    version: str, count: int
) -> None:
    fields = dict(list(FULL_SGLANG.items())[:count])
    for event in encodings("BlockStored", fields):
        assert only(DECODERS["sglang"](encode(event))) == BlocksStored(
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
        read = only(DECODERS["sglang"](encode(event)))
        assert read == BlocksRemoved((U64, 12), fields.get("medium"))


@pytest.mark.parametrize("engine", DECODERS)
def test_arrays_longer_than_any_known_version_are_read(engine: str) -> None:
    kinds = ENGINE_FIELDS[engine]
    full = FULL_VLLM if engine == "vllm" else FULL_SGLANG
    for kind, fields in kinds.items():
        longer = [kind, *(full[name] for name, _ in fields), "newest", {"and": [1, 2]}, None]
        assert len(DECODERS[engine](encode(longer)).events) == 1
    assert only(DECODERS[engine](encode(["AllBlocksCleared", "GPU"]))) == BlocksCleared()


@pytest.mark.parametrize("engine", DECODERS)
@pytest.mark.parametrize("count", range(4))
def test_arrays_shorter_than_the_first_version_are_dropped(engine: str, count: int) -> None:
    values = [[1], None, [1, 2], 2][:count]
    assert "BlockStored" in complaint(DECODERS[engine](encode(["BlockStored", *values])))
    assert "BlockRemoved" in complaint(DECODERS[engine](encode(["BlockRemoved"])))


@pytest.mark.parametrize("engine", DECODERS)
@pytest.mark.parametrize("name", ["block_hashes", "parent_block_hash", "token_ids", "block_size"])
def test_maps_without_a_field_that_every_version_sends_are_dropped(engine: str, name: str) -> None:
    event = stored()
    del event[name]
    # A missing parent above all must not pass for the start of a chain.
    assert name in complaint(DECODERS[engine](encode(event)))


@pytest.mark.parametrize("engine", DECODERS)
def test_unknown_fields_of_maps_are_ignored(engine: str) -> None:
    event = stored(newest={"deep": [1, {"er": None}]}, other=b"\xff")
    assert only(DECODERS[engine](encode(event))).hashes == (11, 12)


@pytest.mark.parametrize("engine", DECODERS)
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
    engine: str, batch: Any, rank: int | None
) -> None:
    decoded = DECODERS[engine](msgspec.msgpack.encode(batch))
    assert decoded == EngineBatch(decoded.time_s, rank, ())
    assert decoded.time_s in (1.5, 2.0)


# Values


@pytest.mark.parametrize("engine", DECODERS)
@pytest.mark.parametrize(
    "medium",
    ["GPU", "CPU", "STORAGE", "CPU_PINNED", "DISK", "EXTERNAL", "SOMETHING_NEW", None],
)
def test_mediums_stay_as_the_engine_names_them(engine: str, medium: str | None) -> None:
    batch = DECODERS[engine](encode(stored(medium=medium), removed(medium=medium)))
    assert [event.medium for event in batch.events] == [medium, medium]  # type: ignore[union-attr]
    assert batch.malformed == ()


@pytest.mark.parametrize("engine", DECODERS)
@pytest.mark.parametrize("medium", [1, True, b"GPU", ["GPU"], {}])
def test_a_medium_that_is_no_text_drops_the_event(engine: str, medium: Any) -> None:
    assert "medium" in complaint(DECODERS[engine](encode(stored(medium=medium))))
    assert "medium" in complaint(DECODERS[engine](encode(removed(medium=medium))))


@pytest.mark.parametrize("engine", DECODERS)
@pytest.mark.parametrize(
    ("value", "read"),
    [
        (0, 0),
        (U64, U64),
        (-1, U64),
        (-(1 << 63), 1 << 63),
        (b"12345678", b"12345678"),
        (b"x" * 32, b"x" * 32),
    ],
)
def test_hashes_are_unsigned_numbers_or_bytes(engine: str, value: Any, read: Any) -> None:
    event = only(DECODERS[engine](encode(stored(block_hashes=[value, 5], parent_block_hash=value))))
    assert event.hashes == (read, 5)
    assert event.parent == read
    assert only(DECODERS[engine](encode(removed(block_hashes=[value])))).hashes == (read,)


@pytest.mark.parametrize("engine", DECODERS)
@pytest.mark.parametrize("value", [True, 1.0, "12345678", b"1234567", b"x" * 33, [1], None])
def test_a_hash_of_another_kind_drops_the_event(engine: str, value: Any) -> None:
    decode = DECODERS[engine]
    assert "hash" in complaint(decode(encode(stored(block_hashes=[value, 5]))))
    assert "hash" in complaint(decode(encode(removed(block_hashes=[5, value]))))
    if value is not None:
        assert "hash" in complaint(decode(encode(stored(parent_block_hash=value))))


@pytest.mark.parametrize("engine", DECODERS)
def test_token_ids_are_kept_as_u32(engine: str) -> None:
    tokens = [0, 1, 127, 128, 255, 256, 65536, (1 << 32) - 1]
    event = only(DECODERS[engine](encode(stored(token_ids=tokens))))
    assert event.token_ids == array("I", tokens)


@pytest.mark.parametrize("engine", DECODERS)
@pytest.mark.parametrize(
    "token_id", [-1, 1 << 32, U64, True, 1.0, "1", b"1", None, [1], [1, 2, 3], [1, "2"], {}]
)
def test_a_token_id_of_another_kind_drops_the_event(engine: str, token_id: Any) -> None:
    for position in (0, 7):
        tokens: list[Any] = [1, 2, 3, 4, 5, 6, 7, 8]
        tokens[position] = token_id
        assert "token_ids" in complaint(DECODERS[engine](encode(stored(token_ids=tokens))))


@pytest.mark.parametrize("engine", DECODERS)
def test_bigrams_of_eagle_models_give_their_first_tokens(engine: str) -> None:
    pairs = [[1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7], [7, 8], [8, 9]]
    event = only(DECODERS[engine](encode(stored(token_ids=pairs))))
    assert event.token_ids == array("I", range(1, 9))
    too_large = [*pairs[:-1], [1 << 32, 9]]
    assert "u32" in complaint(DECODERS[engine](encode(stored(token_ids=too_large))))


@pytest.mark.parametrize("engine", DECODERS)
@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1, 2, 3, 4, 5, 6, 7]},
        {"token_ids": list(range(9))},
        {"block_hashes": []},
        {"block_hashes": [1]},
        {"block_size": 0},
        {"block_size": None},
        {"block_size": 8},
    ],
)
def test_tokens_that_do_not_fill_the_blocks_drop_the_event(
    engine: str, changes: dict[str, Any]
) -> None:
    assert "tokens do not fill" in complaint(DECODERS[engine](encode(stored(**changes))))


@pytest.mark.parametrize("engine", DECODERS)
@pytest.mark.parametrize("block_size", [-1, BLOCK_SIZE_MAX + 1, U64, 4.0, True, "4"])
def test_an_implausible_block_size_drops_the_event(engine: str, block_size: Any) -> None:
    event = stored(block_size=block_size)
    assert "block_size" in complaint(DECODERS[engine](encode(event)))


@pytest.mark.parametrize("engine", DECODERS)
@pytest.mark.parametrize("token_ids", [[], None])
@pytest.mark.parametrize("block_size", [0, None, 4])
def test_an_offload_without_tokens_is_kept(
    engine: str, token_ids: Any, block_size: int | None
) -> None:
    event = only(
        DECODERS[engine](encode(stored(token_ids=token_ids, block_size=block_size, medium="CPU")))
    )
    assert event == BlocksStored(
        hashes=(11, 12),
        parent=None,
        token_ids=array("I"),
        block_size=block_size or 0,
        medium="CPU",
    )


@pytest.mark.parametrize("kind", [None, "full_attention", "mla_attention", "sink_full_attention"])
def test_full_attention_of_every_kind_decides_hits(kind: str | None) -> None:
    event = vllm_stored(group_idx=0, kv_cache_spec_kind=kind)
    assert event.full_attention
    assert len(event.token_ids) == 8


@pytest.mark.parametrize(
    "kind",
    [
        "sliding_window",
        "sliding_window_mla",
        "mamba",
        "chunked_local_attention",
        "encoder_only_attention",
        "cross_attention",
        "unknown",
        "something_new",
    ],
)
def test_other_groups_are_kept_with_lengths_that_do_not_fit(kind: str) -> None:
    event = vllm_stored(
        group_idx=2, kv_cache_spec_kind=kind, token_ids=list(range(40)), extra_keys=[None]
    )
    assert not event.full_attention
    assert event.group == 2
    assert event.hashes == (11, 12)
    assert len(event.token_ids) == 0


def test_a_hybrid_model_tells_each_group_in_turn() -> None:
    batch = DECODERS["vllm"](
        encode(
            stored(group_idx=0, kv_cache_spec_kind="full_attention"),
            stored(group_idx=1, kv_cache_spec_kind="mamba", block_hashes=[12]),
            removed(group_idx=1, block_hashes=[12]),
            {"type": "AllBlocksCleared"},
        )
    )
    assert batch.malformed == ()
    assert [type(event) for event in batch.events] == [
        BlocksStored,
        BlocksStored,
        BlocksRemoved,
        BlocksCleared,
    ]
    assert [getattr(event, "group", None) for event in batch.events] == [0, 1, 1, None]


@pytest.mark.parametrize(
    ("locality", "remote"), [(None, False), ("LOCAL", False), ("REMOTE", True), ("ELSEWHERE", True)]
)
def test_only_what_is_local_counts_as_the_workers_own(locality: str | None, remote: bool) -> None:
    assert vllm_stored(locality=locality).remote == remote
    assert only(DECODERS["vllm"](encode(removed(locality=locality)))).remote == remote


# vLLM's extra_keys


def test_a_lora_without_a_name_is_told_as_such() -> None:
    assert vllm_stored(lora_id=4).unnamed_lora
    assert not vllm_stored(lora_id=4, lora_name="adapter").unnamed_lora
    assert not vllm_stored(lora_id=0).unnamed_lora
    assert not vllm_stored().unnamed_lora
    assert vllm_stored(lora_name="").lora_name is None


def test_a_lora_is_known_by_its_name_and_a_salt_by_its_place() -> None:
    event = vllm_stored(lora_name="ad", extra_keys=[["ad", "salt"], ["ad"]])
    assert (event.lora_name, event.cache_salt, event.item_ids) == ("ad", "salt", None)
    assert not event.unhashable


def test_a_salt_may_read_like_the_lora() -> None:
    assert vllm_stored(lora_name="ad", extra_keys=[["ad", "ad"], ["ad"]]).cache_salt == "ad"


def test_a_salt_may_read_like_an_image() -> None:
    # Not in the newer form, where images come in pairs.
    event = vllm_stored(group_idx=0, extra_keys=[[ITEM], None])
    assert (event.cache_salt, event.item_ids) == (ITEM, None)


def test_items_are_told_by_block_without_their_offsets() -> None:
    event = vllm_stored(extra_keys=[[["a", 2], "salt"], [["a", -2], ["b", 1]]])
    assert event.item_ids == (("a",), ("a", "b"))
    assert event.cache_salt == "salt"
    assert not event.unhashable


def test_an_item_id_loses_the_lora_before_it() -> None:
    event = vllm_stored(lora_name="ad", extra_keys=[["ad", [f"ad:{ITEM}", 0]], ["ad"]])
    assert event.item_ids == ((ITEM,), ())


def test_in_the_older_form_an_item_is_its_id_alone() -> None:
    fields = [[11, 12], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, "GPU", None]
    event = only(
        DECODERS["vllm"](encode(["BlockStored", *fields, [[ITEM, "salt"], ["own id", ITEM]]]))
    )
    assert event.item_ids == ((ITEM,), ("own id", ITEM))
    assert event.cache_salt == "salt"
    fields[1] = 10
    event = only(DECODERS["vllm"](encode(["BlockStored", *fields, [["own id"], None]])))
    assert event.item_ids == (("own id",), ())
    assert event.cache_salt is None


@pytest.mark.parametrize(
    "keys",
    [
        [[b"digest"], None],
        [None, ["not the lora"]],
        [["one", "two"], None],
        [[["lora", "name"]], None],
        [[["mm", "id", 0]], None],
        [[{"salt": "x"}], None],
        [[7], None],
        [[None], None],
    ],
)
def test_what_cannot_be_known_outside_makes_blocks_unhashable(keys: Any) -> None:
    assert vllm_stored(extra_keys=keys, group_idx=0).unhashable


def test_a_string_after_a_parent_is_no_salt() -> None:
    event = vllm_stored(parent_block_hash=10, extra_keys=[["text"], None])
    assert event.unhashable
    assert event.cache_salt is None


@pytest.mark.parametrize("keys", [None, [None, None], [[], []]])
def test_no_extra_keys_are_no_dependence(keys: Any) -> None:
    event = vllm_stored(extra_keys=keys)
    assert (event.cache_salt, event.item_ids, event.unhashable) == (None, None, False)


@pytest.mark.parametrize("keys", [[], [None], [None] * 3, "text", [1, 2], ["ab", "cd"], {}, 5])
def test_extra_keys_that_do_not_match_the_blocks_drop_the_event(keys: Any) -> None:
    assert "extra_keys" in complaint(DECODERS["vllm"](encode(stored(extra_keys=keys))))


def test_sglang_tells_salt_and_lora_with_each_event() -> None:
    event = only(
        DECODERS["sglang"](
            encode(stored(parent_block_hash=3, cache_salt="s", lora_name="l", session_id="x"))
        )
    )
    assert (event.cache_salt, event.lora_name, event.unnamed_lora) == ("s", "l", False)
    event = only(DECODERS["sglang"](encode(stored(cache_salt="", lora_name="", lora_id=3))))
    assert (event.cache_salt, event.lora_name, event.unnamed_lora) == (None, None, True)


# What must be refused, and counted


@pytest.mark.parametrize("engine", DECODERS)
def test_one_bad_event_leaves_the_others_in_their_order(engine: str) -> None:
    batch = DECODERS[engine](
        encode(
            removed(block_hashes=[1]),
            stored(token_ids=[1]),
            {"type": "BlockMigrated", "block_hashes": [1]},
            ["AllBlocksCleared"],
            ["BlockSwapped", 1],
            17,
            {"no": "kind"},
            removed(block_hashes=[2]),
        )
    )
    assert batch.events == (
        BlocksRemoved((1,), "GPU"),
        BlocksCleared(),
        BlocksRemoved((2,), "GPU"),
    )
    assert batch.unknown_kinds == ("BlockMigrated", "BlockSwapped")
    assert [reason.split(":")[0] for reason in batch.malformed] == [
        "event 1 (BlockStored)",
        "event 5 (no kind)",
        "event 6 (no kind)",
    ]


@pytest.mark.parametrize("engine", DECODERS)
def test_an_unknown_kind_is_cut(engine: str) -> None:
    batch = DECODERS[engine](encode(["x" * 1000], {"type": "y" * 1000}))
    assert batch.unknown_kinds == ("x" * UNKNOWN_KIND_CHARS, "y" * UNKNOWN_KIND_CHARS)
    assert batch.malformed == ()


@pytest.mark.parametrize("engine", DECODERS)
@pytest.mark.parametrize("kind", [None, 1, True, b"BlockStored", ["BlockStored"], {}, ""])
def test_a_kind_that_is_no_name_is_counted(engine: str, kind: Any) -> None:
    for event in ([kind, [1]], {"type": kind, "block_hashes": [1]}):
        batch = DECODERS[engine](encode(event))
        assert batch.events == ()
        assert len(batch.malformed) + len(batch.unknown_kinds) == 1


@pytest.mark.parametrize("engine", DECODERS)
@pytest.mark.parametrize(
    "batch",
    [
        None,
        1,
        "text",
        [],
        [1.5],
        {},
        {"ts": 1.5},
        [1.5, None],
        [1.5, {}],
        [1.5, "x"],
        {"ts": 1.5, "events": 3},
        {1: 2},
    ],
)
def test_a_batch_of_another_shape_is_one_complaint(engine: str, batch: Any) -> None:
    decoded = DECODERS[engine](msgspec.msgpack.encode(batch))
    assert (decoded.time_s, decoded.dp_rank) == (0.0, None)
    assert complaint(decoded).startswith("the batch: ")


@pytest.mark.parametrize("engine", DECODERS)
@pytest.mark.parametrize("time_s", ["now", None, [], float("nan"), float("inf"), -1.0, True])
def test_an_unreadable_time_keeps_the_events(engine: str, time_s: Any) -> None:
    batch = DECODERS[engine](msgspec.msgpack.encode([time_s, [["AllBlocksCleared"]], 1]))
    assert batch.time_s == 0.0
    assert (batch.dp_rank, batch.events) == (1, (BlocksCleared(),))
    assert [reason.split(":")[0] for reason in batch.malformed] == ["the batch's time"]


@pytest.mark.parametrize("engine", DECODERS)
@pytest.mark.parametrize("rank", ["0", 1.0, True, -1, 1 << 40, []])
def test_an_unreadable_rank_keeps_the_events(engine: str, rank: Any) -> None:
    batch = DECODERS[engine](msgspec.msgpack.encode([1.5, [["AllBlocksCleared"]], rank]))
    assert batch.dp_rank is None
    assert batch.events == (BlocksCleared(),)
    assert [reason.split(":")[0] for reason in batch.malformed] == ["the batch's rank"]


WRONG: list[Any] = [None, True, -1, 1 << 63, 1.5, "text", b"bytes", [], [[]], [None], {}, {"a": 1}]


@pytest.mark.parametrize("engine", DECODERS)
def test_every_field_of_every_wrong_type_is_kept_or_counted(engine: str) -> None:
    full = FULL_VLLM if engine == "vllm" else FULL_SGLANG
    for kind, fields in ENGINE_FIELDS[engine].items():
        for name, _ in fields:
            for wrong in WRONG:
                values = {field: full[field] for field, _ in fields} | {name: wrong}
                for event in encodings(kind, values):
                    batch = DECODERS[engine](encode(event))
                    assert len(batch.events) + len(batch.malformed) == 1, (kind, name, wrong)


def some_payloads() -> Iterator[tuple[str, bytes]]:
    """Real payloads of both encodings, the longest aside: every offset of them is tried."""
    for capture in CAPTURES:
        payloads = sorted((payload_of(frame) for frame in frames(capture)), key=len)
        for payload in (payloads[0], payloads[len(payloads) // 2]):
            if len(payload) < 1500:
                yield engine_of(capture), payload


def test_a_payload_cut_anywhere_is_one_complaint() -> None:
    for engine, payload in some_payloads():
        decode = DECODERS[engine]
        for end in range(len(payload)):
            assert complaint(decode(payload[:end])).startswith("the batch: ")
        assert complaint(decode(payload + b"\xc0")).startswith("the batch: ")


def test_a_payload_with_any_byte_changed_is_answered() -> None:
    for engine, payload in some_payloads():
        decode = DECODERS[engine]
        for i in range(0, len(payload), 3):
            for byte in (0x00, 0x93, 0xC0, 0xC1, 0xC6, 0xD6, 0xDD, 0xDF, 0xFF):
                changed = bytearray(payload)
                changed[i] = byte
                assert isinstance(decode(bytes(changed)), EngineBatch)


@pytest.mark.parametrize("engine", DECODERS)
@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x91\xdd\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x91\xc6\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x91\xdb\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x91" + b"\xdd\x00\x0f\xff\xff" * 200_000,
        b"\x93\xcb" + bytes(8) + b"\x91" + b"\x91" * 200_000 + b"\xc0\x00",
        b"\x93\xcb" + bytes(8) + b"\x91" + b"\x81\xa1x" * 200_000 + b"\xc0\x00",
        b"\xc1",
        b"",
    ],
)
def test_huge_claims_and_deep_nests_are_one_complaint(engine: str, payload: bytes) -> None:
    assert complaint(DECODERS[engine](payload)).startswith("the batch: ")


@pytest.mark.parametrize("engine", DECODERS)
def test_a_nest_of_ordinary_depth_in_an_unknown_field_is_skipped(engine: str) -> None:
    nest: Any = None
    for _ in range(100):
        nest = [nest]
    assert only(DECODERS[engine](encode(stored(newest=nest)))).hashes == (11, 12)


@pytest.mark.parametrize("engine", DECODERS)
def test_text_that_is_no_utf8_costs_its_event_only(engine: str) -> None:
    whole = encode(removed(medium="GPU!"), ["AllBlocksCleared"])
    batch = DECODERS[engine](whole.replace(b"GPU!", b"GPU\xff"))
    assert batch.events == (BlocksCleared(),)
    assert len(batch.malformed) == 1


@pytest.mark.parametrize("engine", DECODERS)
def test_a_payload_beyond_the_limit_is_not_read(engine: str) -> None:
    assert "bytes" in complaint(DECODERS[engine](bytes(PAYLOAD_BYTES_MAX + 1)))


@pytest.mark.parametrize("engine", DECODERS)
def test_more_events_than_the_limit_are_not_read(engine: str) -> None:
    payload = b"\x92\xcb" + bytes(8) + b"\xdd" + (EVENTS_MAX + 1).to_bytes(4, "big")
    assert complaint(DECODERS[engine](payload + b"\xc0" * (EVENTS_MAX + 1)))


@pytest.mark.parametrize("engine", DECODERS)
@settings(derandomize=True, deadline=None, max_examples=300)
@given(payload=st.binary(max_size=200))
def test_random_bytes_are_answered(engine: str, payload: bytes) -> None:
    assert isinstance(DECODERS[engine](payload), EngineBatch)


ANY_VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), U64)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


@pytest.mark.parametrize("engine", DECODERS)
@settings(derandomize=True, deadline=None, max_examples=100)
@given(data=st.data())
def test_events_of_random_values_are_each_kept_or_counted(engine: str, data: Any) -> None:
    full = FULL_VLLM if engine == "vllm" else FULL_SGLANG
    kind = data.draw(st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "New"]))
    fields = {name: data.draw(st.just(full[name]) | ANY_VALUE) for name in full}
    events = encodings(kind, fields)
    batch = DECODERS[engine](encode(*events))
    assert len(batch.events) + len(batch.malformed) + len(batch.unknown_kinds) == len(events)


def test_the_table_names_both_engines() -> None:
    assert sorted(DECODERS) == ["sglang", "vllm"]
