"""One engine through a random life: its clients, a subscriber, and the laws of every scheduler.

Laws, looked at whenever a step ends:
- blocks add up, and the events, replayed, give what the cache holds;
- every request is running, waiting or has ended, and ends once;
- tokens come in order, each once, and KV of a token exists once it has been computed;
- an engine with nothing to compute has nobody who waits for ever.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from indexer.identity import Tier
from simulator.engines.block_pool import Cleared, PoolEvent, Removed, Stored
from simulator.engines.content import ChainContent
from simulator.engines.scheduler import (
    RequestRefused,
    Scheduler,
    Sequence,
    Step,
    StepResult,
    Submission,
)

Check = Callable[["Life"], None]


def chained(name: str, hashes: list[int], prompt: int, output: int, **options: Any) -> Submission:
    """A request whose prompt begins with these blocks."""
    content = ChainContent(hashes, name)
    return Submission(
        request_id=name, content=content, prompt_tokens=prompt, output_tokens=output, **options
    )


def begin(scheduler: Scheduler, now_s: float = 0.0) -> Step:
    begun = scheduler.begin_step(now_s)
    assert begun is not None
    return begun


def step(scheduler: Scheduler, now_s: float = 0.0) -> float:
    """One step; returns its end."""
    end_s = begin(scheduler, now_s).end_s
    scheduler.end_step(end_s)
    return end_s


class Life:
    """check: an engine's own laws, beside those of all."""

    def __init__(self, scheduler: Scheduler, check: Check, ranks: int = 1) -> None:
        self.scheduler = scheduler
        self.ranks = range(ranks)
        self.sequences: list[Sequence] = []
        self.refused = 0
        self.joined = 0
        """Runs of several steps."""
        self.heard: list[list[tuple[str, Tier, int]]] = [[] for _ in self.ranks]
        """Of each rank, (kind, tier, hash) of all events so far."""
        self.copies = [Counter[tuple[Tier, int]]() for _ in self.ranks]
        self._out: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()
        self._check_own = check

    @property
    def due_s(self) -> float | None:
        """When something happens by itself."""
        step = self.scheduler.step
        return self.scheduler.next_ready_s if step is None else step.end_s

    def run_until(self, now_s: float) -> None:
        """Lets happen all that happens by now."""
        while (due_s := self.due_s) is not None and due_s <= now_s:
            if self.scheduler.step is not None:
                self._hear(self.scheduler.end_step(due_s))
                for rank in self.ranks:
                    held = {one for one, copies in self.copies[rank].items() if copies}
                    assert held == set(self.scheduler.contents(rank))
                self.check()
            self._begin(due_s)
        self._hear(self.scheduler.advance(now_s))
        self.check()

    def add(self, asked: Submission, now_s: float) -> None:
        try:
            self.sequences.append(self.scheduler.add(asked, now_s))
        except RequestRefused:
            self.refused += 1
            return
        if self.scheduler.step is None:
            self._begin(now_s)
        else:
            self.scheduler.cut_step(now_s)

    def abort(self, index: int, now_s: float) -> None:
        scheduler, sequence = self.scheduler, self.sequences[index % len(self.sequences)]
        lived = sequence in scheduler.running() or sequence in scheduler.waiting()
        scheduler.cut_step(now_s)
        assert scheduler.abort(sequence) is lived
        self._ends[sequence.request_id] += lived
        if scheduler.step is None:
            self._begin(now_s)

    def finish(self, now_s: float = 0.0) -> float:
        """Runs until idle; returns the time."""
        while (due_s := self.due_s) is not None:
            now_s = due_s
            self.run_until(now_s)
        for rank in self.ranks:
            load = self.scheduler.load(rank)
            assert load.running == load.waiting == load.used_blocks == 0
        assert [self._ends[one.request_id] for one in self.sequences] == [1] * len(self.sequences)
        return now_s

    def look(self, asked: Submission) -> Any:
        """What can be asked, and what was told so far."""
        scheduler = self.scheduler
        return (
            [(scheduler.load(rank), scheduler.blocks(rank)) for rank in self.ranks],
            [(one.known_tokens, one.computed_tokens, one.preemptions) for one in self.sequences],
            [one.request_id for one in scheduler.running()],
            [one.request_id for one in scheduler.waiting()],
            [list(heard) for heard in self.heard],
            scheduler.cached_tokens(asked),
        )

    def first_tokens(self) -> list[float]:
        return [one.first_token_s or 0.0 for one in self.sequences]

    def check(self) -> None:
        scheduler = self.scheduler
        running, waiting = scheduler.running(), scheduler.waiting()
        loads = [scheduler.load(rank) for rank in self.ranks]
        for rank, load in zip(self.ranks, loads, strict=True):
            blocks = scheduler.blocks(rank)
            assert blocks.free + blocks.cached + blocks.in_use == blocks.total
            assert min(blocks.free, blocks.cached, blocks.in_use) >= 0
            assert load.used_blocks == blocks.in_use
            assert load.external_hit_tokens <= load.external_queried_tokens
        assert sum(load.running for load in loads) == len(running)
        assert sum(load.waiting for load in loads) == len(waiting)
        assert len({*running, *waiting}) == len(running) + len(waiting)
        ended = sum(load.finished + load.aborted for load in loads)
        assert len(self.sequences) == ended + len(running) + len(waiting)
        for one in running:
            assert 0 <= one.computed_tokens < one.known_tokens <= one.total_tokens
        for one in waiting:  # also with KV that is being loaded
            assert 0 <= one.computed_tokens <= one.known_tokens <= one.total_tokens
        for one in self.sequences:
            assert self._out[one.request_id] == one.output_tokens
        assert sum(load.generated_tokens for load in loads) == self._out.total()
        self._check_own(self)

    def _begin(self, now_s: float) -> None:
        step = self.scheduler.begin_step(now_s)
        if step is None:
            assert not self.scheduler.running()
            ready_s = self.scheduler.next_ready_s
            assert not self.scheduler.waiting() if ready_s is None else ready_s > now_s
            return
        self.joined += step.count > 1
        assert all(tokens > 0 for _, tokens in self.scheduler.scheduled())

    def _hear(self, result: StepResult) -> None:
        for output in result.outputs:
            name = output.sequence.request_id
            assert output.first == output.sequence.prompt_tokens + self._out[name]
            assert output.last > output.first
            self._out[name] += output.last - output.first
            self._ends[name] += output.finished
        for event in result.events:
            self._replay(event)

    def _replay(self, event: PoolEvent) -> None:
        copies, heard = self.copies[event.dp_rank], self.heard[event.dp_rank]
        match event:
            case Stored():
                copies.update((event.tier, one) for one in event.hashes)
                heard += [("stored", event.tier, one) for one in event.hashes]
            case Removed():
                copies.subtract((event.tier, one) for one in event.hashes)
                assert all(copies[event.tier, one] >= 0 for one in event.hashes)
                heard += [("removed", event.tier, one) for one in event.hashes]
            case Cleared():
                copies.clear()


