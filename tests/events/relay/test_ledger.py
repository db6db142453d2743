"""Copies in, first arrivals and last departures out: what test_ledger_multiset.py does not draw."""

from collections.abc import Sequence

import pytest

from events.engines.events import BlocksCleared, BlocksRemoved, BlocksStored
from events.feed.fleet_view import FleetView
from events.plane.facts import Epoch
from events.relay.ledger import COPIES_MAX, Gone, Ledger, Placed, Wiped, canonical_block_size
from events.relay.outbox import Outbox
from indexer.hashing import (
    MultimodalItem,
    block_hashes,
    hash_seed,
    multimodal_hash,
    pack_tokens,
    prefix_hashes,
)
from indexer.identity import EngineHash, Tier, WorkerKey
from indexer.reference import ReferenceIndex

DEVICE, HOST, DISK = Tier
MEDIUMS = {DEVICE: "GPU", HOST: "CPU", DISK: "STORAGE"}


def tokens_of(blocks: Sequence[int], size: int = 16) -> list[int]:
    """Token ids of blocks: each is `size` tokens that nothing else has."""
    return [block * 1000 + i for block in blocks for i in range(size)]


def prefixes_of(
    blocks: Sequence[int], size: int = 16, canonical: int = 16, seed: int | None = None
) -> list[int]:
    """PrefixHashes of a whole chain of blocks, from the root."""
    packed = pack_tokens(tokens_of(blocks, size))
    hashes = block_hashes(packed, canonical, hash_seed() if seed is None else seed)
    return prefix_hashes(hashes).tolist()


def stored(
    hashes: Sequence[EngineHash],
    blocks: Sequence[int],
    parent: EngineHash | None = None,
    size: int = 16,
    **changes: object,
) -> BlocksStored:
    return BlocksStored(
        hashes=tuple(hashes),
        parent=parent,
        token_ids=tokens_of(blocks, size),
        block_size=size,
        **changes,  # type: ignore[arg-type]
    )


def offloaded(hashes: Sequence[EngineHash], medium: str = "CPU") -> BlocksStored:
    return BlocksStored(tuple(hashes), None, (), 0, medium=medium)


def removed(
    hashes: Sequence[EngineHash], medium: str | None = "GPU", group: int | None = None
) -> BlocksRemoved:
    return BlocksRemoved(tuple(hashes), medium, group)


def held(ledger: Ledger) -> dict[Tier, set[int]]:
    return {tier: set(hashes) for tier, hashes in ledger.placements()}


# --- examples ---


def test_a_chain_that_arrives_is_placed_after_its_parent() -> None:
    ledger = Ledger()
    whole = prefixes_of([1, 2, 3])
    assert ledger.apply(stored([11, 12], [1, 2])) == [Placed(DEVICE, None, whole[:2])]
    assert ledger.apply(stored([13], [3], parent=12)) == [Placed(DEVICE, whole[1], whole[2:])]
    assert (ledger.block_size, ledger.count(), len(ledger)) == (16, 3, 3)


def test_events_of_a_batch_share_changes_in_their_order() -> None:
    ledger = Ledger()
    whole = prefixes_of([1, 2, 3])
    begins, goes_on = stored([11], [1]), stored([12, 13], [2, 3], parent=11)
    assert ledger.apply(begins, goes_on) == [Placed(DEVICE, None, whole)]
    assert ledger.apply(removed([13]), removed([12]), goes_on, removed([13])) == [
        Gone(DEVICE, [whole[2], whole[1]]),
        Placed(DEVICE, whole[0], whole[1:]),
        Gone(DEVICE, whole[2:]),
    ]
    assert held(ledger)[DEVICE] == set(whole[:2])
    assert ledger.apply(goes_on, BlocksCleared(), begins) == [
        Wiped(),
        Placed(DEVICE, None, whole[:1]),
    ]
    assert ledger.apply() == []


