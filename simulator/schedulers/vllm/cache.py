"""Blocks of vLLM's requests: on the device, and in the host cache when there is one. Pure.

Laws:
- the content of a block is stored when the step that fills it is decided, and its event is
  published when that step ends;
- the host is offered a step's full blocks when the whole step is decided.

Source: vllm-project/vllm vllm/v1/core/kv_cache_manager.py and
vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py, release 0.32.0.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from typing_extensions import override

from indexer.identity import Tier
from simulator.engines.host_cache import HostCache
from simulator.engines.scheduler import Sequence, Submission
from simulator.engines.sequence_blocks import SequenceBlocks
from simulator.schedulers.vllm.config import VllmConfig, VllmSequence


class VllmCache(SequenceBlocks):
    """The block pool and the host cache of one engine, and the blocks that requests hold."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config.block_count, config.block_size)
        self.host = (
            HostCache(config.host_block_count, self.pool.add_event)
            if config.host_block_count
            else None
        )
        self._config = config
        self._offers: list[tuple[VllmSequence, int]] = []
        """(request, leading blocks to offer to the host) of the step that is being decided."""
        self._gone: list[tuple[VllmSequence, int]] = []
        """(request, leading blocks) of the requests that ended since the last step was decided."""

    def contents(self) -> Iterator[tuple[Tier, int]]:
        """(tier, hash) of all cached blocks."""
        yield from ((Tier.DEVICE, block_hash) for block_hash in self.pool.contents())
        if self.host is not None:
            yield from ((Tier.HOST, block_hash) for block_hash in self.host.contents())

    def cached_tokens(self, submission: Submission) -> int:
        """Tokens that a request would reuse if it were admitted now."""
        length, size = submission.prompt_tokens, self._config.block_size
        hashes = submission.content.hashes(length // size)[: length // size]
        blocks = len(self.pool.find_prefix(hashes, length))
        return min((blocks + self.host_run(hashes, blocks)) * size, length - 1)

    def reset(self) -> bool:
        """Forgets all content; False, and nothing changed, while requests hold blocks."""
        done = self.pool.reset()
        if done and self.host is not None:
            self.host.clear()
            self._gone.clear()
        return done

    @override
    def fill(self, sequence: Sequence, token_count: int) -> None:
        self.store(sequence, token_count)
        if self.host is not None and isinstance(sequence, VllmSequence):
            self._offers.append((sequence, sequence.stored_count))

    def end(self, sequence: VllmSequence) -> None:
        """Takes back the blocks of a request that has ended."""
        self.unpin(sequence)
        if self.host is not None:
            self._gone.append((sequence, sequence.computed_tokens // self._config.block_size))
        self.release(sequence)

    # ---- the host ----

    def host_run(self, hashes: list[int], first: int) -> int:
        """Consecutive blocks from `first` on that can be loaded from the host."""
        return 0 if self.host is None else self.host.run_length(hashes, first, len(hashes))

    def any_loading(self, hashes: Iterable[int]) -> bool:
        """Whether any of these blocks is being loaded from the host."""
        return self.host is not None and self.host.any_loading(hashes)

    def pin(self, sequence: VllmSequence) -> None:
        """Keeps in the host cache, until `unpin`, the blocks that a request loads from it: its
        computed blocks that are not on the device."""
        if self.host is not None:
            first, last = sequence.stored_count, sequence.computed_tokens // self._config.block_size
            sequence.pinned = sequence.content.hashes(last)[first:last]
            sequence.seen_blocks.update(range(first, last))
            self.host.begin_load(sequence.pinned)

    def unpin(self, sequence: VllmSequence) -> None:
        """Ends the protection of the blocks that a request loaded from the host, if it loaded
        any."""
        if self.host is not None and sequence.pinned:
            self.host.end_load(sequence.pinned)
            sequence.pinned = []

    @override
    def settle(self) -> None:
        """Ends the decision of a step: offers to the host the step's full blocks, and blocks of
        earlier steps that didn't fit. Then the blocks of ended requests become the last used."""
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
