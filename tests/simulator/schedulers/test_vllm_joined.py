"""Joined steps against single ones: the same tokens, blocks, events and times, whatever happens."""

from collections import Counter
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.identity import Tier
from simulator.engines.block_pool import PoolEvent, Removed, Stored
from simulator.engines.content import ChainContent
from simulator.engines.scheduler import RequestRefused, SchedulerConfig, Sequence, Submission
from simulator.schedulers.vllm.config import VllmConfig
from simulator.schedulers.vllm.scheduler import VllmScheduler
from tests.simulator.schedulers.test_vllm_laws import configs, requests, submission

CONFIG = SchedulerConfig(block_count=40, block_size=4, max_num_seqs=4, step_tokens_max=24)
NOTHING_SPECIAL = {
    "priority": None,
    "lora_name": "",
    "wait_s": 0.0,
    "input_wait_s": 0.0,
    "remote": 0.0,
}


class World:
    """One engine, and the time of those who look at it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.scheduler = VllmScheduler(config)
        self.sequences: list[Sequence] = []
        self.heard: list[tuple[str, Tier, int]] = []
        self.copies: Counter[tuple[Tier, int]] = Counter()

    def run_until(self, now_s: float) -> None:
        """Ends all steps that end by now, and begins one whenever somebody becomes ready."""
        scheduler = self.scheduler
        while True:
            if (step := scheduler.step) is not None and step.end_s <= now_s:
                self.hear(scheduler.end_step(step.end_s).events)
                assert self.held() == set(scheduler.contents())
                scheduler.begin_step(step.end_s)
            elif step is None and (ready_s := scheduler.next_ready_s or inf) <= now_s:
                scheduler.begin_step(ready_s)
            else:
                break
        self.hear(scheduler.advance(now_s).events)

    def held(self) -> set[tuple[Tier, int]]:
        return {one for one, copies in self.copies.items() if copies > 0}

    def hear(self, events: list[PoolEvent]) -> None:
        for event in events:
            match event:
                case Stored():
                    self.heard += [("stored", event.tier, one) for one in event.hashes]
                    self.copies.update((event.tier, one) for one in event.hashes)
                case Removed():
                    self.heard += [("removed", event.tier, one) for one in event.hashes]
                    self.copies.subtract((event.tier, one) for one in event.hashes)
                case _:
                    raise AssertionError(event)

    def add(self, submission: Submission, now_s: float) -> None:
        try:
            self.sequences.append(self.scheduler.add(submission, now_s))
        except RequestRefused:
            return
        if self.scheduler.step is None:
            self.scheduler.begin_step(now_s)
        else:
            self.scheduler.cut_step(now_s)

    def abort(self, index: int, now_s: float) -> None:
        self.scheduler.cut_step(now_s)
        self.scheduler.abort(self.sequences[index % len(self.sequences)])
        if self.scheduler.step is None:
            self.scheduler.begin_step(now_s)

    def look(self, asked: Submission) -> Any:
        scheduler = self.scheduler
        return (
            scheduler.load(),
            scheduler.blocks(),
            [(one.known_tokens, one.computed_tokens, one.preemptions) for one in self.sequences],
            list(self.heard),
            scheduler.cached_tokens(asked),
        )

    def first_tokens(self) -> list[float]:
        return [one.first_token_s or 0.0 for one in self.sequences]

    def finish(self, now_s: float) -> float:
        while True:
            step, ready_s = self.scheduler.step, self.scheduler.next_ready_s
            if step is not None:
                now_s = step.end_s
            elif ready_s is not None:
                now_s = ready_s
            else:
                assert not self.scheduler.waiting()
                return now_s
            self.run_until(now_s)


Acts = list[tuple[float, Any]]
acts_over_time = st.lists(
    st.tuples(
        st.floats(0.0, 0.3).map(lambda s: s + 0.000123),
        st.one_of(requests, requests, st.integers(0, 20), st.none()),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(config=configs, acts=acts_over_time, joined=st.sampled_from([7, 10_000]))
def test_a_run_is_its_steps_one_by_one(config: VllmConfig, acts: Acts, joined: int) -> None:
    single = World(replace(config, joined_steps_max=1))
    run = World(replace(config, joined_steps_max=joined))
    now_s = 0.0
    for index, (after_s, act) in enumerate(acts):
        now_s += after_s
        for world in (single, run):
            world.run_until(now_s)
        asked = short_submission(0, 0, 40, 1)
        assert run.look(asked) == single.look(asked)
        for world in (single, run):
            match act:
                case dict():
                    world.add(submission(index, now_s, act), now_s)
                case int() as at if world.sequences:
                    world.abort(at, now_s)
                case _:
                    pass
    assert run.finish(now_s) == pytest.approx(single.finish(now_s), rel=1e-12)
    assert run.heard == single.heard
    assert run.first_tokens() == pytest.approx(single.first_tokens(), rel=1e-12)


def short_submission(index: int, family: int, prompt_tokens: int, output_tokens: int) -> Submission:
    told = {"family": family, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    return submission(index, 0.0, told | NOTHING_SPECIAL)


def test_a_run_lasts_while_somebody_waits_for_blocks() -> None:
    scheduler = VllmScheduler(replace(CONFIG, block_count=16, joined_steps_max=10_000))
    scheduler.add(short_submission(0, 0, 16, 30), 0.0)
    scheduler.add(short_submission(1, 1, 60, 1), 0.0)
    step = scheduler.begin_step(0.0)
    assert step is not None
    assert step.count == 1
    scheduler.end_step(step.end_s)
    step = scheduler.begin_step(step.end_s)
    assert step is not None
    assert step.count == 29
    assert scheduler.load().waiting == 1


def test_a_run_ends_before_the_step_that_stores_what_the_first_in_line_lacks() -> None:
    scheduler = VllmScheduler(
        SchedulerConfig(block_count=12, block_size=4, joined_steps_max=10_000, max_model_len=48)
    )
    first = scheduler.add(short_submission(0, 0, 8, 24), 0.0)
    step = scheduler.begin_step(0.0)
    assert step is not None
    scheduler.end_step(step.end_s)
    answer = first.content.hashes(8)
    follower = Submission(
        request_id="f", content=ChainContent(answer, "f"), prompt_tokens=45, output_tokens=1
    )
    scheduler.add(follower, step.end_s)
    # 12 blocks are needed; 2 of them are there, and 12 - 3 are left. The block of the 12th token
    # makes it 9 of 9.
    step = scheduler.begin_step(step.end_s)
    assert step is not None
    assert step.count == 3