Acts = list[tuple[float, Any]]
Act = Callable[[Life, int, Any, float], None]
"""(life, number of the act, what is done, now_s)"""


def acts_of(requests: st.SearchStrategy[Any]) -> st.SearchStrategy[Acts]:
    """Requests, aborts and resets, each so long after the one before."""
    after_s = st.floats(0.0, 0.3).map(lambda s: s + 0.000123)
    act = st.one_of(requests, requests, st.integers(0, 20), st.none())
    return st.lists(st.tuples(after_s, act), min_size=1, max_size=25)


def act_on(life: Life, doing: Any, now_s: float) -> None:
    """What any engine lives through beside requests: a number aborts, None resets."""
    match doing:
        case int() if life.sequences:
            life.abort(doing, now_s)
        case None:
            life.scheduler.reset_prefix_cache()


def assert_alike(single: Life, run: Life, acts: Acts, act: Act, asked: Submission) -> None:
    """Joined steps against single ones: the same tokens, blocks, events and times. So an engine
    does the same each time, whatever it draws."""
    now_s = 0.0
    for index, (after_s, doing) in enumerate(acts):
        now_s += after_s
        for life in (single, run):
            life.run_until(now_s)
        assert run.look(asked) == single.look(asked)
        for life in (single, run):
            act(life, index, doing, now_s)
    assert run.finish(now_s) == pytest.approx(single.finish(now_s), rel=1e-9)
    assert run.look(asked) == single.look(asked)
    assert run.first_tokens() == pytest.approx(single.first_tokens(), rel=1e-9)