def test_a_batch_that_empties_the_ledger_and_clears_it_is_a_wipe() -> None:
    ledger = Ledger()
    ledger.apply(stored([11, 12], [1, 2]))
    assert ledger.apply(removed([11, 12]), BlocksCleared()) == [Wiped()]
    assert ledger.apply(removed([11]), BlocksCleared()) == []


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, DEVICE),
        ("GPU", DEVICE),
        ("CPU", HOST),
        ("CPU_PINNED", HOST),
        ("STORAGE", DISK),
        ("DISK", DISK),
    ],
)
def test_each_medium_has_its_tier(medium: str | None, tier: Tier) -> None:
    ledger = Ledger()
    ledger.apply(stored([11], [1], medium=medium))
    assert held(ledger)[tier] == set(prefixes_of([1]))
    ledger.apply(removed([11], medium))
    assert ledger.count() == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"medium": "TAPE"}, "unknown_medium"),
        ({"medium": "EXTERNAL"}, "shared"),
        ({"remote": True}, "shared"),
    ],
)
def test_what_is_nobodys_residency_is_counted_and_not_placed(
    changes: dict[str, object], reason: str
) -> None:
    ledger = Ledger()
    assert ledger.apply(stored([11], [1], **changes)) == []
    assert ledger.apply(BlocksRemoved((11,), **changes)) == []  # type: ignore[arg-type]
    assert ledger.dropped == {reason: 2}
    ledger.apply(stored([11], [1]))
    ledger.apply(BlocksRemoved((11,), **changes))  # type: ignore[arg-type]
    assert ledger.count() == 1


def test_only_full_attention_groups_count_and_their_removals_too() -> None:
    ledger = Ledger()
    sliding = BlocksStored((11, 12), None, (), 16, group=1, full_attention=False)
    assert ledger.apply(sliding) == []
    ledger.apply(stored([11, 12], [1, 2], group=0))
    assert ledger.apply(removed([12, 11], group=1)) == []
    assert ledger.dropped["other_group"] == 2
    assert ledger.apply(removed([12], group=0)) == [Gone(DEVICE, prefixes_of([1, 2])[1:])]


def test_groups_beyond_the_bound_are_counted_and_left_out() -> None:
    ledger = Ledger()
    for group in range(15):
        ledger.apply(stored([11], [1], group=group))
    assert ledger.apply(stored([12], [2], group=99)) == []
    assert ledger.apply(removed([12], group=99)) == []
    assert ledger.dropped == {"too_many_groups": 1, "unknown_removal": 1}
    for group in range(15):
        assert ledger.count() == 1
        ledger.apply(removed([11], group=group))
    assert ledger.count() == 0


def test_removals_of_unheard_groups_take_no_place_from_real_ones() -> None:
    ledger = Ledger()
    for group in range(100, 200):
        ledger.apply(removed([11], group=group))
    assert ledger.apply(stored([11], [1], group=3)) != []
    assert ledger.dropped == {"unknown_removal": 100}


def test_copies_are_capped_so_that_announcements_without_a_copy_end() -> None:
    ledger = Ledger()
    for _ in range(COPIES_MAX + 40):
        ledger.apply(stored([11], [1]))
    assert ledger.dropped == {"copies_capped": 40}
    for _ in range(COPIES_MAX - 1):
        assert ledger.apply(removed([11])) == []
    assert ledger.apply(removed([11])) == [Gone(DEVICE, prefixes_of([1]))]


def test_a_block_with_more_copies_than_are_counted_may_be_held_on_when_it_is_told_gone() -> None:
    ledger = Ledger()
    for _ in range(COPIES_MAX + 1):
        ledger.apply(stored([11], [1]))
    for _ in range(COPIES_MAX - 1):
        ledger.apply(removed([11]))
        assert not ledger.may_miss
    ledger.apply(removed([11]))
    assert ledger.may_miss
    assert len(ledger) == 0
    ledger.apply(BlocksCleared())
    assert not ledger.may_miss


