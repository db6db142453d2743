"""The copies of an engine's blocks, by the engine's names, and the prefixes that they make.

    names, tokens ─> blocks, with their copies by group and tier ─> prefixes that each tier holds

A tier holds the prefix of a canonical block while it has a copy of an engine's block with all its
tokens: of a block as long as that, of a longer one, or of each of the shorter ones (pages) that it
consists of. Several blocks, of other names, may make the same prefix. Pure.

Laws:
- a block is known while any tier has a copy of it, or of a page after it in its canonical block;
- `take` returns, in order, the prefixes that tiers have gained and lost since the last `take`,
  `clear` or `restore`;
- a call that changes blocks and raises MemoryError has cleared all;
- the first and the last copy of a page take time in proportion to the pages after it in its
  canonical block.
"""

from collections.abc import Sequence

from typing_extensions import override

from indexer.identity import EngineHash, HashArray, PrefixHash, Tier

GROUPS_MAX: int
"""Most KV cache groups whose copies are counted."""

class BlockCopies:
    """The blocks of one engine rank: about 131 bytes each, 78 where they are pages of one token; 40
    more from the third KV cache group on."""

    may_miss: bool
    """Whether a block left a tier that had had more copies of it than are counted."""

    def __init__(self, blocks_max: int, copies_max: int) -> None:
        """blocks_max: blocks that are kept. copies_max: copies counted of a block on a tier, for a
        group; raises ValueError unless it is 1 to 255."""

    def __len__(self) -> int: ...
    def __contains__(self, name: EngineHash) -> bool: ...
    @override
    def __repr__(self) -> str: ...
    @property
    def capped(self) -> int:
        """Copies that were not counted, ever."""

    def shape(self, block_size: int, canonical_size: int) -> None:
        """Sets the tokens of an engine's block and of a canonical block, one a multiple of the
        other; call before the first block. Raises ValueError."""

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
        """Records a chain of blocks that arrived on a tier; returns how many of them are known now:
        fewer than all at blocks_max, -1 after a parent that is not known.

        tokens: little-endian u32. seed: of the BlockHashes of a chain without a parent; other
        blocks have their parent's seed. suffixes: bytes that are hashed after the tokens of each
        block, only where blocks of the engine are canonical. Raises ValueError.
        """

    def put(
        self,
        names: Sequence[EngineHash],
        prefixes: HashArray,
        parent: PrefixHash | None,
        tier: Tier,
    ) -> tuple[int, int]:
        """Records a chain of blocks with these prefixes that arrived on a tier, where blocks of the
        engine are canonical. Returns how many of them are known now, and how many had another
        prefix before, which has gone."""

    def store_known(self, names: Sequence[EngineHash], group: int, tier: Tier) -> list[EngineHash]:
        """Counts a copy of known blocks on a tier; returns the names that are not known."""

    def remove(self, names: Sequence[EngineHash], group: int, tier: Tier) -> list[EngineHash]:
        """Counts off a copy of each block on a tier; returns the names without a copy there."""

    def end(self, name: EngineHash) -> PrefixHash | None:
        """Prefix of the last canonical block that ends in this engine block or before it; None: no
        canonical block does, or the engine block is not known."""

    def take(self) -> list[tuple[bool, Tier, PrefixHash | None, list[PrefixHash]]]:
        """Changes since the last call: (True: arrived, or False: left; tier; the prefix before
        these, None: unknown or none; prefixes)."""

    def clear(self) -> None:
        """Forgets all blocks, and the changes that were not taken."""

    def count(self) -> int:
        """Number of placements: (tier, prefix) pairs."""

    def xors(self) -> tuple[int, int, int]:
        """The xor of each tier's prefixes."""

    def held(self, tier: Tier) -> HashArray:
        """A new array of a tier's prefixes: 13 ms for a million blocks."""

    def save(self) -> bytes:
        """All blocks as bytes, for `restore`: some 25 ms for a million."""

    def restore(self, saved: bytes) -> None:
        """Adds the blocks that `save` wrote, with the same sizes of blocks, to an empty object;
        raises ValueError for bytes that `save` can't have written."""
