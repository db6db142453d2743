"""Byte for byte what vLLM 0.32.0 and SGLang 0.5.23 sent: the messages of recorded engines."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from events.engines.events import BlocksRemoved, BlocksStored
from events.engines.sglang.events import decode as decode_sglang
from events.engines.vllm.events import decode as decode_vllm
from indexer.identity import Tier
from simulator.engines import sglang_wire, vllm_wire
from simulator.engines.block_pool import Cleared, PoolEvent, Removed, Stored

GOLDEN = Path(__file__).parents[1] / "golden"
_U64 = (1 << 64) - 1


def payloads(folder: str) -> Iterator[bytes]:
    for line in (GOLDEN / folder / "frames.jsonl").read_text().splitlines():
        yield base64.b64decode(json.loads(line)["payload_b64"])


def pool_event(told: dict[str, Any]) -> PoolEvent:
    match told["type"]:
        case "BlockStored":
            keys = told.get("extra_keys", [[told["cache_salt"]]] if "cache_salt" in told else [])
            parent = told["parent_block_hash"]
            return Stored(
                hashes=tuple(one & _U64 for one in told["block_hashes"]),
                parent=None if parent is None else parent & _U64,
                token_ids=tuple(told["token_ids"]),
                extra_keys=tuple(each and tuple(each) for each in keys),
                lora_name=told.get("lora_name"),
                lora_id=told["lora_id"],
                session_id=told.get("session_id"),
            )
        case "BlockRemoved":
            return Removed(tuple(one & _U64 for one in told["block_hashes"]))
        case _:
            return Cleared()


@pytest.mark.parametrize(
    ("folder", "block_size"),
    [
        ("vllm-0.32.0/single-int", 32),
        ("vllm-0.32.0/dp2-connect", 32),
        ("sglang-0.5.23/server-single", 16),
        ("sglang-0.5.23/radix-only/page16", 16),
    ],
)
def test_recorded_messages_are_written_in_their_very_bytes(folder: str, block_size: int) -> None:
    encode_batch = (vllm_wire if folder.startswith("vllm") else sglang_wire).encode_batch
    kinds = set()
    for payload in payloads(folder):
        unix_s, events, rank = msgspec.msgpack.decode(payload)
        kinds |= {event["type"] for event in events}
        assert encode_batch(unix_s, map(pool_event, events), block_size, rank) == payload
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def test_sglangs_salts_loras_and_sessions_are_read_again() -> None:
    stored = Stored(
        hashes=(1 << 63, 2),
        parent=None,
        token_ids=tuple(range(32)),
        extra_keys=(("ad", "mine"), ("ad",)),
        lora_name="ad",
        session_id="s",
    )
    [read] = decode_sglang(sglang_wire.encode_batch(0.0, [stored], 16)).events
    assert isinstance(read, BlocksStored)
    assert (read.cache_salt, read.lora_name, list(read.hashes)) == ("mine", "ad", [1 << 63, 2])


def test_vllm_tells_a_lora_by_number_and_name_and_in_every_blocks_keys() -> None:
    told = Stored((1, 2), None, (5, 6), (("ad", "salt"), ("ad",)), lora_name="ad", lora_id=1)
    _, [event], rank = msgspec.msgpack.decode(vllm_wire.encode_batch(0.0, [told], 1))
    assert list(event) == [
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id",
        "medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
    ]  # fmt: skip
    assert event["lora_id"] == 1
    assert event["lora_name"] == "ad"
    assert event["extra_keys"] == [["ad", "salt"], ["ad"]]
    assert rank == 0


def test_sequence_numbers_are_eight_bytes_big_endian() -> None:
    assert vllm_wire.encode_sequence(258) == bytes([0, 0, 0, 0, 0, 0, 1, 2])
    assert vllm_wire.END_OF_REPLAY == b"\xff" * 8


def test_vllm_tells_each_evicted_block_in_an_event_of_its_own() -> None:
    payload = vllm_wire.encode_batch(0.0, [Removed((1, 2))], 1)
    _, events, _ = msgspec.msgpack.decode(payload)
    assert [event["block_hashes"] for event in events] == [[1], [2]]


def test_the_host_tier_is_told_as_vllms_offloading_connector_does() -> None:
    told = Stored((1, 2), 9, (5, 6), (None, None), tier=Tier.HOST)
    gone = Removed((3, 4), tier=Tier.HOST)
    batch = decode_vllm(vllm_wire.encode_batch(0.0, [told, gone], 1))
    first, second, removed = batch.events
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert isinstance(removed, BlocksRemoved)
    assert (first.hashes, second.hashes, removed.hashes) == ((1,), (2,), (3, 4))
    assert (first.medium, first.parent, len(first.token_ids)) == ("CPU", None, 0)
    assert removed.medium == "CPU"
