"""Joined decode steps of vLLM: how many steps may be joined, and the blocks of each. Pure.

While all running requests decode and none can be admitted, consecutive steps differ only in their
number. The run ends when a request finishes, when blocks would not suffice for another step, when a
request that was passed over becomes ready, or before a step stores the block that the first request
in line misses.

Law: a run takes, evicts and stores the same blocks as single steps, in the same order.
"""

from bisect import bisect_right

from simulator.engines.decode_run import DecodeRun
from simulator.schedulers.vllm.admission import Admission
from simulator.schedulers.vllm.cache import VllmCache
from simulator.schedulers.vllm.config import VllmConfig, VllmSequence


class JoinedSteps:
    """The run of steps that is going on, if any."""

    def __init__(self, config: VllmConfig, cache: VllmCache, admission: Admission) -> None:
        self.run: DecodeRun | None = None
        self.begun = 1
        """Steps whose blocks are taken."""
        self.ended = 0
        """Steps whose tokens are out."""
        self._config = config
        self._cache = cache
        self._admission = admission

    def start(self, run: DecodeRun | None) -> None:
        """Begins a run; None: a single step."""
        self.run = run
        self.begun, self.ended = 1, 0

    def longest(self, run: DecodeRun, running: list[VllmSequence]) -> int:
        """How many decode steps from this one on differ only in their number."""
        if self._config.num_speculative_tokens or self._host_may_change():
            return 1
        steps = self._config.joined_steps_max
        for sequence in running:
            steps = min(steps, sequence.remaining_tokens)
        if steps > 1 and not self._fit(steps, running):
            steps = bisect_right(range(1, steps), False, key=lambda n: not self._fit(n, running))
        lacked = self._admission.blocked_hash
        if steps > 1 and lacked is not None:
            steps = min(steps, self._before_store(lacked, steps, running))
        for ready_s in self._admission.unready.values():
            if ready_s > run.start_s:
                steps = min(steps, run.begun(ready_s, max(steps, 1)))
        return max(steps, 1)

    def begin(self, target: int, scheduled: list[tuple[VllmSequence, int]]) -> None:
        """Takes and announces the blocks of the steps up to the `target`-th, step by step."""
        steps = target - self.begun
        if steps <= 0:
            return
        size, cache = self._config.block_size, self._cache
        crossings: list[tuple[int, int, bool, int]] = []
        """(step counted from the begun steps, place in the batch, whether a block becomes full,
        tokens at that place)"""
        lead = self.begun - self.ended
        for place, (sequence, _) in enumerate(scheduled):
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
                cache.settle()
                step = at
            sequence, _ = scheduled[place]
            if full:
                cache.fill(sequence, tokens)
            elif not cache.grow(sequence, tokens):
                raise RuntimeError(f"a run of steps that doesn't fit: {cache.pool!r}")
        cache.settle()
        self.begun = target

    def _host_may_change(self) -> bool:
        """Whether decoding can change which blocks a waiting request loads from the host."""
        cache = self._cache
        return (
            cache.host is not None
            and not self._config.offload_prompt_only
            and len(self._admission) > 0
        )

    def _fit(self, steps: int, running: list[VllmSequence]) -> bool:
        size = self._config.block_size
        needed = sum(
            -(-(sequence.computed_tokens + steps) // size) - len(sequence.blocks)
            for sequence in running
        )
        return self._cache.pool.fits((), needed)

    def _before_store(self, block_hash: int, steps: int, running: list[VllmSequence]) -> int:
        """How many of the next steps pass before a step stores this block."""
        size = self._config.block_size
        for sequence in running:
            last = (sequence.computed_tokens + steps) // size
            hashes = sequence.content.hashes(last)
            if block_hash in hashes[sequence.stored_count : last]:
                at = hashes.index(block_hash, sequence.stored_count, last)
                steps = (at + 1) * size - sequence.computed_tokens - 1
        return steps
