"""Engine blocks in the ledger (events/relay/ledger.py): whole blocks, and pages of a chunk."""

from indexer.identity import EngineHash, PrefixHash, Tier

GROUPS_MAX = 16
COUNT_BITS = 8
COUNT_MASK = (1 << COUNT_BITS) - 1
CAPPED = 1 << (COUNT_BITS * GROUPS_MAX * len(Tier))


def shift(place: int, tier: Tier) -> int:
    """Offset, in bits, of the count of a group's place and a tier in `Block.copies`."""
    return COUNT_BITS * (place * len(Tier) + tier)


TIER_MASKS = tuple(
    sum(COUNT_MASK << shift(place, tier) for place in range(GROUPS_MAX)) for tier in Tier
)


class Block:
    """An engine block that some tier holds."""

    __slots__ = ("copies", "end", "prefixes", "seed")

    def __init__(self, seed: int, end: PrefixHash | None, prefixes: tuple[PrefixHash, ...]) -> None:
        self.seed = seed
        self.end = end
        """PrefixHash of the last canonical block that ends in or before this block."""
        self.prefixes = prefixes
        """Canonical blocks inside this block; several where it is split."""
        self.copies = 0
        """A count of 8 bits for each (group, tier), in a single int to save an object; and a bit
        for a block that has had more copies than the counts hold."""


class Page(Block):
    """An engine block smaller than a canonical block."""

    __slots__ = ("children", "chunks", "engine_hash", "own_chunk", "parent", "pending")

    def __init__(
        self,
        seed: int,
        end: PrefixHash | None,
        engine_hash: EngineHash,
        pending: bytes,
        parent: "Page | None",
    ) -> None:
        super().__init__(seed, end, ())
        self.engine_hash = engine_hash
        self.pending = pending
        """Token bytes since the last canonical block's end; empty: this page ends a canonical
        block."""
        self.parent = parent
        """The page before, inside the same canonical block."""
        self.children = 0
        """Known pages with this page as their parent; they keep it in the ledger."""
        self.chunks: list[Chunk] = []
        """Canonical blocks with this page; several where chains branch inside a block."""
        self.own_chunk: Chunk | None = None
        """The canonical block that ends with this page."""

    def let_go(self) -> None:
        """Drops the references between the page and its chunks."""
        self.chunks.clear()
        if self.own_chunk is not None:
            self.own_chunk.pages = ()
        self.own_chunk = self.parent = None


class Chunk:
    """A canonical block made of pages: a tier holds it while it holds all its pages."""

    __slots__ = ("before", "missing", "pages", "prefix")

    def __init__(
        self, prefix: PrefixHash, before: PrefixHash | None, pages: tuple[Page, ...]
    ) -> None:
        self.prefix = prefix
        self.before = before
        self.pages = pages
        self.missing = [len(pages) for _ in Tier]
