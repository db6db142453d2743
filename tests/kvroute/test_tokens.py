"""Every form of a prompt makes the same bytes."""

import struct
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.client import InvalidRequest, pack_tokens

IDS = [0, 1, 255, 256, 65_536, 151_643, 2**31 - 1]
EXPECTED = struct.pack(f"<{len(IDS)}I", *IDS)
FORMS: dict[str, Callable[[list[int]], Iterable[int]]] = {
    "list": list,
    "tuple": tuple,
    "generator": lambda ids: (one for one in ids),
    "array of u32": lambda ids: array("I", ids),
    "array of i32": lambda ids: array("i", ids),
    "array of i64": lambda ids: array("q", ids),
    "array of u64": lambda ids: array("Q", ids),
    "memoryview of i64": lambda ids: memoryview(array("q", ids)),
    "bytes": lambda ids: struct.pack(f"<{len(ids)}I", *ids),
    "bytearray": lambda ids: bytearray(struct.pack(f"<{len(ids)}I", *ids)),
    "memoryview of bytes": lambda ids: memoryview(struct.pack(f"<{len(ids)}I", *ids)),
    "numpy uint32": lambda ids: np.array(ids, np.uint32),
    "numpy int32": lambda ids: np.array(ids, np.int32),
    "numpy int64": lambda ids: np.array(ids, np.int64),
    "numpy uint64": lambda ids: np.array(ids, np.uint64),
    "numpy big-endian": lambda ids: np.array(ids, ">i8"),
    "numpy strided": lambda ids: np.repeat(np.array(ids, np.int64), 2)[::2],
    "numpy read-only": lambda ids: np.frombuffer(np.array(ids, np.int64).tobytes(), np.int64),
    "list of numpy ints": lambda ids: list(np.array(ids, np.int64)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_makes_the_same_bytes(form: str) -> None:
    assert pack_tokens(FORMS[form](IDS)) == EXPECTED


@pytest.mark.parametrize("form", FORMS)
def test_no_tokens_make_no_bytes_in_every_form(form: str) -> None:
    assert pack_tokens(FORMS[form]([])) == b""


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_any_ids_make_the_same_bytes_in_every_form(ids: list[int]) -> None:
    assert {pack_tokens(form(ids)) for form in FORMS.values()} == {
        struct.pack(f"<{len(ids)}I", *ids)
    }


def test_small_integers_are_ids_and_not_bytes() -> None:
    expected = struct.pack("<3I", 1, 2, 200)
    assert pack_tokens(np.array([1, 2, 200], np.uint8)) == expected
    assert pack_tokens(array("H", [1, 2, 200])) == expected


def test_the_highest_id_is_the_highest_u32() -> None:
    assert pack_tokens([2**32 - 1]) == b"\xff" * 4
    assert pack_tokens(np.array([2**32 - 1], np.int64)) == b"\xff" * 4


@pytest.mark.parametrize(
    ("token_ids", "told"),
    [
        ([-1], "outside"),
        ([2**32], "outside"),
        (np.array([1, -1], np.int64), "outside"),
        (np.array([2**32], np.int64), "outside"),
        (np.array([1, -1], np.int32), "negative"),
        (np.array([-1], np.int8), "outside"),
        (np.array([[1, 2]], np.int64), "2 dimensions"),
        (np.array(1, np.int64), "0 dimensions"),
        (np.array([1.0]), "flat row of integers"),
        ([1.5], "flat row of integers"),
        ([[1, 2]], "flat row of integers"),
        ("12", "flat row of integers"),
        (7, "flat row of integers"),
        (b"12345", "5 bytes"),
        (memoryview(b"123"), "3 bytes"),
    ],
)
def test_what_is_no_row_of_token_ids_is_refused_with_a_sentence(token_ids: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        pack_tokens(token_ids)
    assert caught.value.reason == "MALFORMED_PROMPT"
    assert isinstance(caught.value, ValueError)
