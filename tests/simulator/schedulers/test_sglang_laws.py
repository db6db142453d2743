"""SGLang's scheduler through random lives: its laws, and joined steps against single ones."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engines.scheduler import RequestRefused, Submission
from simulator.schedulers.sglang.config import SglangConfig, SglangSequence
from simulator.schedulers.sglang.scheduler import SglangScheduler
from tests.simulator.schedulers.lives import Acts, Life, act_on, acts_of, assert_alike, chained

CONFIG = SglangConfig(
    block_count=40,
    block_size=4,
    max_num_seqs=4,
    step_tokens_max=24,
    prefill_tokens_max=40,
    lora_names=("a", "b"),
    loras_max=2,
)


def submission(
    index: int,
    family: int,
    prompt_tokens: int,
    output_tokens: int,
    priority: int | None = None,
    remote_tokens: int = 0,
) -> Submission:
    """Requests of one family have the same prompt as far as both reach, and the same answer.

    Families 0 and 3 have the first six pages in common.
    """
    hashes = [1000 * (family % 3 + 1) + i + 500 * (family == 3 and i > 5) for i in range(60)]
    return chained(
        f"r{index}",
        hashes,
        prompt_tokens,
        output_tokens,
        max_tokens=output_tokens + index % 7,
        priority=priority,
        lora_name=("", "a", "b")[index % 3] if family == 2 else "",
        remote_tokens=remote_tokens,
    )


def check(life: Life) -> None:
    scheduler = life.scheduler
    assert isinstance(scheduler, SglangScheduler)
    cache, size, running = scheduler.cache, scheduler.config.block_size, scheduler.running()
    assert cache.evictable + cache.protected == len(list(cache.contents()))
    assert max(life.copies[0].values(), default=0) <= 1, "a page is stored once"
    held = [
        one
        for one in (*running, *scheduler.waiting())
        if isinstance(one, SglangSequence) and one.node
    ]
    for one in held:
        assert one.computed_tokens <= (one.shared_pages + one.private_pages) * size
    assert sum(one.private_pages for one in held) == cache.private
    assert {*running} <= {*held}
    assert held or not cache.protected
    assert len(running) <= scheduler.config.max_num_seqs


def life_of(config: SglangConfig, joined: int = 1) -> Life:
    return Life(SglangScheduler(replace(config, joined_steps_max=joined)), check)


requests = st.tuples(
    st.integers(0, 3),
    st.integers(1, 90),
    st.integers(1, 80),
    st.none() | st.integers(-30, 30),
    st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0]),
)
configs = st.one_of(
    st.builds(
        lambda **choices: replace(CONFIG, **choices),
        policy=st.sampled_from(["fcfs", "lpm", "dfs-weight", "lof", "random"]),
        block_size=st.sampled_from([1, 4]),
        radix_cache=st.sampled_from([True, True, False]),
        mixed_chunk=st.booleans(),
        chunked_prefill=st.sampled_from([True, True, False]),
        ignore_eos=st.booleans(),
        prefill_requests_max=st.sampled_from([None, 1]),
        conservativeness=st.sampled_from([0.0, 0.3, 1.0]),
    ),
    st.builds(
        lambda **choices: replace(CONFIG, priority_scheduling=True, max_num_seqs=2, **choices),
        block_count=st.sampled_from([40, 120]),
        policy=st.sampled_from(["fcfs", "lof"]),
        low_priority_values_first=st.booleans(),
        preemption_threshold=st.sampled_from([0, 10]),
        radix_cache=st.sampled_from([True, True, False]),
        ignore_eos=st.booleans(),
        conservativeness=st.sampled_from([0.3, 1.0]),
    ),
)


def act(life: Life, index: int, doing: Any, now_s: float) -> None:
    match doing:
        case (family, prompt, output, priority, elsewhere):
            remote = int(prompt * elsewhere)
            life.add(submission(index, family, prompt, output, priority, remote), now_s)
        case _:
            act_on(life, doing, now_s)


@settings(max_examples=400, deadline=None)
@given(config=configs, acts=acts_of(requests), joined=st.sampled_from([7, 10_000]))
def test_laws_hold_and_a_run_is_its_steps_one_by_one(
    config: SglangConfig, acts: Acts, joined: int
) -> None:
    asked = submission(0, 0, 40, 1)
    assert_alike(life_of(config), life_of(config, joined), acts, act, asked)


def test_under_overload_everybody_gets_an_answer() -> None:
    engine = life_of(replace(CONFIG, conservativeness=0.0), 10_000)
    for index in range(60):
        engine.add(submission(index, index % 3, 20 + index, 40), 0.0)
    engine.finish()
    load = engine.scheduler.load()
    assert load.finished == 60 - engine.refused > 40
    assert load.preemptions > 0


Maker = Callable[[], SglangConfig]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: replace(CONFIG, step_tokens_max=23), "not a multiple"),
        (lambda: replace(CONFIG, policy="lpm", priority_scheduling=True), "fcfs or lof"),
        (lambda: replace(CONFIG, mixed_chunk=True, max_num_seqs=24), "above max_num_seqs"),
        (lambda: replace(CONFIG, loras_max=0), "at least 1"),
        (lambda: replace(CONFIG, conservativeness=-1.0), "must not be negative"),
        (lambda: replace(CONFIG, max_model_len=1000), "exceeds the pool"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(make: Maker, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_a_request_that_would_wait_for_ever_is_refused() -> None:
    scheduler = SglangScheduler(CONFIG)
    scheduler.add(submission(0, 0, 100, 58), 0.0)
    with pytest.raises(RequestRefused, match="room for 158 tokens"):
        scheduler.add(submission(0, 0, 100, 59), 0.0)
    life_of(CONFIG).add(submission(0, 0, 100, 58), 0.0)
