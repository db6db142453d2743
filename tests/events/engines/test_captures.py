"""Captured frames of real engines decode to their rendering."""

import json
from typing import Any

import msgspec
import pytest
from xxhash import xxh3_64_hexdigest

from events.engines.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    EngineEvent,
)
from events.engines.table import READINGS
from tests.events.engines.encoded import (
    CAPTURES,
    ENGINE_FIELDS,
    GOLDEN,
    REWRITE,
    engine_of,
    frames,
    payload_of,
)

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
    decode = READINGS[engine_of(capture)].decode
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
        batch = READINGS[engine].decode(payload)
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
    decode = READINGS["vllm"].decode
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
