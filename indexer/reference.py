"""Hashes and the overlap index in plain Python: the definition of right results.

Slower than the native implementation (kernel.pyx), but short enough to be checked by reading.
"""

from collections import defaultdict

import numpy as np
import numpy.typing as npt
from typing_extensions import override
from xxhash import xxh3_64_intdigest

from indexer.hashing import HASH_SEED, extend_prefix
from indexer.identity import BlockHash, HashArray, PrefixHash, Tier
from indexer.index import GENERATIONS, PREDICTED, IndexStats, Match, mix_digest

_PLACEMENT_BYTES = 200
"""Bytes of memory for each placement (dicts, sets, ints), measured with tracemalloc."""


def block_hashes(
    token_bytes: bytes | bytearray | memoryview, block_size: int, seed: int = HASH_SEED
) -> HashArray:
    """XXH3-64 of each full block's little-endian u32 tokens."""
    tokens = memoryview(token_bytes).cast("B")
    size = 4 * block_size
    starts = range(0, len(tokens) // size * size, size)
    return np.array(
        [xxh3_64_intdigest(tokens[at : at + size], seed) for at in starts], dtype=np.uint64
    )


def prefix_hashes(blocks: HashArray, parent: PrefixHash | None = None) -> HashArray:
    """PrefixHashes of a chain of BlockHashes, after `parent` if there is one."""
    chain = []
    for block in map(BlockHash, blocks.tolist()):
        parent = extend_prefix(parent, block)
        chain.append(parent)
    return np.array(chain, dtype=np.uint64)


class ReferenceIndex:
    """The overlap index: PrefixHash -> its holders, and slot -> tier -> the set of its hashes.

    Generations of predictions are further tiers. It has no limits, so it drops nothing.
    """

    def __init__(self) -> None:
        self._holders: dict[PrefixHash, dict[int, int]] = {}
        """PrefixHash -> slot -> bit mask of the tiers, and generations of predictions, with it"""
        self._held: list[tuple[set[PrefixHash], ...]] = []
        """slot -> tier or generation -> its PrefixHashes"""
        self._xor: list[list[int]] = []
        """slot -> tier -> xor of its PrefixHashes"""
        self._free: list[int] = []

    @override
    def __repr__(self) -> str:
        stats = self.stats()
        slots = len(self._held) - len(self._free)
        return f"<ReferenceIndex {stats.blocks} blocks, {stats.placements} placed, {slots} slots>"

    def open_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._held.append(tuple(set() for _ in range(PREDICTED + GENERATIONS)))
        self._xor.append([0 for _ in Tier])
        return len(self._held) - 1

    def forget(self, slot: int) -> int:
        dropped = self.clear(slot)
        self._free.append(slot)
        return dropped

    def store(self, slot: int, tier: Tier, hashes: HashArray) -> int:
        added = 0
        for prefix in map(PrefixHash, hashes.tolist()):
            for generation in range(GENERATIONS):
                self._drop(slot, PREDICTED + generation, prefix)
            if self._add(slot, tier, prefix):
                self._xor[slot][tier] ^= prefix
                added += 1
        return added

    def remove(self, slot: int, tier: Tier, hashes: HashArray) -> int:
        removed = 0
        for prefix in map(PrefixHash, hashes.tolist()):
            if self._drop(slot, tier, prefix):
                self._xor[slot][tier] ^= prefix
                removed += 1
        return removed

    def predict(self, slot: int, generation: int, hashes: HashArray) -> int:
        added = 0
        for prefix in map(PrefixHash, hashes.tolist()):
            if any(prefix in self._held[slot][tier] for tier in Tier):
                continue
            self._drop(slot, PREDICTED + (1 - generation), prefix)
            added += self._add(slot, PREDICTED + generation, prefix)
        return added

    def unpredict(self, slot: int, generation: int, hashes: HashArray) -> int:
        prefixes = map(PrefixHash, hashes.tolist())
        return sum(self._drop(slot, PREDICTED + generation, prefix) for prefix in prefixes)

    def clear(self, slot: int, tier: Tier | None = None) -> int:
        if tier in (None, Tier.DEVICE):
            for generation in range(GENERATIONS):
                held = self._held[slot][PREDICTED + generation]
                self.unpredict(slot, generation, np.fromiter(held, np.uint64))
        return sum(
            self.remove(slot, each, np.fromiter(self._held[slot][each], np.uint64))
            for each in ([tier] if tier is not None else Tier)
        )

    def match(self, hashes: HashArray) -> Match:
        blocks: dict[int, list[int]] = defaultdict(lambda: [0] * (PREDICTED + 1))
        running: set[int] | None = None
        for prefix in map(PrefixHash, hashes.tolist()):
            holders = self._holders.get(prefix, {})
            running = set(holders) if running is None else running & holders.keys()
            if not running:
                break
            for slot in running:
                blocks[slot][_fastest(holders[slot])] += 1
        table = np.zeros((PREDICTED + 1, len(self._held)), np.int32)
        for slot, counts in blocks.items():
            table[:, slot] = counts
        return Match(table)

    def overlap(
        self, hashes: HashArray, usable_max: int, slots: npt.NDArray[np.intp], unit: int = 1
    ) -> npt.NDArray[np.int32]:
        usable = self.match(hashes[:usable_max])
        rows = [self.match(hashes).run(), usable.run(), *usable.blocks]
        return np.array(rows, np.int32)[:, slots] * np.int32(unit)

    def count(self, slot: int, tier: Tier | None = None) -> int:
        held = self._held[slot]
        return len(held[tier]) if tier is not None else sum(map(len, held[:PREDICTED]))

    def told(self, slot: int) -> int:
        return self.count(slot)

    def whole(self, slot: int) -> bool:
        return True

    def predicted(self, slot: int) -> int:
        return sum(map(len, self._held[slot][PREDICTED:]))

    def digest(self, slot: int) -> int:
        return mix_digest(*self._xor[slot])

    def sweep(self, steps: int = 0) -> bool:
        return False  # forgetting frees at once here

    def stats(self) -> IndexStats:
        placements = sum(self.count(slot) for slot in range(len(self._held)))
        return IndexStats(len(self._holders), placements, placements * _PLACEMENT_BYTES)

    def _add(self, slot: int, level: int, prefix: PrefixHash) -> bool:
        """Adds a hash to a level (tier or generation) of a slot; returns whether it was absent."""
        held = self._held[slot][level]
        if prefix in held:
            return False
        held.add(prefix)
        levels = self._holders.setdefault(prefix, {})
        levels[slot] = levels.get(slot, 0) | 1 << level
        return True

    def _drop(self, slot: int, level: int, prefix: PrefixHash) -> bool:
        """Drops a hash from a slot's level; returns whether it was present."""
        held = self._held[slot][level]
        if prefix not in held:
            return False
        held.remove(prefix)
        levels = self._holders[prefix]
        levels[slot] &= ~(1 << level)
        if not levels[slot]:
            del levels[slot]
            if not levels:
                del self._holders[prefix]
        return True


def _fastest(levels: int) -> int:
    """A Match's row for a bit mask of levels: the fastest tier, or PREDICTED without a tier."""
    return min(PREDICTED, (levels & -levels).bit_length() - 1)
