"""The laws of Chitu's three schedulers, whatever their options and whoever comes and goes."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.schedulers.chitu.dp import DpFifoScheduler
from simulator.schedulers.chitu.scheduler import ChituScheduler
from simulator.schedulers.chitu.skew import SkewScheduler
from simulator.schedulers.chitu.task import ChituConfig
from tests.simulator.schedulers.chitu_world import KINDS, World, submission

SIZE = 4
LENGTH = 80
"""Longest sequence, in tokens: 20 blocks."""

Acts = list[tuple[float, Any]]
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


def act(world: World, index: int, doing: Any, now_s: float) -> None:
    match doing:
        case (text, prompt, output, number, elsewhere):
            if world.scheduler.options.scheduler_type == "prefill_only":
                output = 1
            output = min(output, LENGTH - prompt)
            asked = submission(f"r{index}", prompt, output, text=text, priority=number)
            asked = replace(asked, remote_tokens=int(prompt * elsewhere))
            if number is not None and number < world.scheduler.options.dp_size:
                asked = replace(asked, dp_rank=number)
            world.add(asked, now_s)
        case int() if world.sequences:
            world.abort(doing, now_s)


def played(world: World, acts: Acts) -> float:
    now_s = 0.0
    for index, (after_s, doing) in enumerate(acts):
        now_s += after_s
        world.run_until(now_s)
        act(world, index, doing, now_s)
    return world.finish(now_s)


@settings(max_examples=150, deadline=None)
@given(engine=engines(), acts=acts_over_time, joined=st.sampled_from([1, 5, 10_000]))
def test_blocks_requests_tokens_and_events_add_up_at_every_step(
    engine: tuple[type[ChituScheduler], ChituConfig], acts: Acts, joined: int
) -> None:
    kind, config = engine
    world = World(kind, replace(config, joined_steps_max=joined))
    played(world, acts)
    assert world.refused == 0


@settings(max_examples=50, deadline=None)
@given(engine=engines(), acts=acts_over_time)
def test_the_same_run_has_the_same_effects(
    engine: tuple[type[ChituScheduler], ChituConfig], acts: Acts
) -> None:
    one, other = World(*engine), World(*engine)
    assert played(one, acts) == played(other, acts)
    assert one.log == other.log


def assert_alike(kind: type[ChituScheduler], config: ChituConfig, acts: Acts, joined: int) -> World:
    """Joined steps against single ones; returns the joined world."""
    single, run = World(kind, config), World(kind, replace(config, joined_steps_max=joined))
    now_s = 0.0
    for index, (after_s, doing) in enumerate(acts):
        now_s += after_s
        for world in (single, run):
            world.run_until(now_s)
        assert run.state() == single.state()
        for world in (single, run):
            act(world, index, doing, now_s)
    assert run.finish(now_s) == pytest.approx(single.finish(now_s), rel=1e-9)
    assert run.state() == single.state()
    assert run.first_tokens() == pytest.approx(single.first_tokens(), rel=1e-9)
    return run


@settings(max_examples=100, deadline=None)
@given(engine=engines(), acts=acts_over_time, joined=st.sampled_from([7, 10_000]))
def test_a_run_is_its_steps_one_by_one(
    engine: tuple[type[ChituScheduler], ChituConfig], acts: Acts, joined: int
) -> None:
    assert_alike(*engine, acts, joined)


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
        run = assert_alike(kind, config, heavy_load(rng), 10_000)
        evictions += sum(rank.counts.preemptions for rank in run.scheduler.ranks)
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
