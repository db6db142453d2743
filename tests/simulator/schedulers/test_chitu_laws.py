"""Chitu's three schedulers through random lives: laws, and joined steps against single ones."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engines.scheduler import Submission
from simulator.schedulers.chitu.dp import DpFifoScheduler
from simulator.schedulers.chitu.scheduler import ChituScheduler
from simulator.schedulers.chitu.skew import SkewScheduler
from simulator.schedulers.chitu.task import ChituConfig, TaskType
from tests.simulator.schedulers.lives import Acts, Life, act_on, assert_alike, chained

KINDS = (ChituScheduler, SkewScheduler, DpFifoScheduler)
SIZE = 4
LENGTH = 80
"""Longest sequence, in tokens: 20 blocks."""

requests = st.tuples(
    st.sampled_from([None, 0, 1, 2]),
    st.integers(1, 60),
    st.sampled_from([1, 3, 20, 50, 79]),
    st.one_of(st.none(), st.integers(0, 2)),
    st.sampled_from([0, 0, 0, 0.5, 1]),
)
"""(text, prompt, output, priority or rank, share of the prompt that another engine has)"""
acts_over_time = st.lists(
    st.tuples(
        st.one_of(st.just(0.0), st.floats(0.0, 0.3).map(lambda s: s + 0.000123)),
        st.one_of(requests, requests, requests, st.integers(0, 20)),
    ),
    min_size=1,
    max_size=30,
)
types = st.sampled_from(
    [
        "request_preset,prefill_first",
        "prefill_first",
        "fcfs",
        "prefill_first,fcfs",
        "prefix_align",
        "deadline,prefill_first",
        "stride",
        "prefill_only",
        "decode_only",
    ]
)


@st.composite
def engines(draw: st.DrawFn) -> tuple[type[ChituScheduler], ChituConfig]:
    kind = draw(st.sampled_from(KINDS))
    groups, places = draw(st.sampled_from([1, 1, 2, 3])), draw(st.integers(3, 9))
    names = types.filter(lambda name: name != "decode_only") if kind is SkewScheduler else types
    config = ChituConfig(
        block_count=20 * places if kind is SkewScheduler else draw(st.integers(20, 30)),
        block_size=SIZE,
        max_model_len=LENGTH,
        max_num_seqs=places,
        step_tokens_max=draw(st.sampled_from([5, 16, 64])),
        scheduler_type="fcfs" if kind is DpFifoScheduler else draw(names),
        chunked_prefill=draw(st.booleans()),
        prefill_num_tasks=draw(st.sampled_from([None, 1, 2])),
        decode_num_tasks=draw(st.sampled_from([None, 2])),
        num_scheduler_groups=groups,
        dp_size=draw(st.integers(1, 3)) if kind is DpFifoScheduler else 1,
        prefix_caching=draw(st.integers(0, 4)) > 0,
    )
    return kind, config


def submission(name: str, prompt: int, output: int, text: int | None, **more: Any) -> Submission:
    """Requests of one text have the same prompt as far as both reach."""
    hashes = [] if text is None else [1000 * (text + 1) + i for i in range(100)]
    return chained(name, hashes, prompt, output, **more)


def check(life: Life) -> None:
    scheduler = life.scheduler
    assert isinstance(scheduler, ChituScheduler)
    for rank in scheduler.ranks:
        in_use = {block for task in rank.holders for block in task.sequence.blocks}
        assert rank.pool.in_use_count == len(in_use)
        assert 1 <= rank.block_threshold <= scheduler.config.block_count
    for task in scheduler.pool.values():
        sequence = task.sequence
        if not sequence.blocks:
            assert (sequence.computed_tokens, task.type) == (0, TaskType.PREFILL)
            assert not task.in_flight
        assert len(sequence.blocks) * SIZE >= sequence.computed_tokens
    in_flight = [task for batch in scheduler.in_flight for task, _ in batch.work]
    assert all(task.in_flight for task in in_flight)
    assert len(in_flight) == len(set(in_flight))


def life_of(kind: type[ChituScheduler], config: ChituConfig, joined: int = 1) -> Life:
    return Life(kind(replace(config, joined_steps_max=joined)), check, config.dp_size)


def act(life: Life, index: int, doing: Any, now_s: float) -> None:
    match doing:
        case (text, prompt, output, number, elsewhere):
            options = life.scheduler.config
            assert isinstance(options, ChituConfig)
            output = 1 if options.scheduler_type == "prefill_only" else min(output, LENGTH - prompt)
            rank = number if number is not None and number < options.dp_size else None
            remote = int(prompt * elsewhere)
            more = {"priority": number, "remote_tokens": remote, "dp_rank": rank}
            life.add(submission(f"r{index}", prompt, output, text, **more), now_s)
        case _:
            act_on(life, doing, now_s)


def alike(kind: type[ChituScheduler], config: ChituConfig, acts: Acts, joined: int) -> Life:
    single, run = life_of(kind, config), life_of(kind, config, joined)
    assert_alike(single, run, acts, act, submission("asked", 60, 1, 0))
    assert run.refused == 0
    return run


@settings(max_examples=200, deadline=None)
@given(engine=engines(), acts=acts_over_time, joined=st.sampled_from([5, 10_000]))
def test_laws_hold_and_a_run_is_its_steps_one_by_one(
    engine: tuple[type[ChituScheduler], ChituConfig], acts: Acts, joined: int
) -> None:
    alike(*engine, acts, joined)


HEAVY_TYPES = ["prefill_first", "request_preset,prefill_first", "fcfs", "stride", "prefix_align"]


@pytest.mark.parametrize("kind", KINDS)
def test_under_heavy_load_a_run_is_its_steps_one_by_one(kind: type[ChituScheduler]) -> None:
    evictions = joined = 0
    for seed in range(24):
        rng = Random(seed)
        config = ChituConfig(
            block_count=60 if kind is SkewScheduler else rng.randint(30, 60),
            block_size=SIZE,
            max_model_len=LENGTH,
            max_num_seqs={SkewScheduler: 3, DpFifoScheduler: 8}.get(kind, 16),
            step_tokens_max=rng.choice([8, 32, 256]),
            scheduler_type=rng.choice(
                ["decode_only", *HEAVY_TYPES] if kind is ChituScheduler else HEAVY_TYPES
            ),
            prefix_caching=rng.random() < 0.7,
            dp_size=2 if kind is DpFifoScheduler else 1,
        )
        run = alike(kind, config, heavy_load(rng), 10_000)
        evictions += sum(run.scheduler.load(rank).preemptions for rank in run.ranks)
        joined += run.joined
    assert joined > 100
    assert (evictions > 20) == (kind is not SkewScheduler)


def heavy_load(rng: Random) -> Acts:
    acts: Acts = []
    for _ in range(30):
        prompt, output = rng.randint(1, 50), rng.randint(1, 30)
        text, number = rng.choice([None, 0, 1]), rng.choice([None, None, 0, 2])
        request = (text, prompt, output, number, rng.choice([0, 0, 0, 0.3, 1]))
        acts.append((rng.choice([0.0, 0.01, 0.1]) * rng.random(), request))
        if rng.random() < 0.1:
            acts.append((0.01, rng.randrange(30)))
    return acts
