"""The scheduler against vLLM's own: every decision of every step, and every event.

data/vllm_0_32_schedules.jsonl.gz: 120 engines recorded from vLLM 0.32.0 by
tests/real_engines/record_schedules.py, with random limits (two policies, chunks, thresholds,
watermarks, LoRAs, drafted tokens, host caches), short of blocks, and requests that come and go.
"""

import gzip
import json
from collections import deque
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexer.identity import Tier
from simulator.engines.block_pool import Cleared, PoolEvent, Removed, Stored
from simulator.engines.content import TokenContent
from simulator.engines.cost_model import KvTransfer, LinearCost, Link
from simulator.engines.scheduler import Sequence, Submission
from simulator.schedulers.vllm.config import VllmConfig, VllmSequence
from simulator.schedulers.vllm.scheduler import VllmScheduler

RECORDING = Path(__file__).parents[1] / "data" / "vllm_0_32_schedules.jsonl.gz"
BLOCK = 16
ACCEPTED = 0.6
LORAS = ("red", "blue", "green")
COST = LinearCost(
    base_s=0.01,
    sequence_s=0.0,
    context_token_s=0.0,
    prefill_token_s=0.0,
    pair_s=0.0,
    kv=KvTransfer(bytes_per_token=1, tiers={Tier.HOST: Link(bytes_per_s=1e6)}),
)


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


class Replay:
    """The recorded requests on an engine of ours. Loads end when they did, whatever links say."""

    def __init__(self, told: dict[str, Any]) -> None:
        config = VllmConfig(
            **told["config"],
            block_size=BLOCK,
            lora_names=LORAS,
            acceptance_rate=ACCEPTED,
            cost=COST,
        )
        self.config = config
        self.scheduler = VllmScheduler(config)
        self.sequences: dict[int, VllmSequence] = {}
        self.names: dict[int, int] = {}
        self.now_s = 0.0
        self.come: dict[VllmSequence, float] = {}
        """When a load ended; inf: not yet."""
        self.owed: list[list[int]] = []
        self.owed_host: list[int] = []
        """Recorded events of steps that our engine hasn't told yet."""

    def add(self, index: int, told: dict[str, Any]) -> None:
        sequence = self.scheduler.add(submission(index, told, self.config), float(index))
        assert isinstance(sequence, VllmSequence)
        self.sequences[index] = sequence

    def step(self, told: dict[str, Any], where: str) -> None:
        scheduler = self.scheduler
        for index in told["aborted"]:
            assert scheduler.abort(self.sequences[index])
        self.owed += told["events"]
        self.owed_host += told.get("host", [])
        # When all were preempted nobody is computed: here such a step takes no time.
        if not told["preempted"] or told["scheduled"]:
            begun = scheduler.begin_step(self.now_s)
            computed = [[int(one.request_id), tokens] for one, tokens in scheduler.scheduled()]
            assert computed == told["scheduled"], where
            assert ids(scheduler.running()) == told["running"], where
            assert ids(scheduler.waiting()) == told["waiting"], where
            for one in scheduler._waiting.unready:
                if one.ready_s != self.come.get(one):
                    one.ready_s = scheduler._waiting.unready[one] = self.come[one] = inf
            if begun is not None:
                self.now_s = begun.end_s
                self.hear(scheduler.end_step(self.now_s).events, where)
        for index in told["loaded"]:
            one = self.sequences[index]
            one.ready_s = scheduler._waiting.unready[one] = self.come[one] = self.now_s

    def hear(self, events: list[PoolEvent], where: str) -> None:
        device = [one for one in events if _tier(one) is Tier.DEVICE]
        host = [one for one in events if _tier(one) is Tier.HOST]
        assert [named for one in device for named in self.named(one)] == self.owed, where
        named = sorted(name for one in host for group in self.named(one) for name in group)
        assert named == sorted(self.owed_host), where
        self.owed, self.owed_host = [], []

    def named(self, event: PoolEvent) -> list[list[int]]:
        names = self.names
        match event:
            case Stored():
                return [[names.setdefault(one, len(names)) for one in event.hashes]]
            case Removed():
                return [[-1 - names[one]] for one in event.hashes]
            case Cleared():
                raise AssertionError("nobody resets")


@pytest.mark.parametrize("told", recorded(), ids=lambda told: f"seed {told['seed']}")
def test_each_step_is_vllms_own(told: dict[str, Any]) -> None:
    replay = Replay(told)
    coming = deque(enumerate(told["requests"]))
    for number, step in enumerate(told["steps"]):
        while coming and coming[0][1]["step"] == number:
            replay.add(*coming.popleft())
        replay.step(step, f"step {number}")
    assert replay.scheduler.load().used_blocks == 0


def _tier(event: PoolEvent) -> Tier:
    return Tier.DEVICE if isinstance(event, Cleared) else event.tier
