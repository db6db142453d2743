"""SGLang: which requests a step computes, and its results. Pure.

A step is a prefill batch if a request can be admitted or is partly computed, else it computes a
token of each running request. Admission: prefills.py and budget.py; order of the queue: policy.py;
cached prefixes: radix_cache.py. A prompt joins the radix tree when it has been computed, an answer
when it ends. Memory is not set aside for whole answers, so running requests can outgrow it. Then
the requests with the fewest output tokens are *retracted*, back to the queue, until the others have
room for their next token, and the share that is set aside rises.

Laws, besides those of every scheduler (simulator/engines/scheduler.py):
- pages add up: free + evictable + protected + private = total, private those of admitted requests;
- at most one request is partly computed, and meanwhile none decodes (unless mixed_chunk).

Source: sgl-project/sglang python/sglang/srt/managers/scheduler.py and schedule_batch.py, release
0.5.7 without overlap. Rules of 0.5.23 where 0.5.7 loses requests or pages, or a recording differs:
- preempted requests go back to the queue even when no request was admitted for them;
- an empty batch is never full;
- eviction frees the missing pages, not again all wanted pages;
- an ended answer joins the tree (0.5.7 keeps the prompt only);
- events are published with each step, not every 40 decode steps.
Unlike SGLang:
- an aborted request leaves at once instead of after another step;
- a request that can never fit is refused instead of its answer shortened;
- a lookup precedes preemption;
- when mixed chunks run out of memory, a request waits; the engine would fail.
"""

from collections.abc import Iterable

from typing_extensions import override

from indexer.identity import Tier
from simulator.engines.block_pool import PoolEvent
from simulator.engines.cost_model import PrefillChunk
from simulator.engines.decode_run import DecodeRun
from simulator.engines.radix_cache import RadixCache
from simulator.engines.scheduler import (
    BlockCounts,
    Counts,
    Load,
    Output,
    RequestRefused,
    Scheduler,
    SchedulerConfig,
    Sequence,
    Step,
    Submission,
)
from simulator.schedulers.sglang.arrivals import Arrivals
from simulator.schedulers.sglang.batch import DecodeBatch
from simulator.schedulers.sglang.config import LOWEST_PRIORITY, SglangConfig, SglangSequence
from simulator.schedulers.sglang.pages import SequencePages
from simulator.schedulers.sglang.prefills import Prefills
from simulator.schedulers.sglang.ratio import NewTokenRatio

LENGTH_MARGIN_TOKENS = 2
"""Tokens of the pool that prompt and answer of a request must leave free."""


