"""vLLM V1: which requests a step computes, and what comes of it. Pure.

One step computes at most `step_tokens_max` tokens. Running requests come first: one token each, the
next chunk of their prompt, or drafted tokens to verify. Then waiting ones, in order of arrival or
priority, while tokens, slots and blocks last. A request waits until its whole prompt fits, since
two half-admitted prompts could block one another. Who waits for a grammar, for more input, for KV
on its way or for a LoRA's turn is passed over and holds up nobody. When a running request finds no
block, the one that came last, or has the worst priority, gives up its blocks and starts over
("preempted by recompute"); nobody is admitted in such a step.

KV that the host cache or another engine has is loaded: the request holds its blocks meanwhile, and
has computed what came when it is its turn again.

*Joined steps.* While all running requests decode and nobody can be admitted, consecutive steps
differ only in their number. A run of them ends when somebody finishes, when the blocks would not
suffice for another step, when somebody passed over becomes ready, or when somebody comes
(`cut_step`). A block is taken, evicted and stored with the step of the run that does it.

Laws:
- the first in line always gets on: no request waits for ever, and none is lost;
- KV of a token exists once it has been computed, so never for the last token of an answer;
- a block is announced when the step that fills it begins, and told when that step ends.

Source: vllm-project/vllm vllm/v1/core/sched/scheduler.py and vllm/v1/core/kv_cache_manager.py,
release 0.32.0, read 2026-11-21.
"""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import chain
from random import Random

from typing_extensions import override

from indexer.identity import Tier
from simulator.block_pool import BlockId, BlockPool
from simulator.cost_model import PrefillChunk
from simulator.decode_run import DecodeRun
from simulator.host_cache import HostCache
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
from simulator.schedulers.vllm_config import VllmSequence, vllm_config
from simulator.schedulers.vllm_queue import QUEUES, WaitingQueue


