"""The native twin of indexer.hashing and indexer.reference: see kernel.pyx."""

from typing_extensions import override

from indexer.identity import HashArray, Tier
from indexer.index import IndexStats, Match

Buffer = bytes | bytearray | memoryview

def xxh3(data: Buffer, seed: int = 0) -> int:
    """XXH3-64 of some bytes."""

def block_hashes(token_bytes: Buffer, block_size: int, seed: int) -> HashArray:
    """BlockHashes of the full blocks of little-endian u32 tokens; raises ValueError."""

def prefix_hashes(blocks: HashArray, parent: int | None = None) -> HashArray:
    """PrefixHashes of a chain of BlockHashes that goes on after `parent`, if there is one."""

class NativeIndex:
    """See indexer.index.BlockIndex; `stats().blocks` counts the forgotten until they are swept."""

    @override
    def __repr__(self) -> str: ...
    def open_slot(self) -> int: ...
    def forget(self, slot: int) -> int: ...
    def store(self, slot: int, tier: Tier, hashes: HashArray) -> int: ...
    def remove(self, slot: int, tier: Tier, hashes: HashArray) -> int: ...
    def clear(self, slot: int, tier: Tier | None = None) -> int: ...
    def sweep(self, entries: int = ...) -> bool:
        """Frees what forgotten workers held, about so many entries' worth. True: more is left."""

    def match(self, hashes: HashArray) -> Match: ...
    def count(self, slot: int, tier: Tier | None = None) -> int: ...
    def digest(self, slot: int) -> int: ...
    def stats(self) -> IndexStats: ...
