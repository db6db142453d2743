"""Blocks of vLLM's requests: on the device, and in the host cache when there is one. Pure.

Laws:
- a block is announced when the step that fills it is decided, and told when that step ends;
- the host sees what a step fills when all of that step is decided.

Source: vllm-project/vllm vllm/v1/core/kv_cache_manager.py and
vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py, release 0.32.0.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from indexer.identity import Tier
from simulator.engines.block_pool import BlockId, BlockPool
from simulator.engines.host_cache import HostCache
from simulator.engines.scheduler import Submission
from simulator.schedulers.vllm.config import VllmConfig, VllmSequence


class VllmCache:
    """The block pool and the host cache of one engine, and who holds what."""

    def __init__(self, config: VllmConfig) -> None:
        self.pool = BlockPool(config.block_count, config.block_size)
        self.host = (
            HostCache(config.host_block_count, self.pool.tell) if config.host_block_count else None
        )
        self._config = config
        self._offers: list[tuple[VllmSequence, int]] = []
        """Whose leading blocks the host shall see when the step is decided, and how many."""
        self._gone: list[tuple[VllmSequence, int]] = []
        """The same of those who ended since the last step was decided."""

    def contents(self) -> Iterator[tuple[Tier, int]]:
        """What can be found."""
        yield from ((Tier.DEVICE, one) for one in self.pool.contents())
        if self.host is not None:
            yield from ((Tier.HOST, one) for one in self.host.contents())

    def cached_tokens(self, submission: Submission) -> int:
        """What a request would find if it were admitted now."""
        length, size = submission.prompt_tokens, self._config.block_size
        hashes = submission.content.hashes(length // size)[: length // size]
        found = len(self.pool.find_prefix(hashes, length))
        return min((found + self.host_run(hashes, found)) * size, length - 1)

    def reset(self) -> bool:
        """Forgets all content; False, and nothing changed, while requests hold blocks."""
        done = self.pool.reset()
        if done and self.host is not None:
            self.host.clear()
            self._gone.clear()
        return done

    def blocks_for(self, token_count: int) -> int:
        return -(-token_count // self._config.block_size)

    def take(self, sequence: VllmSequence, reused: list[BlockId], new_count: int) -> None:
        """Gives somebody found blocks and new ones, which there must be."""
        fresh = self.pool.take(reused, new_count)
        if fresh is None:
            raise RuntimeError(f"room for a whole prompt, but not for a part: {self.pool!r}")
        if not sequence.blocks:
            sequence.stored_count = len(reused)
        sequence.blocks += [*reused, *fresh]

    def grow(self, sequence: VllmSequence, token_count: int) -> bool:
        """Takes what `token_count` tokens need; False, and nothing changed, without room."""
        missing = self.blocks_for(token_count) - len(sequence.blocks)
        if missing <= 0:
            return True
        fresh = self.pool.take((), missing)
        if fresh is None:
            return False
        sequence.blocks += fresh
        return True

    def fill(self, sequence: VllmSequence, token_count: int) -> None:
        """A step computes somebody's first `token_count` tokens, as far as they are certain."""
        if token_count // self._config.block_size > sequence.stored_count:
            self.announce(sequence, token_count)
        if self.host is not None:
            self._offers.append((sequence, sequence.stored_count))

    def announce(self, sequence: VllmSequence, token_count: int) -> None:
        """Gives the blocks that are full with the first `token_count` tokens their content."""
        first, last = sequence.stored_count, token_count // self._config.block_size
        if last > first:
            told = sequence.content.stored(first, last)
            self.pool.store(sequence.blocks[first:last], told)
            sequence.stored_count = last

    def release(self, sequence: VllmSequence) -> None:
        """Somebody gives up its blocks."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.stored_count = 0

    def end(self, sequence: VllmSequence) -> None:
        """Somebody has ended."""
        self.unpin(sequence)
        if self.host is not None:
            self._gone.append((sequence, sequence.computed_tokens // self._config.block_size))
        self.release(sequence)

    # ---- the host ----

    def host_run(self, hashes: list[int], found: int) -> int:
        """Blocks that can be loaded beyond the first `found` ones."""
        return 0 if self.host is None else self.host.run_length(hashes, found, len(hashes))

    def any_loading(self, hashes: Iterable[int]) -> bool:
        """Whether some of this is on its way from the host to the device."""
        return self.host is not None and self.host.any_loading(hashes)

    def pin(self, sequence: VllmSequence) -> None:
        """A load begins, of what is computed and not on the device."""
        if self.host is not None:
            first, last = sequence.stored_count, sequence.computed_tokens // self._config.block_size
            sequence.pinned = sequence.content.hashes(last)[first:last]
            sequence.seen_blocks.update(range(first, last))
            self.host.begin_load(sequence.pinned)

    def unpin(self, sequence: VllmSequence) -> None:
        """Its load, if there was one, has ended."""
        if self.host is not None and sequence.pinned:
            self.host.end_load(sequence.pinned)
            sequence.pinned = []

    def settle(self) -> None:
        """A step is decided. The host may keep what it fills, and what an earlier one would not let
        it keep; then those who have ended make their blocks the last used."""
        if self.host is None:
            return
        size, prompt_only = self._config.block_size, self._config.offload_prompt_only
        for sequence, full in chain(self._offers, self._gone):
            first = sequence.offered_count
            last = min(full, sequence.prompt_tokens // size) if prompt_only else full
            if last > first and (sequence.blocks or sequence.finished):
                content = sequence.content
                hashes = content.hashes(last)[:last]
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
