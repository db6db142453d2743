"""SGLang's waiting queue, and the prefill batches that are made of it. Pure.

A batch has the partly computed request, if any, and waiting requests as far as the budget allows
(budget.py), in the order of policy.py. After a request that lacked memory, or with all places
taken, the queue is not examined until a request has left the decode batch (`full`). Under priority
scheduling each step examines the queue, since a new request may preempt running requests.

Law: at most one request is partly computed.

Source: sgl-project/sglang python/sglang/srt/managers/scheduler.py, `get_new_batch_prefill`, release
0.5.7; differences: scheduler.py.
"""

from itertools import count

from simulator.engines.radix_cache import RadixCache
from simulator.engines.scheduler import Counts, Output
from simulator.schedulers.sglang.batch import DecodeBatch
from simulator.schedulers.sglang.budget import PrefillBudget, Verdict
from simulator.schedulers.sglang.config import SglangConfig, SglangSequence
from simulator.schedulers.sglang.pages import SequencePages
from simulator.schedulers.sglang.policy import WaitingOrder
from simulator.schedulers.sglang.ratio import NewTokenRatio


class Prefills:
    """The waiting queue, the prefill batch of the present step and the partly computed request."""

    def __init__(
        self,
        config: SglangConfig,
        cache: RadixCache,
        pages: SequencePages,
        batch: DecodeBatch,
        ratio: NewTokenRatio,
        counts: Counts,
    ) -> None:
        self.waiting: list[SglangSequence] = []
        self.chunked: SglangSequence | None = None
        """The partly computed request."""
        self.current: list[SglangSequence] = []
        """Requests whose prompt, or a part of it, the present step computes."""
        self.full = False
        """Whether admission waits until a request has left the batch."""
        self._config = config
        self._cache = cache
        self._pages = pages
        self._batch = batch
        self._ratio = ratio
        self._counts = counts
        self._order = WaitingOrder(config, cache)
        self._serial = count()

    def joining(self) -> list[SglangSequence]:
        """Requests whose whole prompt is computed at the end of the present step."""
        return [
            request
            for request in self.current
            if request.node is not None and request is not self.chunked
        ]

    def enqueue(self, sequence: SglangSequence) -> None:
        """Puts a request at the end of the queue."""
        sequence.queued = next(self._serial)
        self.waiting.append(sequence)

    def admit(self, now_s: float) -> None:
        """Makes a prefill batch of the partly computed request and of waiting requests."""
        config, batch = self._config, self._batch
        if config.priority_scheduling or not batch.members:
            self.full = False
        if self.chunked is None:
            if self.full or not self.waiting:
                return
            if len(batch.members) >= config.max_num_seqs and not config.priority_scheduling:
                self.full = True
                return
        self._order.sort(self.waiting)
        mixed = len(batch.members) if config.mixes else 0
        budget = PrefillBudget(
            config, self._cache, self._pages, batch.members, self._ratio.value, mixed
        )
        if self.chunked is not None and not budget.add_next_chunk(self.chunked):
            return
        preempted: list[SglangSequence] = []
        for sequence in self.waiting:
            if sequence.submission.lora_name and not self._loras_fit(sequence, budget):
                continue
            if len(budget.admitted) >= config.max_num_seqs - len(self._batch.members):
                self.full = True
            if self.full:
                stopped = self._preempt_for(sequence, budget)
                if not stopped:
                    break
                preempted += stopped
            verdict = budget.add(sequence)
            if verdict is Verdict.NO_MEMORY:
                self.full = bool(budget.admitted or self._batch.members)
            if verdict is not Verdict.GO_ON:
                break
        if budget.admitted:
            admitted = set(budget.admitted)
            self.waiting = [request for request in self.waiting if request not in admitted]
        for request in preempted:
            self.enqueue(request)
        self.chunked = budget.chunked
        self.current = budget.admitted
        if self.current:
            self._begin(now_s)

    def apply(self, now_s: float) -> list[Output]:
        """Ends the prefill batch, and returns its first tokens. Its requests join the decode batch,
        except for a request of whose prompt only a part is computed."""
        outputs: list[Output] = []
        joining: list[SglangSequence] = []
        for request in self.current:
            if request.node is None:
                continue  # aborted
            request.computed_tokens += request.extend_tokens
            if request is self.chunked:
                self.full = False
                continue
            request.known_tokens += 1
            self._counts.first_token(request, now_s)
            self._counts.generated_tokens += 1
            outputs.append(
                Output(request, request.known_tokens - 1, request.known_tokens, request.finished)
            )
            self._pages.store(request)
            if request.finished:
                self._pages.release(request)
                self._counts.finished += 1
                self.full = False
            else:
                joining.append(request)
        self._batch.join(joining)
        return outputs

    def _loras_fit(self, sequence: SglangSequence, budget: PrefillBudget) -> bool:
        """Whether the batch has room for the LoRA adapter of a request."""
        names = {
            request.submission.lora_name for request in (*self._batch.members, *budget.admitted)
        }
        return len(names | {sequence.submission.lora_name}) <= self._config.loras_max

    def _preempt_for(self, sequence: SglangSequence, budget: PrefillBudget) -> list[SglangSequence]:
        """Stops less important running requests, if that makes room; returns them."""
        if not self._config.priority_scheduling:
            return []
        victims = budget.victims(sequence, self._batch.members)
        for request in victims:
            budget.forgo(request)
        self._batch.preempt(victims)
        self._counts.preemptions += len(victims)
        return victims

    def _begin(self, now_s: float) -> None:
        """Takes the pages of the prefill batch, and of the decodes that join it."""
        for request in self.current:
            if request.scheduled_s is None:
                request.scheduled_s = now_s
            self._counts.looked_up(request, request.computed_tokens)
        size = self._config.block_size
        extend = sum(request.extend_tokens for request in self.current)
        self._cache.make_room(extend if size == 1 else -(-extend // size) + len(self.current))
        ends = (request.computed_tokens + request.extend_tokens for request in self.current)
        self._pages.take(self.current, ends)
        if self._config.mixes:
            self._batch.begin_beside_prefill()
