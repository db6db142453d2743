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
"""The row of a match after the tiers: blocks that a worker will probably hold soon."""
BLOCK_BYTES = 32
"""Most bytes of a block on one worker in the native index; of a shared block, much less."""
GENERATIONS = 2
"""Generations of predictions: the young generation fills, the elder runs out."""
U64_MASK = (1 << 64) - 1
_DIGEST_ROTATION = 21


class Match(NamedTuple):
    """The part of a prompt that each slot holds, in blocks."""

    blocks: npt.NDArray[np.int32]
    """Shape (len(Tier) + 1, slots): blocks of the run by the fastest tier that holds each; the last
    row (PREDICTED) has blocks that are only predicted."""

    def held(self) -> npt.NDArray[np.int32]:
        """Blocks of the run that some tier holds, for each slot; shape (slots,)."""
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
    """placements dropped so far for lack of space"""


class BlockIndex(Protocol):
    """The interface of every implementation, tested by tests/indexer/test_index.py."""

    def open_slot(self) -> int:
        """An unused slot, for a new worker; reuses forgotten slots."""

    def forget(self, slot: int) -> int:
        """Drops all placements of a slot and frees the slot. Returns the placements dropped."""

    def store(self, slot: int, tier: Tier, hashes: HashArray) -> int:
        """Adds placements. Returns the number of new placements."""

    def remove(self, slot: int, tier: Tier, hashes: HashArray) -> int:
        """Drops placements. Returns the number that were present."""

    def clear(self, slot: int, tier: Tier | None = None) -> int:
        """Drops all placements of a slot, on one tier or on all, and with those of the device its
        predictions. Returns the number of placements dropped."""

    def match(self, hashes: HashArray) -> Match:
        """The longest run of leading blocks, for every slot. Reads only."""

    def overlap(
        self, hashes: HashArray, usable_max: int, slots: npt.NDArray[np.intp], unit: int = 1
    ) -> npt.NDArray[np.int32]:
        """The match of these slots, and its usable part: the first usable_max blocks.

        Shape (2 + len(Tier) + 1, len(slots)): the run, the usable run, and the usable run by the
        rows of a match, in blocks; times `unit`: a block's tokens give tokens. Reads only.
        """

    def count(self, slot: int, tier: Tier | None = None) -> int:
        """Placements of a slot, on one tier or on all."""

    def told(self, slot: int) -> int:
        """Placements of a slot in its facts: present ones, and those dropped for lack of space."""

    def whole(self, slot: int) -> bool:
        """Whether all that a slot's facts say is here: nothing was dropped for lack of space."""

    def predict(self, slot: int, generation: int, hashes: HashArray) -> int:
        """Predicts the blocks that a slot does not hold; a predicted block is in the generation of
        its last prediction. Storing a block ends its prediction. Returns how many are new or moved.
        """

    def unpredict(self, slot: int, generation: int, hashes: HashArray) -> int:
        """Ends the predictions of these blocks in this generation. Returns how many."""

    def predicted(self, slot: int) -> int:
        """Predicted blocks of a slot."""

    def digest(self, slot: int) -> int:
        """Order-free digest of a slot's placements, see `mix_digest`; includes placements dropped
        for lack of space, so that it is comparable with the relay's."""

    def stats(self) -> IndexStats:
        """Sizes. Blocks of forgotten workers may count until they are swept."""

    def sweep(self, steps: int = ...) -> bool:
        """Frees about `steps` blocks of forgotten workers. Returns whether any are left.

        Forgetting returns at once and frees in slices, so that no worker is too large to forget.
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