def test_a_block_that_reached_the_cap_and_not_more_is_gone_for_certain() -> None:
    ledger = Ledger()
    for _ in range(COPIES_MAX):
        ledger.apply(stored([11], [1]))
    for _ in range(COPIES_MAX):
        ledger.apply(removed([11]))
    assert not ledger.may_miss


def test_the_cap_of_one_tier_spills_into_no_other() -> None:
    ledger = Ledger()
    for _ in range(300):
        ledger.apply(stored([11], [1], group=1))
        ledger.apply(stored([11], [1], group=1, medium="CPU"))
    assert held(ledger) == {DEVICE: set(prefixes_of([1])), HOST: set(prefixes_of([1])), DISK: set()}


def test_the_items_of_a_block_are_part_of_its_name() -> None:
    ledger = Ledger()
    ids = (("picture", "a" * 64), ())
    ledger.apply(stored([11, 12], [1, 2], item_ids=ids))
    items = [MultimodalItem(multimodal_hash(one), 3, 1) for one in ids[0]]
    blocks = block_hashes(pack_tokens(tokens_of([1, 2])), 16, items=items)
    assert held(ledger)[DEVICE] == set(prefix_hashes(blocks).tolist())


@pytest.mark.parametrize("size", [4, 64])
def test_items_whose_place_is_unknown_leave_their_chain_out(size: int) -> None:
    ledger = Ledger(16)
    assert ledger.apply(stored([11], [1], size=size, item_ids=(("picture",),))) == []
    assert ledger.apply(stored([12], [2], parent=11, size=size)) == []
    assert ledger.dropped == {"item_place_unknown": 1, "unknown_parent": 1}
    plain = stored([13, 14, 15, 16], [3, 4, 5, 6], size=size, item_ids=((),) * 4)
    assert ledger.apply(plain) == [Placed(DEVICE, None, prefixes_of([3, 4, 5, 6], size))]


@pytest.mark.parametrize("reason", ["unnamed_lora", "unhashable"])
def test_what_nobody_can_name_is_left_out_with_what_follows_it(reason: str) -> None:
    ledger = Ledger()
    assert ledger.apply(stored([11, 12], [1, 2], **{reason: True})) == []
    assert ledger.apply(stored([13], [3], parent=12)) == []
    assert ledger.dropped == {reason: 2, "unknown_parent": 1}


def test_the_map_is_bounded_and_what_is_in_it_still_counts() -> None:
    ledger = Ledger(blocks_max=3)
    assert ledger.apply(stored([11, 12, 13, 14, 15], [1, 2, 3, 4, 5])) == [
        Placed(DEVICE, None, prefixes_of([1, 2, 3]))
    ]
    assert ledger.dropped == {"ledger_full": 2}
    assert ledger.apply(stored([11, 12, 13], [1, 2, 3])) == []
    ledger.apply(removed([11, 11]))
    assert len(ledger) == 2
    assert ledger.apply(stored([11], [1])) == [Placed(DEVICE, None, prefixes_of([1]))]


@pytest.mark.parametrize(
    ("engine", "wanted", "canonical"),
    [
        (16, None, 16),
        (64, None, 64),
        (17, None, 17),
        (1, None, 16),
        (3, None, 18),
        (5, None, 20),
        (15, None, 30),
        (8, None, 16),
        (64, 16, 16),
        (4, 16, 16),
        (16, 16, 16),
        (16, 24, None),
        (48, 32, None),
        (3, 16, None),
    ],
)
def test_the_canonical_size_is_wanted_or_the_smallest_that_fits(
    engine: int, wanted: int | None, canonical: int | None
) -> None:
    assert canonical_block_size(engine, wanted) == canonical


def test_a_size_that_can_be_neither_split_nor_merged_is_counted() -> None:
    ledger = Ledger(24)
    assert ledger.apply(stored([11], [1])) == []
    assert ledger.dropped == {"block_size_unsuitable": 1}
    assert (ledger.engine_block_size, ledger.block_size) == (16, None)


