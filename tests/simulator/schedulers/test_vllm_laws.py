"""vLLM's scheduler through random lives: its laws, and joined steps against single ones."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.identity import Tier
from simulator.engines.cost_model import Distance, KvTransfer, LinearCost, Link
from simulator.engines.scheduler import SchedulerConfig, Submission
from simulator.schedulers.vllm.config import VllmConfig
from simulator.schedulers.vllm.scheduler import VllmScheduler
from tests.simulator.schedulers.lives import (
    Acts,
    Life,
    act_on,
    acts_of,
    assert_alike,
    begin,
    chained,
    step,
)

SIZE = 4
COST = LinearCost(
    base_s=0.01,
    sequence_s=0.0001,
    context_token_s=1e-6,
    prefill_token_s=1e-4,
    pair_s=1e-7,
    kv=KvTransfer(
        bytes_per_token=1,
        tiers={Tier.HOST: Link(bytes_per_s=1000.0, latency_s=0.002)},
        distances={Distance.RACK: Link(bytes_per_s=500.0, latency_s=0.004)},
    ),
)


configs = st.builds(
    VllmConfig,
    block_count=st.sampled_from([12, 20, 40]),
    block_size=st.just(SIZE),
    max_num_seqs=st.sampled_from([2, 4]),
    step_tokens_max=st.sampled_from([9, 48, 160]),
    cost=st.just(COST),
    lora_names=st.just(("red", "blue", "green")),
    policy=st.sampled_from(["fcfs", "priority"]),
    long_prefill_token_threshold=st.sampled_from([0, 5]),
    scheduler_reserve_full_isl=st.booleans(),
    watermark=st.sampled_from([0.0, 0.2]),
    max_loras=st.sampled_from([1, 2]),
    num_speculative_tokens=st.sampled_from([0, 0, 3]),
    draft_in_cache=st.booleans(),
    host_block_count=st.sampled_from([0, 6, 50]),
    offload_prompt_only=st.booleans(),
)
requests = st.fixed_dictionaries(
    {
        "family": st.integers(0, 2),
        "prompt_tokens": st.integers(1, 60),
        "output_tokens": st.integers(1, 30),
        "priority": st.sampled_from([None, None, -2, 7]),
        "lora_name": st.sampled_from(["", "", "red", "blue", "green"]),
        "remote": st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    }
)
CONFIG = SchedulerConfig(block_count=40, block_size=4, max_num_seqs=4, step_tokens_max=24)
NOTHING_SPECIAL = {"priority": None, "lora_name": "", "remote": 0.0}


def submission(index: int, asked: dict[str, Any]) -> Submission:
    """Equal family and LoRA: the same prompt as far as both reach, and the same answer."""
    told = dict(asked)
    start = 10_000 * (1 + told.pop("family")) + 1000 * len(told["lora_name"])
    prompt, output = told.pop("prompt_tokens"), told.pop("output_tokens")
    told["remote_tokens"] = int(prompt * told.pop("remote"))
    return chained(f"r{index}", [start + i for i in range(30)], prompt, output, **told)


def check(life: Life) -> None:
    scheduler = life.scheduler
    config, running = scheduler.config, scheduler.running()
    assert isinstance(config, VllmConfig)
    held = {block for one in [*running, *scheduler.waiting()] for block in one.blocks}
    assert len(held) == scheduler.blocks().in_use
    assert len(running) <= config.max_num_seqs
    for one in running:
        assert one.stored_count * SIZE <= one.known_tokens
        assert one.computed_tokens <= len(one.blocks) * SIZE
    scheduled = scheduler.scheduled()
    assert scheduled or scheduler.step is None
    assert sum(tokens for _, tokens in scheduled) <= config.step_tokens_max
    assert len({one.submission.lora_name for one, _ in scheduled} - {""}) <= config.max_loras
    load = scheduler.load()
    assert load.accepted_tokens <= load.drafted_tokens


def life_of(config: VllmConfig, joined: int = 1) -> Life:
    return Life(VllmScheduler(replace(config, joined_steps_max=joined)), check)


def act(life: Life, index: int, doing: Any, now_s: float) -> None:
    if isinstance(doing, dict):
        life.add(submission(index, doing), now_s)
    else:
        act_on(life, doing, now_s)


@settings(max_examples=300, deadline=None)
@given(config=configs, acts=acts_of(requests), joined=st.sampled_from([7, 10_000]))
def test_laws_hold_and_a_run_is_its_steps_one_by_one(
    config: VllmConfig, acts: Acts, joined: int
) -> None:
    asked = short_submission(0, 0, 40, 1)
    assert_alike(life_of(config), life_of(config, joined), acts, act, asked)


def short_submission(index: int, family: int, prompt_tokens: int, output_tokens: int) -> Submission:
    told = {"family": family, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    return submission(index, told | NOTHING_SPECIAL)


def test_a_run_lasts_while_somebody_waits_for_blocks() -> None:
    scheduler = VllmScheduler(replace(CONFIG, block_count=16, joined_steps_max=10_000))
    scheduler.add(short_submission(0, 0, 16, 30), 0.0)
    scheduler.add(short_submission(1, 1, 60, 1), 0.0)
    assert begin(scheduler, step(scheduler)).count == 29
    assert scheduler.load().waiting == 1


def test_a_run_ends_before_the_step_that_stores_what_the_first_in_line_lacks() -> None:
    scheduler = VllmScheduler(
        SchedulerConfig(block_count=12, block_size=4, joined_steps_max=10_000, max_model_len=48)
    )
    first = scheduler.add(short_submission(0, 0, 8, 24), 0.0)
    end_s = step(scheduler)
    answer = first.content.hashes(8)
    scheduler.add(chained("f", answer, 45, 1), end_s)
    # 12 blocks are needed; 2 of them are there, and 12 - 3 are left. The block of the 12th token
    # makes it 9 of 9.
    assert begin(scheduler, end_s).count == 3
