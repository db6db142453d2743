"""The copies of an engine's blocks, by the engine's names, and the prefixes that they make.

    names, tokens ─> blocks, with their copies by group and tier ─> prefixes that each tier holds

A tier holds the prefix of a canonical block while it has a copy of an engine's block with all its
tokens: of a block as long as that, of a longer one, or of each of the shorter ones (pages) that it
consists of. Several blocks, of other names, may make the same prefix. Pure.

Laws:
- a block is known while any tier has a copy of it, or of a page after it in its canonical block;
- `take` returns what tiers hold and held not when it, `clear` or `restore` was called last, and the
  reverse, in order;
- a call that changes blocks and raises MemoryError has cleared all;
- the first and the last copy of a page take time in proportion to the pages after it in its
  canonical block.
"""

from collections.abc import Sequence

from typing_extensions import override

from indexer.identity import EngineHash, HashArray, PrefixHash, Tier

GROUPS_MAX: int
"""KV cache groups whose copies are counted."""

class BlockCopies:
    """The blocks of one engine rank: about 131 bytes each, 78 where they are pages of one token; 40
    more from the third KV cache group on."""

    may_miss: bool
    """Whether a block went from a tier that had more copies than are counted."""

    def __init__(self, blocks_max: int, copies_max: int) -> None:
        """copies_max: copies counted of a block on a tier, for a group. Raises ValueError unless it
        is 1 to 255."""

    def __len__(self) -> int: ...
    def __contains__(self, name: EngineHash) -> bool: ...
    @override
    def __repr__(self) -> str: ...
    @property
    def capped(self) -> int:
        """Copies that were not counted, ever."""

    def shape(self, block_size: int, canonical_size: int) -> None:
        """Tokens of an engine's block and of a canonical one, of which one is a multiple of the
        other; before the first block. Raises ValueError."""

    def store(
        self,
        names: Sequence[EngineHash],
        parent: EngineHash | None,
        tokens: bytes | memoryview,
        seed: int,
        group: int,
        tier: Tier,
        suffixes: Sequence[bytes] | None = None,
    ) -> int:
        """A chain of blocks arrived on a tier; returns how many of them are known now: fewer than
        all at blocks_max, -1 after a parent that is not known.

        tokens: little-endian u32. seed: of the BlockHashes of a chain without a parent; a block
        after a known one has that one's. suffixes: what the tokens of each block are followed by,
        for its hash; where blocks are canonical.
        """

    def put(
        self,
        names: Sequence[EngineHash],
        prefixes: HashArray,
        parent: PrefixHash | None,
        tier: Tier,
    ) -> tuple[int, int]:
        """A chain of blocks with these prefixes arrived on a tier; where blocks are canonical.
        Returns how many of them are known now, and how many were known by another prefix, which
        has gone."""

    def store_known(self, names: Sequence[EngineHash], group: int, tier: Tier) -> list[EngineHash]:
        """Known blocks got a copy on a tier; returns the names that are not known."""

    def remove(self, names: Sequence[EngineHash], group: int, tier: Tier) -> list[EngineHash]:
        """Copies of blocks left a tier; returns the names of those that had none there."""

    def end(self, name: EngineHash) -> PrefixHash | None:
        """Prefix of the last canonical block that ends in a block or before it; None: none does, or
        the block is not known."""

    def take(self) -> list[tuple[bool, Tier, PrefixHash | None, list[PrefixHash]]]:
        """Changes since the last call: (arrived or left, tier, prefix before these, prefixes)."""

    def clear(self) -> None:
        """Forgets all blocks, and the changes that were not taken."""

    def count(self) -> int:
        """Placements: (tier, prefix) pairs."""

    def xors(self) -> tuple[int, int, int]:
        """The xor of each tier's prefixes."""

    def held(self, tier: Tier) -> HashArray:
        """A new array of a tier's prefixes: 13 ms for a million blocks."""

    def save(self) -> bytes:
        """All blocks as bytes, for `restore`: some 25 ms for a million."""

    def restore(self, saved: bytes) -> None:
        """Adds saved blocks of the same sizes, into none; raises ValueError for bytes that `save`
        can't have written."""
