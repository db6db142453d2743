"""How fast engine bytes become events, and pages become loads: one core, captured content."""

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from events.engines.events import BlocksCleared
from events.engines.sglang.pages import sglang_metrics
from events.engines.table import READINGS
from events.engines.vllm.pages import vllm_loads
from tests.bench.timing import row

GOLDEN = Path(__file__).parent.parent / "golden"

REPEATS = 5
TIME_S = 0.2
"""Of each repeat; the best of them counts."""


def rows() -> list[dict[str, Any]]:
    """One row a measurement: name, our number, unit, and which direction is better."""
    return [
        _row("decode_vllm_captured", *_captured("vllm-0.32.0/single-int")),
        _row("decode_sglang_captured", *_captured("sglang-0.5.23/server-single")),
        _row("decode_vllm_stores_64_b64", *_long_stores()),
        _row("read_vllm_metrics", *_page(vllm_loads, "vllm-0.32.0/dp2-connect"), "pages/s"),
        _row(
            "read_sglang_metrics",
            *_page(sglang_metrics, "sglang-0.5.23/server-single"),
            "pages/s",
        ),
    ]


def _captured(capture: str) -> tuple[Callable[[], object], int]:
    with (GOLDEN / capture / "frames.jsonl").open() as lines:
        payloads = [base64.b64decode(json.loads(line)["payload_b64"]) for line in lines]
    return _decoding(capture.partition("-")[0], payloads)


def _long_stores() -> tuple[Callable[[], object], int]:
    store = {
        "type": "BlockStored",
        "block_hashes": [(1 << 63) + i for i in range(64)],
        "parent_block_hash": None,
        "token_ids": [i * 7919 % 150_000 for i in range(64 * 64)],
        "block_size": 64,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * 64,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return _decoding("vllm", [msgspec.msgpack.encode([1.5, [store], 0])] * 16)


def _decoding(engine: str, payloads: list[bytes]) -> tuple[Callable[[], object], int]:
    """What to time, and the blocks stored and removed in one go of it."""
    decode = READINGS[engine].decode
    blocks = sum(
        len(event.hashes)
        for payload in payloads
        for event in decode(payload).events
        if not isinstance(event, BlocksCleared)
    )

    def run() -> None:
        for payload in payloads:
            decode(payload)

    return run, blocks


def _page(read: Callable[[str], object], capture: str) -> tuple[Callable[[], object], int]:
    text = (GOLDEN / capture / "metrics-under-load.txt").read_text()
    return lambda: read(text), 1


def _row(
    name: str, run: Callable[[], object], count: int, unit: str = "blocks/s"
) -> dict[str, Any]:
    best = 0.0
    for _ in range(REPEATS):
        started = time.perf_counter()
        goes = 0
        while (spent := time.perf_counter() - started) < TIME_S:
            run()
            goes += 1
        best = max(best, goes * count / spent)
    return row(name, round(best), unit, "more")
