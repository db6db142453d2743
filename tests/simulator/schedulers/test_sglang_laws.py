"""What holds for SGLang's stand-in after every step, whatever it is asked to do."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.identity import Tier
from indexer.reference import ReferenceIndex
from simulator.engines.block_pool import PoolEvent, Removed, Stored
from simulator.engines.content import ChainContent
from simulator.engines.scheduler import Output, RequestRefused, Sequence, Submission
from simulator.schedulers.sglang.config import SglangConfig, SglangSequence
from simulator.schedulers.sglang.scheduler import SglangScheduler

CONFIG = SglangConfig(
    block_count=40,
    block_size=4,
    max_num_seqs=4,
    step_tokens_max=24,
    prefill_tokens_max=40,
    lora_names=("a", "b"),
    loras_max=2,
)


class Engine:
    """One engine, the time of those who look at it, and the laws."""

    def __init__(self, config: SglangConfig) -> None:
        self.scheduler = SglangScheduler(config)
        self.sequences: list[Sequence] = []
        self.refused = 0
        self.heard: list[tuple[str, int]] = []
        self.out: dict[str, list[int]] = {}
        """request -> places of its tokens, as they came"""
        self.oracle = ReferenceIndex()
        self.slot = self.oracle.open_slot()

    def begin(self, now_s: float) -> None:
        step = self.scheduler.begin_step(now_s)
        if step is None:
            assert not self.scheduler.running()
            if self.scheduler.waiting():
                assert self.scheduler.next_ready_s, "nobody runs, and somebody waits for ever"

    @property
    def due_s(self) -> float | None:
        """When something happens by itself."""
        step = self.scheduler.step
        return self.scheduler.next_ready_s if step is None else step.end_s

    def run_until(self, now_s: float) -> None:
        """Lets happen all that happens by now."""
        while (due_s := self.due_s) is not None and due_s <= now_s:
            if self.scheduler.step is not None:
                result = self.scheduler.end_step(due_s)
                self.hear(result.outputs, result.events)
                self.check()
                self.compare()
            self.begin(due_s)
        result = self.scheduler.advance(now_s)
        self.hear(result.outputs, result.events)
        self.check()

    def compare(self) -> None:
        """What was told is what there is."""
        contents = ReferenceIndex()
        held = np.array([page for _, page in self.scheduler.contents()], np.uint64)
        contents.store(contents.open_slot(), Tier.DEVICE, held)
        assert contents.digest(0) == self.oracle.digest(self.slot)
        assert contents.count(0) == self.oracle.count(self.slot)

    def hear(self, outputs: list[Output], events: list[PoolEvent]) -> None:
        for output in outputs:
            places = self.out.setdefault(output.sequence.request_id, [])
            places += range(output.first, output.last)
        for event in events:
            match event:
                case Stored(hashes=hashes):
                    self.heard += [("stored", one) for one in hashes]
                    pages = np.array(hashes, np.uint64)
                    assert self.oracle.store(self.slot, Tier.DEVICE, pages) == len(hashes)
                case Removed(hashes=hashes):
                    self.heard += [("removed", one) for one in hashes]
                    pages = np.array(hashes, np.uint64)
                    assert self.oracle.remove(self.slot, Tier.DEVICE, pages) == len(hashes)
                case _:
                    raise AssertionError(event)

    def check(self) -> None:
        scheduler, cache = self.scheduler, self.scheduler.cache
        load, counts = scheduler.load(), scheduler.blocks()
        running, waiting = scheduler.running(), scheduler.waiting()
        size = scheduler.config.block_size

        assert counts.free + counts.cached + counts.in_use == counts.total == cache.page_count
        assert min(counts.free, counts.cached, counts.in_use, cache.private) >= 0
        assert cache.evictable + cache.protected == len(list(cache.contents()))
        assert load.used_blocks == counts.in_use
        held = [one for one in (*running, *waiting) if isinstance(one, SglangSequence) and one.node]
        for one in held:
            assert one.computed_tokens <= (one.shared_pages + one.private_pages) * size
        assert sum(one.private_pages for one in held) == cache.private
        assert {*running} <= {*held}
        if not held:
            assert not cache.protected

        assert (load.running, load.waiting) == (len(running), len(waiting))
        assert len(running) <= scheduler.config.max_num_seqs
        ended = load.finished + load.aborted
        assert len(self.sequences) == ended + load.running + load.waiting
        assert len({*running, *waiting}) == load.running + load.waiting
        for one in self.sequences:
            places = self.out.get(one.request_id, [])
            assert places == list(range(one.prompt_tokens, one.known_tokens))
            assert one.computed_tokens < one.known_tokens <= one.total_tokens
        assert load.generated_tokens == sum(map(len, self.out.values()))

    def add(self, submission: Submission, now_s: float) -> None:
        try:
            self.sequences.append(self.scheduler.add(submission, now_s))
        except RequestRefused:
            self.refused += 1
            return
        if self.scheduler.step is None:
            self.begin(now_s)
        else:
            self.scheduler.cut_step(now_s)

    def abort(self, index: int, now_s: float) -> None:
        self.scheduler.cut_step(now_s)
        sequence = self.sequences[index % len(self.sequences)]
        lived = not sequence.finished and (
            sequence in self.scheduler.running() or sequence in self.scheduler.waiting()
        )
        assert self.scheduler.abort(sequence) is lived

    def look(self, asked: Submission) -> Any:
        scheduler = self.scheduler
        return (
            scheduler.load(),
            scheduler.blocks(),
            [(one.known_tokens, one.computed_tokens, one.preemptions) for one in self.sequences],
            [one.request_id for one in scheduler.running()],
            [one.request_id for one in scheduler.waiting()],
            list(self.heard),
            scheduler.cached_tokens(asked),
        )

    def first_tokens(self) -> list[float]:
        return [one.first_token_s or 0.0 for one in self.sequences]

    def finish(self) -> float:
        now_s = 0.0
        while (due_s := self.due_s) is not None:
            now_s = due_s
            self.run_until(now_s)
        load = self.scheduler.load()
        assert load.running == load.waiting == load.used_blocks == 0
        return now_s


def submission(
    index: int,
    family: int,
    prompt_tokens: int,
    output_tokens: int,
    priority: int | None = None,
    ready_s: float = 0.0,
    remote_tokens: int = 0,
) -> Submission:
    """Requests of one family have the same prompt as far as both reach, and the same answer.

    Families 0 and 3 have the first six pages in common.
    """
    hashes = [1000 * (family % 3 + 1) + i + 500 * (family == 3 and i > 5) for i in range(60)]
    return Submission(
        request_id=f"r{index}",
        content=ChainContent(hashes, f"r{index}"),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_tokens=output_tokens + index % 7,
        priority=priority,
        lora_name=("", "a", "b")[index % 3] if family == 2 else "",
        ready_s=ready_s,
        remote_tokens=remote_tokens,
    )


Acts = list[tuple[float, Any]]
requests = st.tuples(
    st.integers(0, 3),
    st.integers(1, 90),
    st.integers(1, 80),
    st.none() | st.integers(-30, 30),
    st.sampled_from(["at once", "at once", "at once", "grammar", "remote", "in part"]),
)
acts_over_time = st.lists(
    st.tuples(
        st.floats(0.0, 0.3).map(lambda s: s + 0.000123),
        st.one_of(requests, requests, st.integers(0, 20), st.none()),
    ),
    min_size=1,
    max_size=25,
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


def act_on(engine: Engine, index: int, act: Any, now_s: float) -> None:
    match act:
        case (family, prompt_tokens, output_tokens, priority, how):
            one = submission(
                index,
                family,
                prompt_tokens,
                output_tokens,
                priority,
                ready_s=now_s + 0.05 if how == "grammar" else 0.0,
                remote_tokens={"remote": prompt_tokens, "in part": prompt_tokens // 2}.get(how, 0),
            )
            engine.add(one, now_s)
        case int() as at if engine.sequences:
            engine.abort(at, now_s)


@settings(max_examples=400, deadline=None)
@given(config=configs, acts=acts_over_time, joined=st.sampled_from([7, 10_000]))
def test_laws_hold_and_a_run_is_its_steps_one_by_one(
    config: SglangConfig, acts: Acts, joined: int
) -> None:
    single, run = Engine(config), Engine(replace(config, joined_steps_max=joined))
    now_s = 0.0
    for index, (after_s, act) in enumerate(acts):
        now_s += after_s
        for engine in (single, run):
            engine.run_until(now_s)
        asked = submission(0, 0, 40, 1)
        assert run.look(asked) == single.look(asked)
        for engine in (single, run):
            act_on(engine, index, act, now_s)
    assert run.finish() == pytest.approx(single.finish(), rel=1e-12)
    assert run.heard == single.heard
    assert run.out == single.out
    assert run.first_tokens() == pytest.approx(single.first_tokens(), rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(config=configs, acts=acts_over_time)
def test_the_same_seed_gives_the_same_effects(config: SglangConfig, acts: Acts) -> None:
    def effects() -> tuple[Any, ...]:
        engine, now_s = Engine(config), 0.0
        for index, (after_s, act) in enumerate(acts):
            now_s += after_s
            engine.run_until(now_s)
            act_on(engine, index, act, now_s)
        return engine.finish(), engine.heard, engine.out, engine.first_tokens()

    assert effects() == effects()


def test_under_overload_everybody_gets_an_answer() -> None:
    engine = Engine(replace(CONFIG, joined_steps_max=10_000, conservativeness=0.0))
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
    Engine(CONFIG).add(submission(0, 0, 100, 58), 0.0)
