"""What copies of blocks refuse; that they count right is shown by events/relay's ledgers, beside a
multiset of copies."""

import pytest

from indexer.copies import GROUPS_MAX, BlockCopies
from indexer.hashing import hash_seed, pack_tokens, token_prefixes
from indexer.identity import HashArray, Tier

TOKENS = pack_tokens(range(64))
PREFIXES = token_prefixes(TOKENS, 16, hash_seed())


def copies(block_size: int = 16, canonical_size: int = 16, blocks_max: int = 100) -> BlockCopies:
    made = BlockCopies(blocks_max, 16)
    made.shape(block_size, canonical_size)
    return made


def held(blocks: BlockCopies) -> list[list[int]]:
    return [sorted(blocks.held(tier).tolist()) for tier in Tier]


def test_blocks_are_found_by_their_names() -> None:
    blocks = copies()
    assert blocks.store([1, b"2", 3], None, TOKENS, hash_seed(), 0, Tier.HOST) == 3
    assert [name in blocks for name in (1, b"2", 3, 2, b"1", 4)] == [True] * 3 + [False] * 3
    assert (blocks.end(b"2"), blocks.end(2)) == (PREFIXES[1], None)
    assert repr(blocks) == "<BlockCopies 3 blocks, 3 placements>"
    assert held(blocks) == [[], sorted(PREFIXES[:3].tolist()), []]
    assert blocks.take() == [(True, Tier.HOST, None, PREFIXES[:3].tolist())]
    assert blocks.take() == []


def test_a_group_without_room_gets_some_and_what_was_counted_stays() -> None:
    blocks = copies(32, 16)
    blocks.store([1, 2], None, TOKENS, hash_seed(), 1, Tier.DEVICE)
    blocks.store([1], None, TOKENS, hash_seed(), GROUPS_MAX - 1, Tier.DISK)
    assert blocks.remove([1, 2], GROUPS_MAX - 1, Tier.DISK) == [2]
    assert held(blocks) == [sorted(PREFIXES.tolist()), [], []]
    assert blocks.remove([2, 1], 1, Tier.DEVICE) == []
    assert (len(blocks), blocks.count(), blocks.xors()) == (0, 0, (0, 0, 0))


def test_more_copies_than_are_counted_are_told() -> None:
    blocks = copies()
    for _ in range(18):
        blocks.store([1], None, TOKENS, hash_seed(), 0, Tier.DEVICE)
    assert (blocks.capped, blocks.may_miss) == (2, False)
    for _ in range(16):
        assert blocks.remove([1], 0, Tier.DEVICE) == []
    assert (blocks.may_miss, len(blocks)) == (True, 0)
    blocks.clear()
    assert (blocks.capped, blocks.may_miss) == (2, False)


@pytest.mark.parametrize(("group", "tier"), [(GROUPS_MAX, 0), (0, 3), (0, -1)])
def test_a_group_or_a_tier_that_there_is_not_is_refused(group: int, tier: Tier) -> None:
    blocks = copies()
    for call in (
        lambda: blocks.store([1], None, TOKENS, 0, group, tier),
        lambda: blocks.store_known([1], group, tier),
        lambda: blocks.remove([1], group, tier),
    ):
        with pytest.raises(ValueError, match="no tier"):
            call()
    assert len(blocks) == 0


@pytest.mark.parametrize("sizes", [(0, 16), (16, 0), (5, 16), (24, 16), (1 << 62, 1)])
def test_sizes_are_refused_where_there_can_be_no_blocks(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"not of 1 to|is a multiple"):
        copies(*sizes)


@pytest.mark.parametrize("copies_max", [0, 256])
def test_copies_are_counted_in_a_byte(copies_max: int) -> None:
    with pytest.raises(ValueError, match="1 to 255 copies"):
        BlockCopies(9, copies_max)


def test_sizes_may_change_once_the_blocks_are_gone() -> None:
    blocks = copies()
    for size in (16, 64, 4, 16):
        blocks.shape(size, 16)
        blocks.store([1, 2], None, TOKENS * 2, hash_seed(), 5, Tier.DEVICE)
        assert blocks.remove([2, 1], 5, Tier.DEVICE) == []
    again = copies(4, 16)
    again.store([1, 2, 3, 4], None, TOKENS, hash_seed(), 0, Tier.DEVICE)
    blocks.shape(4, 16)
    blocks.restore(again.save())
    assert (held(blocks), len(blocks)) == (held(again), 4)


