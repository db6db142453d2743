"""What a block's name is: known answers of the common scheme, and its definition in one line."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from indexer import hashing
from indexer.hashing import (
    HASH_SEED,
    MultimodalItem,
    block_hashes,
    extend_prefix,
    hash_seed,
    multimodal_hash,
    pack_tokens,
    prefix_hashes,
)
from indexer.identity import BlockHash, PrefixHash

U64 = (1 << 64) - 1
FIRST_BLOCK = pack_tokens(range(1, 17))
FOUR_BLOCKS = pack_tokens(range(64))
BLOCK_HASHES = [
    15310707395893867146,
    15292316782987903195,
    5532946206955930018,
    14928757266181269122,
]
PREFIX_HASHES = [
    15310707395893867146,
    13769157705258532664,
    11879827756109914528,
    3888788807566526800,
]

laws = settings(derandomize=True, deadline=None, max_examples=150)
token_ids = st.lists(st.integers(0, (1 << 32) - 1), max_size=70)
seeds = st.integers(0, U64)
names = st.text(max_size=8)


def block_hashes_by_definition(tokens: Sequence[int], size: int, seed: int) -> list[int]:
    return [
        xxh3_64_intdigest(b"".join(t.to_bytes(4, "little") for t in tokens[i : i + size]), seed)
        for i in range(0, len(tokens) - size + 1, size)
    ]


def prefix_hashes_by_definition(blocks: Sequence[int], parent: int | None) -> list[int]:
    chain: list[int] = [] if parent is None else [parent]
    for block in blocks:
        pair = (chain[-1].to_bytes(8, "little") if chain else b"") + block.to_bytes(8, "little")
        chain.append(xxh3_64_intdigest(pair, 1337) if chain else block)
    return chain if parent is None else chain[1:]


@pytest.mark.parametrize(
    ("lora_name", "cache_salt", "answer"),
    [
        ("", "", 16863443419780771464),
        ("ad", "", 10852202083277049524),
        ("", "tenant", 3208900250063314977),
        ("ad", "tenant", 12322326724242726798),
    ],
)
def test_the_first_block_has_the_known_hash(lora_name: str, cache_salt: str, answer: int) -> None:
    assert block_hashes(FIRST_BLOCK, 16, hash_seed(lora_name, cache_salt)).tolist() == [answer]


def test_items_in_a_block_give_the_known_hash_in_any_order() -> None:
    items = [MultimodalItem(0xDEADBEEF, 3, 1), MultimodalItem(5, 0, 16)]
    for one in (items, items[::-1]):
        assert block_hashes(FIRST_BLOCK, 16, items=one).tolist() == [427473972921511215]


def test_a_chain_has_the_known_hashes() -> None:
    blocks = block_hashes(FOUR_BLOCKS, 16)
    assert blocks.tolist() == BLOCK_HASHES
    assert prefix_hashes(blocks).tolist() == PREFIX_HASHES


def test_the_seed_is_1337_and_a_term_for_each_of_lora_and_salt() -> None:
    lora = xxh3_64_intdigest(b"ad", 0)
    salt = xxh3_64_intdigest("tenänt".encode(), 1)
    assert hash_seed() == HASH_SEED == 1337
    assert hash_seed("ad") == (1337 + lora) & U64
    assert hash_seed("ad", "tenänt") == (1337 + lora + salt) & U64


@laws
@given(lora_name=names, cache_salt=names)
def test_lora_and_salt_are_told_apart(lora_name: str, cache_salt: str) -> None:
    seed = hash_seed(lora_name, cache_salt)
    assert 0 <= seed <= U64
    assert (seed == HASH_SEED) == (not lora_name and not cache_salt)
    if lora_name != cache_salt:
        assert hash_seed(cache_salt, lora_name) != seed


@laws
@given(tokens=token_ids, size=st.integers(1, 20), seed=seeds)
def test_block_hashes_are_their_definition(tokens: list[int], size: int, seed: int) -> None:
    assert block_hashes(pack_tokens(tokens), size, seed).tolist() == block_hashes_by_definition(
        tokens, size, seed
    )


@laws
@given(blocks=st.lists(seeds, max_size=20), parent=st.none() | seeds)
def test_prefix_hashes_are_their_definition(blocks: list[int], parent: int | None) -> None:
    chain = prefix_hashes(
        np.array(blocks, np.uint64), None if parent is None else PrefixHash(parent)
    )
    assert chain.dtype == np.uint64
    assert chain.tolist() == prefix_hashes_by_definition(blocks, parent)


@laws
@given(blocks=st.lists(seeds, min_size=1, max_size=20), data=st.data())
def test_a_chain_cut_anywhere_goes_on_from_its_parent(
    blocks: list[int], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, len(blocks)))
    array = np.array(blocks, np.uint64)
    whole = prefix_hashes(array).tolist()
    assert prefix_hashes(array[cut:], PrefixHash(whole[cut - 1])).tolist() == whole[cut:]


@pytest.mark.parametrize("length", range(70))
def test_only_full_blocks_have_a_hash(length: int) -> None:
    packed = pack_tokens(range(length))
    assert block_hashes(packed, 16).tolist() == BLOCK_HASHES[: length // 16]
    assert block_hashes(packed + b"\x01\x02\x03", 16).tolist() == BLOCK_HASHES[: length // 16]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_bytes_will_do(kind: type) -> None:
    assert block_hashes(kind(FOUR_BLOCKS), 16).tolist() == BLOCK_HASHES


def test_numpy_and_lists_pack_alike() -> None:
    tokens = [0, 1, 255, 256, (1 << 32) - 1]
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert pack_tokens(tokens) == packed
    assert pack_tokens(np.array(tokens, np.uint32)) == packed
    assert pack_tokens([]) == b""


@pytest.mark.parametrize("token", [-1, 1 << 32, 1 << 70])
def test_a_token_id_outside_u32_is_an_error(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([1, token])


def test_an_item_marks_every_block_that_it_covers_a_token_of() -> None:
    plain = block_hashes(FOUR_BLOCKS, 16)
    marked = block_hashes(FOUR_BLOCKS, 16, items=[MultimodalItem(7, 15, 18)])
    assert (plain != marked).tolist() == [True, True, True, False]
    only_last = block_hashes(FOUR_BLOCKS, 16, items=[MultimodalItem(7, 63, 1)])
    assert (plain != only_last).tolist() == [False, False, False, True]


item_spans = st.builds(
    MultimodalItem, st.integers(0, (1 << 64) - 1), st.integers(0, 90), st.integers(0, 90)
)


@laws
@given(
    tokens=token_ids, size=st.integers(1, 20), seed=seeds, items=st.lists(item_spans, max_size=6)
)
def test_items_are_hashed_behind_their_blocks_ascending(
    tokens: list[int], size: int, seed: int, items: list[MultimodalItem]
) -> None:
    packed = pack_tokens(tokens)
    expected = []
    for i in range(len(tokens) // size):
        first, end = i * size, (i + 1) * size
        own = [
            one.content_hash
            for one in items
            if one.token_count
            and one.first_token < end
            and one.first_token + one.token_count > first
        ]
        suffix = b"".join(one.to_bytes(8, "little") for one in sorted(own))
        expected.append(xxh3_64_intdigest(packed[4 * first : 4 * end] + suffix, seed))
    assert block_hashes(packed, size, seed, items).tolist() == expected


def test_covered_blocks_are_not_hashed_one_by_one_in_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hashes(*_: object) -> int:
        raise AssertionError("a block is hashed outside of the kernel")

    monkeypatch.setattr(hashing, "xxh3_64_intdigest", hashes)
    items = [MultimodalItem(i, 0, 1 << 16) for i in range(8)]
    assert len(block_hashes(bytes(4 << 16), 16, items=items)) == 1 << 12


@pytest.mark.parametrize("item", [MultimodalItem(7, 64, 10), MultimodalItem(7, 3, 0)])
def test_an_item_outside_the_full_blocks_or_without_tokens_marks_none(item: MultimodalItem) -> None:
    assert block_hashes(FOUR_BLOCKS, 16, items=[item]).tolist() == BLOCK_HASHES


def test_the_same_item_twice_in_a_block_counts_twice() -> None:
    once = block_hashes(FIRST_BLOCK, 16, items=[MultimodalItem(7, 0, 2)])
    twice = block_hashes(FIRST_BLOCK, 16, items=[MultimodalItem(7, 0, 2), MultimodalItem(7, 4, 2)])
    assert once.tolist() != twice.tolist()
    suffix = (7).to_bytes(8, "little")
    assert twice.tolist() == [xxh3_64_intdigest(FIRST_BLOCK + suffix + suffix, HASH_SEED)]


def test_64_hex_digits_count_as_their_first_16() -> None:
    assert multimodal_hash("0123456789abcdef" * 4) == 0x0123456789ABCDEF
    assert multimodal_hash("0123456789ABCDEF" * 4) == 0x0123456789ABCDEF


@pytest.mark.parametrize(
    "item_id",
    [
        "",
        "image-1",
        "0123456789abcdef" * 3,
        "g" * 64,
        "ab " * 21 + "c",
        " " * 64,
        "\u0661" * 64,  # digits, but not hexadecimal ones
        "0x" + "1" * 62,
        "1_" * 32,
        "+" + "1" * 63,
    ],
)
def test_any_other_item_id_is_hashed(item_id: str) -> None:
    assert multimodal_hash(item_id) == xxh3_64_intdigest(item_id.encode(), 0)


def test_extending_a_prefix_is_what_prefix_hashes_do() -> None:
    first = extend_prefix(None, BlockHash(BLOCK_HASHES[0]))
    second = extend_prefix(first, BlockHash(BLOCK_HASHES[1]))
    assert [first, second] == PREFIX_HASHES[:2]
    assert extend_prefix(PrefixHash(0), BlockHash(0)) == xxh3_64_intdigest(bytes(16), 1337)
