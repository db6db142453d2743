"""Chitu's options, scores, prices and ranks. Stories are in tests/simulator/scenarios, laws in
test_chitu_laws.py."""

from dataclasses import replace
from typing import Any

import pytest

from simulator.engines.block_pool import Stored
from simulator.engines.content import ChainContent
from simulator.engines.cost_model import Distance, KvTransfer, Link, PrefillChunk
from simulator.engines.scheduler import RequestRefused, SchedulerConfig, Sequence, Submission
from simulator.schedulers import SCHEDULERS
from simulator.schedulers.chitu.dp import DpFifoScheduler
from simulator.schedulers.chitu.scheduler import ChituScheduler
from simulator.schedulers.chitu.scores import Order
from simulator.schedulers.chitu.skew import SkewScheduler
from simulator.schedulers.chitu.task import ChituConfig, Task, TaskType
from tests.simulator.schedulers.lives import begin, chained, step


def config(**options: Any) -> ChituConfig:
    return ChituConfig(**({"block_count": 64, "block_size": 4} | options))


def submission(
    name: str, prompt: int, output: int, *, text: int | None = None, **options: Any
) -> Submission:
    """Requests of one text have the same prompt as far as both reach."""
    hashes = [1000 * (text + 1) + i for i in range(100)] if text is not None else []
    return chained(name, hashes, prompt, output, **options)


def end_first(scheduler: ChituScheduler) -> None:
    """Ends the step that is going on as if it were not joined with those after it."""
    cut = scheduler.cut_step(0.0)
    assert cut is not None
    assert cut.count == 1
    scheduler.end_step(cut.end_s)


def task(
    order: int, *, arrival_s: float = 0.0, prompt: int = 10, priority: int = 1, decode: bool = False
) -> Task:
    sequence = Sequence(submission(f"r{order}", prompt, 5), prompt, arrival_s)
    return Task(sequence, order, priority, TaskType.DECODE if decode else TaskType.PREFILL)


@pytest.mark.parametrize(
    ("scheduler_type", "order"),
    [
        ("fcfs", [1, 2, 0]),
        ("fifo", [1, 2, 0]),
        ("prefill_first", [1, 2, 0]),
        ("request_preset", [2, 0, 1]),
        ("request_preset,prefill_first", [2, 1, 0]),
        ("stride", [2, 1, 0]),  # at 10 s: 10 - 3, 10 - 1, 2 * (10 - 2)
        ("deadline", [1, 0, 2]),  # 3 + 1.034 s, 1 + 3.024 s, 2 + 2.124 s
        ("prefix_align", [0, 2, 1]),
        ("Prefill_First , FIFO", [1, 2, 0]),
        ("", [1, 2, 0]),
    ],
)
def test_scores_order_tasks_the_leading_one_first_and_then_by_place(
    scheduler_type: str, order: list[int]
) -> None:
    tasks = [
        task(0, arrival_s=3.0, prompt=10, decode=True),
        task(1, arrival_s=1.0, prompt=2000),
        task(2, arrival_s=2.0, prompt=1100, priority=2),
    ]
    assert [one.order for one in Order(scheduler_type).sort(tasks, 10.0)] == order


def test_equal_scores_leave_tasks_in_their_places() -> None:
    tasks = [task(2), task(0), task(1)]
    assert [one.order for one in Order("prefill_first").sort(tasks, 0.0)] == [0, 1, 2]


