"""The native implementation of indexer.hashing and indexer.reference: see kernel.pyx."""

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from indexer.identity import HashArray, Tier
from indexer.index import IndexStats, Match

Buffer = bytes | bytearray | memoryview

def xxh3(data: Buffer, seed: int = 0) -> int:
    """XXH3-64 of some bytes."""

def block_hashes(token_bytes: Buffer, block_size: int, seed: int) -> HashArray:
    """BlockHashes of the full blocks of little-endian u32 tokens; raises ValueError."""

def token_prefixes(token_bytes: Buffer, block_size: int, seed: int) -> HashArray:
    """PrefixHashes of the full blocks of little-endian u32 tokens; raises ValueError."""

def add_items(
    token_bytes: Buffer, block_size: int, seed: int, items: HashArray, hashes: HashArray
) -> None:
    """Replaces, in `hashes`, the BlockHashes of the blocks that multimodal items cover.

    items: shape (items, 3): content hash, first block and last block of each, ascending."""

def prefix_hashes(blocks: HashArray, parent: int | None = None) -> HashArray:
    """PrefixHashes of a chain of BlockHashes, after `parent` if there is one."""

class NativeIndex:
    """See indexer.index.BlockIndex; `stats().blocks` includes forgotten blocks until a sweep."""

    def __init__(self, bytes_max: int | None = None, share_max: int | None = None) -> None:
        """bytes_max: bytes of the index. share_max: placements of a worker. None: no limit."""

    @override
    def __repr__(self) -> str: ...
    def open_slot(self) -> int: ...
    def forget(self, slot: int) -> int: ...
    def store(self, slot: int, tier: Tier, hashes: HashArray) -> int: ...
    def remove(self, slot: int, tier: Tier, hashes: HashArray) -> int: ...
    def clear(self, slot: int, tier: Tier | None = None) -> int: ...
    def sweep(self, steps: int = ...) -> bool: ...
    def match(self, hashes: HashArray) -> Match: ...
    def overlap(
        self, hashes: HashArray, usable_max: int, slots: npt.NDArray[np.intp], unit: int = 1
    ) -> npt.NDArray[np.int32]: ...
    def count(self, slot: int, tier: Tier | None = None) -> int: ...
    def told(self, slot: int) -> int: ...
    def whole(self, slot: int) -> bool: ...
    def predict(self, slot: int, generation: int, hashes: HashArray) -> int: ...
    def unpredict(self, slot: int, generation: int, hashes: HashArray) -> int: ...
    def predicted(self, slot: int) -> int: ...
    def digest(self, slot: int) -> int: ...
    def stats(self) -> IndexStats: ...

class BlockUsers:
    """The distinct blocks that open requests use on one worker: a counted set of chains, each from
    its prompt's first block on. Two blocks are the same only if all hashes up to them are equal, so
    a caller's own hashes are counted correctly, too."""

    def __len__(self) -> int: ...
    @override
    def __repr__(self) -> str: ...
    def open(self, prefixes: HashArray) -> None:
        """Adds a user to each block of a chain."""

    def close(self, prefixes: HashArray) -> None:
        """Takes a user from each block of a chain, which must have been opened."""

    def leading(self, prefixes: HashArray) -> int:
        """Leading blocks of a chain that have users."""
