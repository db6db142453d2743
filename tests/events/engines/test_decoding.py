"""Values of events: mediums, hashes, tokens, groups, extra keys."""

from array import array
from typing import Any

import pytest

from events.engines.events import BlocksCleared, BlocksRemoved, BlocksStored
from events.engines.table import READINGS
from events.engines.wire import BLOCK_SIZE_MAX
from tests.events.engines.encoded import (
    ITEM,
    U64,
    Decode,
    complaint,
    encode,
    only,
    removed,
    stored,
    vllm_stored,
)

# Values


@pytest.mark.parametrize(
    "medium",
    ["GPU", "CPU", "STORAGE", "CPU_PINNED", "DISK", "EXTERNAL", "SOMETHING_NEW", None],
)
def test_mediums_stay_as_the_engine_names_them(decode: Decode, medium: str | None) -> None:
    batch = decode(encode(stored(medium=medium), removed(medium=medium)))
    assert [event.medium for event in batch.events] == [medium, medium]  # type: ignore[union-attr]
    assert batch.malformed == ()


@pytest.mark.parametrize("medium", [1, True, b"GPU", ["GPU"], {}])
def test_a_medium_that_is_no_text_drops_the_event(decode: Decode, medium: Any) -> None:
    assert "medium" in complaint(decode(encode(stored(medium=medium))))
    assert "medium" in complaint(decode(encode(removed(medium=medium))))


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (0, 0),
        (U64, U64),
        (-1, U64),
        (-(1 << 63), 1 << 63),
        (b"12345678", b"12345678"),
        (b"x" * 32, b"x" * 32),
    ],
)
def test_hashes_are_unsigned_numbers_or_bytes(decode: Decode, value: Any, read: Any) -> None:
    event = only(decode(encode(stored(block_hashes=[value, 5], parent_block_hash=value))))
    assert event.hashes == (read, 5)
    assert event.parent == read
    assert only(decode(encode(removed(block_hashes=[value])))).hashes == (read,)


@pytest.mark.parametrize("value", [True, 1.0, "12345678", b"1234567", b"x" * 33, [1], None])
def test_a_hash_of_another_kind_drops_the_event(decode: Decode, value: Any) -> None:
    assert "hash" in complaint(decode(encode(stored(block_hashes=[value, 5]))))
    assert "hash" in complaint(decode(encode(removed(block_hashes=[5, value]))))
    if value is not None:
        assert "hash" in complaint(decode(encode(stored(parent_block_hash=value))))


def test_token_ids_are_kept_as_u32(decode: Decode) -> None:
    tokens = [0, 1, 127, 128, 255, 256, 65536, (1 << 32) - 1]
    event = only(decode(encode(stored(token_ids=tokens))))
    assert event.token_ids == array("I", tokens)


@pytest.mark.parametrize(
    "token_id", [-1, 1 << 32, U64, True, 1.0, "1", b"1", None, [1], [1, 2, 3], [1, "2"], {}]
)
def test_a_token_id_of_another_kind_drops_the_event(decode: Decode, token_id: Any) -> None:
    for position in (0, 7):
        tokens: list[Any] = [1, 2, 3, 4, 5, 6, 7, 8]
        tokens[position] = token_id
        assert "token_ids" in complaint(decode(encode(stored(token_ids=tokens))))


def test_bigrams_of_eagle_models_give_their_first_tokens(decode: Decode) -> None:
    pairs = [[1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7], [7, 8], [8, 9]]
    event = only(decode(encode(stored(token_ids=pairs))))
    assert event.token_ids == array("I", range(1, 9))
    too_large = [*pairs[:-1], [1 << 32, 9]]
    assert "u32" in complaint(decode(encode(stored(token_ids=too_large))))


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1, 2, 3, 4, 5, 6, 7]},
        {"token_ids": list(range(9))},
        {"block_hashes": []},
        {"block_hashes": [1]},
        {"block_size": 0},
        {"block_size": None},
        {"block_size": 8},
    ],
)
def test_tokens_that_do_not_fill_the_blocks_drop_the_event(
    decode: Decode, changes: dict[str, Any]
) -> None:
    assert "tokens do not fill" in complaint(decode(encode(stored(**changes))))


@pytest.mark.parametrize("block_size", [-1, BLOCK_SIZE_MAX + 1, U64, 4.0, True, "4"])
def test_an_implausible_block_size_drops_the_event(decode: Decode, block_size: Any) -> None:
    event = stored(block_size=block_size)
    assert "block_size" in complaint(decode(encode(event)))


@pytest.mark.parametrize("token_ids", [[], None])
@pytest.mark.parametrize("block_size", [0, None, 4])
def test_an_offload_without_tokens_is_kept(
    decode: Decode, token_ids: Any, block_size: int | None
) -> None:
    event = only(decode(encode(stored(token_ids=token_ids, block_size=block_size, medium="CPU"))))
    assert event == BlocksStored(
        hashes=(11, 12),
        parent=None,
        token_ids=array("I"),
        block_size=block_size or 0,
        medium="CPU",
    )


@pytest.mark.parametrize("kind", [None, "full_attention", "mla_attention", "sink_full_attention"])
def test_full_attention_of_every_kind_decides_hits(kind: str | None) -> None:
    event = vllm_stored(group_idx=0, kv_cache_spec_kind=kind)
    assert event.full_attention
    assert len(event.token_ids) == 8


@pytest.mark.parametrize(
    "kind",
    [
        "sliding_window",
        "sliding_window_mla",
        "mamba",
        "chunked_local_attention",
        "encoder_only_attention",
        "cross_attention",
        "unknown",
        "something_new",
    ],
)
def test_other_groups_are_kept_with_lengths_that_do_not_fit(kind: str) -> None:
    event = vllm_stored(
        group_idx=2, kv_cache_spec_kind=kind, token_ids=list(range(40)), extra_keys=[None]
    )
    assert not event.full_attention
    assert event.group == 2
    assert event.hashes == (11, 12)
    assert len(event.token_ids) == 0


