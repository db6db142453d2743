"""A ledger as bytes and back; that it goes on as before is shown in test_ledger_multiset.py."""

import struct

import pytest
from msgspec.structs import replace

from events.engines.events import BlocksRemoved, BlocksStored
from events.relay.ledger import COPIES_MAX, Ledger, LedgerCopy
from indexer.identity import Tier

RECORD = "<QQQQIB6s"
"""Name, seed, end, place of the parent, flags, copies of two groups; then a page's tokens."""


def stored(names: list[int], size: int = 16, group: int | None = None) -> BlocksStored:
    tokens = [name * 100 + i for name in names for i in range(size)]
    return BlocksStored(tuple(names), None, tokens, size, "GPU", group=group)


def again(ledger: Ledger) -> Ledger:
    return Ledger.restored(ledger.copy(), None)


def test_a_copy_is_of_its_moment_whatever_comes_after_it() -> None:
    ledger = Ledger()
    ledger.apply(stored([1, 2, 3]))
    held = {tier: set(hashes) for tier, hashes in ledger.placements()}
    copy = ledger.copy()
    ledger.apply(BlocksRemoved((2, 3), "GPU"))
    ledger.apply(stored([1, 4]))
    ledger.wipe()
    restored = Ledger.restored(copy, None)
    assert {tier: set(hashes) for tier, hashes in restored.placements()} == held


def test_an_empty_ledger_is_one_too() -> None:
    assert (len(again(Ledger())), again(Ledger()).engine_block_size) == (0, None)


def test_groups_keep_their_places_and_the_other_ones_stay_left_out() -> None:
    ledger = Ledger()
    ledger.apply(stored([1, 2], group=7))
    ledger.apply(stored([1], group=3))
    ledger.apply(BlocksStored((9,), None, (), 0, "GPU", group=5, full_attention=False))
    restored = again(ledger)
    assert restored.apply(BlocksRemoved((1,), "GPU", 5)) == []
    assert restored.dropped == {"other_group": 1}
    assert restored.apply(BlocksRemoved((1,), "GPU", 7)) == []
    assert restored.count() == 2
    restored.apply(BlocksRemoved((1,), "GPU", 3))
    assert restored.count() == 1


def test_more_copies_than_are_counted_are_remembered() -> None:
    ledger = Ledger()
    for _ in range(COPIES_MAX + 1):
        ledger.apply(stored([1]))
    restored = again(ledger)
    for _ in range(COPIES_MAX):
        assert not restored.may_miss
        restored.apply(BlocksRemoved((1,), "GPU"))
    assert restored.may_miss
    assert again(restored).may_miss


def test_a_block_size_stays_what_it_was() -> None:
    ledger = Ledger()
    ledger.apply(stored([1], size=32))
    restored = again(ledger)
    assert (restored.engine_block_size, restored.block_size) == (32, 32)
    assert restored.apply(stored([2], size=16)) == []
    assert restored.dropped == {"block_size_changed": 1}


def copy_of(size: int) -> LedgerCopy:
    ledger = Ledger()
    ledger.apply(stored([1, 2, 3, 4], size))
    return ledger.copy()


@pytest.mark.parametrize(
    ("size", "field", "value"),
    [
        pytest.param(16, 0, 2, id="a name twice"),
        pytest.param(16, 3, 5, id="another prefix"),
        pytest.param(16, 4, 0, id="a parent in another canonical block"),
        pytest.param(4, 4, 3, id="a page after itself"),
        pytest.param(4, 4, 9, id="a page after a block that there is not"),
        pytest.param(4, 4, 0xFFFFFFFF, id="a page that begins a canonical block it ended"),
        pytest.param(16, 5, 0, id="no prefix at its end"),
        pytest.param(16, 5, 8, id="an unknown flag"),
        pytest.param(16, 6, b"\xff" * 6, id="more copies than are counted"),
        pytest.param(16, 6, bytes(6), id="no copies"),
    ],
)
def test_blocks_that_do_not_fit_together_are_no_ledger(
    size: int, field: int, value: int | bytes
) -> None:
    copy = copy_of(size)
    assert Ledger.restored(copy, None).digest() == copy.digest
    record = struct.calcsize(RECORD) + (4 * size if size < 16 else 0)
    assert len(copy.blocks) == 1 + 4 * record
    last = 1 + 3 * record
    fields = list(struct.unpack_from(RECORD, copy.blocks, last))
    fields[field] = value
    wrong = bytearray(copy.blocks)
    struct.pack_into(RECORD, wrong, last, *fields)
    with pytest.raises(ValueError, match=r"is there twice, or fits no other|its head says"):
        Ledger.restored(replace(copy, blocks=bytes(wrong)), None)


@pytest.mark.parametrize("blocks", [b"", b"\x02x", b"\x03", b"\x10" + bytes(43)])
def test_other_bytes_are_no_blocks(blocks: bytes) -> None:
    with pytest.raises(ValueError, match="saved blocks"):
        Ledger.restored(replace(copy_of(16), blocks=blocks), None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"engine_block_size": None}, "unknown size"), ({"groups": [None, None]}, "group twice")],
)
def test_a_head_that_does_not_fit_is_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Ledger.restored(replace(copy_of(16), **changes), None)


def test_a_wanted_block_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 16 tokens can't be split or merged to 24"):
        Ledger.restored(copy_of(16), 24)


def test_another_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="its head says"):
        Ledger.restored(replace(copy_of(16), digest=1), None)


def test_names_are_numbers_or_digests() -> None:
    ledger = Ledger()
    names = ((1 << 64) - 1, b"\xff" * 32, 0, b"")
    ledger.apply(BlocksStored(names, None, list(range(64)), 16, "GPU"))
    restored = again(ledger)
    assert len(restored) == len(names)
    restored.apply(BlocksRemoved(names, "GPU"))
    assert (restored.count(), len(restored)) == (0, 0)
    assert not dict(restored.placements())[Tier.DEVICE]
