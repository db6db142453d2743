"""The stand-in against a recording of the engine that it stands for.

data/vllm_0_32_sequential.jsonl: requests sent one after another to vLLM 0.32.0 (2-layer model with
random weights, 64 blocks of 32 tokens, of which one is its null block), each with its answer and
the batches published meanwhile, in order; block hashes are replaced by numbers in order of
appearance. It has reuse, a fully cached prompt, a block filled while decoding, a salt, a session,
and evictions.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from simulator.engines.block_pool import Cleared, PoolEvent, Removed, Stored
from simulator.engines.content import add_tokens
from simulator.engines.scheduler import SchedulerConfig, TokenArray
from simulator.schedulers.vllm.scheduler import VllmScheduler

RECORDING = Path(__file__).parent / "data" / "vllm_0_32_sequential.jsonl"


def test_every_event_of_a_recorded_engine_comes_in_the_same_batch_and_order() -> None:
    requests = [json.loads(line) for line in RECORDING.read_text().splitlines()]
    answers = {bytes(json.dumps(one["prompt"]), "ascii"): one["answer"] for one in requests}

    def recorded_answer(
        prompt: TokenArray, max_tokens: int, config: SchedulerConfig, lora_name: str
    ) -> TokenArray:
        answer = answers[bytes(json.dumps(prompt.tolist()), "ascii")]
        assert len(answer) == max_tokens
        return np.array(answer, np.uint32)

    scheduler = VllmScheduler(SchedulerConfig(block_count=63, block_size=32))
    names: dict[int, int] = {}
    for request in requests:
        add_tokens(
            scheduler,
            np.array(request["prompt"], np.uint32),
            len(request["answer"]),
            0.0,
            answer=recorded_answer,
            cache_salt=request["cache_salt"] or "",
            session_id=request["session_id"],
        )
        batches = []
        while step := scheduler.begin_step(0.0):
            if events := scheduler.end_step(step.end_s).events:
                batches.append([one for event in events for one in _plain(event, names)])
        assert batches == request["batches"], request["label"]


def _plain(event: PoolEvent, names: dict[int, int]) -> list[dict[str, Any]]:
    match event:
        case Stored():
            told: dict[str, Any] = {
                "stored": [names.setdefault(one, len(names)) for one in event.hashes],
                "parent": None if event.parent is None else names[event.parent],
                "token_ids": list(event.token_ids),
                "extra_keys": [keys and list(keys) for keys in event.extra_keys],
            }
            return [told | ({"session_id": event.session_id} if event.session_id else {})]
        case Removed():
            return [{"removed": [names[one]]} for one in event.hashes]
        case Cleared():
            return [{"cleared": True}]
