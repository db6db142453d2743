"""Chitu: a pool of tasks, and rounds of a single type of task. Pure.

A round takes the tasks that are not in flight and orders them by score. The type of the best task
decides whether the round computes prefills or decodes. When no prefill can be admitted, decodes go
on instead. Blocks and evictions: rank.py.

*Scheduling groups.* A batch goes through `num_scheduler_groups` stages, one in each step of the
engine. Its group and its tasks are taken until it leaves the last stage. A stage takes its share of
the batch's time, and a step takes as long as its slowest stage. One group: no pipeline.

*prefill_only* takes requests for one token, *decode_only* requests whose KV was computed elsewhere.
A request whose KV another engine has (`remote_tokens`) takes its blocks first, and is scheduled
when the KV has arrived.

Laws:
- a round has tasks of one type only;
- no request waits for ever: an evicted task keeps its place in the pool;
- KV of a token exists once it has been computed, so never for the last token of an answer.

Source: the description of Chitu's scheduling (part 10 of its series), and where it is silent
thu-pacman/chitu chitu/scheduler.py, read 2026-11-21. Differences from the code:
- the cache is looked up when a prefill begins, not again with every chunk;
- a new prefill that doesn't fit keeps those behind it waiting, as described; in the code they may
  overtake it;
- an evicted task keeps its place among tasks of the same score.
"""

from collections import deque
from collections.abc import Iterable
from itertools import chain

from typing_extensions import override

from indexer.identity import Tier
from simulator.engines.block_pool import PoolEvent
from simulator.engines.cost_model import PrefillChunk
from simulator.engines.decode_run import DecodeRun
from simulator.engines.scheduler import (
    BlockCounts,
    Load,
    Output,
    RequestRefused,
    Scheduler,
    SchedulerConfig,
    Sequence,
    Step,
    Submission,
)
from simulator.schedulers.chitu.rank import Rank
from simulator.schedulers.chitu.scores import Order
from simulator.schedulers.chitu.task import (
    ORDINARY_PRIORITY,
    Batch,
    ChituConfig,
    Task,
    TaskType,
)


