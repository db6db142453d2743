"""The blocks of one engine rank: counts copies, reports first arrivals and last departures.

An engine announces every copy of a block under its own hash. The ledger makes PrefixHashes of the
token ids, in the pool's canonical block size, and reports only the arrival of the first copy and
the departure of the last copy of each (PrefixHash, tier). It knows what events mean; copies and
prefixes are kept natively (indexer/copies.pyx). Pure: no clock, no sockets.

Laws:
- the blocks reported placed and not gone since are exactly `placements()`;
- an engine hash is known while any tier holds a copy of it (or of a page that continues it inside
  the same canonical block), and no longer;
- nothing is guessed: a block whose content or place in a chain is unknown is left out and counted.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Self

from msgspec import Meta, Struct
from typing_extensions import override

from events.engines.events import BlocksCleared, BlocksRemoved, BlocksStored, EngineEvent
from events.engines.wire import BLOCK_SIZE_MAX
from events.plane.facts import LACKS_MAX, Name
from events.plane.left_out import LeftOut
from indexer.copies import GROUPS_MAX, BlockCopies
from indexer.hashing import hash_seed, multimodal_hash
from indexer.identity import EngineHash, HashArray, PrefixHash, Tier
from indexer.index import mix_digest

COPIES_MAX = 16
"""Copies of a block counted on a tier and group. vLLM's report mode announces blocks without a new
copy, so counts can exceed the real copies; the cap bounds by how much. An engine that really has
more copies may still hold a block that is reported gone: see `Ledger.may_miss`."""
BLOCKS_MAX = 1 << 22

MEDIUM_TIERS = {
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "STORAGE": Tier.DISK,
    "DISK": Tier.DISK,
}
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


class LedgerCopy(Struct, frozen=True):
    """A ledger at one moment, as it is saved."""

    engine_block_size: Annotated[int, Meta(ge=1, le=BLOCK_SIZE_MAX)] | None
    groups: Annotated[list[int | None], Meta(min_length=1, max_length=GROUPS_MAX)]
    """KV cache groups, in the order of their places in the counts of copies."""
    other_groups: list[int | None]
    may_miss: bool
    count: int
    digest: int
    lacks: Annotated[list[Name], Meta(max_length=LACKS_MAX)]
    """Reasons for which blocks were left out."""
    blocks: bytes
    """See `BlockCopies.save`."""


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


class HeldBlocks:
    """The prefixes that a rank holds on each tier."""

    def __init__(
        self, blocks_max: int, copies_max: int, dropped: Counter[str] | None = None
    ) -> None:
        """blocks_max bounds the ledger; stores beyond it are counted as `ledger_full`."""
        self.dropped: Counter[str] = Counter() if dropped is None else dropped
        """Reason -> events (or blocks) left out."""
        self.left_out = LeftOut()
        """Blocks of the engine that are not in this ledger."""
        self._copies = BlockCopies(blocks_max, copies_max)
        self._is_half_applied = False
        """Whether a call raised, so that changes of it were not returned."""

    @override
    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self)} engine blocks, {self.count()} placements>"

    def __len__(self) -> int:
        """Engine blocks in the ledger."""
        return len(self._copies)

    def __contains__(self, engine_hash: EngineHash) -> bool:
        """Whether a block of the engine is in the ledger."""
        return engine_hash in self._copies

    def wipe(self) -> list[Change]:
        """Forgets all copies, also after a call that raised; returns the changes."""
        is_half_applied, self._is_half_applied = self._is_half_applied, False
        return self._cleared() or ([Wiped()] if is_half_applied else [])

    def _cleared(self) -> list[Change]:
        had_any = bool(self.count() or self._copies.take())
        self.left_out.clear()
        self._copies.clear()
        return [Wiped()] if had_any else []

    def _changes(self) -> list[Change]:
        """The changes by a call that has ended without raising."""
        self._is_half_applied = False
        return [
            Placed(tier, parent, hashes) if is_placed else Gone(tier, hashes)
            for is_placed, tier, parent, hashes in self._copies.take()
        ]

    def count(self) -> int:
        """Placements: (tier, PrefixHash) pairs."""
        return self._copies.count()

    def digest(self) -> int:
        """Equal to the digest of an index with the same placements."""
        return mix_digest(*self._copies.xors())

    def held(self, tier: Tier) -> HashArray:
        """A new array of a tier's prefixes."""
        return self._copies.held(tier)

    def placements(self) -> Iterator[tuple[Tier, list[PrefixHash]]]:
        """All placements: each tier with a new list of its prefixes."""
        for tier in Tier:
            yield tier, self.held(tier).tolist()


