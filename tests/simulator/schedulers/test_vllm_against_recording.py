"""The scheduler against vLLM's own: every decision of every step, and every event.

data/vllm_0_32_schedules.jsonl.gz: 120 engines recorded from vLLM 0.32.0 by
tests/real_engines/record_schedules.py, with random limits (two policies, chunks, thresholds,
watermarks, LoRAs, drafted tokens), short of blocks, and requests that come and go.
"""

import gzip
import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.block_pool import PoolEvent, Removed, Stored
from simulator.content import TokenContent
from simulator.scheduler import Sequence, Submission
from simulator.schedulers.vllm import VllmScheduler
from simulator.schedulers.vllm_config import VllmConfig

RECORDING = Path(__file__).parents[1] / "data" / "vllm_0_32_schedules.jsonl.gz"
BLOCK = 16
ACCEPTED = 0.6
LORAS = ("red", "blue", "green")


def recorded() -> list[dict[str, Any]]:
    with gzip.open(RECORDING, "rt") as lines:
        return [json.loads(line) for line in lines]


def text(family: int, length: int) -> list[int]:
    """As in the recorder."""
    return [2 + (family * 131 + at * 17) % 1000 for at in range(length)]


def submission(index: int, told: dict[str, Any], config: VllmConfig) -> Submission:
    prompt, output = told["prompt"], told["output"]
    answer = text(1000 + index, prompt + output)[prompt:]
    tokens = np.array(text(told["family"], prompt) + answer, np.uint32)
    return Submission(
        request_id=str(index),
        content=TokenContent(tokens, config, lora_name=told["lora"]),
        prompt_tokens=prompt,
        output_tokens=output,
        priority=told["priority"],
        lora_name=told["lora"],
    )


def ids(sequences: list[Sequence]) -> list[int]:
    return [int(one.request_id) for one in sequences]


@pytest.mark.parametrize("told", recorded(), ids=lambda told: f"seed {told['seed']}")
def test_each_step_is_vllms_own(told: dict[str, Any]) -> None:
    config = VllmConfig(
        **told["config"], block_size=BLOCK, lora_names=LORAS, acceptance_rate=ACCEPTED
    )
    scheduler = VllmScheduler(config)
    coming = deque(enumerate(told["requests"]))
    sequences: dict[int, Sequence] = {}
    names: dict[int, int] = {}
    earlier: list[list[int]] = []
    now_s = 0.0
    for number, step in enumerate(told["steps"]):
        for index, one in enumerate(told["requests"]):
            if one["step"] == number:
                assert coming.popleft()[0] == index
                sequences[index] = scheduler.add(submission(index, one, config), float(index))
            if one["abort"] is not None and one["step"] + one["abort"] + 1 == number:
                scheduler.abort(sequences[index])
        if step["waiting"] and not step["scheduled"]:
            earlier += step["events"]  # all were preempted: here such a step takes no time
            continue
        begun = scheduler.begin_step(now_s)
        scheduled = [[int(one.request_id), tokens] for one, tokens in scheduler.scheduled()]
        where = f"step {number}"
        assert scheduled == step["scheduled"], where
        assert ids(scheduler.running()) == step["running"], where
        assert ids(scheduler.waiting()) == step["waiting"], where
        if begun is not None:
            now_s = begun.end_s
            events = scheduler.end_step(now_s).events
            told_here = [one for event in events for one in _plain(event, names)]
            assert told_here == earlier + step["events"], where
            earlier = []


def _plain(event: PoolEvent, names: dict[int, int]) -> list[list[int]]:
    match event:
        case Stored():
            return [[names.setdefault(one, len(names)) for one in event.hashes]]
        case Removed():
            return [[-1 - names[one]] for one in event.hashes]
        case _:
            raise AssertionError(event)