class ChituScheduler(Scheduler):
    """The task pool, the batches in flight and the cache of one engine.

    Follows Chitu's own class step for step. Chitu's other schedulers derive from this class and
    replace `select` (skew.py, dp.py).
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.options = ChituConfig.of(config)
        self.order = Order(self.options.scheduler_type)
        allowed = self.order.allowed
        self.ranks = [Rank(self.options, rank, allowed) for rank in range(self.options.dp_size)]
        self.pool: dict[Sequence, Task] = {}
        """Tasks in order of arrival."""
        self.free_groups = deque(range(self.options.num_scheduler_groups))
        """The scheduling groups without a batch; the group that was freed first stands first."""
        self.in_flight: deque[Batch] = deque()
        """Batches in the order in which they will leave the pipeline."""
        self._added = 0
        self._check_options()

    @override
    def __repr__(self) -> str:
        running, waiting = len(self.running()), len(self.waiting())
        name = type(self).__name__
        return f"<{name} {running} running, {waiting} waiting, {self.ranks!r}>"

    @property
    @override
    def next_ready_s(self) -> float | None:
        """When the next transfer of KV will have ended."""
        times = (rank.next_arrival_s() for rank in self.ranks)
        return min((time_s for time_s in times if time_s is not None), default=None)

    @override
    def running(self) -> list[Sequence]:
        """Sequences whose blocks hold KV, in order of arrival."""
        return [task.sequence for task in self.pool.values() if self._runs(task)]

    @override
    def waiting(self) -> list[Sequence]:
        """Sequences without a block that holds KV, in order of arrival."""
        return [task.sequence for task in self.pool.values() if not self._runs(task)]

    @override
    def scheduled(self) -> list[tuple[Sequence, int]]:
        """The sequences and tokens of all batches in flight."""
        work = chain.from_iterable(batch.work for batch in self.in_flight)
        return [(task.sequence, tokens) for task, tokens in work]

    @override
    def load(self, dp_rank: int = 0) -> Load:
        rank = self.ranks[dp_rank]
        return rank.load(self.waiting_count(rank))

    def waiting_count(self, rank: Rank) -> int:
        """Tasks of this rank that hold no blocks."""
        return len(self.pool) - len(rank.holders)

    @override
    def blocks(self, dp_rank: int = 0) -> BlockCounts:
        return self.ranks[dp_rank].cache.counts()

    @override
    def contents(self, dp_rank: int = 0) -> Iterable[tuple[Tier, int]]:
        return [(Tier.DEVICE, block_hash) for block_hash in self.ranks[dp_rank].pool.contents()]

    @override
    def _enqueue(self, submission: Submission, now_s: float) -> Sequence:
        self.check(submission)
        sequence = Sequence(submission, submission.prompt_tokens, now_s)
        priority = submission.priority
        self.pool[sequence] = Task(
            sequence, self._added, ORDINARY_PRIORITY if priority is None else priority
        )
        self._added += 1
        return sequence

    def check(self, submission: Submission) -> None:
        """Raises RequestRefused for a rank that the engine lacks, and for an answer of several
        tokens in the mode prefill_only."""
        if submission.dp_rank is not None and not 0 <= submission.dp_rank < len(self.ranks):
            raise RequestRefused(f"no rank {submission.dp_rank}: there are {len(self.ranks)}")
        most = submission.longest_answer
        if TaskType.DECODE not in self.order.allowed and most > 1:
            raise RequestRefused(f"prefill_only computes 1 token of an answer, not up to {most}")

    @override
    def abort(self, sequence: Sequence) -> bool:
        task = self.pool.get(sequence)
        if task is None:
            return False
        for batch in self.in_flight:
            batch.work = [work for work in batch.work if work[0] is not task]
        self.rank_of(task).abort(task)
        self.forget(task)
        return True

    @override
    def cached_tokens(self, submission: Submission) -> int:
        return self.ranks[submission.dp_rank or 0].cache.cached_tokens(submission)

    @override
    def reset_prefix_cache(self) -> bool:
        if any(rank.holders for rank in self.ranks):
            return False
        for rank in self.ranks:
            rank.pool.reset()
        return True

    @override
    def _decide(self, now_s: float) -> Step | None:
        """Sends the next round's batch into the pipeline; None when the pipeline stays empty."""
        batch = self.select(now_s) if self.free_groups else None
        if batch is not None:
            self.free_groups.remove(batch.group)
            batch.stages_left = self.options.num_scheduler_groups
            batch.stage_s = self._batch_s(batch) / batch.stages_left
            for task, _ in batch.work:
                task.in_flight = True
            self.in_flight.append(batch)
        if not self.in_flight:
            return None
        end_s = now_s + max(batch.stage_s for batch in self.in_flight)
        step = Step(now_s, end_s)
        if batch is not None and batch.may_join and self.options.num_scheduler_groups == 1:
            return self._join(batch, now_s) or step
        return step

    @override
    def _end(self, count: int, now_s: float) -> list[Output]:
        """Moves every batch a stage on, and applies the batch that leaves the pipeline."""
        for batch in self.in_flight:
            batch.stages_left -= 1
        if self.in_flight[0].stages_left:
            return []
        outputs = self._go_on(count, now_s)
        batch = self.in_flight.popleft()
        for task, _ in batch.work:
            task.in_flight = False
        self.free_groups.append(batch.group)
        return outputs

    def select(self, now_s: float) -> Batch | None:
        """Chooses the next round's batch and takes its blocks; None: no task can be scheduled.
        Called when a scheduling group is free."""
        rank, options, group = self.ranks[0], self.options, self.free_groups[0]
        evictions = rank.counts.preemptions
        ordered = self._ordered(rank, now_s)
        if ordered and ordered[0].type is TaskType.PREFILL:
            work = rank.prefill(ordered, options.prefill_limit, options.chunk_tokens, now_s)
            if work:
                return Batch(group, TaskType.PREFILL, work)
        decode_count = sum(task.type is TaskType.DECODE for task in ordered)
        work = rank.decode(ordered, options.decode_limit)
        if not work:
            return None
        evicted = rank.counts.preemptions > evictions
        alike = self.order.steady and len(work) == decode_count and not evicted
        return Batch(group, TaskType.DECODE, work, alike)

    def rank_of(self, task: Task) -> Rank:
        return self.ranks[task.owner or 0]

    def forget(self, task: Task) -> None:
        """Removes a task that has ended from the pool."""
        del self.pool[task.sequence]

    def _check_options(self) -> None:
        """Raises ValueError for options that this scheduler doesn't support."""
        if self.options.dp_size != 1:
            raise ValueError("dp_size is for the data-parallel FIFO, chitu-dp; here it must be 1")

    def _runs(self, task: Task) -> bool:
        return task.holds_blocks and not self.rank_of(task).arriving(task)

    def _ordered(self, rank: Rank, now_s: float) -> list[Task]:
        """Tasks of a rank that can be scheduled now, best first."""
        rank.begin_round(now_s)
        ready = self._ready(rank)
        if any(rank.awaits_kv(task) for task in ready):
            rank.receive(self.order.sort(ready, now_s), now_s)
            ready = rank.schedulable(ready)
        return self.order.sort(ready, now_s)

    def _ready(self, rank: Rank) -> list[Task]:
        """Tasks that are not in flight; of tasks without blocks, the earliest that have a place."""
        holders = len(rank.holders)
        places = self.options.max_num_seqs - holders
        ready = []
        for task in self.pool.values():
            if task.holds_blocks:
                holders -= 1
                if not task.in_flight and task.type in self.order.allowed:
                    ready.append(task)
            elif places:
                places -= 1
                ready.append(task)
            if not holders and not places:
                break
        return ready

    def _batch_s(self, batch: Batch) -> float:
        """Seconds of a batch over all stages. Ranks wait for one another at every layer, so the
        slowest rank counts."""
        cost = self.config.cost
        if batch.type is TaskType.DECODE:
            return max(cost.step_s((), *load) for load in self._decode_loads(batch))
        chunks: list[list[PrefillChunk]] = [[] for _ in self.ranks]
        for task, tokens in batch.work:
            chunks[task.owner or 0].append(PrefillChunk(tokens, task.sequence.computed_tokens))
        return max(cost.step_s(prefill) for prefill in chunks if prefill)

    def _decode_loads(self, batch: Batch) -> list[tuple[int, int]]:
        """(number of sequences, tokens that they attend to) of each rank that has sequences in the
        batch."""
        loads = []
        for rank in self.ranks:
            own = self._sequences(batch, rank)
            if own:
                loads.append((len(own), sum(sequence.computed_tokens for sequence in own)))
        return loads

    def _sequences(self, batch: Batch, rank: Rank) -> list[Sequence]:
        return [task.sequence for task, _ in batch.work if self.rank_of(task) is rank]

    def _join(self, batch: Batch, now_s: float) -> Step | None:
        """This decode step and the following steps that differ only in their number, joined to one
        Step; None if no step follows."""
        sequences = [task.sequence for task, _ in batch.work]
        steps = min(
            self.config.joined_steps_max, *(sequence.remaining_tokens for sequence in sequences)
        )
        if any(sequence.first_token_s is None for sequence in sequences):
            return None  # its time would be that of the run
        for rank in self.ranks:
            own = self._sequences(batch, rank)
            steps = rank.cache.steps_alike(own, steps, rank.blocked_hashes)
        loads, cost = self._decode_loads(batch), self.config.cost

        def slowest(step: int) -> tuple[int, int]:
            return max(loads, key=lambda load: cost.step_s((), load[0], load[1] + load[0] * step))

        while steps > 1 and slowest(0) != slowest(steps - 1):
            steps //= 2
        if steps < 2:
            return None
        self._run = DecodeRun(cost, now_s, *slowest(0))
        arrival_s = self.next_ready_s
        if arrival_s is not None:
            steps = self._run.begun(arrival_s, steps)
        return Step(now_s, self._run.end_s(steps), steps)

    @override
    def _take_blocks(self, begun: int, steps: int) -> None:
        for rank in self.ranks:
            rank.cache.decode_ahead(self._sequences(self.in_flight[0], rank), begun, steps)

    @override
    def _apply(self, steps: int, now_s: float) -> list[Output]:
        outputs = []
        for task, tokens in self.in_flight[0].work:
            sequence = task.sequence
            first = sequence.known_tokens
            if self.rank_of(task).compute(task, tokens, steps, now_s):
                finished = sequence.finished
                outputs.append(Output(sequence, first, sequence.known_tokens, finished))
                if finished:
                    self.forget(task)
        return outputs

    @override
    def _take_events(self) -> list[PoolEvent]:
        return [event for rank in self.ranks for event in rank.cache.take_events()]
