"""vLLM V1: which requests a step computes, and its results. Pure.

A step computes at most `step_tokens_max` tokens. Running requests go first: a token each, the next
chunk of their prompt, or drafted tokens to verify. Then come waiting requests (admission.py). When
a running request lacks a block, the request that arrived last, or has the worst priority, gives up
its blocks and starts over ("preempted by recompute"). Such a step admits no requests.

Blocks on the device and at the host: cache.py.

Laws:
- every request ends: finished or aborted; added = finished + aborted + waiting + running;
- KV of a token exists once it has been computed, so never for the last token of an answer;
- a step is decided when it begins; its results are published when it ends.

Source: vllm-project/vllm vllm/v1/core/sched/scheduler.py, release 0.32.0, read
2026-11-21.
"""

from collections.abc import Iterable
from random import Random

from typing_extensions import override

from indexer.identity import Tier
from simulator.engines.block_pool import PoolEvent
from simulator.engines.cost_model import PrefillChunk
from simulator.engines.decode_run import DecodeRun
from simulator.engines.scheduler import (
    BlockCounts,
    Counts,
    Load,
    Output,
    Scheduler,
    SchedulerConfig,
    Sequence,
    Step,
    Submission,
)
from simulator.schedulers.vllm.admission import Admission, Room
from simulator.schedulers.vllm.cache import VllmCache
from simulator.schedulers.vllm.config import VllmConfig, VllmSequence


