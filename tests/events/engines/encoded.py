"""Events in engines' encodings, and captured frames, for tests of the decoders."""

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from events.engines.events import BlocksStored, EngineBatch
from events.engines.table import READINGS

Decode = Callable[[bytes], EngineBatch]

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
TRTLLM_STORED = [
    ("block_hashes", "1.3"),
    ("parent_block_hash", "1.3"),
    ("token_ids", "1.3"),
    ("block_size", "1.3"),
    ("lora_id", "1.3"),
    ("medium", "1.3"),
    ("lora_name", "1.3"),
    ("mm_keys", "1.3"),
]
TRTLLM_REMOVED = [("block_hashes", "1.3"), ("medium", "1.3")]
ENGINE_FIELDS = {
    "vllm": {"BlockStored": VLLM_STORED, "BlockRemoved": VLLM_REMOVED},
    "sglang": {"BlockStored": SGLANG_STORED, "BlockRemoved": SGLANG_REMOVED},
    "trtllm": {"BlockStored": TRTLLM_STORED, "BlockRemoved": TRTLLM_REMOVED},
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


def encode(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


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
    event = only(READINGS["vllm"].decode(encode(stored(**changes))))
    assert isinstance(event, BlocksStored)
    return event


def complaint(batch: EngineBatch) -> str:
    """Why the one event of a batch was dropped."""
    assert batch.events == ()
    assert batch.unknown_kinds == ()
    (reason,) = batch.malformed
    return reason