class SglangScheduler(Scheduler):
    """The queue, the running batch and the radix cache of one engine."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._config = SglangConfig.of(config)
        self.cache = RadixCache(config.block_count)
        self.ratio = NewTokenRatio(self._config.conservativeness)
        self._pages = SequencePages(self._config, self.cache)
        self._arrivals = Arrivals(self._config, self.cache, self._pages)
        self._batch = DecodeBatch(self._config, self.cache, self._pages, self.ratio)
        self._counts = Counts()
        self._prefills = Prefills(
            self._config, self.cache, self._pages, self._batch, self.ratio, self._counts
        )

    @override
    def __repr__(self) -> str:
        running, waiting = len(self.running()), len(self.waiting())
        return f"<SglangScheduler {running} running, {waiting} waiting, {self.cache!r}>"

    @property
    @override
    def next_ready_s(self) -> float | None:
        return self._arrivals.next_ready_s

    @override
    def running(self) -> list[Sequence]:
        """The decode batch, then the requests whose prompt is being computed."""
        chunked = self._prefills.chunked
        partly = [] if chunked is None else [chunked]
        return [*self._batch.members, *self._prefills.joining(), *partly]

    @override
    def waiting(self) -> list[Sequence]:
        return [*self._prefills.waiting, *self._arrivals.sequences()]

    @override
    def scheduled(self) -> list[tuple[Sequence, int]]:
        return [
            *((request, request.extend_tokens) for request in self._prefills.current),
            *((request, 1) for request in self._batch.decoding),
        ]

    @override
    def load(self, dp_rank: int = 0) -> Load:
        """Running requests include requests in prefill, unlike in SGLang's own gauge."""
        prefills = self._prefills
        in_prefill = len(prefills.joining()) + (prefills.chunked is not None)
        return Load(
            running=len(self._batch.members) + in_prefill,
            waiting=len(prefills.waiting) + len(self._arrivals),
            used_blocks=self.cache.page_count - self.cache.available,
            total_blocks=self.cache.page_count,
            deferred=len(self._arrivals),
            **vars(self._counts),
        )

    @override
    def blocks(self, dp_rank: int = 0) -> BlockCounts:
        cache = self.cache
        in_use = cache.protected + cache.private
        return BlockCounts(cache.free, cache.evictable, in_use, cache.page_count)

    @override
    def contents(self, dp_rank: int = 0) -> Iterable[tuple[Tier, int]]:
        return [(Tier.DEVICE, page) for page in self.cache.contents()]

    @override
    def _enqueue(self, submission: Submission, now_s: float) -> Sequence:
        sequence = SglangSequence(submission, submission.prompt_tokens, now_s)
        self._refuse_hopeless(sequence)
        priority = submission.priority
        if priority is None or not self._config.priority_scheduling:
            priority = LOWEST_PRIORITY[self._config.low_priority_values_first]
        sequence.priority = priority
        if not self._arrivals.add(sequence):
            self._prefills.enqueue(sequence)
        return sequence

    @override
    def abort(self, sequence: Sequence) -> bool:
        """Forgets a request; what it has computed stays in the cache. False when it has ended."""
        if not isinstance(sequence, SglangSequence):
            raise TypeError(f"{sequence!r} is no sequence of SGLang's scheduler")
        if sequence.node is not None:
            if sequence is self._prefills.chunked:
                self._prefills.chunked = None
            elif sequence in self._batch.members:
                self._batch.members.remove(sequence)
            else:
                self._arrivals.drop(sequence)
            self._pages.store(sequence)
            self._pages.release(sequence)
            self._prefills.full = False
        elif sequence in self._prefills.waiting:
            self._prefills.waiting.remove(sequence)
        elif not self._arrivals.drop(sequence):
            return False
        self._counts.aborted += 1
        return True

    @override
    def cached_tokens(self, submission: Submission) -> int:
        if not self._config.radix_cache:
            return 0
        pages = (submission.prompt_tokens - 1) // self._config.block_size
        return self.cache.find(submission.content.hashes(pages), pages) * self._config.block_size

    @override
    def reset_prefix_cache(self) -> bool:
        return self.cache.reset()

    @override
    def _decide(self, now_s: float) -> Step | None:
        if self._prefills.chunked is not None:
            self._pages.store(self._prefills.chunked)
        if self._arrivals:
            self._welcome(now_s)
        self._prefills.admit(now_s)
        if not self._prefills.current:
            self._decode()
            if not self._batch.decoding:
                # All were retracted, so there is room for waiting requests.
                self._prefills.admit(now_s)
        if not self._prefills.current and not self._batch.decoding:
            self.ratio.restart()
            return None
        return self._price(now_s)

    @override
    def _take_blocks(self, begun: int, steps: int) -> None:
        self._batch.take_pages(begun, steps)
        self.ratio.decay(steps)

    @override
    def _end(self, count: int, now_s: float) -> list[Output]:
        outputs = self._prefills.apply(now_s) + self._go_on(count, now_s)
        self._prefills.current = []
        self._batch.end()
        return outputs

    @override
    def _take_events(self) -> list[PoolEvent]:
        return self.cache.take_events()

    def _refuse_hopeless(self, sequence: SglangSequence) -> None:
        """Raises RequestRefused for a request that not even an empty engine would admit."""
        config = self._config
        room = config.block_count * config.block_size - LENGTH_MARGIN_TOKENS
        if config.ignore_eos and not config.radix_cache:
            room -= config.block_size  # prompts are counted in whole pages then
        if sequence.prompt_tokens + sequence.max_tokens > room:
            raise RequestRefused(
                f"the cache has room for {room} tokens, but the prompt has "
                f"{sequence.prompt_tokens} and its answer up to {sequence.max_tokens}"
            )

    def _welcome(self, now_s: float) -> None:
        """Lets requests whose KV has arrived from another engine go on, and begins further
        transfers."""
        arrivals = self._arrivals
        fetches: list[tuple[SglangSequence, int]] = []
        if self._prefills.chunked is None:  # pages are set aside for its next chunks
            fetches = arrivals.begin_fetches(len(self._batch.members), now_s)
        for request, tokens in fetches:
            self._counts.looked_up(request, request.computed_tokens, tokens)
        places = self._config.max_num_seqs - len(self._batch.members)
        for request in arrivals.arrived(places, now_s):
            self._pages.store(request)
            if request.computed_tokens + 1 == request.known_tokens:
                request.scheduled_s = now_s
                self._batch.join([request])
            else:  # the rest of its prompt is computed here, after the transferred prefix
                self._pages.release(request)
                request.computed_tokens = 0
                self._prefills.enqueue(request)

    def _decode(self) -> None:
        """Begins a step that only decodes, and retracts the requests that don't fit."""
        others_hold = self._arrivals.fetching or self._prefills.chunked is not None
        for request in self._batch.make_room(may_empty=others_hold):
            self._counts.preemptions += 1
            self._prefills.enqueue(request)
            self._prefills.full = False
        self._batch.begin()

    def _price(self, now_s: float) -> Step:
        """The next step with its duration. Steps of decoding alone that follow one another with the
        same batch are one Step, which ends with the last of them."""
        batch, cost = self._batch, self._config.cost
        decoding = len(batch.decoding)
        context = sum(request.computed_tokens for request in batch.decoding)
        if self._prefills.current:
            chunks = [
                PrefillChunk(request.extend_tokens, request.computed_tokens)
                for request in self._prefills.current
            ]
            return Step(now_s, now_s + cost.step_s(chunks, decoding, context))
        self._run = DecodeRun(cost, now_s, decoding, context)
        steps = 1
        none_joins = not self._prefills.waiting or (
            self._prefills.full and not self._config.priority_scheduling
        )
        if none_joins and self._prefills.chunked is None:
            steps = batch.steps_max(self._config.joined_steps_max)
            ready_s = self._arrivals.ready_after(now_s)
            if ready_s is not None:
                steps = self._run.begun(ready_s, steps)
        batch.take_pages(0, 1)
        return Step(now_s, self._run.end_s(steps), steps)

    @override
    def _apply(self, steps: int, now_s: float) -> list[Output]:
        outputs = self._batch.apply(steps)
        for output in outputs:
            self._counts.first_token(output.sequence, now_s)  # another engine computed its prompt
            if output.finished:
                self._counts.finished += 1
                self._prefills.full = False
        self._counts.generated_tokens += steps * len(outputs)
        return outputs
