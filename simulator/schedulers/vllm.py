"""vLLM V1: which requests a step computes, and what comes of it. Pure.

One step computes at most `step_tokens_max` tokens. Running requests
come first, one token each or the next chunk of their prompt; then waiting ones in order of arrival,
while tokens, slots and blocks last. A request waits until its whole prompt fits, since two
half-admitted prompts could block one another. When a running request finds no block, the one that
came last gives up its blocks and starts over ("preempted by recompute").

Laws:
- the first in line always gets on: no request waits for ever, and none is lost;
- KV of a token exists once it has been computed, so never for the last token of an answer;
- a block is announced when the step that fills it begins, and told when that step ends.

A caller runs it as  step = begin_step(now) -> wait until step.end_s -> end_step(now).

*Joined steps.* While all running requests decode and nobody can be admitted, consecutive steps
differ only in their number. A run of them ends when somebody finishes, when the blocks would not
suffice for another step, or when somebody comes (`cut_step`). A block is taken, evicted and stored
with the step of the run that does it.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

from typing_extensions import override

from indexer.identity import Tier
from simulator.block_pool import BlockPool
from simulator.cost_model import PrefillChunk
from simulator.decode_run import DecodeRun
from simulator.scheduler import (
    BlockCounts,
    Load,
    Output,
    SchedulerConfig,
    Sequence,
    Step,
    StepResult,
    Submission,
    check,
)


class VllmScheduler:
    """The queue, the running batch and the block pool of one engine."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.block_count, config.block_size)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._scheduled: list[tuple[Sequence, int]] = []
        """Sequences of the step that is going on, with the tokens it computes of each."""
        self._step: Step | None = None
        self._run: DecodeRun | None = None
        """The step that is going on, if it is one of several."""
        self._begun = self._ended = 0
        """Its steps whose blocks are taken, and those whose tokens are out."""
        self._blocked_hash: int | None = None
        """What the first in line would need in the cache to find more of its prompt there; None
        when that is not what it waits for."""
        self.newest_arrival_s = 0.0
        self._queried_tokens = self._hit_tokens = self._preemptions = 0
        self._prompt_tokens = self._generated_tokens = self._finished = self._aborted = 0

    @override
    def __repr__(self) -> str:
        running, waiting = len(self._running), len(self._waiting)
        return f"<VllmScheduler {running} running, {waiting} waiting, {self.pool!r}>"

    @property
    def step(self) -> Step | None:
        """The step that is going on."""
        return self._step

    @property
    def next_ready_s(self) -> float | None:
        return None

    def running(self) -> list[Sequence]:
        return list(self._running)

    def waiting(self) -> list[Sequence]:
        return list(self._waiting)

    def scheduled(self) -> list[tuple[Sequence, int]]:
        return list(self._scheduled)

    def load(self, dp_rank: int = 0) -> Load:
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            used_blocks=self.pool.in_use_count,
            total_blocks=self.pool.block_count,
            prefix_queried_tokens=self._queried_tokens,
            prefix_hit_tokens=self._hit_tokens,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            finished=self._finished,
            aborted=self._aborted,
        )

    def blocks(self, dp_rank: int = 0) -> BlockCounts:
        pool = self.pool
        return BlockCounts(pool.free_count, pool.cached_count, pool.in_use_count, pool.block_count)

    def contents(self, dp_rank: int = 0) -> Iterable[tuple[Tier, int]]:
        return [(Tier.DEVICE, block_hash) for block_hash in self.pool.contents()]

    def add(self, submission: Submission, now_s: float) -> Sequence:
        """Puts a request at the end of the queue. Raises RequestRefused."""
        check(submission, self.config)
        sequence = Sequence(submission, submission.prompt_tokens, now_s)
        self._waiting.append(sequence)
        self.newest_arrival_s = max(self.newest_arrival_s, now_s)
        return sequence

    def abort(self, sequence: Sequence) -> bool:
        """Forgets a request, gives its blocks back; False when it has already ended."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._running:
            self._running.remove(sequence)
        else:
            return False
        self._release(sequence)
        self._aborted += 1
        return True

    def cached_tokens(self, submission: Submission) -> int:
        """What a request would find in the cache if it were admitted now. Changes nothing."""
        length, size = submission.prompt_tokens, self.config.block_size
        hashes = submission.content.hashes(length // size)[: length // size]
        return len(self.pool.find_prefix(hashes, length)) * size

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, and nothing changed, while requests hold blocks."""
        return self.pool.reset()

    def begin_step(self, now_s: float) -> Step | None:
        """Decides what to compute next and takes the blocks for it; None when there is nothing."""
        if self._step is not None:
            raise RuntimeError("a step is going on")
        budget = self.config.step_tokens_max
        preemptions = self._preemptions
        i = 0
        while i < len(self._running) and budget:
            sequence = self._running[i]
            tokens = min(sequence.known_tokens - sequence.computed_tokens, budget)
            if self._grow_or_preempt(sequence, tokens):
                self._schedule(sequence, tokens)
                budget -= tokens
                i += 1
        preempted = self._preemptions > preemptions
        if not preempted:
            self._admit(budget, now_s)
        if not self._scheduled:
            return None
        self._step = self._price(now_s, may_join=not preempted)
        return self._step

    def cut_step(self, now_s: float) -> Step | None:
        """Shortens joined steps to the end of the one going on; returns the step as it is now."""
        step, run = self._step, self._run
        if step is not None and run is not None:
            steps = max(run.begun(now_s, step.count), self._begun)
            self._step = Step(step.start_s, run.end_s(steps), steps)
        return self._step

    def advance(self, now_s: float) -> StepResult:
        """Applies those of the joined steps that have ended by now, but not the last."""
        step, run = self._step, self._run
        if step is None or run is None:
            return StepResult([], [])
        ended = run.ended(now_s, step.count - 1)
        if ended <= self._ended:
            return StepResult([], [])
        self._begin_joined(ended)
        outputs = self._apply(ended, now_s)
        events = self.pool.take_events()
        self._begin_joined(ended + 1)
        return StepResult(outputs, events)

    def end_step(self, now_s: float) -> StepResult:
        """Applies the step: tokens come out, requests finish, events are told."""
        if self._step is None:
            raise RuntimeError("no step is going on")
        self._begin_joined(self._step.count)
        outputs = self._apply(self._step.count, now_s)
        self._scheduled.clear()
        self._step = self._run = None
        return StepResult(outputs, self.pool.take_events())

    def _apply(self, ended: int, now_s: float) -> list[Output]:
        """Brings out the tokens of all steps up to the `ended`-th."""
        steps = ended - self._ended
        self._ended = ended
        outputs: list[Output] = []
        for sequence, tokens in self._scheduled:
            if not sequence.blocks:
                continue  # aborted while the step was going on
            sequence.computed_tokens += tokens + steps - 1
            if sequence.computed_tokens < sequence.known_tokens:
                continue  # more of the prompt to come
            first = sequence.known_tokens
            sequence.known_tokens += steps
            if sequence.first_token_s is None:
                sequence.first_token_s = now_s
                self._prompt_tokens += sequence.prompt_tokens
            self._generated_tokens += steps
            outputs.append(Output(sequence, first, sequence.known_tokens, sequence.finished))
            if sequence.finished:
                self._running.remove(sequence)
                self._release(sequence)
                self._finished += 1
        return outputs

    def _begin_joined(self, target: int) -> None:
        """Takes and announces the blocks of the run's steps up to the `target`-th, step by step."""
        steps = target - self._begun
        if steps <= 0:
            return
        size = self.config.block_size
        crossings: list[tuple[int, int, bool, int]] = []
        """(step after those begun, place in the batch, whether it fills a block, tokens there)"""
        for place, (sequence, _) in enumerate(self._scheduled):
            if not sequence.blocks:
                continue  # aborted
            computed = sequence.computed_tokens + self._begun - self._ended
            boundary = computed + -computed % size
            for tokens in range(boundary, computed + steps + 1, size):
                if tokens > computed:
                    crossings.append((tokens - computed, place, True, tokens))
                if tokens < computed + steps:
                    crossings.append((tokens - computed + 1, place, False, tokens + 1))
        for _, place, full, tokens in sorted(crossings):
            sequence, _ = self._scheduled[place]
            if full:
                self._store_full_blocks(sequence, tokens)
            elif not self._grow(sequence, tokens):
                raise RuntimeError(f"a run of steps that doesn't fit: {self.pool!r}")
        self._begun = target

    def _grow_or_preempt(self, sequence: Sequence, tokens: int) -> bool:
        """Makes room for `tokens` more; False when the sequence itself had to give way."""
        while not self._grow(sequence, sequence.computed_tokens + tokens):
            victim = self._running.pop()
            self._release(victim)
            victim.computed_tokens = 0
            victim.preemptions += 1
            self._preemptions += 1
            self._waiting.appendleft(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self, budget: int, now_s: float) -> None:
        self._blocked_hash = None
        while self._waiting and budget and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            hashes = sequence.content.hashes(sequence.known_tokens // self.config.block_size)
            reused = self.pool.find_prefix(hashes, sequence.known_tokens)
            whole = self._blocks_for(sequence.known_tokens) - len(reused)
            if not self.pool.fits(reused, whole):
                if len(reused) < (sequence.known_tokens - 1) // self.config.block_size:
                    self._blocked_hash = hashes[len(reused)]
                return
            computed = len(reused) * self.config.block_size
            tokens = min(sequence.known_tokens - computed, budget)
            fresh = self.pool.take(reused, self._blocks_for(computed + tokens) - len(reused))
            if fresh is None:
                raise RuntimeError(f"room for a whole prompt, but not for a part: {self.pool!r}")
            sequence.blocks = [*reused, *fresh]
            sequence.stored_count = len(reused)
            sequence.computed_tokens = computed
            if sequence.cached_tokens is None:  # recomputing after a preemption is no query
                sequence.cached_tokens = computed
                sequence.scheduled_s = now_s
                self._queried_tokens += sequence.prompt_tokens
                self._hit_tokens += computed
            self._waiting.popleft()
            self._running.append(sequence)
            self._schedule(sequence, tokens)
            budget -= tokens

    def _schedule(self, sequence: Sequence, tokens: int) -> None:
        self._store_full_blocks(sequence, sequence.computed_tokens + tokens)
        self._scheduled.append((sequence, tokens))

    def _price(self, now_s: float, *, may_join: bool) -> Step:
        """The step's duration; joins steps where that changes nothing but their number."""
        cost = self.config.cost
        prefill: list[PrefillChunk] = []
        decoding = context = 0
        for sequence, tokens in self._scheduled:
            if sequence.output_tokens and sequence.computed_tokens + 1 == sequence.known_tokens:
                decoding += 1
                context += sequence.computed_tokens
            else:
                prefill.append(PrefillChunk(tokens, sequence.computed_tokens))
        self._begun, self._ended = 1, 0
        if may_join and not prefill and decoding == len(self._running):
            steps = self._joinable()
            if steps > 1:
                self._run = DecodeRun(cost, now_s, decoding, context)
                return Step(now_s, self._run.end_s(steps), steps)
        return Step(now_s, now_s + cost.step_s(prefill, decoding, context))

    def _joinable(self) -> int:
        """How many decode steps from this one on differ only in their number."""
        steps = self.config.joined_steps_max
        for one in self._running:
            steps = min(steps, one.remaining_tokens)
        if steps > 1 and not self._steps_fit(steps):
            steps = bisect_right(range(1, steps), False, key=lambda n: not self._steps_fit(n))
        if steps > 1 and self._blocked_hash is not None:
            steps = min(steps, self._steps_before_store(self._blocked_hash, steps))
        return max(steps, 1)

    def _steps_fit(self, steps: int) -> bool:
        needed = sum(
            self._blocks_for(one.computed_tokens + steps) - len(one.blocks) for one in self._running
        )
        return self.pool.fits((), needed)

    def _steps_before_store(self, block_hash: int, steps: int) -> int:
        """How many of the next steps pass before one stores this content."""
        size = self.config.block_size
        for one in self._running:
            last = (one.computed_tokens + steps) // size
            hashes = one.content.hashes(last)
            if block_hash in hashes[one.stored_count : last]:
                at = hashes.index(block_hash, one.stored_count, last)
                steps = (at + 1) * size - one.computed_tokens - 1
        return steps

    def _grow(self, sequence: Sequence, token_count: int) -> bool:
        missing = self._blocks_for(token_count) - len(sequence.blocks)
        if missing <= 0:
            return True
        fresh = self.pool.take((), missing)
        if fresh is None:
            return False
        sequence.blocks += fresh
        return True

    def _blocks_for(self, token_count: int) -> int:
        return -(-token_count // self.config.block_size)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.stored_count = 0

    def _store_full_blocks(self, sequence: Sequence, token_count: int) -> None:
        """Announces the blocks that are full with the first `token_count` tokens."""
        first, last = sequence.stored_count, token_count // self.config.block_size
        if last <= first:
            return
        told = sequence.content.stored(first, last)
        self.pool.store(sequence.blocks[first:last], told)
        sequence.stored_count = last
