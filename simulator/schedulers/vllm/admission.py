"""Waiting requests at vLLM, and their admission. Pure.

Requests are admitted in order of arrival or priority, while tokens, slots and blocks last. A
request waits until its whole prompt fits, since two half-admitted prompts could block one another.
A request that waits for KV or a LoRA's turn is passed over and holds up no other.

KV in the host cache or at another engine is loaded: the request holds its blocks meanwhile. The
loaded tokens count as computed when the request is admitted.

Law: the first request in line is always admitted in the end: no request waits for ever, and none
is lost.

Source: vllm-project/vllm vllm/v1/core/sched/scheduler.py, release 0.32.0.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from indexer.identity import Tier
from simulator.engines.block_pool import BlockId
from simulator.engines.scheduler import Counts
from simulator.schedulers.vllm.cache import VllmCache
from simulator.schedulers.vllm.config import VllmConfig, VllmSequence
from simulator.schedulers.vllm.queue import WaitingQueue


@dataclass(slots=True)
class Room:
    """What a step has left for waiting requests, and the requests that the step already has."""

    budget: int
    """Tokens that the step can still compute."""
    chunk_max: int
    """Most tokens that the step computes of one request."""
    running: list[VllmSequence]
    scheduled: list[tuple[VllmSequence, int]]
    """(request, its tokens) of the step. Admitted requests join both lists."""
    padding: int = 0
    """Tokens by which a request with a single token to compute is padded; 0: not at all."""
    loras: set[str] = field(default_factory=set)
    came_first: int = 0
    """Number of the scheduled requests that ran before this step."""


class Admission:
    """The waiting requests of one engine, and their admission to steps."""

    def __init__(self, config: VllmConfig, cache: VllmCache, counts: Counts) -> None:
        self.unready: dict[VllmSequence, float] = {}
        """Request that waits for KV -> time at which the KV will be here, in seconds."""
        self.blocked_hash: int | None = None
        """Hash of the first block that the first request in line misses in the cache; None when it
        doesn't wait for blocks."""
        self.deferred = 0
        """Requests that the last step passed over."""
        self._config = config
        self._counts = counts
        self._cache = cache
        self._waiting = WaitingQueue(config.policy)
        self._holding = WaitingQueue(config.policy)
        """Requests that wait with blocks: their KV is being loaded, or is here. They go first."""
        self._watermark_blocks = int(config.watermark * config.block_count)
        self._looked_s = 0.0
        """Time of the last `look`."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._holding)

    def __iter__(self) -> Iterator[VllmSequence]:
        """The waiting requests, next first."""
        return chain(self._holding, self._waiting)

    @property
    def next_ready_s(self) -> float | None:
        """When the next request that is passed over will be ready."""
        later = [ready_s for ready_s in self.unready.values() if ready_s > self._looked_s]
        return min(later, default=None)

    def add(self, sequence: VllmSequence) -> None:
        """Puts a new request into the queue."""
        self._waiting.add(sequence)

    def put_back(self, sequence: VllmSequence) -> None:
        """Puts a preempted request back into the queue."""
        self._waiting.put_back([sequence])

    def remove(self, sequence: VllmSequence) -> bool:
        """Removes a request; False when it doesn't wait."""
        self.unready.pop(sequence, None)
        return self._holding.remove(sequence) or self._waiting.remove(sequence)

    def look(self, now_s: float) -> None:
        """Begins the decision of a step: blocks that are loaded by now may be evicted from the
        host."""
        self._looked_s = now_s
        for sequence, ready_s in self.unready.items():
            if ready_s <= now_s:
                self._cache.unpin(sequence)

    def admit(self, room: Room, now_s: float) -> None:
        """Admits the requests that the step has room for."""
        config = self._config
        self.blocked_hash = None
        passed: list[VllmSequence] = []
        passed_holding: list[VllmSequence] = []
        room.came_first = len(room.scheduled)
        # An admitted decode is padded to a whole draft when only decodes run: steps of equal rows
        # are faster.
        if all(scheduled.draft_tokens for scheduled, _ in room.scheduled):
            room.padding = config.num_speculative_tokens
        if config.lora_names:
            names = {scheduled.submission.lora_name for scheduled, _ in room.scheduled}
            room.loras = names - {""}
        while room.budget and len(room.running) < config.max_num_seqs:
            queue = self._holding if len(self._holding) else self._waiting
            if not len(queue):
                break
            sequence = queue.peek()
            if self._is_passed(sequence, room, now_s):
                (passed if queue is self._waiting else passed_holding).append(queue.pop())
                continue
            tokens = self._find_room(sequence, room, passed_holding, now_s)
            if tokens is None:
                break
            queue.pop()
            if sequence.ready_s is not None:
                passed_holding.append(sequence)
            else:
                self._schedule(sequence, tokens, room, now_s)
        self._waiting.put_back(passed)
        self._holding.put_back(passed_holding)
        self.deferred = len(passed) + len(passed_holding)

    def _is_passed(self, sequence: VllmSequence, room: Room, now_s: float) -> bool:
        """Whether a request is passed over, since it waits for KV, or for its LoRA's place in a
        step."""
        if not self._is_ready(sequence, now_s):
            return True
        lora = sequence.submission.lora_name
        if lora and lora not in room.loras and len(room.loras) >= self._config.max_loras:
            return True
        if sequence.blocks or self._cache.host is None or self._fetches(sequence):
            return False
        # Blocks that another request is loading will be on the device at the end of that load.
        hashes, reused = self._find(sequence)
        last = len(reused) + self._cache.host_run(hashes, len(reused))
        return self._cache.any_loading(hashes[len(reused) : last])

    def _is_ready(self, sequence: VllmSequence, now_s: float) -> bool:
        """Whether a request waits for no KV. KV that is loaded by now counts as computed."""
        if sequence.ready_s is None:
            return True
        if now_s < sequence.ready_s:
            return False
        sequence.ready_s = None
        del self.unready[sequence]
        self._cache.store(sequence, sequence.computed_tokens)
        sequence.computed_tokens = min(sequence.computed_tokens, sequence.known_tokens - 1)
        return True

    def _find_room(
        self, sequence: VllmSequence, room: Room, passed_holding: list[VllmSequence], now_s: float
    ) -> int | None:
        """Takes blocks for a request; returns the number of tokens to compute, 0 when a load of KV
        begins. None when there is no room."""
        if sequence.blocks:
            return self._place(sequence, [], sequence.computed_tokens, room)
        size = self._config.block_size
        hashes, reused = self._find(sequence)
        cached = len(reused) * size
        if self._fetches(sequence):
            external = max(sequence.submission.remote_tokens - cached, 0)
        else:
            external = self._cache.host_run(hashes, len(reused)) * size
        if external:
            left = self._reserved_blocks(room, passed_holding)
            tokens = self._load(sequence, reused, external, left, self._watermark(room), now_s)
        else:
            tokens = self._place(sequence, reused, cached, room)
        if tokens is not None:
            elsewhere = self._cache.host is not None or sequence.submission.remote_tokens
            self._counts.looked_up(sequence, cached, external if elsewhere else None)
        elif len(reused) < (sequence.known_tokens - 1) // size:
            self.blocked_hash = hashes[len(reused)]
        return tokens

    def _find(self, sequence: VllmSequence) -> tuple[list[int], list[BlockId]]:
        """The hashes of a request's full blocks, and its leading blocks that are on the device."""
        count = sequence.known_tokens // self._config.block_size
        hashes = sequence.content.hashes(count)[:count]
        return hashes, self._cache.pool.find_prefix(hashes, sequence.known_tokens)

    def _place(
        self, sequence: VllmSequence, reused: list[BlockId], computed: int, room: Room
    ) -> int | None:
        """Takes blocks for a request's first chunk; returns its tokens, None when there is no room.

        computed: tokens that are in the cache, or were loaded. A single token is padded with tokens
        that the step verifies like drafted tokens, and rejects.
        """
        config, cache = self._config, self._cache
        tokens = sequence.known_tokens - computed
        padding = room.padding if computed or room.came_first else 0
        if tokens == 1 and padding and computed + 1 + padding < config.model_len:
            tokens += padding
            if tokens > room.budget:
                return None
        tokens = min(tokens, room.chunk_max)
        if tokens > room.budget and not config.enable_chunked_prefill:
            return None
        tokens = min(tokens, room.budget)
        held = len(sequence.blocks) + len(reused)
        end = min(computed + tokens + config.lookahead_tokens, config.model_len)
        needed = max(cache.blocks_for(end) - held, 0)
        wanted = needed
        if config.scheduler_reserve_full_isl:
            wanted = max(needed, cache.blocks_for(sequence.known_tokens) - held)
        if not cache.pool.fits(reused, wanted + self._watermark(room)):
            return None
        cache.take(sequence, reused, needed)
        sequence.computed_tokens = computed
        return tokens

    def _load(
        self,
        sequence: VllmSequence,
        reused: list[BlockId],
        external: int,
        left: int,
        watermark: int,
        now_s: float,
    ) -> int | None:
        """Takes blocks for KV and begins to load it; None when there is no room.

        The blocks are held without progress, so `left` blocks must be left to other requests.
        """
        config, cost, cache = self._config, self._config.cost, self._cache
        cached = len(reused) * config.block_size
        needed = cache.blocks_for(cached + external) - len(reused)
        wanted = needed + left
        if config.scheduler_reserve_full_isl:
            wanted = max(wanted, cache.blocks_for(sequence.known_tokens) - len(reused))
        if not cache.pool.fits(reused, wanted + watermark):
            return None
        cache.take(sequence, reused, needed)
        sequence.computed_tokens = cached + external
        sequence.offered_count = sequence.computed_tokens // config.block_size
        if self._fetches(sequence):
            took_s = cost.transfer_s(external, sequence.submission.remote_distance)
            sequence.remote_fetched = True
        else:
            took_s = cost.load_s(external, Tier.HOST)
            cache.pin(sequence)
        sequence.ready_s = self.unready[sequence] = now_s + took_s
        return 0

    def _schedule(self, sequence: VllmSequence, tokens: int, room: Room, now_s: float) -> None:
        if sequence.scheduled_s is None:
            sequence.scheduled_s = now_s
        if sequence.submission.lora_name:
            room.loras.add(sequence.submission.lora_name)
        room.running.append(sequence)
        room.scheduled.append((sequence, tokens))
        room.budget -= tokens
        certain = min(sequence.computed_tokens + tokens, sequence.known_tokens)
        self._cache.fill(sequence, certain)

    def _fetches(self, sequence: VllmSequence) -> bool:
        """Whether KV of another engine has yet to be fetched."""
        return bool(sequence.submission.remote_tokens) and not sequence.remote_fetched

    def _reserved_blocks(self, room: Room, passed_holding: list[VllmSequence]) -> int:
        """Number of blocks that the load of a new request must leave free: the blocks that requests
        with blocks still need for their prompts, and, with drafted tokens, the blocks for one
        step's drafts of each of these requests and of the new one.

        0 when no request has blocks: a single request is always admitted.
        """
        drafts = self._config.num_speculative_tokens
        ahead = 1 + drafts + self._config.lookahead_tokens if drafts else 0
        holders = [*self._holding, *passed_holding]
        if not room.running and not holders:
            return 0
        through = {
            sequence
            for sequence, tokens in room.scheduled[room.came_first :]
            if sequence.computed_tokens + tokens >= sequence.known_tokens
        }
        for sequence in room.running:
            prefilling = (
                not sequence.draft_tokens
                if drafts
                else sequence.computed_tokens + 1 < sequence.known_tokens
            )
            if prefilling and sequence not in through:
                holders.append(sequence)
        blocks_for = self._cache.blocks_for
        needed = sum(
            max(blocks_for(sequence.known_tokens + ahead) - len(sequence.blocks), 0)
            for sequence in holders
        )
        return needed + blocks_for(ahead)

    def _watermark(self, room: Room) -> int:
        return self._watermark_blocks if room.running else 0