def test_both_modes_together_are_none() -> None:
    assert Order("prefill_only").allowed == {TaskType.PREFILL}
    assert Order("decode_only,fcfs").allowed == {TaskType.DECODE}
    assert Order("prefill_only,decode_only").allowed == set(TaskType)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ChituScheduler, {"scheduler_type": "lifo"}, "unknown scheduler type 'lifo'"),
        (ChituScheduler, {"num_scheduler_groups": 0}, "at least 1"),
        (ChituScheduler, {"prefill_num_tasks": 0}, "at least 1"),
        (ChituScheduler, {"max_num_seqs": 0}, "at least 1"),
        (ChituScheduler, {"dp_size": 2}, "dp_size is for"),
        (SkewScheduler, {"max_num_seqs": 4}, "max_num_seqs 4 times max_model_len 256"),
        (
            SkewScheduler,
            {"max_num_seqs": 2, "max_model_len": 64, "num_scheduler_groups": 3},
            "at most max_num_seqs",
        ),
        (
            SkewScheduler,
            {"max_num_seqs": 2, "max_model_len": 64, "scheduler_type": "decode_only"},
            "decode_only needs",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(
    kind: type[ChituScheduler], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(config(**options))


@pytest.mark.parametrize("name", ["chitu", "chitu-dp"])
def test_the_common_options_alone_are_enough(name: str) -> None:
    scheduler = SCHEDULERS[name].scheduler(
        SchedulerConfig(block_count=64, block_size=4, max_num_seqs=3)
    )
    assert isinstance(scheduler, ChituScheduler)
    assert scheduler.options.prefill_limit == 3
    assert scheduler.options.scheduler_type == "request_preset,prefill_first"


def test_a_step_costs_what_its_tasks_cost() -> None:
    scheduler = ChituScheduler(config())
    cost = scheduler.config.cost
    scheduler.add(submission("a", 20, 3), 0.0)
    scheduler.add(submission("b", 9, 3), 0.0)
    end_s = step(scheduler)
    assert end_s == cost.step_s([PrefillChunk(20, 0), PrefillChunk(9, 0)])
    assert step(scheduler, end_s) - end_s == pytest.approx(cost.step_s((), 2, 29))


def test_a_stage_takes_its_share_and_a_step_as_long_as_its_slowest_stage() -> None:
    scheduler = ChituScheduler(config(num_scheduler_groups=2, max_num_seqs=2))
    cost = scheduler.config.cost
    first = scheduler.add(submission("a", 200, 3), 0.0)
    second = scheduler.add(submission("b", 8, 3), 0.0)
    long_s, short_s = (cost.step_s([PrefillChunk(tokens, 0)]) / 2 for tokens in (200, 8))
    times = [0.0]
    for _ in range(3):
        times.append(step(scheduler, times[-1]))
    assert first.first_token_s == times[2] == pytest.approx(2 * long_s)
    assert second.first_token_s == times[3]
    assert times[3] - times[2] == pytest.approx(max(short_s, cost.step_s((), 1, 200) / 2))


def test_ranks_wait_for_the_slowest() -> None:
    scheduler = DpFifoScheduler(config(dp_size=2))
    cost = scheduler.config.cost
    scheduler.add(submission("a", 20, 2), 0.0)
    scheduler.add(submission("b", 9, 2), 0.0)
    end_s = step(scheduler)
    assert end_s == cost.step_s([PrefillChunk(20, 0)])
    assert step(scheduler, end_s) - end_s == pytest.approx(cost.step_s((), 1, 20))


def test_a_joined_run_of_ranks_ends_before_another_rank_becomes_the_slowest() -> None:
    def ends(joined: int) -> list[float]:
        options = config(block_count=256, dp_size=2, joined_steps_max=joined)
        scheduler = DpFifoScheduler(options)
        scheduler.add(submission("long", 400, 300, dp_rank=0), 0.0)
        for name in ("b", "c"):
            scheduler.add(submission(name, 8, 300, dp_rank=1), 0.0)
        times = [0.0]
        while begun := scheduler.begin_step(times[-1]):
            times.append(begun.end_s)
            scheduler.end_step(begun.end_s)
        return times

    single, joined = ends(1), ends(10_000)
    assert joined[-1] == pytest.approx(single[-1], rel=1e-12)
    assert 4 <= len(joined) < 30


def test_a_run_ends_with_the_step_that_stores_what_the_first_in_line_lacks() -> None:
    scheduler = ChituScheduler(
        config(block_count=12, joined_steps_max=10_000, scheduler_type="prefill_first")
    )
    first = scheduler.add(submission("a", 8, 24), 0.0)
    step(scheduler)
    assert begin(scheduler).count == 23
    follower = ChainContent(first.content.hashes(8), "b")
    scheduler.add(
        Submission(request_id="b", content=follower, prompt_tokens=45, output_tokens=1), 0.0
    )
    end_first(scheduler)
    # b needs 12 blocks, 2 of them are there, and 12 - 3 are left. When the block of the 12th token
    # is stored, it is 9 of 9.
    for alike in (3, 2, 1):
        assert begin(scheduler).count == alike
        end_first(scheduler)
    begin(scheduler)
    assert [one.request_id for one, _ in scheduler.scheduled()] == ["b"]


def test_nothing_is_joined_to_a_step_that_evicts() -> None:
    scheduler = ChituScheduler(
        config(
            block_count=20,
            step_tokens_max=8,
            prefix_caching=False,
            joined_steps_max=10_000,
            scheduler_type="prefill_first",
        )
    )
    scheduler.add(submission("a", 8, 30), 0.0)
    step(scheduler)
    long = scheduler.add(submission("long", 76, 1), 0.0)
    for _ in range(9):
        step(scheduler)
    assert len(long.blocks) == 18
    assert begin(scheduler).count == 1
    assert long.preemptions == 1
    scheduler.end_step(0.0)
    begin(scheduler)
    assert [one.request_id for one, _ in scheduler.scheduled()] == ["long"]


def test_events_and_loads_say_whose_rank_they_are() -> None:
    scheduler = DpFifoScheduler(config(dp_size=3))
    for number in range(4):
        scheduler.add(submission(f"r{number}", 8, 2), 0.0)
    assert [scheduler.load(rank).waiting for rank in range(3)] == [2, 1, 1]
    events = scheduler.end_step(begin(scheduler).end_s).events
    told = [(event.dp_rank, len(event.hashes)) for event in events if isinstance(event, Stored)]
    assert told == [(0, 2), (0, 2), (1, 2), (2, 2)]
    assert [scheduler.load(rank).running for rank in range(3)] == [2, 1, 1]
    assert [scheduler.load(rank).used_blocks for rank in range(3)] == [4, 2, 2]
    assert [len(list(scheduler.contents(rank))) for rank in range(3)] == [4, 2, 2]


def test_a_rank_that_is_asked_for_waits_for_a_place_there() -> None:
    scheduler = DpFifoScheduler(config(dp_size=2, max_num_seqs=1))
    for name in ("a", "b"):
        scheduler.add(submission(name, 8, 3, dp_rank=1), 0.0)
    assert [scheduler.load(rank).waiting for rank in range(2)] == [0, 2]
    step(scheduler)
    assert [(scheduler.load(rank).running, scheduler.load(rank).waiting) for rank in range(2)] == [
        (0, 0),
        (1, 1),
    ]


def test_cached_tokens_are_those_of_the_rank_whose_turn_it_is() -> None:
    scheduler = DpFifoScheduler(config(dp_size=2))
    asked = submission("again", 18, 1, text=1)
    scheduler.add(submission("a", 16, 1, text=1, dp_rank=1), 0.0)
    step(scheduler)
    assert scheduler.cached_tokens(asked) == 0
    assert scheduler.cached_tokens(submission("a", 16, 1, text=1, dp_rank=1)) == 15
    scheduler.add(submission("b", 16, 1), 0.0)
    step(scheduler)
    assert scheduler.cached_tokens(asked) == 16


def test_a_reset_is_for_all_ranks_or_none_and_told_with_the_next_step() -> None:
    scheduler = DpFifoScheduler(config(dp_size=2))
    scheduler.add(submission("a", 8, 1), 0.0)
    scheduler.begin_step(0.0)
    assert not scheduler.reset_prefix_cache()
    assert list(scheduler.contents(0))
    scheduler.end_step(1.0)
    assert scheduler.reset_prefix_cache()
    assert not list(scheduler.contents(0))
    scheduler.add(submission("b", 8, 1), 1.0)
    scheduler.begin_step(1.0)
    told = [(type(event).__name__, event.dp_rank) for event in scheduler.end_step(2.0).events]
    assert told == [("Cleared", 0), ("Cleared", 1), ("Stored", 1)]


def test_aborted_in_flight_gives_blocks_place_and_threshold_back() -> None:
    scheduler = ChituScheduler(config(num_scheduler_groups=2, block_count=16))
    sequences = [scheduler.add(submission(name, 8, 9), 0.0) for name in "ab"]
    scheduler.begin_step(0.0)
    scheduler.ranks[0].block_threshold = 3
    assert scheduler.abort(sequences[0])
    assert not scheduler.abort(sequences[0])
    assert scheduler.ranks[0].block_threshold == 16
    assert scheduler.blocks().in_use == 2
    assert [one.request_id for one, _ in scheduler.scheduled()] == ["b"]
    assert scheduler.end_step(1.0).outputs == []
    step(scheduler, 1.0)
    assert sequences[1].output_tokens == 1
    assert scheduler.abort(sequences[1])
    assert scheduler.load().aborted == 2
    assert scheduler.begin_step(3.0) is None


def test_the_threshold_never_falls_below_one_block() -> None:
    scheduler = ChituScheduler(config(block_count=8, block_size=1, max_model_len=8))
    for number in range(4):
        scheduler.add(submission(f"r{number}", 2, 6), 0.0)
    lowest, now_s = 8, 0.0
    while begun := scheduler.begin_step(now_s):
        now_s = begun.end_s
        lowest = min(lowest, scheduler.ranks[0].block_threshold)
        scheduler.end_step(now_s)
    assert lowest == 1
    assert scheduler.load().finished == 4
    assert scheduler.ranks[0].block_threshold == 8


def test_a_request_for_more_than_a_prefill_engine_computes_is_refused() -> None:
    scheduler = ChituScheduler(config(scheduler_type="prefill_only"))
    with pytest.raises(RequestRefused, match="not up to 2"):
        scheduler.add(submission("a", 8, 1, max_tokens=2), 0.0)
    with pytest.raises(RequestRefused, match="the prompt is empty"):
        scheduler.add(submission("a", 0, 1), 0.0)


def test_kv_on_its_way_is_waited_for_and_others_go_on() -> None:
    link = Link(bytes_per_s=1e9)
    kv = KvTransfer(bytes_per_token=10**8, distances={Distance.RACK: link})  # 0.1 s a token
    scheduler = ChituScheduler(
        config(joined_steps_max=10_000, cost=replace(config().cost, kv=kv), block_count=200)
    )
    fetched = scheduler.add(submission("fetched", 16, 2, remote_tokens=16), 0.0)
    assert scheduler.begin_step(0.0) is None
    assert scheduler.next_ready_s == pytest.approx(1.5)
    load = scheduler.load()
    assert (load.running, load.waiting, load.deferred, load.used_blocks) == (0, 1, 1, 4)
    assert not list(scheduler.contents())

    scheduler.add(submission("other", 8, 500), 0.0)
    run = begin(scheduler, step(scheduler))
    assert run.start_s < 1.5 <= run.end_s < 1.52
    scheduler.end_step(run.end_s)
    scheduler.begin_step(run.end_s)
    assert [one.request_id for one, _ in scheduler.scheduled()] == ["fetched", "other"]
    assert fetched.cached_tokens == 15
    assert scheduler.next_ready_s is None
    assert scheduler.load().external_hit_tokens == 15


def test_nobody_computes_what_another_engine_has_while_there_is_no_room_for_it() -> None:
    scheduler = ChituScheduler(config(block_count=10, step_tokens_max=4))
    scheduler.add(submission("a", 4, 30), 0.0)
    end_s = step(scheduler)
    while scheduler.blocks().in_use < 5:
        end_s = step(scheduler, end_s)
    waits = scheduler.add(submission("waits", 24, 2, remote_tokens=24), end_s)
    step(scheduler, end_s)
    assert not waits.blocks
    assert [one.request_id for one in scheduler.waiting()] == ["waits"]


def test_without_prefix_caching_nothing_is_found_and_nothing_told() -> None:
    scheduler = ChituScheduler(config(prefix_caching=False))
    for name in "ab":
        scheduler.add(submission(name, 16, 1, text=0), 0.0)
    begun = begin(scheduler)
    assert [tokens for _, tokens in scheduler.scheduled()] == [16, 16]
    assert scheduler.end_step(begun.end_s).events == []
    assert scheduler.cached_tokens(submission("c", 16, 1, text=0)) == 0
