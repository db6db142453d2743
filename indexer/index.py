"""The interface of the overlap index: the workers that hold a prefix, and on which tier.

The index is a set of placements (worker, tier, PrefixHash). A PrefixHash names its whole chain, so
the index needs no tree: a prompt is matched block by block until no worker holds the next block.

Laws:
- storing a present placement, and removing an absent placement, changes nothing;
- a match is the longest run of leading blocks, on any tier or predicted, and never crosses a hole;
- forgetting or clearing a worker leaves no trace of it.

Workers are dense slots (small integers) here, so that answers can be arrays; the caller maps
workers to slots.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from indexer.identity import HashArray, Tier

PREDICTED = len(Tier)
"""Row of a Match, after the tiers' rows: blocks that a worker will probably hold soon."""
BLOCK_BYTES = 32
"""Most bytes of the native index for a block on one worker; each further worker takes less."""
GENERATIONS = 2
"""Generations of predictions: the young generation fills, the elder runs out."""
U64_MASK = (1 << 64) - 1
_DIGEST_ROTATION = 21


class Match(NamedTuple):
    """The leading part of a prompt that each worker (slot) holds, in blocks."""

    blocks: npt.NDArray[np.int32]
    """Shape (len(Tier) + 1, slots): blocks of the leading run by the fastest tier that holds each;
    the last row (PREDICTED) has blocks that are only predicted."""

    def held(self) -> npt.NDArray[np.int32]:
        """Blocks of the leading run that some tier holds; shape (slots,)."""
        total: npt.NDArray[np.int32] = self.blocks[:PREDICTED].sum(axis=0, dtype=np.int32)
        return total

    def run(self) -> npt.NDArray[np.int32]:
        """Blocks of the leading run, on any tier or predicted; shape (slots,)."""
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
    """placements dropped so far for lack of space"""


class BlockIndex(Protocol):
    """Interface of the overlap index, in which a slot is a worker's number;
    tests/indexer/test_index.py tests every implementation."""

    def open_slot(self) -> int:
        """A free slot (a worker's number in the index) for a new worker; reuses forgotten slots."""

    def forget(self, slot: int) -> int:
        """Drops all placements of an index slot and frees the slot. Returns how many it dropped."""

    def store(self, slot: int, tier: Tier, hashes: HashArray) -> int:
        """Adds placements of an index slot on a tier. Returns the number of new placements."""

    def remove(self, slot: int, tier: Tier, hashes: HashArray) -> int:
        """Drops placements of an index slot on a tier. Returns the number that were present."""

    def clear(self, slot: int, tier: Tier | None = None) -> int:
        """Drops all placements of an index slot on one tier or (None) all; with those of the device
        tier, its predictions, too. Returns the number of placements dropped."""

    def match(self, hashes: HashArray) -> Match:
        """The longest run of leading blocks that each index slot holds. Changes nothing."""

    def overlap(
        self, hashes: HashArray, usable_max: int, slots: npt.NDArray[np.intp], unit: int = 1
    ) -> npt.NDArray[np.int32]:
        """Leading runs of index slots, and their usable parts: in the first usable_max blocks.

        Shape (2 + len(Tier) + 1, len(slots)): rows are the run, the usable run, and the usable run
        split as Match.blocks; in blocks times `unit` (tokens, for a block's tokens). Changes
        nothing.
        """

    def count(self, slot: int, tier: Tier | None = None) -> int:
        """Number of placements of an index slot, on one tier or (None) on all."""

    def told(self, slot: int) -> int:
        """Number of placements that an index slot's facts report: present, or dropped for space."""

    def whole(self, slot: int) -> bool:
        """Whether no placement of an index slot was dropped for lack of space."""

    def predict(self, slot: int, generation: int, hashes: HashArray) -> int:
        """Predicts those of the blocks that an index slot does not hold, in generation 0 or 1. A
        predicted block moves to the generation of its last prediction, which ends when the block is
        stored. Returns how many predictions are new or moved."""

    def unpredict(self, slot: int, generation: int, hashes: HashArray) -> int:
        """Ends an index slot's predictions of these blocks in a generation. Returns how many."""

    def predicted(self, slot: int) -> int:
        """Number of predicted blocks of an index slot."""

    def digest(self, slot: int) -> int:
        """Order-free digest of an index slot's placements, see `mix_digest`; includes those dropped
        for lack of space, so that it is comparable with the relay's."""

    def stats(self) -> IndexStats:
        """Sizes of the index. Blocks of forgotten workers may count until `sweep` frees them."""

    def sweep(self, steps: int = ...) -> bool:
        """Frees about `steps` blocks of forgotten workers. Returns whether any are left.

        `forget` returns at once, and leaves the freeing to these slices: no worker is too large.
        """


def mix_digest(device: int, host: int, disk: int) -> int:
    """Digest of a worker's placements, from the xor of its PrefixHashes on each tier.

    digest = device ^ rotl64(host, 21) ^ rotl64(disk, 42): the xor over all placements of a value
    that depends on block and tier, so that relay and router can both update it in one operation a
    fact, and a block that moved between tiers changes it. An empty worker has 0.
    """
    host_turned = _rotate_left(host, _DIGEST_ROTATION)
    return device ^ host_turned ^ _rotate_left(disk, 2 * _DIGEST_ROTATION)


def _rotate_left(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & U64_MASK
