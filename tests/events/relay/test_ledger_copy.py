"""A ledger as columns and back; that it goes on as before is shown in test_ledger.py, too."""

from dataclasses import replace

import msgspec
import pytest

from events.engines.events import BlocksRemoved, BlocksStored
from events.relay.ledger import COPIES_MAX, Ledger
from events.relay.ledger_copy import BlockRows, LedgerCopy
from indexer.identity import Tier


def stored(names: list[int], size: int = 16, group: int | None = None) -> BlocksStored:
    tokens = [name * 100 + i for name in names for i in range(size)]
    return BlocksStored(tuple(names), None, tokens, size, "GPU", group=group)


def again(ledger: Ledger) -> Ledger:
    copy = ledger.copy()
    return Ledger.restored(copy.head, copy.rows(), None)


def test_a_copy_is_of_its_moment_whatever_comes_after_it() -> None:
    ledger = Ledger()
    ledger.apply(stored([1, 2, 3]))
    held, copy = dict(ledger.placements()), ledger.copy()
    ledger.apply(BlocksRemoved((2, 3), "GPU"))
    ledger.apply(stored([1, 4]))
    restored = Ledger.restored(copy.head, copy.rows(), None)
    assert dict(restored.placements()) == held
    ledger.wipe()
    assert dict(Ledger.restored(copy.head, copy.rows(), None).placements()) == held


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
        (16, "names", [1, 2, 3]),
        (16, "seeds", [1337]),
        (16, "copies", [b"\x01"] * 3),
        (16, "prefixes", [1, 2, 3, 4]),
        (16, "prefixes", [1, 2, 3, 4, 5]),
        (16, "prefixes", [1, 2]),
        (4, "ends", [None]),
        (4, "parents", [None, 0, 9, 2]),
        (4, "parents", [None, 0, -1, 2]),
        (4, "parents", [None] * 4),
        (16, "names", []),
        (16, "copies", [b"", b"", b"", b""]),
    ],
)
def test_columns_that_do_not_fit_together_are_no_ledger(
    size: int, field: str, value: list[object]
) -> None:
    copy = copy_of(size)
    (rows,) = copy.rows()
    wrong = msgspec.structs.replace(rows, **{field: value})
    with pytest.raises(ValueError, match=r"."):
        Ledger.restored(copy.head, [wrong], None)
    assert Ledger.restored(copy.head, [rows], None).digest() == copy.head.digest


def test_a_wanted_block_size_that_does_not_fit_is_refused() -> None:
    copy = copy_of(16)
    with pytest.raises(ValueError, match="blocks of 16 tokens can't become blocks of 24"):
        Ledger.restored(copy.head, copy.rows(), 24)


def test_another_digest_is_refused() -> None:
    copy = copy_of(16)
    wrong = replace(copy, head=msgspec.structs.replace(copy.head, digest=1))
    with pytest.raises(ValueError, match="differ"):
        Ledger.restored(wrong.head, wrong.rows(), None)


def test_names_are_numbers_or_digests() -> None:
    ledger = Ledger()
    tokens = list(range(48))
    names = ((1 << 64) - 1, b"\xff" * 32, 0)
    ledger.apply(BlocksStored(names, None, tokens, 16, "GPU"))
    encoded = [msgspec.msgpack.encode(rows) for rows in ledger.copy().rows()]
    rows = [msgspec.msgpack.decode(one, type=BlockRows) for one in encoded]
    restored = Ledger.restored(ledger.copy().head, rows, None)
    restored.apply(BlocksRemoved(names, "GPU"))
    assert (restored.count(), len(restored)) == (0, 0)
    assert not dict(restored.placements())[Tier.DEVICE]
