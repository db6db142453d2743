"""vLLM V1: which requests a step computes, and its results. Pure.

A step computes at most `step_tokens_max` tokens. Running requests go first: a token each, the next
chunk of their prompt, or drafted tokens to verify. Then come waiting requests (admission.py). When
a running request lacks a block, the request that arrived last, or has the worst priority, gives up
its blocks and starts over ("preempted by recompute"). Such a step admits no requests.

Joined decode steps: joined.py. Blocks on the device and at the host: cache.py.

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
from simulator.engines.cost_model import PrefillChunk
from simulator.engines.decode_run import DecodeRun
from simulator.engines.scheduler import (
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
from simulator.schedulers.vllm.admission import Admission, Room
from simulator.schedulers.vllm.cache import VllmCache
from simulator.schedulers.vllm.config import VllmSequence, vllm_config
from simulator.schedulers.vllm.joined import JoinedSteps


class VllmScheduler:
    """The queue, the running batch, the block pool and the host cache of one engine."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = own = vllm_config(config)
        self.config: SchedulerConfig = own
        self._cache = VllmCache(own)
        self.pool = self._cache.pool
        self.newest_arrival_s = 0.0
        self._waiting = Admission(own, self._cache)
        self._running: list[VllmSequence] = []
        self._scheduled: list[tuple[VllmSequence, int]] = []
        """(sequence, its tokens) of the present step."""
        self._step: Step | None = None
        self._joined = JoinedSteps(own, self._cache, self._waiting)
        self._rng = Random(own.seed)
        self._added = self._preemptions = 0
        self._drafted_tokens = self._accepted_tokens = 0
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
        return self._waiting.next_ready_s

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
            prefix_queried_tokens=self._waiting.queried_tokens,
            prefix_hit_tokens=self._waiting.hit_tokens,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            finished=self._finished,
            aborted=self._aborted,
            deferred=self._waiting.deferred,
            external_queried_tokens=self._waiting.external_queried_tokens,
            external_hit_tokens=self._waiting.external_hit_tokens,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def blocks(self, dp_rank: int = 0) -> BlockCounts:
        pool = self.pool
        return BlockCounts(pool.free_count, pool.cached_count, pool.in_use_count, pool.block_count)

    def contents(self, dp_rank: int = 0) -> Iterable[tuple[Tier, int]]:
        return self._cache.contents()

    def add(self, submission: Submission, now_s: float) -> Sequence:
        """Puts a request into the queue. Raises RequestRefused."""
        check(submission, self._config)
        sequence = VllmSequence(submission, submission.prompt_tokens, now_s, number=self._added)
        self._added += 1
        self._waiting.add(sequence, now_s)
        self.newest_arrival_s = max(self.newest_arrival_s, now_s)
        return sequence

    def abort(self, sequence: Sequence) -> bool:
        """Forgets a request, gives its blocks back; False when it has already ended."""
        if not isinstance(sequence, VllmSequence):
            return False
        if sequence in self._running:
            self._running.remove(sequence)
        elif not self._waiting.remove(sequence):
            return False
        self._cache.end(sequence)
        self._aborted += 1
        return True

    def cached_tokens(self, submission: Submission) -> int:
        """Tokens that a request would reuse if it were admitted now. Changes nothing."""
        return self._cache.cached_tokens(submission)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content, on the host as well; False, and nothing changed, while
        requests hold blocks."""
        return self._cache.reset()

    def begin_step(self, now_s: float) -> Step | None:
        """Decides what to compute next and takes the blocks for it; None when there is nothing."""
        if self._step is not None:
            raise RuntimeError("a step is going on")
        self._waiting.look(now_s)
        preempted = True
        while preempted and not self._scheduled:  # a step that preempted all takes no time
            preemptions = self._preemptions
            chunk_max = self._chunk_max()
            budget = self._schedule_running(chunk_max)
            preempted = self._preemptions > preemptions
            if not preempted:
                room = Room(budget, chunk_max, self._running, self._scheduled)
                self._waiting.admit(room, now_s)
        self._cache.settle()
        if not self._scheduled:
            return None
        self._step = self._price(now_s, may_join=not preempted)
        return self._step

    def cut_step(self, now_s: float) -> Step | None:
        """Ends joined steps with the present step; returns what is left of them."""
        step, run = self._step, self._joined.run
        if step is not None and run is not None:
            steps = max(run.begun(now_s, step.count), self._joined.begun)
            self._step = Step(step.start_s, run.end_s(steps), steps)
        return self._step

    def advance(self, now_s: float) -> StepResult:
        """Applies the joined steps that have ended by now, except for the last."""
        step, joined = self._step, self._joined
        if step is None:
            return StepResult([], self.pool.take_events())
        if joined.run is None:
            return StepResult([], [])
        ended = joined.run.ended(now_s, step.count - 1)
        if ended <= joined.ended:
            return StepResult([], [])
        joined.begin(ended, self._scheduled)
        outputs = self._apply(ended, now_s)
        events = self.pool.take_events()
        joined.begin(ended + 1, self._scheduled)
        return StepResult(outputs, events)

    def end_step(self, now_s: float) -> StepResult:
        """Applies the step: tokens come out, requests finish, events are published."""
        if self._step is None:
            raise RuntimeError("no step is going on")
        self._joined.begin(self._step.count, self._scheduled)
        outputs = self._apply(self._step.count, now_s)
        self._scheduled.clear()
        self._step = None
        return StepResult(outputs, self.pool.take_events())

    def _chunk_max(self) -> int:
        """The most tokens of a request in this step."""
        threshold = self._config.long_prefill_token_threshold
        alone = len(self._running) + len(self._waiting) <= 1
        return threshold if threshold and not alone else self._config.step_tokens_max

    def _schedule_running(self, chunk_max: int) -> int:
        """Schedules the running requests; returns the tokens that are left."""
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
        """The request to preempt: the last to arrive, or the worst priority, of equals the last."""
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
        self._preemptions += 1
        self._waiting.put_back(victim)

    def _apply(self, ended: int, now_s: float) -> list[Output]:
        """Returns the tokens of all steps up to the `ended`-th."""
        steps = ended - self._joined.ended
        self._joined.ended = ended
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
            if sequence.first_token_s is None:
                sequence.first_token_s = now_s
                self._prompt_tokens += sequence.prompt_tokens
            finished = end == sequence.total_tokens
            outputs.append(Output(sequence, first, end, finished))
            if finished:
                self._running.remove(sequence)
                self._cache.end(sequence)
                self._finished += 1
        self._generated_tokens += generated
        return outputs

    def _accepted(self, drafted: int) -> int:
        accepted = 0
        while accepted < drafted and self._rng.random() < self._config.acceptance_rate:
            accepted += 1
        self._drafted_tokens += drafted
        self._accepted_tokens += accepted
        return accepted

    def _price(self, now_s: float, *, may_join: bool) -> Step:
        """The step with its duration; joins steps that differ only in their number."""
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
            steps = self._joined.longest(run, self._running)
            if steps > 1:
                self._joined.start(run)
                return Step(now_s, run.end_s(steps), steps)
        self._joined.start(None)
        return Step(now_s, now_s + cost.step_s(prefill, decoding, context))
