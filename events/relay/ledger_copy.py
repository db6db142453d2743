"""A copy of a ledger (events/relay/ledger.py) at one moment, and its columns for the disk.

    Ledger.copy() ─> LedgerCopy ─> rows ─> bytes ─> rows ─> Ledger.restored()

A copy is taken between two messages, so it has to be quick. The other steps take at least five
times as long, and may run in another thread: a block's only attribute that changes is `copies`, and
the LedgerCopy has those as numbers.
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
"""Unsigned; MessagePack bounds it to 64 bits."""


class LedgerHead(msgspec.Struct, frozen=True):
    """A ledger's state besides its blocks, and their count and digest."""

    engine_block_size: Annotated[int, Meta(ge=1, le=BLOCK_SIZE_MAX)] | None
    groups: Annotated[list[int | None], Meta(min_length=1, max_length=GROUPS_MAX)]
    """Groups in the order of their places in `Block.copies`."""
    other_groups: list[int | None]
    may_miss: bool
    count: int
    digest: int
    lacks: Annotated[list[Name], Meta(max_length=LACKS_MAX)] = []
    """Reasons for which blocks were left out."""


class BlockRows(msgspec.Struct, frozen=True, array_like=True):
    """Part of a ledger's blocks in columns, each page after its parent."""

    names: list[EngineHash]
    seeds: list[U64]
    copies: list[Annotated[bytes, Meta(max_length=_COPIES_BYTES)]]
    """`Block.copies`, little-endian."""
    prefixes: list[Annotated[PrefixHash, Meta(ge=0)]]
    """Prefix hashes of the blocks, for each as many as it has canonical blocks inside; empty where
    blocks are pages."""
    ends: list[Annotated[PrefixHash, Meta(ge=0)] | None]
    """Prefix hash at the end of each page, as the columns below for each page."""
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
        # A page's parent has fewer tokens pending; a page without pending tokens ends a chunk.
        order = sorted(range(len(self.blocks)), key=lambda i: _tokens_pending(self.blocks[i]))
        for at in range(0, len(order), _ROWS_MAX):
            part = order[at : at + _ROWS_MAX]
            blocks = [self.blocks[i] for i in part]
            pages = [block for block in blocks if isinstance(block, Page)]
            place_of.update((page, at + i) for i, page in enumerate(pages))
            yield BlockRows(
                names=[self.names[i] for i in part],
                seeds=[block.seed for block in blocks],
                copies=[_bytes_of(self.copies[i]) for i in part],
                prefixes=[prefix for block in blocks for prefix in block.prefixes],
                ends=[page.end for page in pages],
                pendings=[page.pending for page in pages],
                parents=[place_of.get(page.parent) for page in pages],
            )


def blocks_of(parts: Iterable[BlockRows], in_chunk: int) -> Iterator[tuple[EngineHash, Block, int]]:
    """Names, new blocks without copies, and their numbers of copies, in order.

    in_chunk: pages of a canonical block, at most. Raises ValueError for columns that don't fit
    together.
    """
    pages: list[Page] = []
    places: list[int] = []
    """Place of each page in its chunk."""
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
        copies = [int.from_bytes(packed, "little") for packed in rows.copies]
        yield from zip(rows.names, blocks, copies, strict=True)


def _tokens_pending(block: Block) -> int:
    """Pending bytes of a page, _ENDS for a page that ends a chunk; 0 for other blocks."""
    return (len(block.pending) or _ENDS) if isinstance(block, Page) else 0


def _bytes_of(copies: int) -> bytes:
    return copies.to_bytes((copies.bit_length() + 7) // 8, "little")
