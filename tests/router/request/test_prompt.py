"""Prompts: a length, and hashes in whatever block size a pool asks for."""

import struct

import pytest

from indexer.hashing import MultimodalItem, block_hashes, hash_seed, pack_tokens, prefix_hashes
from router.request.prompt import ITEM_LAYERS_MAX, Prompt
from router.request.refusal import Reason, Refusal
from tests.stage.fleet import hashes, prompt


def refused(make: object, *args: object, **more: object) -> Refusal:
    assert callable(make)
    with pytest.raises(Refusal) as caught:
        make(*args, **more)
    return caught.value


class TestTokens:
    def test_prefixes_are_those_of_the_fields_common_scheme(self) -> None:
        assert prompt(64).prefixes(16).tolist() == [
            15310707395893867146,
            13769157705258532664,
            11879827756109914528,
            3888788807566526800,
        ]

    def test_only_full_blocks_have_a_hash(self) -> None:
        assert len(prompt(64).prefixes(16)) == 4
        assert len(prompt(63).prefixes(16)) == 3
        assert len(prompt(15).prefixes(16)) == 0
        assert len(prompt(64).prefixes(64)) == 1

    def test_equal_starts_share_their_prefixes(self) -> None:
        long, short = prompt(100).prefixes(16), prompt(50).prefixes(16)
        assert long[:3].tolist() == short.tolist()

    def test_each_block_size_is_hashed_once(self) -> None:
        asked = prompt(64)
        assert asked.prefixes(16) is asked.prefixes(16)
        assert asked.prefixes(32) is not asked.prefixes(16)

    def test_a_worker_without_a_block_size_has_nothing_to_compare(self) -> None:
        assert len(prompt(64).prefixes(0)) == 0

    def test_lora_and_salt_and_items_make_other_prefixes(self) -> None:
        item = MultimodalItem(5, 0, 16)
        all_of_them = [
            prompt(16, **about).prefixes(16)[0]
            for about in (
                {},
                {"lora_name": "ad"},
                {"cache_salt": "tenant"},
                {"lora_name": "ad", "cache_salt": "tenant"},
                {"items": [item]},
            )
        ]
        assert len(set(all_of_them)) == len(all_of_them)

    def test_an_empty_prompt_is_refused(self) -> None:
        refusal = refused(Prompt.from_tokens, b"")
        assert refusal.reason is Reason.EMPTY_PROMPT
        assert refusal.message == "the prompt has no tokens"

    @pytest.mark.parametrize("length", [1, 2, 3, 5, 4097])
    def test_bytes_that_are_no_whole_tokens_are_refused(self, length: int) -> None:
        refusal = refused(Prompt.from_tokens, bytes(length))
        assert refusal.reason is Reason.MALFORMED_PROMPT
        assert f"{length} bytes" in refusal.message
        assert "32-bit token ids" in refusal.message

    def test_tokens_are_little_endian(self) -> None:
        assert (
            Prompt.from_tokens(struct.pack("<16I", *range(16))).prefixes(16).tolist()
            == prompt(16).prefixes(16).tolist()
        )

    @pytest.mark.parametrize("count", [1, 15, 16, 63, 64, 65, 128, 133])
    def test_hashed_in_steps_it_is_the_same_prompt(
        self, count: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("router.request.prompt.STEP_BLOCKS", 4)
        tokens = pack_tokens(range(count))
        items = [
            MultimodalItem(content, first, length)
            for content, first, length in [(9, 0, 200), (3, 60, 10), (7, 63, 1), (5, 64, 64)]
            if first < count
        ]
        items = [
            one._replace(token_count=min(one.token_count, count - one.first_token)) for one in items
        ]
        whole, stepped = (Prompt.from_tokens(tokens, items=items, lora_name="ad") for _ in range(2))
        steps = len(list(stepped.hashed(16)))
        assert steps == (count // 16 + 3) // 4, "four blocks a step"
        assert stepped.prefixes(16).tolist() == whole.prefixes(16).tolist()
        assert list(stepped.hashed(16)) == [], "known by now"

    def test_a_repr_tells_the_length_and_no_content(self) -> None:
        assert repr(prompt(64)) == "<Prompt 64 tokens>"


class TestHashes:
    def test_a_callers_hashes_make_the_prefixes_that_its_tokens_make(self) -> None:
        tokens = pack_tokens(range(70))
        blocks = block_hashes(tokens, 16, hash_seed("ad", "tenant"))
        hashed = Prompt.from_hashes(blocks, 16, 70, lora_name="ad")
        whole = Prompt.from_tokens(tokens, lora_name="ad", cache_salt="tenant")
        assert hashed.prefixes(16).tolist() == whole.prefixes(16).tolist()
        assert hashed.token_count == 70

    def test_they_can_be_compared_in_their_own_block_size_only(self) -> None:
        hashed = Prompt.from_hashes(hashes([1, 2, 3]), 16, 48)
        assert hashed.hashes_block_size == 16
        assert len(hashed.prefixes(16)) == 3
        assert len(hashed.prefixes(32)) == 0

    def test_a_prompt_shorter_than_a_block_has_none(self) -> None:
        hashed = Prompt.from_hashes(hashes([]), 16, 9)
        assert len(hashed.prefixes(16)) == 0

    @pytest.mark.parametrize(("count", "tokens"), [(2, 48), (4, 48), (0, 16), (3, 47), (3, 64)])
    def test_numbers_that_do_not_fit_are_refused(self, count: int, tokens: int) -> None:
        refusal = refused(Prompt.from_hashes, hashes(range(count)), 16, tokens)
        assert refusal.reason is Reason.MALFORMED_PROMPT
        assert f"{tokens} tokens have {tokens // 16} full blocks of 16" in refusal.message
        assert refusal.message.endswith(f"block_hashes holds {count}")

    def test_a_missing_block_size_is_refused(self) -> None:
        refusal = refused(Prompt.from_hashes, hashes([1]), 0, 16)
        assert (refusal.reason, "block_size" in refusal.message) == (Reason.MALFORMED_PROMPT, True)

    def test_a_missing_length_is_refused(self) -> None:
        refusal = refused(Prompt.from_hashes, hashes([]), 16, 0)
        assert (refusal.reason, "prompt_tokens" in refusal.message) == (Reason.EMPTY_PROMPT, True)

    def test_hashes_are_chained_only_when_somebody_compares_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A message holds millions of them: chained before the length is checked they cost seconds.
        monkeypatch.setattr("router.request.prompt.prefix_hashes", lambda _: pytest.fail("chained"))
        assert Prompt.from_hashes(hashes([1, 2, 3]), 16, 48).only_block_size == 16


class TestLength:
    def test_a_length_alone_matches_nothing_in_any_block_size(self) -> None:
        only = Prompt.from_length(70, lora_name="ad")
        assert (only.token_count, only.lora_name, only.only_block_size) == (70, "ad", 0)
        for size in (1, 16, 64):
            assert list(only.hashed(size)) == []
            assert len(only.prefixes(size)) == 0
        assert only.leading_tokens(16) is None

    def test_its_blocks_are_its_own_up_to_a_bound(self) -> None:
        counts = [Prompt.from_length(tokens).own_blocks(16) for tokens in (1, 16, 17, 8192, 99_999)]
        assert counts == [1, 1, 2, 512, 512]
        assert Prompt.from_length(70).own_blocks(0) == 1, "the size is not known yet"
        assert [prompt(tokens).own_blocks(16) for tokens in (15, 16, 70)] == [1, 0, 1]

    def test_a_length_of_zero_is_refused(self) -> None:
        refusal = refused(Prompt.from_length, 0)
        assert (refusal.reason, "estimated_tokens" in refusal.message) == (
            Reason.EMPTY_PROMPT,
            True,
        )


class TestFingerprint:
    @pytest.mark.parametrize("block_size", [0, 1, 15, 16, 63, 64, 65])
    def test_it_tells_prompts_apart(self, block_size: int) -> None:
        item = MultimodalItem(5, 0, 3)
        different = [
            prompt(64),
            prompt(63),
            prompt(64, first=1),
            Prompt.from_tokens(pack_tokens([*range(63), 99])),
            Prompt.from_tokens(pack_tokens([99, *range(1, 64)])),
            prompt(64, lora_name="ad"),
            prompt(64, cache_salt="ad"),
            prompt(64, items=[item]),
            prompt(64, items=[item._replace(first_token=1)]),
            Prompt.from_hashes(hashes([1, 2]), 16, 32),
            Prompt.from_hashes(hashes([1, 2]), 16, 33),
            Prompt.from_hashes(hashes([2, 1]), 16, 32),
            Prompt.from_hashes(hashes([1, 2]), 15, 32),
            Prompt.from_length(64),
            Prompt.from_length(32),
            Prompt.from_length(64, lora_name="ad"),
            Prompt.from_length(64, digest=b"one text"),
            Prompt.from_length(64, digest=b"another"),
        ]
        assert len({one.fingerprint(block_size) for one in different}) == len(different)

    @pytest.mark.parametrize("block_size", [0, 1, 15, 16, 63, 64, 65])
    def test_it_is_the_same_for_the_same_prompt(self, block_size: int) -> None:
        about = {"lora_name": "ad", "items": [MultimodalItem(5, 0, 3)]}
        for same in (about, {}):
            hashed = prompt(64, **same)
            for _ in hashed.hashed(16):
                pass
            assert hashed.fingerprint(block_size) == prompt(64, **same).fingerprint(block_size)


class TestItems:
    def test_an_item_beyond_the_prompt_is_refused(self) -> None:
        tokens = pack_tokens(range(20))
        refusal = refused(
            Prompt.from_tokens, tokens, items=[MultimodalItem(1, 0, 20), MultimodalItem(2, 18, 3)]
        )
        assert refusal.reason is Reason.INVALID_FIELD
        assert refusal.message == (
            "multimodal_items[1] covers 3 tokens from token 18 on, but the prompt has 20"
        )

    def test_items_may_overlap_as_a_video_and_its_sound_do(self) -> None:
        items = [MultimodalItem(i, 0, 20) for i in range(ITEM_LAYERS_MAX)]
        assert prompt(20, items=items).token_count == 20

    def test_items_that_would_have_the_prompt_hashed_over_and_over_are_refused(self) -> None:
        items = [MultimodalItem(i, 0, 20) for i in range(ITEM_LAYERS_MAX + 1)]
        refusal = refused(Prompt.from_tokens, pack_tokens(range(20)), items=items)
        assert refusal.reason is Reason.INVALID_FIELD
        assert "8 times" in refusal.message

    def test_an_item_changes_the_blocks_it_covers_and_all_after_them(self) -> None:
        plain = prompt(64).prefixes(16)
        with_item = prompt(64, items=[MultimodalItem(9, 20, 4)]).prefixes(16)
        assert [a == b for a, b in zip(plain, with_item, strict=True)] == [True] + [False] * 3
        tokens = pack_tokens(range(64))
        blocks = block_hashes(tokens, 16, items=[MultimodalItem(9, 20, 4)])
        assert with_item.tolist() == prefix_hashes(blocks).tolist()