class Ledger(HeldBlocks):
    """The copies of blocks on one engine rank."""

    def __init__(
        self,
        wanted_block_size: int | None = None,
        blocks_max: int = BLOCKS_MAX,
        dropped: Counter[str] | None = None,
    ) -> None:
        """wanted_block_size: canonical tokens a block; None: see `canonical_block_size`."""
        super().__init__(blocks_max, COPIES_MAX, dropped)
        self._wanted = wanted_block_size
        self.engine_block_size: int | None = None
        self.block_size: int | None = None
        """Tokens of a canonical block; known from the first store on."""
        self._groups: dict[int | None, int] = {None: 0}
        """KV cache group -> its place in the counts of copies"""
        self._other_groups: set[int | None] = set()
        """Groups without full attention, known from stores: removals don't have the kind."""

    @property
    def may_miss(self) -> bool:
        """Whether a block was reported gone that had more copies than are counted, so that the
        engine may still hold it; until a wipe."""
        return self._copies.may_miss

    def apply(self, *events: EngineEvent) -> list[Change]:
        """Applies events; returns the changes in order: one for each run of blocks, in however many
        events it came. No event of an engine makes this raise."""
        wiped: list[Change] = []
        self._is_half_applied = True
        for event in events:
            match event:
                case BlocksStored():
                    self._store(event)
                case BlocksRemoved():
                    self._remove(event)
                case BlocksCleared():
                    wiped = self._cleared() or wiped
        return wiped + self._changes()

    def copy(self) -> LedgerCopy:
        """A copy of the present state: some 25 ms for a million blocks."""
        return LedgerCopy(
            engine_block_size=self.engine_block_size,
            groups=list(self._groups),
            other_groups=list(self._other_groups),
            may_miss=self.may_miss,
            count=self.count(),
            digest=self.digest(),
            lacks=list(self.left_out.reasons()),
            blocks=self._copies.save(),
        )

    @classmethod
    def restored(cls, copy: LedgerCopy, wanted_block_size: int | None) -> Self:
        """The ledger of a copy. Raises ValueError for a copy that no ledger can have made."""
        ledger = cls(wanted_block_size)
        size = copy.engine_block_size
        if size is not None and ledger._refused_block_size(size):
            raise ValueError(
                f"the saved ledger's blocks of {size} tokens can't be split or merged to"
                f" {wanted_block_size}"
            )
        ledger._groups = {group: place for place, group in enumerate(copy.groups)}
        if len(ledger._groups) < len(copy.groups):
            raise ValueError(f"the saved ledger lists a KV cache group twice: {copy.groups}")
        ledger._other_groups = set(copy.other_groups)
        ledger.left_out.add_all(copy.lacks)
        ledger._copies.restore(copy.blocks)
        ledger._copies.may_miss = copy.may_miss
        if (ledger.count(), ledger.digest()) != (copy.count, copy.digest):
            raise ValueError(
                f"the saved ledger has {ledger.count()} placements, of digest {ledger.digest()};"
                f" its head says {copy.count}, of {copy.digest}"
            )
        return ledger

    def _store(self, event: BlocksStored) -> None:
        tier = self._tier(event)
        if tier is None:
            return
        if not event.full_attention:
            self._other_groups.add(event.group)
            self.dropped["other_group"] += 1
            return
        group = self._place(event.group)
        if group is None:
            self._leave_out("too_many_groups", event.hashes, count=1)
            return
        capped = self._copies.capped
        if event.token_ids:
            self._store_chain(event, group, tier)
        elif unknown := self._copies.store_known(event.hashes, group, tier):
            # Without tokens, as offload connectors send: another copy of known blocks.
            self._leave_out("unresolved", unknown)
        if capped != self._copies.capped:
            self.dropped["copies_capped"] += self._copies.capped - capped

    def _store_chain(self, event: BlocksStored, group: int, tier: Tier) -> None:
        if reason := self._refused_block_size(event.block_size):
            self._leave_out(reason, event.hashes, count=1)
            return
        if reason := _unhashable(event, self.block_size):
            self._leave_out(reason, event.hashes)
            return
        suffixes = None
        if event.item_ids and any(event.item_ids):
            suffixes = [_items_suffix(items) for items in event.item_ids]
        stored = self._copies.store(
            event.hashes,
            event.parent,
            array("I", event.token_ids).tobytes(),
            hash_seed(event.lora_name or "", event.cache_salt or ""),
            group,
            tier,
            suffixes,
        )
        if stored < 0:
            self._leave_out("unknown_parent", event.hashes)
        elif stored < len(event.hashes):
            self._leave_out("ledger_full", event.hashes[stored:])

    def _remove(self, event: BlocksRemoved) -> None:
        tier = self._tier(event)
        if tier is None:
            return
        if event.group in self._other_groups:
            self.dropped["other_group"] += 1
            return
        group = self._groups.get(event.group)
        # Of a group without a place no block is counted.
        unknown = event.hashes if group is None else self._copies.remove(event.hashes, group, tier)
        if unknown:
            self.dropped["unknown_removal"] += len(unknown)
            for engine_hash in unknown:
                self.left_out.remove(engine_hash)

    def _leave_out(
        self, reason: str, blocks: Sequence[EngineHash], count: int | None = None
    ) -> None:
        """Records blocks that are left out. count: added to `dropped`; None: their number."""
        self.dropped[reason] += len(blocks) if count is None else count
        if reason != "unhashable":  # no request can match such blocks
            self.left_out.add(reason, blocks)

    def _refused_block_size(self, engine_block_size: int) -> str:
        """Why blocks of this size can't be kept; empty: they can."""
        if self.engine_block_size is None:
            self.engine_block_size = engine_block_size
            self.block_size = canonical_block_size(engine_block_size, self._wanted)
            if self.block_size is not None:
                self._copies.shape(engine_block_size, self.block_size)
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

    def _place(self, group: int | None) -> int | None:
        """The place of a group in the counts; a new group gets one, if one is left."""
        place = self._groups.get(group)
        if place is None and len(self._groups) < GROUPS_MAX:
            place = self._groups[group] = len(self._groups)
        return place


def _items_suffix(items: tuple[str, ...]) -> bytes:
    """What a block's multimodal items add to the content that is hashed."""
    return b"".join(value.to_bytes(8, "little") for value in sorted(map(multimodal_hash, items)))


def _unhashable(event: BlocksStored, block_size: int | None) -> str:
    """Why the blocks of an event can't be hashed by their content; empty: they can."""
    if event.unnamed_lora:
        return "unnamed_lora"
    if event.unhashable:
        return "unhashable"
    if event.item_ids and block_size != event.block_size and any(event.item_ids):
        return "item_place_unknown"  # events don't have the part of a block that an item covers
    return ""
