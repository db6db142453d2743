"""The stand-in against a recording of the engine that it stands for.

tests/golden/vllm-0.32.0/single-int: requests sent one after another to vLLM 0.32.0 (64 blocks of 32
tokens, of which one is its null block), before those that came at once. They have reuse, a fully
cached prompt, a block filled while decoding, a salt, a session, and evictions.
"""

import base64
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from simulator.engines.content import add_tokens
from simulator.engines.scheduler import SchedulerConfig, TokenArray
from simulator.engines.vllm_wire import encode_batch
from simulator.schedulers.vllm.scheduler import VllmScheduler

RECORDING = Path(__file__).parents[1] / "golden" / "vllm-0.32.0" / "single-int"


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDING / name).read_text().splitlines()]


def named(payload: bytes, names: dict[int, int]) -> list[dict[str, Any]]:
    """A batch's events, their blocks by numbers in order of appearance."""
    events: list[dict[str, Any]] = msgspec.msgpack.decode(payload)[1]
    for event in events:
        event["block_hashes"] = [names.setdefault(one, len(names)) for one in event["block_hashes"]]
        if event.get("parent_block_hash") is not None:
            event["parent_block_hash"] = names[event["parent_block_hash"]]
    return events


def test_every_event_of_a_recorded_engine_comes_in_the_same_batch_and_order() -> None:
    prompts = [one for one in recorded("requests.jsonl") if one["prompt_token_ids"]]
    requests = list(takewhile(lambda one: not one["label"].startswith("conc-"), prompts))
    payloads = [base64.b64decode(frame["payload_b64"]) for frame in recorded("frames.jsonl")]
    answers = {str(one["prompt_token_ids"]): one["output_token_ids"] for one in requests}

    def recorded_answer(prompt: TokenArray, max_tokens: int, lora_name: str) -> TokenArray:
        return np.array(answers[str(prompt.tolist())], np.uint32)

    scheduler = VllmScheduler(SchedulerConfig(block_count=63, block_size=32))
    ours: dict[int, int] = {}
    theirs: dict[int, int] = {}
    for request in requests:
        add_tokens(
            scheduler,
            np.array(request["prompt_token_ids"], np.uint32),
            len(request["output_token_ids"]),
            0.0,
            answer=recorded_answer,
            cache_salt=request["request"].get("cache_salt", ""),
            session_id=(request["headers"] or {}).get("X-Session-ID"),
        )
        batches = []
        while step := scheduler.begin_step(0.0):
            if events := scheduler.end_step(step.end_s).events:
                batches.append(named(encode_batch(0.0, events, 32), ours))
        first, last = request["frames_seen"]
        told = [named(payload, theirs) for payload in payloads[first:last]]
        assert batches == told, request["label"]
    assert len(requests) == 39
