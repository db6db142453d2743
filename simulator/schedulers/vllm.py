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
differ only in their number, so up to `joined_steps_max` are done as one, at their average price;
`cut_step` shortens the run when somebody comes. What this changes: blocks that the run will fill
are taken when it begins, and told when it ends. 1 turns it off.
"""

from collections import deque
from collections.abc import Iterable
from math import ceil

from typing_extensions import override

from indexer.identity import Tier
from simulator.block_pool import BlockPool
from simulator.cost_model import PrefillChunk
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
        if self._preemptions == preemptions:
            self._admit(budget, now_s)
        if not self._scheduled:
            return None
        self._step = self._price(now_s)
        return self._step

    def cut_step(self, now_s: float) -> Step | None:
        """Shortens joined steps to the end of the one going on; returns the step as it is now."""
        step = self._step
        if step is not None and step.count > 1:
            begun = ceil((now_s - step.start_s) / step.single_s)
            self._step = Step(step.start_s, step.single_s, min(max(begun, 1), step.count))
        return self._step

    def advance(self, now_s: float) -> StepResult:
        return StepResult([], [])

    def end_step(self, now_s: float) -> StepResult:
        """Applies the step: tokens come out, requests finish, events are told."""
        if self._step is None:
            raise RuntimeError("no step is going on")
        steps = self._step.count
        outputs: list[Output] = []
        for sequence, tokens in self._scheduled:
            if not sequence.blocks:
                continue  # aborted while the step was going on
            sequence.computed_tokens += tokens
            if sequence.computed_tokens < sequence.known_tokens:
                continue  # more of the prompt to come
            first = sequence.known_tokens
            sequence.known_tokens += steps
            if steps > 1:
                sequence.computed_tokens += steps - 1
                self._store_full_blocks(sequence, sequence.computed_tokens)
            if sequence.first_token_s is None:
                sequence.first_token_s = now_s
                self._prompt_tokens += sequence.prompt_tokens
            self._generated_tokens += steps
            outputs.append(Output(sequence, first, sequence.known_tokens, sequence.finished))
            if sequence.finished:
                self._running.remove(sequence)
                self._release(sequence)
                self._finished += 1
        self._scheduled.clear()
        self._step = None
        return StepResult(outputs, self.pool.take_events())

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
        while self._waiting and budget and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            hashes = sequence.content.hashes(sequence.known_tokens // self.config.block_size)
            reused = self.pool.find_prefix(hashes, sequence.known_tokens)
            whole = self._blocks_for(sequence.known_tokens) - len(reused)
            if not self.pool.fits(reused, whole):
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

    def _price(self, now_s: float) -> Step:
        """The step's duration; joins steps where that changes nothing but their number."""
        prefill: list[PrefillChunk] = []
        decoding = context = 0
        for sequence, tokens in self._scheduled:
            if sequence.output_tokens and sequence.computed_tokens + 1 == sequence.known_tokens:
                decoding += 1
                context += sequence.computed_tokens
            else:
                prefill.append(PrefillChunk(tokens, sequence.computed_tokens))
        steps = 1
        if not prefill and decoding == len(self._running):
            steps = self._join()
        mean_context = context + decoding * (steps - 1) / 2
        return Step(now_s, self.config.cost.step_s(prefill, decoding, mean_context), steps)

    def _join(self) -> int:
        """How many decode steps can be done as one; takes the blocks that they will fill."""
        steps = min(
            self.config.joined_steps_max, min(one.remaining_tokens for one in self._running)
        )
        needed = sum(
            self._blocks_for(one.computed_tokens + steps) - len(one.blocks) for one in self._running
        )
        if steps == 1 or not self.pool.fits((), needed):
            return 1
        for one in self._running:
            self._grow(one, one.computed_tokens + steps)
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