class VllmScheduler:
    """The queue, the running batch, the block pool and the host cache of one engine."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = own = vllm_config(config)
        self.config: SchedulerConfig = own
        self.pool = BlockPool(own.block_count, own.block_size)
        self.host = (
            HostCache(own.host_block_count, self.pool.tell) if own.host_block_count else None
        )
        self.newest_arrival_s = 0.0
        self._waiting: WaitingQueue = QUEUES[own.policy]()
        self._holding: WaitingQueue = QUEUES[own.policy]()
        """Who waits with blocks: KV for them is on its way, or has come."""
        self._running: list[VllmSequence] = []
        self._unready: dict[VllmSequence, float] = {}
        """Who waits for something else than its turn, and when that is there."""
        self._scheduled: list[tuple[VllmSequence, int]] = []
        """Sequences of the step that is going on, with the tokens it computes of each."""
        self._step: Step | None = None
        self._run: DecodeRun | None = None
        """The step that is going on, if it is one of several."""
        self._looked_s = 0.0
        """When it was last decided what to compute."""
        self._begun = self._ended = 0
        """Its steps whose blocks are taken, and those whose tokens are out."""
        self._blocked_hash: int | None = None
        """What the first in line would need in the cache to find more of its prompt there; None
        when that is not what it waits for."""
        self._offers: list[tuple[VllmSequence, int]] = []
        """Whose leading blocks the host shall see when the step is decided, and how many."""
        self._gone: list[tuple[VllmSequence, int]] = []
        """The same of those who ended since the last step was decided."""
        self._watermark_blocks = int(own.watermark * own.block_count)
        self._rng = Random(own.seed)
        self._added = self._deferred = 0
        self._queried_tokens = self._hit_tokens = self._preemptions = 0
        self._external_queried_tokens = self._external_hit_tokens = 0
        self._drafted_tokens = self._accepted_tokens = 0
        self._prompt_tokens = self._generated_tokens = self._finished = self._aborted = 0

    @override
    def __repr__(self) -> str:
        running, waiting = len(self._running), len(self._waiting) + len(self._holding)
        return f"<VllmScheduler {running} running, {waiting} waiting, {self.pool!r}>"

    @property
    def step(self) -> Step | None:
        """The step that is going on."""
        return self._step

    @property
    def next_ready_s(self) -> float | None:
        later = [ready_s for ready_s in self._unready.values() if ready_s > self._looked_s]
        return min(later, default=None)

    def running(self) -> list[Sequence]:
        return list(self._running)

    def waiting(self) -> list[Sequence]:
        return [*self._holding, *self._waiting]

    def scheduled(self) -> list[tuple[Sequence, int]]:
        return list(self._scheduled)

    def load(self, dp_rank: int = 0) -> Load:
        return Load(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._holding),
            used_blocks=self.pool.in_use_count,
            total_blocks=self.pool.block_count,
            prefix_queried_tokens=self._queried_tokens,
            prefix_hit_tokens=self._hit_tokens,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            finished=self._finished,
            aborted=self._aborted,
            deferred=self._deferred,
            external_queried_tokens=self._external_queried_tokens,
            external_hit_tokens=self._external_hit_tokens,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def blocks(self, dp_rank: int = 0) -> BlockCounts:
        pool = self.pool
        return BlockCounts(pool.free_count, pool.cached_count, pool.in_use_count, pool.block_count)

    def contents(self, dp_rank: int = 0) -> Iterable[tuple[Tier, int]]:
        return chain(
            ((Tier.DEVICE, block_hash) for block_hash in self.pool.contents()),
            ((Tier.HOST, block_hash) for block_hash in (self.host.contents() if self.host else ())),
        )

    def add(self, submission: Submission, now_s: float) -> Sequence:
        """Puts a request into the queue. Raises RequestRefused."""
        check(submission, self._config)
        sequence = VllmSequence(submission, submission.prompt_tokens, now_s, number=self._added)
        self._added += 1
        self._waiting.add(sequence)
        ready_s = max(submission.ready_s, submission.input_ready_s)
        if ready_s > now_s:
            sequence.ready_s = self._unready[sequence] = ready_s
        self.newest_arrival_s = max(self.newest_arrival_s, now_s)
        return sequence

    def abort(self, sequence: Sequence) -> bool:
        """Forgets a request, gives its blocks back; False when it has already ended."""
        if not isinstance(sequence, VllmSequence):
            return False
        if sequence in self._running:
            self._running.remove(sequence)
        elif not (self._holding.remove(sequence) or self._waiting.remove(sequence)):
            return False
        self._unpin(sequence)
        self._unready.pop(sequence, None)
        self._end(sequence)
        self._aborted += 1
        return True

    def cached_tokens(self, submission: Submission) -> int:
        """What a request would find in the caches if it were admitted now. Changes nothing."""
        length, size = submission.prompt_tokens, self._config.block_size
        hashes = submission.content.hashes(length // size)[: length // size]
        found = len(self.pool.find_prefix(hashes, length))
        if self.host is not None:
            found += self.host.run_length(hashes, found, len(hashes))
        return min(found * size, length - 1)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content, the host's too; False, and nothing changed, while requests
        hold blocks."""
        done = self.pool.reset()
        if done and self.host is not None:
            self.host.clear()
            self._gone.clear()
        return done

    def begin_step(self, now_s: float) -> Step | None:
        """Decides what to compute next and takes the blocks for it; None when there is nothing."""
        if self._step is not None:
            raise RuntimeError("a step is going on")
        self._looked_s = now_s
        self._end_loads(now_s)
        preempted = True
        while preempted and not self._scheduled:  # a step that nobody is left in takes no time
            preemptions = self._preemptions
            chunk_max = self._chunk_max()
            budget = self._schedule_running(chunk_max)
            preempted = self._preemptions > preemptions
            if not preempted:
                self._admit(budget, chunk_max, now_s)
        self._offer_all()
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

    # ---- the running ----

    def _chunk_max(self) -> int:
        """The most tokens of one request in this step."""
        threshold = self._config.long_prefill_token_threshold
        alone = len(self._running) + len(self._waiting) + len(self._holding) <= 1
        return threshold if threshold and not alone else self._config.step_tokens_max

    def _schedule_running(self, chunk_max: int) -> int:
        """Schedules who runs already; returns the tokens that are left."""
        size, running = self._config.block_size, self._running
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
            while needed > len(sequence.blocks) * size and not self._grow(sequence, needed):
                victim = self._victim()
                place = running.index(victim)
                del running[place]
                if place < at:
                    at -= 1
                    budget += self._unschedule(victim)
                self._preempt(victim)
                if victim is sequence:
                    return budget
            self._schedule(sequence, tokens)
            budget -= tokens
            at += 1
        return budget

    def _victim(self) -> VllmSequence:
        """Who gives way: the last to come, or the worst priority (the latest of these)."""
        if self._config.policy == "fcfs":
            return self._running[-1]
        return max(self._running, key=lambda one: one.rank[:2])

    def _unschedule(self, victim: VllmSequence) -> int:
        """Takes somebody out of this step again; returns its tokens. What was announced as filled
        stays announced, as with vLLM."""
        for place, (sequence, tokens) in enumerate(self._scheduled):
            if sequence is victim:
                del self._scheduled[place]
                return tokens
        return 0

    def _preempt(self, victim: VllmSequence) -> None:
        self._release(victim)
        victim.computed_tokens = victim.draft_tokens = 0
        victim.preemptions += 1
        self._preemptions += 1
        self._waiting.put_back([victim])

    def _schedule(self, sequence: VllmSequence, tokens: int) -> None:
        last = (sequence.computed_tokens + tokens) // self._config.block_size
        if last > sequence.stored_count:
            certain = min(sequence.computed_tokens + tokens, sequence.known_tokens)
            self._store_full_blocks(sequence, certain)
        if self.host is not None:
            self._offers.append((sequence, sequence.stored_count))
        self._scheduled.append((sequence, tokens))

    # ---- the waiting ----

    def _admit(self, budget: int, chunk_max: int, now_s: float) -> None:
        config = self._config
        self._blocked_hash = None
        passed: list[VllmSequence] = []
        passed_holding: list[VllmSequence] = []
        slots = config.max_num_seqs - sum(
            one.submission.input_ready_s > now_s for one in self._unready
        )
        # An admitted decode is padded to a whole draft when only decodes run: steps of equal rows
        # are faster.
        decodes_only = all(one.draft_tokens for one, _ in self._scheduled)
        padding = config.num_speculative_tokens if decodes_only else 0
        running_before = len(self._scheduled)
        loras: set[str] = set()
        if config.lora_names:
            loras = {one.submission.lora_name for one, _ in self._scheduled} - {""}
        while budget and len(self._running) < slots:
            queue = self._holding if len(self._holding) else self._waiting
            if not len(queue):
                break
            sequence = queue.peek()
            lora = sequence.submission.lora_name
            lora_waits = lora and lora not in loras and len(loras) >= config.max_loras
            if not self._is_ready(sequence, now_s) or lora_waits:
                (passed if queue is self._waiting else passed_holding).append(queue.pop())
                continue
            if sequence.blocks:
                tokens = self._place(
                    sequence, [], sequence.computed_tokens, budget, chunk_max, padding
                )
            else:
                hashes = sequence.content.hashes(sequence.known_tokens // config.block_size)
                reused = self.pool.find_prefix(hashes, sequence.known_tokens)
                found = len(reused) * config.block_size
                external = self._external_tokens(sequence, hashes, len(reused))
                if external and self._loaded_by_others(sequence, hashes, len(reused)):
                    passed.append(queue.pop())
                    continue
                if external:
                    admitted = self._scheduled[running_before:]
                    reserved = self._reserved_blocks(passed_holding, admitted)
                    tokens = self._load(sequence, reused, external, reserved, now_s)
                else:
                    pad = padding if found or running_before else 0
                    tokens = self._place(sequence, reused, found, budget, chunk_max, pad)
                if tokens is None:
                    if len(reused) < (sequence.known_tokens - 1) // config.block_size:
                        self._blocked_hash = hashes[len(reused)]
                    break
                self._count_query(sequence, found, external)
            if tokens is None:
                break
            queue.pop()
            if sequence.loading:
                passed_holding.append(sequence)
                continue
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now_s
            if lora:
                loras.add(lora)
            self._running.append(sequence)
            self._schedule(sequence, tokens)
            budget -= tokens
        self._waiting.put_back(passed)
        self._holding.put_back(passed_holding)
        self._deferred = len(passed) + len(passed_holding)

    def _is_ready(self, sequence: VllmSequence, now_s: float) -> bool:
        """Whether it waits for nothing but its turn; KV that has come counts as computed."""
        if sequence.ready_s is None:
            return True
        if now_s < sequence.ready_s:
            return False
        sequence.ready_s = None
        del self._unready[sequence]
        if sequence.loading:
            sequence.loading = False
            self._store_full_blocks(sequence, sequence.computed_tokens)
            sequence.computed_tokens = min(sequence.computed_tokens, sequence.known_tokens - 1)
        return True

    def _place(
        self,
        sequence: VllmSequence,
        reused: list[BlockId],
        computed: int,
        budget: int,
        chunk_max: int,
        padding: int,
    ) -> int | None:
        """Finds blocks for somebody's first chunk; returns its tokens, None when there is no room.

        computed: tokens of it that are in the cache, or were loaded. padding: what a single token
        is padded with; a step verifies it like drafted tokens, and rejects it.
        """
        config = self._config
        tokens = sequence.known_tokens - computed
        if tokens == 1 and padding and computed + 1 + padding < config.model_len:
            tokens += padding
            if tokens > budget:
                return None
        tokens = min(tokens, chunk_max)
        if tokens > budget and not config.enable_chunked_prefill:
            return None
        tokens = min(tokens, budget)
        held = len(sequence.blocks) + len(reused)
        end = min(computed + tokens + config.lookahead_tokens, config.model_len)
        needed = max(self._blocks_for(end) - held, 0)
        whole = self._blocks_for(sequence.known_tokens) - held
        wanted = max(needed, whole) if config.scheduler_reserve_full_isl else needed
        if not self.pool.fits(reused, wanted + self._watermark()):
            return None
        self._take(sequence, reused, needed)
        sequence.computed_tokens = computed
        return tokens

    def _load(
        self,
        sequence: VllmSequence,
        reused: list[BlockId],
        external: int,
        reserved: int,
        now_s: float,
    ) -> int | None:
        """Finds blocks for KV that has to come, and lets it come; None when there is no room.

        Such blocks are held without progress, so they must leave the `reserved` ones.
        """
        config, cost = self._config, self._config.cost
        found = len(reused) * config.block_size
        needed = self._blocks_for(found + external) - len(reused)
        whole = self._blocks_for(sequence.known_tokens) - len(reused)
        wanted = needed + reserved
        if config.scheduler_reserve_full_isl:
            wanted = max(wanted, whole)
        if not self.pool.fits(reused, wanted + self._watermark()):
            return None
        self._take(sequence, reused, needed)
        sequence.computed_tokens = found + external
        sequence.offered_count = sequence.computed_tokens // config.block_size
        sequence.loading = True
        if self._asks_another(sequence):
            took_s = cost.transfer_s(external, sequence.submission.remote_distance)
            sequence.remote_asked = True
        else:
            took_s = cost.load_s(external, Tier.HOST)
            if self.host is not None:
                sequence.pinned = self._loaded_hashes(sequence)
                self.host.begin_load(sequence.pinned)
                sequence.seen_blocks.update(range(len(reused), sequence.offered_count))
        sequence.ready_s = self._unready[sequence] = now_s + took_s
        return 0

    def _end_loads(self, now_s: float) -> None:
        """What has been loaded by now may leave the host."""
        for sequence, ready_s in self._unready.items():
            if ready_s <= now_s:
                self._unpin(sequence)

    def _unpin(self, sequence: VllmSequence) -> None:
        if self.host is not None and sequence.pinned:
            self.host.end_load(sequence.pinned)
            sequence.pinned = []

    def _loaded_hashes(self, sequence: VllmSequence) -> list[int]:
        last = sequence.computed_tokens // self._config.block_size
        return sequence.content.hashes(last)[sequence.stored_count : last]

    def _external_tokens(self, sequence: VllmSequence, hashes: list[int], found: int) -> int:
        """Tokens that can be loaded beyond the first `found` blocks."""
        size = self._config.block_size
        if self._asks_another(sequence):
            return max(sequence.submission.remote_tokens - found * size, 0)
        if self.host is None:
            return 0
        return self.host.run_length(hashes, found, sequence.known_tokens // size) * size

    def _loaded_by_others(self, sequence: VllmSequence, hashes: list[int], found: int) -> bool:
        """Whether some of what it would load from the host is on its way to the device already."""
        if self.host is None or self._asks_another(sequence):
            return False
        last = sequence.known_tokens // self._config.block_size
        last = found + self.host.run_length(hashes, found, last)
        return self.host.any_loading(hashes[found:last])

    def _asks_another(self, sequence: VllmSequence) -> bool:
        return bool(sequence.submission.remote_tokens) and not sequence.remote_asked

    def _reserved_blocks(
        self, passed_holding: list[VllmSequence], admitted: list[tuple[VllmSequence, int]]
    ) -> int:
        """What those who hold blocks, and whose prompts are not through yet, still need; with
        drafted tokens, also what each of them and the newcomer need for a step of these.

        Nothing when nobody holds blocks: who is alone always gets on.
        """
        drafts = self._config.num_speculative_tokens
        ahead = 1 + drafts + self._config.lookahead_tokens if drafts else 0
        holders = [*self._holding, *passed_holding]
        if not self._running and not holders:
            return 0
        through = {
            one for one, tokens in admitted if one.computed_tokens + tokens >= one.known_tokens
        }
        for one in self._running:
            prefilling = (
                not one.draft_tokens if drafts else one.computed_tokens + 1 < one.known_tokens
            )
            if prefilling and one not in through:
                holders.append(one)
        needed = sum(
            max(self._blocks_for(one.known_tokens + ahead) - len(one.blocks), 0) for one in holders
        )
        return needed + self._blocks_for(ahead)

    def _watermark(self) -> int:
        return self._watermark_blocks if self._running else 0

    def _count_query(self, sequence: VllmSequence, found: int, external: int) -> None:
        if sequence.cached_tokens is not None:
            return  # recomputing after a preemption is no query
        sequence.cached_tokens = min(found + external, sequence.known_tokens - 1)
        self._queried_tokens += sequence.prompt_tokens
        self._hit_tokens += found
        if self.host is not None or sequence.submission.remote_tokens:
            self._external_queried_tokens += sequence.prompt_tokens - found
            self._external_hit_tokens += external

    # ---- the step ----

    def _apply(self, ended: int, now_s: float) -> list[Output]:
        """Brings out the tokens of all steps up to the `ended`-th."""
        steps = ended - self._ended
        self._ended = ended
        drafts = self._config.num_speculative_tokens
        generated = 0
        outputs: list[Output] = []
        for sequence, tokens in self._scheduled:
            if not sequence.blocks:
                continue  # aborted while the step was going on
            computed = sequence.computed_tokens + tokens + steps - 1
            first = sequence.known_tokens
            if computed < first:
                sequence.computed_tokens = computed  # more of the prompt to come
                continue
            end = first + steps
            if computed >= end:  # with drafted tokens, of which some may be rejected
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
                self._finish(sequence)
        self._generated_tokens += generated
        return outputs

    def _accepted(self, drafted: int) -> int:
        accepted = 0
        while accepted < drafted and self._rng.random() < self._config.acceptance_rate:
            accepted += 1
        self._drafted_tokens += drafted
        self._accepted_tokens += accepted
        return accepted

    def _finish(self, sequence: VllmSequence) -> None:
        self._running.remove(sequence)
        self._end(sequence)
        self._finished += 1

    def _price(self, now_s: float, *, may_join: bool) -> Step:
        """The step's duration; joins steps where that changes nothing but their number."""
        cost = self._config.cost
        prefill: list[PrefillChunk] = []
        decoding = context = 0
        for sequence, tokens in self._scheduled:
            computed = sequence.computed_tokens
            if computed + 1 == sequence.known_tokens > sequence.prompt_tokens:
                decoding += 1
                context += computed
                if tokens > 1:  # drafted tokens go through the model like a prompt's
                    prefill.append(PrefillChunk(tokens - 1, computed + 1))
            else:
                prefill.append(PrefillChunk(tokens, computed))
        self._begun, self._ended = 1, 0
        if may_join and not prefill and decoding == len(self._running):
            run = DecodeRun(cost, now_s, decoding, context)
            steps = self._joinable(run)
            if steps > 1:
                self._run = run
                return Step(now_s, run.end_s(steps), steps)
        return Step(now_s, now_s + cost.step_s(prefill, decoding, context))

    # ---- joined steps ----

    def _joinable(self, run: DecodeRun) -> int:
        """How many decode steps from this one on differ only in their number."""
        if self._config.num_speculative_tokens or self._host_may_change():
            return 1
        steps = self._config.joined_steps_max
        for one in self._running:
            left = one.total_tokens - one.known_tokens
            steps = min(steps, left)
        if steps > 1 and not self._steps_fit(steps):
            steps = bisect_right(range(1, steps), False, key=lambda n: not self._steps_fit(n))
        if steps > 1 and self._blocked_hash is not None:
            steps = min(steps, self._steps_before_store(self._blocked_hash, steps))
        for ready_s in self._unready.values():
            if ready_s > run.start_s:
                steps = min(steps, run.begun(ready_s, max(steps, 1)))
        return max(steps, 1)

    def _host_may_change(self) -> bool:
        """Whether decoding can change what somebody who waits would load from the host."""
        waiting = len(self._waiting) + len(self._holding)
        return self.host is not None and not self._config.offload_prompt_only and waiting > 0

    def _steps_fit(self, steps: int) -> bool:
        size = self._config.block_size
        needed = sum(
            -(-(one.computed_tokens + steps) // size) - len(one.blocks) for one in self._running
        )
        return self.pool.fits((), needed)

    def _steps_before_store(self, block_hash: int, steps: int) -> int:
        """How many of the next steps pass before one stores this content."""
        size = self._config.block_size
        for one in self._running:
            last = (one.computed_tokens + steps) // size
            hashes = one.content.hashes(last)
            if block_hash in hashes[one.stored_count : last]:
                at = hashes.index(block_hash, one.stored_count, last)
                steps = (at + 1) * size - one.computed_tokens - 1
        return steps

    def _begin_joined(self, target: int) -> None:
        """Takes and announces the blocks of the run's steps up to the `target`-th, step by step."""
        steps = target - self._begun
        if steps <= 0:
            return
        size = self._config.block_size
        crossings: list[tuple[int, int, bool, int]] = []
        """(step after those begun, place in the batch, whether it fills a block, tokens there)"""
        lead = self._begun - self._ended
        for place, (sequence, _) in enumerate(self._scheduled):
            if not sequence.blocks:
                continue  # aborted
            computed = sequence.computed_tokens + lead
            boundary = computed + -computed % size
            for tokens in range(boundary, computed + steps + 1, size):
                if tokens > computed:
                    crossings.append((tokens - computed, place, True, tokens))
                if tokens < computed + steps:
                    crossings.append((tokens - computed + 1, place, False, tokens + 1))
        step = 0
        for at, place, full, tokens in sorted(crossings):
            if at > step:
                self._offer_all()
                step = at
            sequence, _ = self._scheduled[place]
            if full:
                self._store_full_blocks(sequence, tokens)
                if self.host is not None:
                    self._offers.append((sequence, sequence.stored_count))
            elif not self._grow(sequence, tokens):
                raise RuntimeError(f"a run of steps that doesn't fit: {self.pool!r}")
        self._offer_all()
        self._begun = target

    # ---- blocks ----

    def _take(self, sequence: VllmSequence, reused: list[BlockId], new_count: int) -> None:
        fresh = self.pool.take(reused, new_count)
        if fresh is None:
            raise RuntimeError(f"room for a whole prompt, but not for a part: {self.pool!r}")
        if not sequence.blocks:
            sequence.stored_count = len(reused)
        sequence.blocks += [*reused, *fresh]

    def _grow(self, sequence: VllmSequence, token_count: int) -> bool:
        missing = self._blocks_for(token_count) - len(sequence.blocks)
        if missing <= 0:
            return True
        fresh = self.pool.take((), missing)
        if fresh is None:
            return False
        sequence.blocks += fresh
        return True

    def _blocks_for(self, token_count: int) -> int:
        return -(-token_count // self._config.block_size)

    def _release(self, sequence: VllmSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.stored_count = 0

    def _store_full_blocks(self, sequence: VllmSequence, token_count: int) -> None:
        """Announces the blocks that are full with the first `token_count` tokens."""
        first, last = sequence.stored_count, token_count // self._config.block_size
        if last > first:
            told = sequence.content.stored(first, last)
            self.pool.store(sequence.blocks[first:last], told)
            sequence.stored_count = last

    # ---- the host ----

    def _end(self, sequence: VllmSequence) -> None:
        """Gives up the blocks of somebody who has ended."""
        if self.host is not None:
            self._gone.append((sequence, sequence.computed_tokens // self._config.block_size))
        self._release(sequence)

    def _offer_all(self) -> None:
        """Lets the host keep what this step fills, and what the last one would not let it keep;
        then those who have ended make their blocks the last used."""
        if self.host is None:
            return
        prompt_only = self._config.offload_prompt_only
        for sequence, full in chain(self._offers, self._gone):
            last = full
            if prompt_only:
                last = min(full, sequence.prompt_tokens // self._config.block_size)
            if last > sequence.offered_count and (sequence.blocks or sequence.finished):
                content = sequence.content
                hashes = content.hashes(last)[:last]
                first = sequence.offered_count
                if self.host.offer(hashes, first, content.stored, sequence.seen_blocks):
                    sequence.offered_count = last
        for sequence, _ in self._gone:
            places = sorted(sequence.seen_blocks)
            if places:
                hashes = sequence.content.hashes(places[-1] + 1)
                self.host.touch([hashes[i] for i in places])
        self._offers.clear()
        self._gone.clear()
        self.host.settle()
