"""Runs of decode steps: where blocks are concerned, against one step after the other."""

from hypothesis import given
from hypothesis import strategies as st

from simulator.decode_run import Crossing, crossings


@given(
    computed=st.lists(st.integers(1, 40), max_size=5),
    steps=st.integers(0, 30),
    block_size=st.integers(1, 9),
)
def test_crossings_are_those_of_steps_one_by_one(
    computed: list[int], steps: int, block_size: int
) -> None:
    expected = []
    for step in range(1, steps + 1):
        for place, before in enumerate(computed):
            tokens = before + step
            if (tokens - 1) % block_size == 0:
                expected.append(Crossing(step, place, tokens, full=False))
            if tokens % block_size == 0:
                expected.append(Crossing(step, place, tokens, full=True))
    assert crossings(computed, steps, block_size) == expected