def test_blocks_that_can_t_be_restored_leave_none() -> None:
    whole = copies(4, 16)
    whole.store([1, 2, 3, 4], None, TOKENS, hash_seed(), 0, Tier.DEVICE)
    saved, blocks = whole.save(), copies(4, 16)
    record = (len(saved) - 1) // 4
    with pytest.raises(ValueError, match="saved block 3 of 4"):
        blocks.restore(saved[: 1 + 3 * record] + saved[1 : 1 + record])
    assert (len(blocks), blocks.count()) == (0, 0)
    with pytest.raises(ValueError, match="unknown size"):
        BlockCopies(9, 16).restore(saved[:1] + bytes(43))


def test_a_page_before_the_end_of_a_canonical_block_has_no_prefix() -> None:
    blocks = copies(4, 16)
    blocks.store([1, 2, 3, 4, 5], None, TOKENS * 2, hash_seed(), 0, Tier.DEVICE)
    assert [blocks.end(name) for name in (1, 3, 4, 5)] == [None, None, PREFIXES[0], PREFIXES[0]]


def test_sizes_stay_what_they_were_once_there_are_blocks() -> None:
    blocks = copies()
    blocks.store([1], None, TOKENS, 0, 0, Tier.DEVICE)
    with pytest.raises(ValueError, match="before any block comes"):
        blocks.shape(32, 32)
    with pytest.raises(ValueError, match="restored into an empty object"):
        blocks.restore(copies().save())


@pytest.mark.parametrize("blocks", [BlockCopies(9, 16), copies(), copies(4, 16), copies(64, 16)])
def test_blocks_without_all_their_tokens_are_refused(blocks: BlockCopies) -> None:
    with pytest.raises(ValueError, match="bytes of tokens"):
        blocks.store([1, 2], None, TOKENS[:31], 0, 0, Tier.DEVICE)
    assert (len(blocks), blocks.take()) == (0, [])


@pytest.mark.parametrize("sizes", [(4, 16), (64, 16)])
def test_only_canonical_blocks_have_suffixes_or_prefixes_of_their_own(
    sizes: tuple[int, int],
) -> None:
    blocks = copies(*sizes)
    with pytest.raises(ValueError, match="have no suffixes"):
        blocks.store([1], None, TOKENS, 0, 0, Tier.DEVICE, [b"x"])
    with pytest.raises(ValueError, match="1 suffixes for 2 blocks"):
        copies().store([1, 2], None, TOKENS, 0, 0, Tier.DEVICE, [b"x"])
    with pytest.raises(TypeError):
        copies().store([1], None, TOKENS, 0, 0, Tier.DEVICE, ["x"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="not canonical"):
        blocks.put([1], PREFIXES, None, Tier.DEVICE)


@pytest.mark.parametrize("prefixes", [PREFIXES[:1], PREFIXES[:0]])
def test_each_block_has_its_prefix(prefixes: HashArray) -> None:
    with pytest.raises(ValueError, match="prefixes for 2 blocks"):
        copies().put([1, 2], prefixes, None, Tier.DEVICE)


@pytest.mark.parametrize("name", ["1", 1 << 64, -1, None])
def test_other_names_than_numbers_of_64_bits_and_bytes_are_refused(name: int) -> None:
    with pytest.raises((TypeError, OverflowError)):
        copies().store([name], None, TOKENS, 0, 0, Tier.DEVICE)


def test_thousands_of_blocks_come_and_go() -> None:
    blocks = copies(16, 16, 1 << 20)
    count = 20_000
    tokens = pack_tokens(range(16 * count))
    prefixes = token_prefixes(tokens, 16, hash_seed())
    for _ in range(2):
        assert blocks.store(range(count), None, tokens, hash_seed(), 0, Tier.DEVICE) == count
        assert sorted(blocks.held(Tier.DEVICE).tolist()) == sorted(prefixes.tolist())
        assert blocks.remove(range(0, count, 2), 0, Tier.DEVICE) == []
        assert sorted(blocks.held(Tier.DEVICE).tolist()) == sorted(prefixes[1::2].tolist())
        again = copies(16, 16, 1 << 20)
        again.restore(blocks.save())
        assert (again.count(), again.xors()) == (blocks.count(), blocks.xors())
        assert blocks.remove(range(1, count, 2), 0, Tier.DEVICE) == []
        assert len(blocks) == 0