class VllmScheduler(Scheduler):
    """The queue, the running batch, the block pool and the host cache of one engine."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = own = VllmConfig.of(config)
        super().__init__(own)
        self._cache = VllmCache(own)
        self.pool = self._cache.pool
        self._counts = Counts()
        self._waiting = Admission(own, self._cache, self._counts)
        self._running: list[VllmSequence] = []
        self._scheduled: list[tuple[VllmSequence, int]] = []
        """(sequence, number of its tokens in the step) of the present step."""
        self._rng = Random(own.seed)
        self._added = 0

    @override
    def __repr__(self) -> str:
        running, waiting = len(self._running), len(self._waiting)
        return f"<VllmScheduler {running} running, {waiting} waiting, {self.pool!r}>"

    @property
    @override
    def next_ready_s(self) -> float | None:
        return self._waiting.next_ready_s

    @override
    def running(self) -> list[Sequence]:
        return list(self._running)

    @override
    def waiting(self) -> list[Sequence]:
        return list(self._waiting)

    @override
    def scheduled(self) -> list[tuple[Sequence, int]]:
        return list(self._scheduled)

    @override
    def load(self, dp_rank: int = 0) -> Load:
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            used_blocks=self.pool.in_use_count,
            total_blocks=self.pool.block_count,
            deferred=self._waiting.deferred,
            **vars(self._counts),
        )

    @override
    def blocks(self, dp_rank: int = 0) -> BlockCounts:
        return self._cache.counts()

    @override
    def contents(self, dp_rank: int = 0) -> Iterable[tuple[Tier, int]]:
        return self._cache.contents()

    @override
    def abort(self, sequence: Sequence) -> bool:
        if not isinstance(sequence, VllmSequence):
            return False
        if sequence in self._running:
            self._running.remove(sequence)
        elif not self._waiting.remove(sequence):
            return False
        self._cache.end(sequence)
        self._counts.aborted += 1
        return True

    @override
    def cached_tokens(self, submission: Submission) -> int:
        return self._cache.cached_tokens(submission)

    @override
    def reset_prefix_cache(self) -> bool:
        return self._cache.reset()

    @override
    def _enqueue(self, submission: Submission, now_s: float) -> Sequence:
        sequence = VllmSequence(submission, submission.prompt_tokens, now_s, number=self._added)
        self._added += 1
        self._waiting.add(sequence)
        return sequence

    @override
    def _decide(self, now_s: float) -> Step | None:
        self._waiting.look(now_s)
        preempted = True
        while preempted and not self._scheduled:  # a step that preempted all takes no time
            preemptions = self._counts.preemptions
            chunk_max = self._chunk_max()
            budget = self._schedule_running(chunk_max)
            preempted = self._counts.preemptions > preemptions
            if not preempted:
                room = Room(budget, chunk_max, self._running, self._scheduled)
                self._waiting.admit(room, now_s)
        self._cache.settle()
        return self._price(now_s, may_join=not preempted) if self._scheduled else None

    @override
    def _take_blocks(self, begun: int, steps: int) -> None:
        lively = [sequence for sequence, _ in self._scheduled if sequence.blocks]
        self._cache.decode_ahead(lively, begun, steps)

    @override
    def _end(self, count: int, now_s: float) -> list[Output]:
        outputs = self._go_on(count, now_s)
        self._scheduled.clear()
        return outputs

    @override
    def _take_events(self) -> list[PoolEvent]:
        return self.pool.take_events()

    def _chunk_max(self) -> int:
        """Most tokens that this step computes of one request."""
        threshold = self._config.long_prefill_token_threshold
        alone = len(self._running) + len(self._waiting) <= 1
        return threshold if threshold and not alone else self._config.step_tokens_max

    def _schedule_running(self, chunk_max: int) -> int:
        """Schedules the running requests; returns the number of tokens that the step has left."""
        size, running, cache = self._config.block_size, self._running, self._cache
        length_max, lookahead = self._config.model_len, self._config.lookahead_tokens
        budget = self._config.step_tokens_max
        at = 0
        while at < len(running) and budget:
            sequence = running[at]
            computed = sequence.computed_tokens
            tokens = sequence.known_tokens + sequence.draft_tokens - computed
            if tokens > 1:
                tokens = min(tokens, chunk_max, budget, length_max - 1 - computed)
            needed = computed + tokens + lookahead
            if needed > length_max:
                needed = length_max
            while needed > len(sequence.blocks) * size and not cache.grow(sequence, needed):
                victim = self._victim()
                place = running.index(victim)
                del running[place]
                if place < at:
                    at -= 1
                    budget += self._unschedule(victim)
                self._preempt(victim)
                if victim is sequence:
                    return budget
            cache.fill(sequence, min(computed + tokens, sequence.known_tokens))
            self._scheduled.append((sequence, tokens))
            budget -= tokens
            at += 1
        return budget

    def _victim(self) -> VllmSequence:
        """The request to preempt: the last that was admitted, or with policy priority the one with
        the worst priority, of equals the last to arrive."""
        if self._config.policy == "fcfs":
            return self._running[-1]
        return max(self._running, key=lambda sequence: sequence.rank[:2])

    def _unschedule(self, victim: VllmSequence) -> int:
        """Takes a request out of this step again; returns its tokens. Blocks that were stored for
        this step stay stored, as in vLLM."""
        for place, (sequence, tokens) in enumerate(self._scheduled):
            if sequence is victim:
                del self._scheduled[place]
                return tokens
        return 0

    def _preempt(self, victim: VllmSequence) -> None:
        self._cache.release(victim)
        victim.computed_tokens = victim.draft_tokens = 0
        victim.preemptions += 1
        self._counts.preemptions += 1
        self._waiting.put_back(victim)

    @override
    def _apply(self, steps: int, now_s: float) -> list[Output]:
        drafts = self._config.num_speculative_tokens
        generated = 0
        outputs: list[Output] = []
        for sequence, tokens in self._scheduled:
            if not sequence.blocks:
                continue  # aborted while the step was going on
            computed = sequence.computed_tokens + tokens + steps - 1
            first = sequence.known_tokens
            if computed < first:
                sequence.computed_tokens = computed  # the prompt is not complete
                continue
            end = first + steps
            if computed >= end:  # with drafted tokens, which may be rejected
                drafted = min(computed - first, sequence.draft_tokens)
                computed = first + self._accepted(drafted)
                end = min(computed + 1, sequence.total_tokens)
            sequence.computed_tokens = computed
            sequence.known_tokens = end
            sequence.draft_tokens = drafts
            generated += end - first
            self._counts.first_token(sequence, now_s)
            finished = end == sequence.total_tokens
            outputs.append(Output(sequence, first, end, finished))
            if finished:
                self._running.remove(sequence)
                self._cache.end(sequence)
                self._counts.finished += 1
        self._counts.generated_tokens += generated
        return outputs

    def _accepted(self, drafted: int) -> int:
        accepted = 0
        while accepted < drafted and self._rng.random() < self._config.acceptance_rate:
            accepted += 1
        self._counts.drafted_tokens += drafted
        self._counts.accepted_tokens += accepted
        return accepted

    def _price(self, now_s: float, *, may_join: bool) -> Step:
        """The scheduled step with its duration. may_join: consecutive decode steps with the same
        batch become one Step, which ends with the last of them."""
        cost = self._config.cost
        prefill: list[PrefillChunk] = []
        decoding = context = 0
        for sequence, tokens in self._scheduled:
            computed = sequence.computed_tokens
            if computed + 1 == sequence.known_tokens > sequence.prompt_tokens:
                decoding += 1
                context += computed
                if tokens > 1:  # drafted tokens go through the model like prompt tokens
                    prefill.append(PrefillChunk(tokens - 1, computed + 1))
            else:
                prefill.append(PrefillChunk(tokens, computed))
        if may_join and not prefill and decoding == len(self._running):
            run = DecodeRun(cost, now_s, decoding, context)
            steps = self._steps_alike(run)
            if steps > 1:
                self._run = run
                return Step(now_s, run.end_s(steps), steps)
        return Step(now_s, now_s + cost.step_s(prefill, decoding, context))

    def _steps_alike(self, run: DecodeRun) -> int:
        """How many consecutive decode steps, this one included, differ only in their number.

        The run ends when a request finishes, when blocks would not suffice for another step, when
        a request that was passed over becomes ready, or before a step stores the block that the
        first request in line misses.
        """
        cache, running = self._cache, self._running
        if self._config.num_speculative_tokens or self._host_may_change():
            return 1
        steps = min(sequence.remaining_tokens for sequence in running)
        steps = cache.steps_that_fit(running, min(steps, self._config.joined_steps_max))
        lacked = self._waiting.blocked_hash
        if steps > 1 and lacked is not None:
            storing = cache.step_that_stores(running, lacked, steps)
            steps = steps if storing is None else storing - 1
        for ready_s in self._waiting.unready.values():
            if ready_s > run.start_s:
                steps = min(steps, run.begun(ready_s, max(steps, 1)))
        return steps

    def _host_may_change(self) -> bool:
        """Whether decoding can change which blocks a waiting request loads from the host."""
        keeps_answers = self._cache.host is not None and not self._config.offload_prompt_only
        return keeps_answers and len(self._waiting) > 0
