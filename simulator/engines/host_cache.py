"""The host tier of an engine: blocks that were computed on the device, kept in the host's memory.

Modelled on vLLM's OffloadingConnector. The scheduler *offers* each request's blocks once they are
full; the cache copies them, whatever happens to the device's copies. The longest unused block is
evicted when room is needed, except for blocks that are being loaded and blocks of the same offer.
When that leaves too little room, nothing of the offer is kept. A request that ends makes its blocks
the last used, tails before roots. Pure.

Copies to the host take no time beyond the step that fills the blocks; only loads cost time
(cost_model.py).

Source: vllm-project/vllm vllm/v1/kv_offload/cpu/{manager,policies/lru}.py, release 0.32.0.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, KeysView, Sequence
from dataclasses import replace

from typing_extensions import override

from indexer.identity import Tier
from simulator.engines.block_pool import PoolEvent, Removed, Stored


class HostCache:
    """The host tier: a fixed number of blocks, looked up by content hash, one copy of each."""

    def __init__(self, block_count: int, add_event: Callable[[PoolEvent], None]) -> None:
        self.block_count = block_count
        self._add_event = add_event
        self._blocks: OrderedDict[int, int] = OrderedDict()
        """hash -> number of loads of the block that are going on; in the order of eviction"""
        self._fresh: set[int] = set()
        """Blocks offered since the last `settle`: still being copied, so not evictable."""

    @override
    def __repr__(self) -> str:
        return f"<HostCache {len(self._blocks)} of {self.block_count} blocks>"

    def contents(self) -> KeysView[int]:
        """The hashes of all cached blocks."""
        return self._blocks.keys()

    def run_length(self, hashes: Sequence[int], first: int, last: int) -> int:
        """How many consecutive blocks from place `first` to before `last` are in the cache."""
        at = first
        while at < last and hashes[at] in self._blocks:
            at += 1
        return at - first

    def offer(
        self,
        hashes: Sequence[int],
        first: int,
        stored: Callable[[int, int], Stored],
        seen: set[int],
    ) -> bool:
        """Copies the blocks of `hashes` from place `first` on that the cache lacks; False, and none
        is copied, when they don't fit.

        stored(i, j): makes the event of the blocks at places i to j - 1. seen: gets the places of
        the offered blocks, which the end of the request makes the last used; blocks that another
        request is copying are left out.
        """
        places = range(first, len(hashes))
        missing = [i for i in places if hashes[i] not in self._blocks]
        seen.update(i for i in places if hashes[i] not in self._fresh)
        if not self._make_room(len(missing), set(hashes[first:])):
            return False
        for i in missing:
            self._blocks[hashes[i]] = 0
            self._fresh.add(hashes[i])
        for begin, end in _runs(missing):
            self._add_event(replace(stored(begin, end), tier=Tier.HOST))
        return True

    def touch(self, hashes: Sequence[int]) -> None:
        """Makes these blocks the last used: a request with them, from the root on, has ended."""
        for block_hash in reversed(hashes):
            if block_hash in self._blocks:
                self._blocks.move_to_end(block_hash)

    def any_loading(self, hashes: Iterable[int]) -> bool:
        """Whether any of these blocks is being loaded."""
        return any(self._blocks.get(block_hash) for block_hash in hashes)

    def begin_load(self, hashes: Iterable[int]) -> None:
        """Protects these blocks from eviction until `end_load`."""
        for block_hash in hashes:
            self._blocks[block_hash] += 1

    def end_load(self, hashes: Iterable[int]) -> None:
        """Ends the protection of these blocks by `begin_load`."""
        for block_hash in hashes:
            self._blocks[block_hash] -= 1

    def settle(self) -> None:
        """Ends the copying of the offered blocks, which can be evicted from now on."""
        self._fresh.clear()

    def clear(self) -> None:
        """Forgets all blocks, without an event: the device's reset adds an event for all tiers."""
        self._blocks.clear()
        self._fresh.clear()

    def _make_room(self, count: int, protected: set[int]) -> bool:
        """Evicts enough for `count` more blocks; False, and nothing changed, when it can't."""
        needed = len(self._blocks) + count - self.block_count
        if needed <= 0:
            return True
        victims = []
        for block_hash, loads in self._blocks.items():
            if not loads and block_hash not in protected and block_hash not in self._fresh:
                victims.append(block_hash)
                if len(victims) == needed:
                    break
        else:
            return False
        for block_hash in victims:
            del self._blocks[block_hash]
        self._add_event(Removed(tuple(victims), tier=Tier.HOST))
        return True


def _runs(places: list[int]) -> list[tuple[int, int]]:
    """Runs of consecutive places as (first, end): [1, 2, 5] -> [(1, 3), (5, 6)]."""
    runs: list[tuple[int, int]] = []
    for at in places:
        if runs and runs[-1][1] == at:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs
