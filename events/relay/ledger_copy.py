"""A ledger (events/relay/ledger.py) as it was at one moment, and as columns that can be kept on
disk.

    Ledger.copy() ─> LedgerCopy ─> rows ─> bytes ─> rows ─> Ledger.restored()

A copy is taken between two messages, so it has to be quick; the rest takes five times as long and
more, and may be done in another thread: of what rows are made of, only a block's copies ever
change, and those are in the LedgerCopy as numbers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from events.engines.wire import BLOCK_SIZE_MAX
from events.plane.facts import LACKS_MAX, Name
from events.relay.blocks import CAPPED, GROUPS_MAX, Block, Page
from indexer.identity import EngineHash, PrefixHash

_ENDS = 1 << 62
_COPIES_BYTES = CAPPED.bit_length() // 8 + 1
_ROWS_MAX = 1 << 14
"""Blocks in one BlockRows: a few milliseconds of encoding."""


U64 = Annotated[int, Meta(ge=0)]
"""MessagePack has none that is larger."""


class LedgerHead(msgspec.Struct, frozen=True):
    """What a ledger knows besides its blocks, and what they add up to."""

    engine_block_size: Annotated[int, Meta(ge=1, le=BLOCK_SIZE_MAX)] | None
    groups: Annotated[list[int | None], Meta(min_length=1, max_length=GROUPS_MAX)]
    """By their places in `Block.copies`."""
    other_groups: list[int | None]
    may_miss: bool
    count: int
    digest: int
    lacks: Annotated[list[Name], Meta(max_length=LACKS_MAX)] = []
    """Why blocks were left out."""


class BlockRows(msgspec.Struct, frozen=True, array_like=True):
    """Some of a ledger's blocks in columns, each page after the one before it."""

    names: list[EngineHash]
    seeds: list[U64]
    copies: list[Annotated[bytes, Meta(max_length=_COPIES_BYTES)]]
    """`Block.copies`, little-endian."""
    prefixes: list[Annotated[PrefixHash, Meta(ge=0)]]
    """As many a block as it has canonical ones inside; none where blocks are pages."""
    ends: list[Annotated[PrefixHash, Meta(ge=0)] | None]
    """Of pages, as are those below."""
    pendings: list[Annotated[bytes, Meta(max_length=4 * BLOCK_SIZE_MAX)]]
    parents: list[int | None]
    """Row of the page before inside the same chunk, counted over all parts."""


@dataclass(frozen=True, slots=True)
class LedgerCopy:
    """A ledger's blocks, in any order."""

    head: LedgerHead
    names: list[EngineHash]
    blocks: list[Block]
    copies: list[int]

    def rows(self) -> Iterator[BlockRows]:
        """All blocks, part by part."""
        place_of: dict[Block | None, int] = {}
        # Before a page comes the one with fewer tokens pending; one that has none ends a chunk.
        order = sorted(range(len(self.blocks)), key=lambda i: _tokens_pending(self.blocks[i]))
        for at in range(0, len(order), _ROWS_MAX):
            part = order[at : at + _ROWS_MAX]
            blocks = [self.blocks[i] for i in part]
            pages = [one for one in blocks if isinstance(one, Page)]
            place_of.update((page, at + i) for i, page in enumerate(pages))
            yield BlockRows(
                names=[self.names[i] for i in part],
                seeds=[one.seed for one in blocks],
                copies=[_bytes_of(self.copies[i]) for i in part],
                prefixes=[prefix for one in blocks for prefix in one.prefixes],
                ends=[page.end for page in pages],
                pendings=[page.pending for page in pages],
                parents=[place_of.get(page.parent) for page in pages],
            )


def blocks_of(parts: Iterable[BlockRows], in_chunk: int) -> Iterator[tuple[EngineHash, Block, int]]:
    """Names, blocks, and the copies they had, in order; the blocks are new ones without copies.

    in_chunk: pages of a canonical block, at most. Raises ValueError for columns that don't fit
    together.
    """
    pages: list[Page] = []
    places: list[int] = []
    """Of each page in its chunk."""
    for rows in parts:
        blocks: list[Block]
        if rows.prefixes:
            each, left = divmod(len(rows.prefixes), len(rows.names) or 1)
            if left or not each:
                raise ValueError(f"{len(rows.prefixes)} prefixes for {len(rows.names)} blocks")
            ends = range(each, len(rows.prefixes) + 1, each)
            chains = [tuple(rows.prefixes[end - each : end]) for end in ends]
            blocks = [
                Block(seed, chain[-1], chain)
                for seed, chain in zip(rows.seeds, chains, strict=True)
            ]
        else:
            first = len(pages)
            for name, seed, end, pending, parent in zip(
                rows.names, rows.seeds, rows.ends, rows.pendings, rows.parents, strict=True
            ):
                if parent is not None and not 0 <= parent < len(pages):
                    raise ValueError(f"page {len(pages)} comes after page {parent}")
                before = None if parent is None else pages[parent]
                if before is None and not pending:
                    raise ValueError(f"page {len(pages)} ends a chunk that never began")
                places.append(0 if parent is None else places[parent] + 1)
                if places[-1] >= in_chunk or (before is not None and not before.pending):
                    raise ValueError(f"page {len(pages)} is beyond the end of its chunk")
                pages.append(Page(seed, end, name, pending, before))
            blocks = list(pages[first:])
        copies = [int.from_bytes(one, "little") for one in rows.copies]
        yield from zip(rows.names, blocks, copies, strict=True)


def _tokens_pending(block: Block) -> int:
    """Bytes, with those of a page that ends a chunk as the most; 0 for what is no page."""
    return (len(block.pending) or _ENDS) if isinstance(block, Page) else 0


def _bytes_of(copies: int) -> bytes:
    return copies.to_bytes((copies.bit_length() + 7) // 8, "little")