def test_a_block_of_another_size_is_counted() -> None:
    ledger = Ledger()
    ledger.apply(stored([11], [1]))
    assert ledger.apply(stored([12], [2], parent=11, size=32)) == []
    assert ledger.dropped == {"block_size_changed": 1}


def test_a_wipe_after_a_call_that_raised_is_told() -> None:
    """What that call took away was not."""
    for before in (BlocksCleared(), removed([11])):
        ledger = Ledger()
        ledger.apply(stored([11], [1]))
        with pytest.raises(TypeError):
            ledger.apply(before, stored([None], [2]))  # type: ignore[list-item]
        assert ledger.count() == 0
        assert ledger.wipe() == [Wiped()]
        assert ledger.wipe() == []


# --- split and merged ---


def test_pages_that_come_and_go_leave_nothing_with_their_neighbours() -> None:
    ledger = Ledger()
    ledger.apply(stored([1], [1], size=8))
    for page in range(2, 50):
        ledger.apply(stored([page], [page], parent=1, size=8))
        assert ledger.apply(removed([page])) != []
    assert (len(ledger), ledger.count()) == (1, 0)
    assert ledger.apply(removed([1])) == []
    assert len(ledger) == 0


# --- through the view and the index ---


class Fleet:
    """Ledgers of several engines, their streams, and one router's view of them."""

    def __init__(self, engines: int) -> None:
        self.index = ReferenceIndex()
        self.view = FleetView(self.index, beat_timeout_s=3.0, forget_s=30.0, workers_max=9)
        self.ledgers = [Ledger() for _ in range(engines)]
        self.outboxes = [Outbox(Epoch(1, i)) for i in range(engines)]

    def tell(self, engine: int, event: BlocksStored | BlocksRemoved) -> None:
        outbox = self.outboxes[engine]
        for message in outbox.add(self.ledgers[engine].apply(event), 1.0) + outbox.flush():
            assert not self.view.on_stream(WorkerKey("w", engine), message, 1.0)

    def overlaps(self, blocks: Sequence[int]) -> list[int]:
        packed = pack_tokens(tokens_of(blocks))
        return self.index.match(prefix_hashes(block_hashes(packed, 16))).run().tolist()


def test_two_engines_with_other_hashes_both_extend_and_remove_through_the_index() -> None:
    fleet = Fleet(2)
    names: list[list[EngineHash]] = [[1, 2, 3, 4, 5], [bytes([i]) * 32 for i in range(5)]]
    for engine, chain in enumerate(names):
        fleet.tell(engine, stored(chain[:3], [1, 2, 3]))
    assert fleet.overlaps([1, 2, 3, 4, 5]) == [3, 3]
    for engine, chain in enumerate(names):
        fleet.tell(engine, stored(chain[3:], [4, 5], parent=chain[2]))
    assert fleet.overlaps([1, 2, 3, 4, 5]) == [5, 5]
    fleet.tell(1, removed(names[1][:2:-1]))
    assert fleet.overlaps([1, 2, 3, 4, 5]) == [5, 3]
    fleet.tell(0, removed(names[0][::-1]))
    assert fleet.overlaps([1, 2, 3, 4, 5]) == [0, 3]
    fleet.tell(1, removed(names[1][2::-1]))
    assert fleet.overlaps([1, 2, 3, 4, 5]) == [0, 0]
    assert fleet.index.stats()[:2] == (0, 0)


def test_an_engine_hash_of_one_engine_means_nothing_to_another() -> None:
    fleet = Fleet(2)
    fleet.tell(0, stored([1, 2], [1, 2]))
    fleet.tell(1, stored([1, 2], [7, 8]))
    fleet.tell(1, removed([2, 1]))
    assert fleet.overlaps([1, 2]) == [2, 0]