def test_a_hybrid_model_tells_each_group_in_turn() -> None:
    batch = READINGS["vllm"].decode(
        encode(
            stored(group_idx=0, kv_cache_spec_kind="full_attention"),
            stored(group_idx=1, kv_cache_spec_kind="mamba", block_hashes=[12]),
            removed(group_idx=1, block_hashes=[12]),
            {"type": "AllBlocksCleared"},
        )
    )
    assert batch.malformed == ()
    assert [type(event) for event in batch.events] == [
        BlocksStored,
        BlocksStored,
        BlocksRemoved,
        BlocksCleared,
    ]
    assert [getattr(event, "group", None) for event in batch.events] == [0, 1, 1, None]


@pytest.mark.parametrize(
    ("locality", "remote"), [(None, False), ("LOCAL", False), ("REMOTE", True), ("ELSEWHERE", True)]
)
def test_only_what_is_local_counts_as_the_workers_own(locality: str | None, remote: bool) -> None:
    assert vllm_stored(locality=locality).remote == remote
    assert only(READINGS["vllm"].decode(encode(removed(locality=locality)))).remote == remote


# vLLM's extra_keys


def test_a_lora_without_a_name_is_told_as_such() -> None:
    assert vllm_stored(lora_id=4).unnamed_lora
    assert not vllm_stored(lora_id=4, lora_name="adapter").unnamed_lora
    assert not vllm_stored(lora_id=0).unnamed_lora
    assert not vllm_stored().unnamed_lora
    assert vllm_stored(lora_name="").lora_name is None


def test_a_lora_is_known_by_its_name_and_a_salt_by_its_place() -> None:
    event = vllm_stored(lora_name="ad", extra_keys=[["ad", "salt"], ["ad"]])
    assert (event.lora_name, event.cache_salt, event.item_ids) == ("ad", "salt", None)
    assert not event.unhashable


def test_a_salt_may_read_like_the_lora() -> None:
    assert vllm_stored(lora_name="ad", extra_keys=[["ad", "ad"], ["ad"]]).cache_salt == "ad"


def test_a_salt_may_read_like_an_image() -> None:
    # Not in the newer form, where images come in pairs.
    event = vllm_stored(group_idx=0, extra_keys=[[ITEM], None])
    assert (event.cache_salt, event.item_ids) == (ITEM, None)


def test_items_are_told_by_block_without_their_offsets() -> None:
    event = vllm_stored(extra_keys=[[["a", 2], "salt"], [["a", -2], ["b", 1]]])
    assert event.item_ids == (("a",), ("a", "b"))
    assert event.cache_salt == "salt"
    assert not event.unhashable


def test_an_item_id_loses_the_lora_before_it() -> None:
    event = vllm_stored(lora_name="ad", extra_keys=[["ad", [f"ad:{ITEM}", 0]], ["ad"]])
    assert event.item_ids == ((ITEM,), ())


def test_in_the_older_form_an_item_is_its_id_alone() -> None:
    fields = [[11, 12], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, "GPU", None]
    event = only(
        READINGS["vllm"].decode(
            encode(["BlockStored", *fields, [[ITEM, "salt"], ["own id", ITEM]]])
        )
    )
    assert event.item_ids == ((ITEM,), ("own id", ITEM))
    assert event.cache_salt == "salt"
    fields[1] = 10
    event = only(READINGS["vllm"].decode(encode(["BlockStored", *fields, [["own id"], None]])))
    assert event.item_ids == (("own id",), ())
    assert event.cache_salt is None


@pytest.mark.parametrize(
    "keys",
    [
        [[b"digest"], None],
        [None, ["not the lora"]],
        [["one", "two"], None],
        [[["lora", "name"]], None],
        [[["mm", "id", 0]], None],
        [[{"salt": "x"}], None],
        [[7], None],
        [[None], None],
    ],
)
def test_what_cannot_be_known_outside_makes_blocks_unhashable(keys: Any) -> None:
    assert vllm_stored(extra_keys=keys, group_idx=0).unhashable


def test_a_string_after_a_parent_is_no_salt() -> None:
    event = vllm_stored(parent_block_hash=10, extra_keys=[["text"], None])
    assert event.unhashable
    assert event.cache_salt is None


@pytest.mark.parametrize("keys", [None, [None, None], [[], []]])
def test_no_extra_keys_are_no_dependence(keys: Any) -> None:
    event = vllm_stored(extra_keys=keys)
    assert (event.cache_salt, event.item_ids, event.unhashable) == (None, None, False)


@pytest.mark.parametrize("keys", [[], [None], [None] * 3, "text", [1, 2], ["ab", "cd"], {}, 5])
def test_extra_keys_that_do_not_match_the_blocks_drop_the_event(keys: Any) -> None:
    assert "extra_keys" in complaint(READINGS["vllm"].decode(encode(stored(extra_keys=keys))))


def test_sglang_tells_salt_and_lora_with_each_event() -> None:
    event = only(
        READINGS["sglang"].decode(
            encode(stored(parent_block_hash=3, cache_salt="s", lora_name="l", session_id="x"))
        )
    )
    assert (event.cache_salt, event.lora_name, event.unnamed_lora) == ("s", "l", False)
    event = only(READINGS["sglang"].decode(encode(stored(cache_salt="", lora_name="", lora_id=3))))
    assert (event.cache_salt, event.lora_name, event.unnamed_lora) == (None, None, True)
