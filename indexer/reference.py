"""Hashes and the overlap index in plain Python: the definition of right.

Slow where a native twin is fast, and short enough to be believed by reading it.
"""

from collections import defaultdict

import numpy as np
from typing_extensions import override
from xxhash import xxh3_64_intdigest

from indexer.hashing import HASH_SEED, extend_prefix
from indexer.identity import BlockHash, HashArray, PrefixHash, Tier
from indexer.index import IndexStats, Match, mix_digest

_PLACEMENT_BYTES = 200
"""Share of the dicts, sets and ints in one placement, measured with tracemalloc."""


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
    """Each block's hash chained to the one before."""
    chain = []
    for block in map(BlockHash, blocks.tolist()):
        parent = extend_prefix(parent, block)
        chain.append(parent)
    return np.array(chain, dtype=np.uint64)


class ReferenceIndex:
    """A map from PrefixHash to its holders, and for each slot and tier the set of what it holds."""

    def __init__(self) -> None:
        self._holders: dict[PrefixHash, dict[int, int]] = {}
        """PrefixHash -> slot -> bit mask of tiers"""
        self._held: list[tuple[set[PrefixHash], ...]] = []
        """slot -> tier -> what it holds"""
        self._xor: list[list[int]] = []
        """slot -> tier -> xor of what it holds"""
        self._free: list[int] = []

    @override
    def __repr__(self) -> str:
        stats = self.stats()
        slots = len(self._held) - len(self._free)
        return f"<ReferenceIndex {stats.blocks} blocks, {stats.placements} placed, {slots} slots>"

    def open_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._held.append(tuple(set() for _ in Tier))
        self._xor.append([0 for _ in Tier])
        return len(self._held) - 1

    def forget(self, slot: int) -> int:
        dropped = self.clear(slot)
        self._free.append(slot)
        return dropped

    def store(self, slot: int, tier: Tier, hashes: HashArray) -> int:
        held = self._held[slot][tier]
        before = len(held)
        for prefix in map(PrefixHash, hashes.tolist()):
            if prefix in held:
                continue
            held.add(prefix)
            self._xor[slot][tier] ^= prefix
            tiers = self._holders.setdefault(prefix, {})
            tiers[slot] = tiers.get(slot, 0) | 1 << tier
        return len(held) - before

    def remove(self, slot: int, tier: Tier, hashes: HashArray) -> int:
        held = self._held[slot][tier]
        before = len(held)
        for prefix in map(PrefixHash, hashes.tolist()):
            if prefix not in held:
                continue
            held.remove(prefix)
            self._xor[slot][tier] ^= prefix
            tiers = self._holders[prefix]
            tiers[slot] &= ~(1 << tier)
            if not tiers[slot]:
                del tiers[slot]
                if not tiers:
                    del self._holders[prefix]
        return before - len(held)

    def clear(self, slot: int, tier: Tier | None = None) -> int:
        return sum(
            self.remove(slot, one, np.fromiter(self._held[slot][one], np.uint64))
            for one in ([tier] if tier is not None else Tier)
        )

    def match(self, hashes: HashArray) -> Match:
        blocks: dict[int, list[int]] = defaultdict(lambda: [0 for _ in Tier])
        running: set[int] | None = None
        for prefix in map(PrefixHash, hashes.tolist()):
            holders = self._holders.get(prefix, {})
            running = set(holders) if running is None else running & holders.keys()
            if not running:
                break
            for slot in running:
                blocks[slot][_fastest(holders[slot])] += 1
        table = np.zeros((len(Tier), len(self._held)), np.int32)
        for slot, counts in blocks.items():
            table[:, slot] = counts
        return Match(table)

    def count(self, slot: int, tier: Tier | None = None) -> int:
        held = self._held[slot]
        return len(held[tier]) if tier is not None else sum(map(len, held))

    def digest(self, slot: int) -> int:
        return mix_digest(*self._xor[slot])

    def sweep(self, entries: int = 0) -> bool:
        return False  # forgetting frees at once here

    def stats(self) -> IndexStats:
        placements = sum(self.count(slot) for slot in range(len(self._held)))
        return IndexStats(len(self._holders), placements, placements * _PLACEMENT_BYTES)


def _fastest(tiers: int) -> Tier:
    """The lowest bit of a non-empty mask."""
    return Tier((tiers & -tiers).bit_length() - 1)
