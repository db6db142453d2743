"""One rank of Chitu: admission, blocks and eviction. Pure.

A prefill is admitted if its blocks fit under the *block threshold*. The threshold is the whole pool
until a decode lacks a block: each eviction for a decode halves it, and each task that ends restores
it. So after an eviction prompts wait while the tasks that made it necessary go on.

Laws:
- a new prefill leaves room for the missing blocks of all partly computed prefills, so these can't
  block one another for ever;
- within a round, no task is evicted for a task behind it.

Source: thu-pacman/chitu chitu/scheduler.py (read 2026-11-21), the scheduler of a rank:
`_schedule_prefill_tasks`, `_schedule_decode_tasks`, `evict_task`.
"""

from collections.abc import Set

from typing_extensions import override

from simulator.engines.block_pool import BlockId
from simulator.engines.scheduler import Counts, Load, Sequence
from simulator.schedulers.chitu.cache import RankCache
from simulator.schedulers.chitu.task import ChituConfig, Task, TaskType, Work


class Rank:
    """The cache of a rank, the tasks that hold its blocks, and its counters."""

    def __init__(self, config: ChituConfig, dp_rank: int, allowed: Set[TaskType]) -> None:
        """allowed: types of task that are scheduled at all."""
        self.config = config
        self.allowed = allowed
        self.dp_rank = dp_rank
        self.cache = RankCache(config, dp_rank)
        self.pool = self.cache.pool
        self.block_threshold = config.block_count
        self.holders: dict[Task, None] = {}
        """The tasks that hold blocks of this rank."""
        self.counts = Counts()
        self.blocked_hashes: list[int] = []
        """The hash of the first block that the cache lacks, for each new task of this round that
        didn't fit."""
        self._arrivals: dict[Task, float] = {}
        """Task whose KV is being transferred to its blocks -> time of the transfer's end, in
        seconds."""

    @override
    def __repr__(self) -> str:
        return f"<Rank {self.dp_rank}: threshold {self.block_threshold}, {self.pool!r}>"

    def load(self, waiting: int) -> Load:
        """The metrics of the rank. waiting: number of its tasks that hold no blocks."""
        arriving = len(self._arrivals)
        return Load(
            running=len(self.holders) - arriving,
            waiting=waiting + arriving,
            deferred=arriving,
            used_blocks=self.pool.in_use_count,
            total_blocks=self.pool.block_count,
            **vars(self.counts),
        )

    def arriving(self, task: Task) -> bool:
        return task in self._arrivals

    def prefill(self, ordered: list[Task], limit: int, budget: int, now_s: float) -> list[Work]:
        """Takes blocks for the prefills of a step, best task first; returns each with its tokens.

        ordered: tasks, best first. limit: most prefills. budget: most prompt tokens. When a new
        task doesn't fit, no new task behind it is admitted; partly computed prefills go on. When a
        partly computed prefill lacks blocks, the last partly computed prefill behind it is evicted,
        which doesn't lower the threshold.
        """
        tasks = [task for task in ordered if task.type is TaskType.PREFILL]
        work: list[Work] = []
        full = False
        i = 0
        while i < len(tasks) and len(work) < limit and budget:
            task = tasks[i]
            begun = task.holds_blocks
            if begun:
                tokens = self._extend(task, budget)
            else:
                tokens = 0 if full else self._admit(task, budget, now_s)
                full = not tokens
            if tokens:
                work.append((task, tokens))
                budget -= tokens
            elif begun:
                behind = (later for later in reversed(tasks[i + 1 :]) if later.holds_blocks)
                victim = next(behind, None)
                if victim is None:
                    break
                self._evict(victim)
                continue
            i += 1
        return work

    def decode(self, ordered: list[Task], limit: int) -> list[Work]:
        """Takes blocks for `limit` decodes of a step at most, best task first; returns the decodes
        that got theirs.

        A decode that lacks a block evicts the last partly computed prefill, or else the last
        decode. When there is no task to evict, the decode waits for the batches in flight.
        """
        decodes = [task for task in ordered if task.type is TaskType.DECODE]
        prefills = [task for task in ordered if task.type is TaskType.PREFILL and task.holds_blocks]
        work: list[Work] = []
        i = 0
        while i < len(decodes) and len(work) < limit:
            task = decodes[i]
            if self.cache.grow(task.sequence, task.sequence.known_tokens):
                self.cache.store(task.sequence, task.sequence.known_tokens)
                work.append((task, 1))
                i += 1
                continue
            if prefills:
                victim = prefills.pop()
            elif len(decodes) > i + 1:
                victim = decodes.pop()
            else:
                break
            self._evict(victim)
            self.block_threshold = max(1, self.block_threshold // 2)
        return work

    def begin_round(self, now_s: float) -> None:
        """Makes KV that has arrived by now usable, before tasks are scheduled."""
        self.blocked_hashes.clear()
        for task, arrives_s in list(self._arrivals.items()):
            if arrives_s <= now_s:
                self._land(task)

    def receive(self, ordered: list[Task], now_s: float) -> None:
        """Takes blocks for new tasks that get KV from another engine, and for the token after that
        KV, and begins the transfers. Ends with the first task that doesn't fit.

        In decode_only mode every task gets the KV of all its tokens but the last; without a
        transfer time when the request has no remote_tokens.
        """
        prefills = TaskType.PREFILL in self.allowed
        for task in ordered:
            sequence, submission = task.sequence, task.sequence.submission
            if not self.awaits_kv(task):
                continue
            last = sequence.known_tokens - 1
            reused = self.cache.find(sequence)
            cached = min(len(reused) * self.config.block_size, last)
            have = max(cached, min(submission.remote_tokens, last) if prefills else last)
            missing = self.cache.blocks_for(have + 1) - len(reused)
            if not self._take(task, reused, missing):
                return
            task.fetched = task.in_flight = True
            sequence.computed_tokens = have
            coming = have - cached
            self._look_up(sequence, cached, coming, now_s)
            took_s = 0.0
            if submission.remote_tokens:
                took_s = self.config.cost.transfer_s(coming, submission.remote_distance)
            self._arrivals[task] = now_s + took_s
            if not took_s:
                self._land(task)

    def awaits_kv(self, task: Task) -> bool:
        """Whether a task waits for room for KV from another engine. An evicted task computes its KV
        itself, unless the mode is decode_only."""
        if task.holds_blocks:
            return False
        if TaskType.PREFILL not in self.allowed:
            return True
        return bool(task.sequence.submission.remote_tokens and not task.fetched)

    def schedulable(self, tasks: list[Task]) -> list[Task]:
        """Tasks that neither are in flight nor wait for KV from another engine."""
        return [task for task in tasks if not task.in_flight and not self.awaits_kv(task)]

    def next_arrival_s(self) -> float | None:
        """When the next transfer of KV will have ended."""
        return min(self._arrivals.values(), default=None)

    def compute(self, task: Task, tokens: int, steps: int, now_s: float) -> int:
        """Applies `steps` rounds that each computed `tokens` of a task; returns how many new tokens
        came out.

        A finished task gives its blocks back.
        """
        sequence = task.sequence
        sequence.computed_tokens += tokens * steps
        known = sequence.known_tokens
        if task.type is TaskType.PREFILL and sequence.computed_tokens < known:
            return 0
        task.type = TaskType.DECODE
        sequence.known_tokens = sequence.computed_tokens + 1
        self.cache.store(sequence, sequence.computed_tokens)
        self.counts.first_token(sequence, now_s)
        new = sequence.known_tokens - known
        self.counts.generated_tokens += new
        if sequence.finished:
            self.counts.finished += 1
            self._end(task)
        return new

    def abort(self, task: Task) -> None:
        self.counts.aborted += 1
        self._end(task)

    def _admit(self, task: Task, budget: int, now_s: float) -> int:
        """Begins a prefill; returns the tokens of its first chunk, 0 when there is no room.

        A prompt that is cached to its last token needs no block: its last token is computed again,
        in place.
        """
        sequence, size = task.sequence, self.config.block_size
        reused = self.cache.find(sequence)
        cached = min(len(reused) * size, sequence.known_tokens - 1)
        tokens = min(sequence.known_tokens - cached, budget)
        missing = self.cache.blocks_for(cached + tokens) - len(reused)
        if not self._take(task, reused, missing):
            return 0
        self._look_up(sequence, cached, 0, now_s)
        sequence.computed_tokens = cached
        self.cache.store(sequence, cached + tokens)
        return tokens

    def _take(self, task: Task, reused: list[BlockId], missing: int) -> bool:
        """Gives a new task its blocks; False when they don't fit under the threshold, or don't
        leave enough blocks for the partly computed prefills."""
        kept = self.config.block_count - self.block_threshold + self._reserved()
        if missing and not self.pool.fits(reused, missing + kept):
            lacking = self.cache.next_hash(task.sequence, len(reused))
            if lacking is not None:
                self.blocked_hashes.append(lacking)
            return False
        self.cache.take(task.sequence, reused, missing)
        self.holders[task] = None
        return True

    def _extend(self, task: Task, budget: int) -> int:
        """Takes blocks for the next chunk of a partly computed prefill; returns the chunk's tokens,
        0 without room."""
        sequence = task.sequence
        tokens = min(sequence.known_tokens - sequence.computed_tokens, budget)
        wanted = sequence.computed_tokens + tokens
        missing = self.cache.missing(sequence, wanted)
        kept = self.config.block_count - self.block_threshold
        if missing and not self.pool.fits((), missing + kept):
            return 0
        if not self.cache.grow(sequence, wanted):
            raise RuntimeError(f"blocks fit under the threshold, but not into the pool: {self!r}")
        self.cache.store(sequence, wanted)
        return tokens

    def _reserved(self) -> int:
        """Blocks that the partly computed prefills still need for their whole prompts."""
        return sum(
            self.cache.missing(task.sequence, task.sequence.known_tokens)
            for task in self.holders
            if task.type is TaskType.PREFILL
        )

    def _land(self, task: Task) -> None:
        """Ends the transfer of a task's KV: that of all its computed tokens is in its blocks."""
        self._arrivals.pop(task)
        task.in_flight = False
        sequence = task.sequence
        self.cache.store(sequence, sequence.computed_tokens)
        whole = sequence.computed_tokens == sequence.known_tokens - 1
        if whole and TaskType.DECODE in self.allowed:
            task.type = TaskType.DECODE

    def _look_up(self, sequence: Sequence, cached: int, coming: int, now_s: float) -> None:
        """Counts the first lookup of a sequence: tokens cached here, and tokens coming from another
        engine."""
        if sequence.cached_tokens is None:
            sequence.scheduled_s = now_s
        self.counts.looked_up(
            sequence, cached, coming if sequence.submission.remote_tokens else None
        )

    def _evict(self, task: Task) -> None:
        """Takes a task's blocks back; its prefill begins again, and will compute the answer so far
        as well."""
        self._release(task)
        task.type = TaskType.PREFILL
        task.sequence.computed_tokens = 0
        task.sequence.preemptions += 1
        self.counts.preemptions += 1

    def _end(self, task: Task) -> None:
        if task.holds_blocks:
            self._release(task)
        self.block_threshold = self.config.block_count

    def _release(self, task: Task) -> None:
        self.cache.release(task.sequence)
        del self.holders[task]
        self._arrivals.pop(task, None)
