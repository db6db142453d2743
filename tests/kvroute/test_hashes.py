"""Block hashes from whatever held them, and what routers make of them."""

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.hashing import block_hashes, pack_tokens, prefix_hashes
from kvroute.client import KvRouteClient
from kvroute.client.messages.tokens import block_hashes_of
from kvroute.v1 import BlockHashes
from router.config.settings.routing_settings import GuardSettings
from tests.stage.served import served

U64 = st.integers(0, 2**64 - 1)
FORMS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    iter,
    lambda hashes: array("Q", hashes),
    lambda hashes: np.array(hashes, np.uint64),
    lambda hashes: np.array(hashes, ">u8"),
    lambda hashes: np.repeat(np.array(hashes, np.uint64), 2)[::2],
    lambda hashes: memoryview(array("Q", hashes)),
    lambda hashes: np.array(hashes, "<u8").tobytes(),
]


def read(pieces: tuple[bytes, ...]) -> BlockHashes:
    return BlockHashes.FromString(b"".join(pieces))


@given(st.lists(U64, max_size=300), st.sampled_from(FORMS))
def test_equal_hashes_make_equal_messages(
    hashes: list[int], form: Callable[[list[int]], Any]
) -> None:
    message = read(block_hashes_of(form(hashes), 16, 16 * len(hashes) + 5))
    expected = BlockHashes(hashes=hashes, block_size=16, prompt_tokens=16 * len(hashes) + 5)
    assert message == expected
    assert message.SerializeToString(deterministic=True) == expected.SerializeToString(
        deterministic=True
    )


def test_a_long_prompt_s_length_takes_more_than_one_byte() -> None:
    hashes = np.arange(65_536, dtype=np.uint64)
    assert list(read(block_hashes_of(hashes, 16, 1 << 20)).hashes) == list(range(65_536))


@pytest.mark.parametrize("hashes", [[-1], [2**64], np.array([-1], np.int64)])
def test_a_hash_that_takes_more_than_64_bits_is_refused(hashes: Any) -> None:
    with pytest.raises(ValueError, match="outside"):
        block_hashes_of(hashes, 16, 16)


@pytest.mark.parametrize(
    "hashes", [[1.5], np.array([1.5]), np.zeros((2, 2), np.uint64), 7, "12345678"]
)
def test_what_is_no_row_of_integers_is_refused(hashes: Any) -> None:
    with pytest.raises(TypeError):
        block_hashes_of(hashes, 16, 16)


def test_bytes_that_are_not_whole_are_refused() -> None:
    hashes: Any = bytes(9)
    with pytest.raises(ValueError, match="9 bytes"):
        block_hashes_of(hashes, 16, 16)


TOKENS = list(range(40))
HASHES = block_hashes(pack_tokens(TOKENS), 16)


@pytest.mark.parametrize("batching", [True, False])
async def test_a_router_picks_the_same_by_hashes_in_the_block_size_of_its_answer(
    batching: bool,
) -> None:
    async with (
        served(guard=GuardSettings(policies=())) as stage,
        KvRouteClient(f"127.0.0.1:{stage.server.port}", batching=batching) as client,
    ):
        stage.fleet.add("w0")
        stage.fleet.store(stage.fleet.add("w1"), prefix_hashes(HASHES))
        by_tokens = await client.route(token_ids=TOKENS)
        block_size = by_tokens.response.hash_block_size
        by_hashes = await client.route(
            block_hashes=HASHES, block_size=block_size, prompt_tokens=len(TOKENS)
        )
        for pick in (by_tokens, by_hashes):
            assert pick.worker_id == "w1"
            assert pick.overlap_tokens.usable == 32
            assert pick.response.hash_block_size == 16
        forms = [one.prompt_tokens for one in stage.fleet.core.reservations._open.values()]
        assert forms == [40, 40]


async def test_answers_name_no_block_size_where_hashes_would_not_do() -> None:
    async with (
        served() as stage,
        KvRouteClient(f"127.0.0.1:{stage.server.port}", batching=False) as client,
    ):

        async def block_size(model: str = "") -> int:
            return (await client.route(token_ids=TOKENS, model=model)).response.hash_block_size

        stage.fleet.add("w0")
        assert await block_size() == 16
        stage.fleet.copy_prefixes(enabled=True)
        assert not await block_size(), "hot prefixes keep the tokens"
        stage.fleet.copy_prefixes(enabled=False)
        stage.fleet.add("tuned", lora_names=("ad",))
        assert not await block_size("ad"), "the name of a LoRA is part of the hashes"
        assert await block_size() == 16
        stage.fleet.add("w1", block_size=32)
        assert not await block_size(), "the model has two block sizes"
