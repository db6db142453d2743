"""One Chitu engine with the time of those who look at it, and its laws, checked at every step."""

from collections import Counter
from typing import Any

import numpy as np

from indexer.identity import Tier
from indexer.reference import ReferenceIndex
from simulator.engines.block_pool import Cleared, PoolEvent, Removed, Stored
from simulator.engines.content import ChainContent
from simulator.engines.scheduler import RequestRefused, Sequence, StepResult, Submission
from simulator.schedulers.chitu.dp import DpFifoScheduler
from simulator.schedulers.chitu.scheduler import ChituScheduler
from simulator.schedulers.chitu.skew import SkewScheduler
from simulator.schedulers.chitu.task import ChituConfig, Task, TaskType

KINDS = (ChituScheduler, SkewScheduler, DpFifoScheduler)


def submission(
    name: str, prompt: int, output: int, *, text: int | None = None, **options: Any
) -> Submission:
    """Requests of one text have the same prompt as far as both reach."""
    hashes = [1000 * (text + 1) + i for i in range(100)] if text is not None else []
    return Submission(
        request_id=name,
        content=ChainContent(hashes, name),
        prompt_tokens=prompt,
        output_tokens=output,
        **options,
    )


class World:
    """Steps without a gap; the oracle hears the events; laws are looked at whenever a step ends."""

    def __init__(self, kind: type[ChituScheduler], config: ChituConfig) -> None:
        self.scheduler = kind(config)
        self.sequences: list[Sequence] = []
        self.refused = 0
        self.joined = 0
        """Runs of several steps."""
        self.log: list[Any] = []
        """All effects, with their times."""
        self.events: list[list[tuple[str, int]]] = [[] for _ in self.scheduler.ranks]
        """Of each rank, (kind, block hash) of all told so far."""
        self._out: Counter[str] = Counter()
        self._copies = [Counter[int]() for _ in self.scheduler.ranks]
        self._oracle = ReferenceIndex()
        self._slots = [self._oracle.open_slot() for _ in self.scheduler.ranks]

    def run_until(self, now_s: float) -> None:
        """Ends all steps that end by now."""
        while (due_s := self._due_s()) is not None and due_s <= now_s:
            if self.scheduler.step is not None:
                self._hear(self.scheduler.end_step(due_s), due_s)
                self.check()
            self._begin(due_s)
        self._hear(self.scheduler.advance(now_s), now_s)

    def add(self, asked: Submission, now_s: float) -> Sequence | None:
        try:
            sequence = self.scheduler.add(asked, now_s)
        except RequestRefused:
            self.refused += 1
            return None
        self.sequences.append(sequence)
        if self.scheduler.step is None:
            self._begin(now_s)
        else:
            self.scheduler.cut_step(now_s)
        return sequence

    def abort(self, index: int, now_s: float) -> None:
        self.scheduler.cut_step(now_s)
        self.scheduler.abort(self.sequences[index % len(self.sequences)])
        if self.scheduler.step is None:
            self._begin(now_s)

    def finish(self, now_s: float = 0.0) -> float:
        """Runs until idle; nobody is left then. Returns the time."""
        while (due_s := self._due_s()) is not None:
            now_s = due_s
            self.run_until(now_s)
        assert not self.scheduler.pool, f"waiting for ever: {self.scheduler!r}"
        assert all(not blocks.in_use for blocks in map(self.scheduler.blocks, self._ranks()))
        return now_s

    def state(self) -> Any:
        """What can be asked, and what was told so far."""
        scheduler = self.scheduler
        asked = submission("asked", 60, 1, text=0)
        return (
            [(scheduler.load(rank), scheduler.blocks(rank)) for rank in self._ranks()],
            [rank.block_threshold for rank in scheduler.ranks],
            [(one.known_tokens, one.computed_tokens, one.preemptions) for one in self.sequences],
            scheduler.cached_tokens(asked),
            self.events,
        )

    def first_tokens(self) -> list[float]:
        return [one.first_token_s or 0.0 for one in self.sequences]

    def check(self) -> None:
        """The laws, between two steps."""
        scheduler = self.scheduler
        accounted = 0
        for rank in self._ranks():
            blocks, load = scheduler.blocks(rank), scheduler.load(rank)
            assert blocks.free + blocks.cached + blocks.in_use == blocks.total
            holders = scheduler.ranks[rank].holders
            in_use = {block for task in holders for block in task.sequence.blocks}
            assert blocks.in_use == len(in_use) == load.used_blocks
            held = {one for _, one in scheduler.contents(rank)}
            assert held == {one for one, copies in self._copies[rank].items() if copies}
            assert self._oracle.told(self._slots[rank]) == len(held)
            assert self._oracle.digest(self._slots[rank]) == _digest(held)
            accounted += load.running + load.waiting + load.finished + load.aborted
            assert 1 <= scheduler.ranks[rank].block_threshold <= blocks.total
        assert accounted == len(self.sequences)
        for task in scheduler.pool.values():
            self._check_task(task)
        for sequence in self.sequences:
            assert self._out[sequence.request_id] == sequence.output_tokens

    def _check_task(self, task: Task) -> None:
        sequence, size = task.sequence, self.scheduler.config.block_size
        assert 0 <= sequence.computed_tokens < sequence.known_tokens <= sequence.total_tokens
        if not sequence.blocks:
            assert sequence.computed_tokens == 0
            assert task.type is TaskType.PREFILL
            assert not task.in_flight
        assert len(sequence.blocks) * size >= sequence.computed_tokens

    def _due_s(self) -> float | None:
        step = self.scheduler.step
        return self.scheduler.next_ready_s if step is None else step.end_s

    def _ranks(self) -> range:
        return range(len(self.scheduler.ranks))

    def _begin(self, now_s: float) -> None:
        step = self.scheduler.begin_step(now_s)
        if step is None:
            ready_s = self.scheduler.next_ready_s
            if ready_s is None:
                assert not self.scheduler.pool, f"nothing to compute: {self.scheduler!r}"
            else:
                assert ready_s > now_s
            return
        self.joined += step.count > 1
        for batch in self.scheduler.in_flight:
            assert all(task.in_flight for task, _ in batch.work)
        in_flight = [task for batch in self.scheduler.in_flight for task, _ in batch.work]
        assert len(in_flight) == len(set(in_flight))

    def _hear(self, result: StepResult, now_s: float) -> None:
        for output in result.outputs:
            name = output.sequence.request_id
            assert output.first == output.sequence.prompt_tokens + self._out[name]
            self._out[name] += output.last - output.first
            self.log.append((now_s, name, output.first, output.last, output.finished))
        for event in result.events:
            self._replay(event)
            if not isinstance(event, Cleared):
                kind = type(event).__name__
                self.events[event.dp_rank] += [(kind, one) for one in event.hashes]
            self.log.append((now_s, event))

    def _replay(self, event: PoolEvent) -> None:
        copies, slot = self._copies[event.dp_rank], self._slots[event.dp_rank]
        match event:
            case Stored():
                copies.update(event.hashes)
                self._oracle.store(slot, Tier.DEVICE, np.array(event.hashes, dtype=np.uint64))
            case Removed():
                copies.subtract(event.hashes)
                gone = [one for one in event.hashes if not copies[one]]
                self._oracle.remove(slot, Tier.DEVICE, np.array(gone, dtype=np.uint64))
            case Cleared():
                copies.clear()
                self._oracle.clear(slot)


def _digest(hashes: set[int]) -> int:
    other = ReferenceIndex()
    slot = other.open_slot()
    other.store(slot, Tier.DEVICE, np.array(sorted(hashes), dtype=np.uint64))
    return other.digest(slot)
