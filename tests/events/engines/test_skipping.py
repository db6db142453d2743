"""Going over MessagePack values: one suite for the definition and its native twin."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.engines import skipping, skipping_reference

Skip = Callable[[bytes, int, int, int], tuple[int, int]]
SKIPS: list[Skip] = [skipping_reference.skip, skipping.skip]
BOTH = pytest.mark.parametrize("skip", SKIPS)
laws = settings(max_examples=300, deadline=None)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=40)),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=40,
)


@laws
@given(before=values, value=values, after=values, steps=st.integers(1, 5))
def test_a_walk_ends_where_a_value_does_however_often_it_is_stopped(
    before: Any, value: Any, after: Any, steps: int
) -> None:
    first, middle, last = map(msgspec.msgpack.encode, (before, value, after))
    data = first + middle + last
    for skip in SKIPS:
        assert skip(data, 0, 3, 1 << 20) == (len(data), 0)
        at, left = len(first), 1
        while left:
            at, left = skip(data, at, left, steps)
        assert at == len(first) + len(middle)


@laws
@given(value=values, data=st.data())
def test_a_value_that_is_cut_is_refused(value: Any, data: st.DataObject) -> None:
    whole = msgspec.msgpack.encode(value)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for skip in SKIPS:
        with pytest.raises(ValueError, match="MessagePack"):
            skip(cut, 0, 1, 1 << 20)


@laws
@given(
    data=st.binary(max_size=200),
    at=st.integers(0, 210),
    left=st.integers(0, 5),
    steps=st.integers(0, 50),
)
def test_both_say_the_same_of_any_bytes(data: bytes, at: int, left: int, steps: int) -> None:
    def said(skip: Skip) -> tuple[int, int] | None:
        try:
            return skip(data, at, left, steps)
        except ValueError:
            return None

    if at > len(data):
        left = left or 1  # nothing is to be gone over: both may do without a look
    assert said(skipping.skip) == said(skipping_reference.skip)


@BOTH
def test_headers_that_say_more_than_there_is_are_refused_at_once(skip: Skip) -> None:
    for kind in (0xC6, 0xDB, 0xDD, 0xDF):
        with pytest.raises(ValueError, match="MessagePack"):
            skip(bytes([kind, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]), 0, 1, 1)
    with pytest.raises(ValueError, match="MessagePack"):
        skip(b"\x00", 0, 2, 1)


@BOTH
def test_a_bomb_of_nested_arrays_costs_its_bytes(skip: Skip) -> None:
    bomb = b"\x91" * 100_000 + b"\x00"
    assert skip(bomb, 0, 1, 50_000) == (50_000, 1)
    assert skip(bomb, 0, 1, 1 << 20) == (len(bomb), 0)
