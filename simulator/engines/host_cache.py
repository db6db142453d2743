"""The host tier of an engine: blocks that were computed on the device, kept in the host's memory.

As vLLM's OffloadingConnector keeps it: a block is copied when it is full, in whatever state the
device's copy ends; the longest unused goes when room is needed, but never one that is being loaded
or that was offered with the newcomers; when that leaves too little room, none of them is kept. A
request that ends makes its blocks the last used, tails before roots. Pure.

Copies take the step that fills the blocks, and nothing else: what a link to the host costs is the
load (cost_model.py).

Source: vllm-project/vllm vllm/v1/kv_offload/cpu/{manager,policies/lru}.py, release 0.32.0.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, KeysView, Sequence
from dataclasses import replace

from typing_extensions import override

from indexer.identity import Tier
from simulator.engines.block_pool import PoolEvent, Removed, Stored


class HostCache:
    """A fixed number of blocks, found by content hash, one copy of each."""

    def __init__(self, block_count: int, tell: Callable[[PoolEvent], None]) -> None:
        self.block_count = block_count
        self._tell = tell
        self._blocks: OrderedDict[int, int] = OrderedDict()
        """hash -> loads going on, in the order in which they will go"""
        self._fresh: set[int] = set()
        """What came since the last `settle`: it is still being copied, and can't go."""

    @override
    def __repr__(self) -> str:
        return f"<HostCache {len(self._blocks)} of {self.block_count} blocks>"

    def contents(self) -> KeysView[int]:
        """The hashes that can be found."""
        return self._blocks.keys()

    def run_length(self, hashes: Sequence[int], first: int, last: int) -> int:
        """How many of the blocks from `first` to before `last` are here, without a hole."""
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
        """Keeps those of the blocks from `first` to the end that are not here; False, and nothing
        changed, when they don't find room.

        stored: the news of blocks i to j. seen: gets the places of the blocks that the owner's end
        will make the last used: all but those that somebody else is just copying.
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
            self._tell(replace(stored(begin, end), tier=Tier.HOST))
        return True

    def touch(self, hashes: Sequence[int]) -> None:
        """A request that used these blocks, from the root on, has ended."""
        for block_hash in reversed(hashes):
            if block_hash in self._blocks:
                self._blocks.move_to_end(block_hash)

    def any_loading(self, hashes: Iterable[int]) -> bool:
        """Whether a load of any of these blocks is going on."""
        return any(self._blocks.get(block_hash) for block_hash in hashes)

    def begin_load(self, hashes: Iterable[int]) -> None:
        """Keeps these blocks from going until `end_load`."""
        for block_hash in hashes:
            self._blocks[block_hash] += 1

    def end_load(self, hashes: Iterable[int]) -> None:
        """The blocks of a load may go again."""
        for block_hash in hashes:
            self._blocks[block_hash] -= 1

    def settle(self) -> None:
        """All copies have ended."""
        self._fresh.clear()

    def clear(self) -> None:
        """Forgets everything. Whoever resets the device tells it."""
        self._blocks.clear()
        self._fresh.clear()

    def _make_room(self, count: int, protected: set[int]) -> bool:
        """Evicts what is needed for `count` more; False, and nothing changed, when it can't."""
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
        self._tell(Removed(tuple(victims), tier=Tier.HOST))
        return True


def _runs(places: list[int]) -> list[tuple[int, int]]:
    """[1, 2, 5] -> [(1, 3), (5, 6)]"""
    runs: list[tuple[int, int]] = []
    for at in places:
        if runs and runs[-1][1] == at:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs
