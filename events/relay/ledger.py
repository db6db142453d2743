"""The blocks of one engine rank: counts copies, reports first arrivals and last departures.

An engine announces every copy of a block under its own hash. The ledger recomputes PrefixHashes
from the token ids, in the pool's canonical block size, and reports only the arrival of the first
copy and the departure of the last copy of each (PrefixHash, tier). Pure: no clock, no sockets.

Laws:
- the blocks reported placed and not gone since are exactly `placements()`;
- an engine hash is known while any tier holds a copy of it (or of a page that continues it inside
  the same canonical block), and no longer;
- nothing is guessed: a block whose content or place in a chain is unknown is left out and counted.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Self

from msgspec import Struct
from typing_extensions import override
from xxhash import xxh3_64_intdigest

from events.engines.events import BlocksCleared, BlocksRemoved, BlocksStored, EngineEvent
from events.plane.left_out import LeftOut
from events.relay.blocks import (
    CAPPED,
    COUNT_MASK,
    GROUPS_MAX,
    TIER_MASKS,
    Block,
    Chunk,
    Page,
    shift,
)
from events.relay.ledger_copy import BlockRows, LedgerCopy, LedgerHead, blocks_of
from indexer.hashing import extend_prefix, hash_seed, multimodal_hash
from indexer.identity import BlockHash, EngineHash, PrefixHash, Tier
from indexer.index import mix_digest

COPIES_MAX = 16
"""Copies of a block counted on a tier and group. vLLM's report mode announces blocks without a new
copy, so counts can exceed the real copies; the cap bounds by how much. An engine that really has
more copies may still hold a block that is reported gone: see `Ledger.may_miss`."""

MEDIUM_TIERS = {
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "STORAGE": Tier.DISK,
    "DISK": Tier.DISK,
}
SHELVES = 256
"""Dictionaries into which a map is split, by the low bits of its keys' hashes. When a dictionary of
a million entries grows, it stops the event loop for 100 ms; one of 16,000, a 256th of four million
blocks, for 0.5 ms."""
SHARED_MEDIUMS = frozenset({"EXTERNAL"})
_SMALLEST_CANONICAL = 16


class Placed(Struct, frozen=True):
    """Blocks that arrived on a tier: a chain after `parent`."""

    tier: Tier
    parent: PrefixHash | None
    hashes: list[PrefixHash]


class Gone(Struct, frozen=True):
    """Blocks that left a tier."""

    tier: Tier
    hashes: list[PrefixHash]


class Wiped(Struct, frozen=True):
    """All blocks left all tiers."""


Change = Placed | Gone | Wiped


def canonical_block_size(engine_block_size: int, wanted: int | None) -> int | None:
    """Tokens of a canonical block; None: the engine's blocks can't be split or merged to `wanted`.

    wanted None: the engine's own size, or if that is under 16 tokens, its smallest multiple of at
    least 16.
    """
    if wanted is None:
        if engine_block_size >= _SMALLEST_CANONICAL:
            return engine_block_size
        return -(-_SMALLEST_CANONICAL // engine_block_size) * engine_block_size
    if wanted % engine_block_size and engine_block_size % wanted:
        return None
    return wanted


class Ledger:
    """The copies of blocks on one engine rank.

    Over 300 lines: whole, split and merged blocks change the same shelves and copies.
    """

    def __init__(
        self,
        wanted_block_size: int | None = None,
        blocks_max: int = 1 << 22,
        dropped: Counter[str] | None = None,
    ) -> None:
        """wanted_block_size: canonical tokens a block; None: see `canonical_block_size`.

        blocks_max bounds the ledger; stores beyond it are counted as `ledger_full`.
        """
        self._wanted = wanted_block_size
        self._blocks_max = blocks_max
        self.engine_block_size: int | None = None
        self.block_size: int | None = None
        """Canonical block size; known from the first store on."""
        self.dropped: Counter[str] = Counter() if dropped is None else dropped
        """Reason -> events (or blocks) left out."""
        self.may_miss = False
        """Whether a block was reported gone that had more copies than are counted, so that the
        engine may still hold it; until a wipe."""
        self.left_out = LeftOut()
        """Blocks of the engine that are not in this ledger."""
        self._blocks: list[dict[EngineHash, Block]] = new_shelves()
        """Shelf of the engine hash -> engine hash -> block"""
        self._block_count = 0
        self._held: list[list[dict[PrefixHash, int]]] = [new_shelves() for _ in Tier]
        """Tier -> shelf of the PrefixHash -> PrefixHash -> engine blocks or chunks that hold it"""
        self._held_count = [0 for _ in Tier]
        self._xor = [0 for _ in Tier]
        self._groups: dict[int | None, int] = {None: 0}
        """KV cache group -> its place in `Block.copies`"""
        self._other_groups: set[int | None] = set()
        """Groups without full attention, known from stores: removals don't have the kind."""
        self._changes: list[Change] = []
        """Changes since the last call of `apply` returned."""

    @override
    def __repr__(self) -> str:
        held = "+".join(map(str, self._held_count))
        return f"<Ledger {len(self)} engine blocks, {held} placements>"

    def __len__(self) -> int:
        """Engine blocks in the ledger."""
        return self._block_count

    def blocks(self) -> Iterator[tuple[EngineHash, Block]]:
        """All engine blocks in the ledger, with their hashes."""
        for shelf in self._blocks:
            yield from shelf.items()

    def apply(self, *events: EngineEvent) -> list[Change]:
        """The changes by events, in order: a change for each run of blocks, however many events
        it came in. No event of an engine makes it raise."""
        for event in events:
            match event:
                case BlocksStored():
                    self._store(event)
                case BlocksRemoved():
                    self._remove(event)
                case BlocksCleared():
                    self._changes = self.wipe()
        changes, self._changes = self._changes, []
        return changes

    def wipe(self) -> list[Change]:
        """Forgets all copies."""
        had_any = any(self._held_count) or bool(self._changes)
        for _, block in self.blocks():
            if isinstance(block, Page):
                block.let_go()
        self.left_out.clear()
        self._blocks, self._block_count = new_shelves(), 0
        self._held, self._held_count = [new_shelves() for _ in Tier], [0 for _ in Tier]
        self._xor = [0 for _ in Tier]
        self._changes.clear()  # the wipe is all that is left of them
        self.may_miss = False
        return [Wiped()] if had_any else []

    def count(self) -> int:
        """Placements: (tier, PrefixHash) pairs."""
        return sum(self._held_count)

    def digest(self) -> int:
        """Equal to the digest of an index with the same placements."""
        return mix_digest(*self._xor)

    def placements(self) -> Iterator[tuple[Tier, list[PrefixHash]]]:
        """All placements: each tier with a new list of its prefixes."""
        for tier in Tier:
            yield tier, [prefix for shelf in self._held[tier] for prefix in shelf]

    def shelves(self) -> Iterator[tuple[Tier, int, dict[PrefixHash, int]]]:
        """All placements in the ledger's own dictionaries: tier, number of the shelf, shelf."""
        for tier in Tier:
            for number, shelf in enumerate(self._held[tier]):
                yield tier, number, shelf

    def copy(self) -> LedgerCopy:
        """A copy of the present state. Takes about 50 ms for a million blocks."""
        head = LedgerHead(
            engine_block_size=self.engine_block_size,
            groups=list(self._groups),
            other_groups=list(self._other_groups),
            may_miss=self.may_miss,
            lacks=list(self.left_out.reasons()),
            count=self.count(),
            digest=self.digest(),
        )
        names = list(chain.from_iterable(self._blocks))
        blocks = list(chain.from_iterable(map(dict.values, self._blocks)))
        return LedgerCopy(head, names, blocks, [block.copies for block in blocks])

    @classmethod
    def restored(
        cls, head: LedgerHead, parts: Iterable[BlockRows], wanted_block_size: int | None
    ) -> Self:
        """The ledger of a copy. Raises ValueError for rows that no ledger can have."""
        ledger = cls(wanted_block_size)
        size = head.engine_block_size
        if size is not None and ledger._refused_block_size(size):
            raise ValueError(f"blocks of {size} tokens can't become blocks of {wanted_block_size}")
        ledger._groups = {group: place for place, group in enumerate(head.groups)}
        ledger._other_groups = set(head.other_groups)
        ledger.may_miss = head.may_miss
        ledger.left_out.add_all(head.lacks)
        in_chunk = (ledger.block_size or 0) // (size or 1)
        for name, block, copies in blocks_of(parts, in_chunk):
            shelf = ledger._blocks[hash(name) % SHELVES]
            if name in shelf or len(ledger) >= ledger._blocks_max:
                raise ValueError(f"block {len(ledger)} is there twice, or over the bound")
            if isinstance(block, Page) and len(block.pending) >= 4 * (ledger.block_size or 0):
                raise ValueError(f"page {len(ledger)} holds tokens of a whole block")
            shelf[name] = block
            ledger._block_count += 1
            if isinstance(block, Page) and block.parent is not None:
                block.parent.children += 1
                if block.end is not None and not block.pending:
                    ledger._close(block, block.parent, block.end)
            block.copies = copies
            for tier in Tier:
                if copies & TIER_MASKS[tier]:
                    ledger._arrive(block, tier, None)
            ledger._changes.clear()
        if ledger.count() != head.count:
            raise ValueError(
                f"the saved ledger has {ledger.count()} placements; its head says {head.count}"
            )
        if ledger.digest() != head.digest:
            raise ValueError(f"the digest of the {head.count} placements differs")
        return ledger

    def _store(self, event: BlocksStored) -> None:
        tier = self._tier(event)
        if tier is None:
            return
        if not event.full_attention:
            self._other_groups.add(event.group)
            self.dropped["other_group"] += 1
            return
        field = self._field(event.group, tier)
        if field is None:
            self._leave_out("too_many_groups", event.hashes, count=1)
            return
        if not event.token_ids:
            self._store_known(event, tier, field)
            return
        if reason := self._refused_block_size(event.block_size):
            self._leave_out(reason, event.hashes, count=1)
            return
        if reason := _unhashable(event, self.block_size):
            self._leave_out(reason, event.hashes)
            return
        parent: Block | None = None
        if event.parent is not None:
            parent = self._block(event.parent)
            if parent is None:
                self._leave_out("unknown_parent", event.hashes)
                return
            seed = parent.seed
        else:
            seed = hash_seed(event.lora_name or "", event.cache_salt or "")
        self._store_chain(event, tier, field, parent, seed)

    def _store_chain(
        self, event: BlocksStored, tier: Tier, field: int, parent: Block | None, seed: int
    ) -> None:
        tokens = array("I", event.token_ids).tobytes()
        size = 4 * event.block_size
        canonical = 4 * (self.block_size or event.block_size)
        for i, engine_hash in enumerate(event.hashes):
            shelf = self._blocks[hash(engine_hash) % SHELVES]
            block = shelf.get(engine_hash)
            if block is None:
                if self._block_count >= self._blocks_max:
                    self._leave_out("ledger_full", event.hashes[i:])
                    return
                content = tokens[i * size : (i + 1) * size]
                if size < canonical:
                    block = self._make_page(engine_hash, content, parent, seed, canonical)
                else:
                    suffix = _items_suffix(event.item_ids[i]) if event.item_ids else b""
                    block = _whole(content, suffix, parent, seed, canonical)
                shelf[engine_hash] = block
                self._block_count += 1
            self._add_copy(block, tier, field, parent.end if parent else None)
            parent = block

    def _store_known(self, event: BlocksStored, tier: Tier, field: int) -> None:
        """A store without tokens, as offload connectors send: another copy of known blocks."""
        for engine_hash in event.hashes:
            block = self._block(engine_hash)
            if block is None:
                self._leave_out("unresolved", (engine_hash,))
            else:
                self._add_copy(block, tier, field, None)

    def _remove(self, event: BlocksRemoved) -> None:
        tier = self._tier(event)
        if tier is None:
            return
        if event.group in self._other_groups:
            self.dropped["other_group"] += 1
            return
        if event.group not in self._groups:  # no block of it is counted, and it has no place
            self.dropped["unknown_removal"] += len(event.hashes)
            for engine_hash in event.hashes:
                self.left_out.remove(engine_hash)
            return
        field = shift(self._groups[event.group], tier)
        for engine_hash in event.hashes:
            block = self._block(engine_hash)
            if block is None or not block.copies >> field & COUNT_MASK:
                self.dropped["unknown_removal"] += 1
                self.left_out.remove(engine_hash)
                continue
            block.copies -= 1 << field
            if not block.copies & TIER_MASKS[tier]:
                self._leave(block, tier)
                if block.copies & CAPPED:
                    self.may_miss = True
                    if block.copies == CAPPED:
                        block.copies = 0
                if not block.copies:
                    self._drop(engine_hash, block)

    def _make_page(
        self,
        engine_hash: EngineHash,
        content: bytes,
        parent: Block | None,
        seed: int,
        canonical: int,
    ) -> Page:
        """A new page after `parent`; canonical: bytes of a canonical block's tokens."""
        before = parent if isinstance(parent, Page) else None
        end = before.end if before else None
        inside = before if before and before.pending else None
        pending = (inside.pending if inside else b"") + content
        if inside:
            inside.children += 1
        if inside is None or len(pending) < canonical:
            return Page(seed, end, engine_hash, pending, inside)
        prefix = extend_prefix(end, _hash(pending, seed))
        page = Page(seed, prefix, engine_hash, b"", inside)
        self._close(page, inside, prefix)
        return page

    def _close(self, page: Page, parent: Page, prefix: PrefixHash) -> None:
        """`page` ends a canonical block."""
        pages = [page]
        while pages[-1].parent is not None:
            pages.append(pages[-1].parent)
        page.own_chunk = chunk = Chunk(prefix, parent.end, tuple(pages))
        for part in pages:
            part.chunks.append(chunk)
            for tier in Tier:
                if part.copies & TIER_MASKS[tier]:
                    chunk.missing[tier] -= 1

    def _add_copy(self, block: Block, tier: Tier, field: int, parent: PrefixHash | None) -> None:
        first = not block.copies & TIER_MASKS[tier]
        if block.copies >> field & COUNT_MASK < COPIES_MAX:
            block.copies += 1 << field
        else:
            block.copies |= CAPPED
            self.dropped["copies_capped"] += 1
        if first:
            self._arrive(block, tier, parent)

    def _arrive(self, block: Block, tier: Tier, parent: PrefixHash | None) -> None:
        self._hold(tier, parent, block.prefixes)
        if isinstance(block, Page):
            for chunk in block.chunks:
                chunk.missing[tier] -= 1
                if not chunk.missing[tier]:
                    self._hold(tier, chunk.before, (chunk.prefix,))

    def _leave(self, block: Block, tier: Tier) -> None:
        self._release(tier, block.prefixes)
        if isinstance(block, Page):
            for chunk in block.chunks:
                if not chunk.missing[tier]:
                    self._release(tier, (chunk.prefix,))
                chunk.missing[tier] += 1

    def _hold(
        self, tier: Tier, parent: PrefixHash | None, prefixes: tuple[PrefixHash, ...]
    ) -> None:
        """A chain after `parent` has another holder."""
        shelves, changes = self._held[tier], self._changes
        for prefix in prefixes:
            held = shelves[prefix % SHELVES]
            givers = held.get(prefix, 0)
            held[prefix] = givers + 1
            if not givers:
                self._held_count[tier] += 1
                self._xor[tier] ^= prefix
                last = changes[-1] if changes else None
                if isinstance(last, Placed) and last.tier is tier and last.hashes[-1] == parent:
                    last.hashes.append(prefix)
                else:
                    changes.append(Placed(tier, parent, [prefix]))
            parent = prefix

    def _release(self, tier: Tier, prefixes: tuple[PrefixHash, ...]) -> None:
        """A chain has a holder less; its end goes first."""
        for prefix in reversed(prefixes):
            held = self._held[tier][prefix % SHELVES]
            givers = held[prefix] - 1
            if givers:
                held[prefix] = givers
                continue
            del held[prefix]
            self._held_count[tier] -= 1
            self._xor[tier] ^= prefix
            last = self._changes[-1] if self._changes else None
            if isinstance(last, Gone) and last.tier is tier:
                last.hashes.append(prefix)
            else:
                self._changes.append(Gone(tier, [prefix]))

    def _drop(self, engine_hash: EngineHash, block: Block) -> None:
        """Forgets a block without copies; a page stays while later pages have it as parent."""
        if not isinstance(block, Page):
            del self._blocks[hash(engine_hash) % SHELVES][engine_hash]
            self._block_count -= 1
            return
        page: Page | None = block
        while page is not None and not page.copies and not page.children:
            if page.own_chunk is not None:
                for part in page.own_chunk.pages:
                    part.chunks.remove(page.own_chunk)
                page.own_chunk = None  # ends the reference cycle, so that no collector has to
            del self._blocks[hash(page.engine_hash) % SHELVES][page.engine_hash]
            self._block_count -= 1
            page = page.parent
            if page is not None:
                page.children -= 1

    def _block(self, name: EngineHash) -> Block | None:
        return self._blocks[hash(name) % SHELVES].get(name)

    def _leave_out(
        self, reason: str, blocks: tuple[EngineHash, ...], count: int | None = None
    ) -> None:
        """count: added to `dropped`; None: the number of blocks."""
        self.dropped[reason] += len(blocks) if count is None else count
        if reason != "unhashable":  # no request can match such blocks
            self.left_out.add(reason, blocks)

    def _refused_block_size(self, engine_block_size: int) -> str:
        """Why blocks of this size can't be kept; empty: they can."""
        if self.engine_block_size is None:
            self.engine_block_size = engine_block_size
            self.block_size = canonical_block_size(engine_block_size, self._wanted)
        if self.block_size is None:
            return "block_size_unsuitable"
        return "" if engine_block_size == self.engine_block_size else "block_size_changed"

    def _tier(self, event: BlocksStored | BlocksRemoved) -> Tier | None:
        """The tier of an event's blocks; None, counted, for a shared or an unknown medium."""
        if event.remote or event.medium in SHARED_MEDIUMS:
            self.dropped["shared"] += 1
            return None
        tier = MEDIUM_TIERS.get(event.medium or "GPU")
        if tier is None and isinstance(event, BlocksStored) and event.full_attention:
            self._leave_out("unknown_medium", event.hashes, count=1)
        elif tier is None:
            self.dropped["unknown_medium"] += 1
            for engine_hash in event.hashes:
                self.left_out.remove(engine_hash)
        return tier

    def _field(self, group: int | None, tier: Tier) -> int | None:
        """Offset of the count of a group and tier; gives a new group a place, if one is left."""
        place = self._groups.get(group)
        if place is None:
            if len(self._groups) >= GROUPS_MAX:
                return None
            place = self._groups[group] = len(self._groups)
        return shift(place, tier)


def new_shelves() -> list[dict[Any, Any]]:
    """SHELVES empty dictionaries."""
    return [{} for _ in range(SHELVES)]


def _whole(content: bytes, suffix: bytes, parent: Block | None, seed: int, canonical: int) -> Block:
    """A new block after `parent`, of whole canonical blocks; canonical: bytes of the tokens of
    each, which `suffix` follows."""
    end = parent.end if parent else None
    prefixes = []
    for at in range(0, len(content), canonical):
        end = extend_prefix(end, _hash(content[at : at + canonical] + suffix, seed))
        prefixes.append(end)
    return Block(seed, end, tuple(prefixes))


def _items_suffix(items: tuple[str, ...]) -> bytes:
    """What a block's multimodal items add to the content that is hashed."""
    return b"".join(value.to_bytes(8, "little") for value in sorted(map(multimodal_hash, items)))


def _hash(content: bytes, seed: int) -> BlockHash:
    return BlockHash(xxh3_64_intdigest(content, seed))


def _unhashable(event: BlocksStored, block_size: int | None) -> str:
    """Why the blocks of an event can't be hashed by their content; empty: they can."""
    if event.unnamed_lora:
        return "unnamed_lora"
    if event.unhashable:
        return "unhashable"
    if event.item_ids and block_size != event.block_size and any(event.item_ids):
        return "item_place_unknown"  # events don't have the part of a block that an item covers
    return ""
