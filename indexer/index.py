"""The interface of the overlap index: who holds which prefix, on which tier.

The index is a set of placements (worker, tier, PrefixHash). A PrefixHash names its whole chain, so
the index needs no tree: a prompt is matched block by block from the root until nobody is left.

Laws:
- storing what is there, and removing what is not, changes nothing;
- a match is the longest run of leading blocks, on any tier or predicted, and never crosses a hole;
- forgetting or clearing a worker leaves no trace of it.

Workers are dense slots (small integers) here, so that answers can be arrays; who owns which slot is
the caller's business.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from indexer.identity import HashArray, Tier

PREDICTED = len(Tier)
"""The row of a match after the tiers: blocks that a worker will probably hold soon."""
BLOCK_BYTES = 32
"""What a block that one worker holds takes up in the native index, at most; shared, much less."""
GENERATIONS = 2
"""Of predictions: while one fills, the one before runs out."""
U64_MASK = (1 << 64) - 1
_DIGEST_ROTATION = 21


class Match(NamedTuple):
    """How much of a prompt each slot holds, in blocks."""

    blocks: npt.NDArray[np.int32]
    """Shape (len(Tier) + 1, slots): blocks of the run by the fastest tier that holds each; in the
    last row (PREDICTED) those that are only predicted."""

    def held(self) -> npt.NDArray[np.int32]:
        """Shape (slots,): blocks of the run that are more than predicted."""
        total: npt.NDArray[np.int32] = self.blocks[:PREDICTED].sum(axis=0, dtype=np.int32)
        return total

    def run(self) -> npt.NDArray[np.int32]:
        """Shape (slots,): length of the run, over all tiers."""
        total: npt.NDArray[np.int32] = self.blocks.sum(axis=0, dtype=np.int32)
        return total


class IndexStats(NamedTuple):
    """Sizes of an index."""

    blocks: int
    """distinct PrefixHashes"""
    placements: int
    """(worker, tier, PrefixHash) entries"""
    bytes: int
    """estimated memory"""
    forgotten: int = 0
    """placements forgotten so far for want of room"""


class BlockIndex(Protocol):
    """What every implementation answers alike; tests/indexer/test_index.py holds them to it."""

    def open_slot(self) -> int:
        """A slot that no worker has; reuses forgotten ones."""

    def forget(self, slot: int) -> int:
        """Drops all that a slot holds and gives the slot back. Returns the placements dropped."""

    def store(self, slot: int, tier: Tier, hashes: HashArray) -> int:
        """Adds placements. Returns how many are new."""

    def remove(self, slot: int, tier: Tier, hashes: HashArray) -> int:
        """Drops placements. Returns how many were there."""

    def clear(self, slot: int, tier: Tier | None = None) -> int:
        """Drops all placements of a slot, on one tier or on all, and with those of the device its
        predictions. Returns how many placements were there."""

    def match(self, hashes: HashArray) -> Match:
        """Longest run of leading blocks a slot holds, for every slot. Reads only."""

    def overlap(
        self, hashes: HashArray, usable_max: int, slots: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.int32]:
        """The match of some slots, and of what is usable of it: the first usable_max blocks.

        Shape (2 + len(Tier) + 1, slots asked for): the run, the usable run, and the usable run by
        the rows of a match. Reads only.
        """

    def count(self, slot: int, tier: Tier | None = None) -> int:
        """Placements of a slot, on one tier or on all."""

    def told(self, slot: int) -> int:
        """Placements of a slot, those included that were forgotten for want of room."""

    def predict(self, slot: int, generation: int, hashes: HashArray) -> int:
        """Predicts what a slot does not hold; a block is in one generation, the last one it was
        predicted in. Storing a block ends its prediction. Returns how many are new or moved."""

    def unpredict(self, slot: int, generation: int, hashes: HashArray) -> int:
        """Ends the predictions of these blocks that are in this generation. Returns how many."""

    def predicted(self, slot: int) -> int:
        """Blocks that are predicted of a slot."""

    def digest(self, slot: int) -> int:
        """Order-free summary of what a slot was told to hold, see `mix_digest`: what was forgotten
        for want of room counts, so that it compares with the engine's."""

    def stats(self) -> IndexStats:
        """Sizes. Blocks that only forgotten workers held may count until they are swept."""

    def sweep(self, steps: int = ...) -> bool:
        """Frees what forgotten workers held, about so many blocks of it: True if more is left.

        Forgetting answers at once and frees in slices, so that no worker is too large to forget.
        """


def mix_digest(device: int, host: int, disk: int) -> int:
    """Digest of a worker's placements, from the xor of its PrefixHashes on each tier.

    digest = device ^ rotl64(host, 21) ^ rotl64(disk, 42): the xor over all placements of a value
    that depends on block and tier, so that relay and router can both keep it up to date in one
    operation a fact, and a block that moved between tiers shows. An empty worker has 0.
    """
    host_turned = _rotate_left(host, _DIGEST_ROTATION)
    return device ^ host_turned ^ _rotate_left(disk, 2 * _DIGEST_ROTATION)


def _rotate_left(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & U64_MASK
