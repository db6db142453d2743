"""Block hashes from whatever held them."""

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.client.messages.hashes import block_hashes_of
from kvroute.v1 import BlockHashes

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
