"""Recent blocks: each once, in the order of their last use, whatever is dropped meanwhile."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.recent_blocks import RecentBlocks

SAMPLE = 4

STEPS = st.one_of(
    st.tuples(st.just("use"), st.lists(st.integers(0, 60), max_size=30)),
    st.tuples(st.just("use"), st.lists(st.integers((1 << 64) - 100, (1 << 64) - 1), max_size=30)),
    st.tuples(st.just("drop oldest"), st.integers(0, 20)),
    st.tuples(st.just("drop before"), st.integers(0, 20)),
)


@given(st.lists(STEPS, max_size=40))
def test_it_is_a_dictionary_in_the_order_of_use(steps: list[tuple[str, object]]) -> None:
    blocks, model = RecentBlocks(SAMPLE), OrderedDict[int, float]()
    for now, (step, about) in enumerate(steps):
        if step == "use":
            assert isinstance(about, list)
            blocks.use(np.array(about, np.uint64), float(now))
            for prefix in about:
                if prefix % SAMPLE == 0:
                    model[prefix] = float(now)
                    model.move_to_end(prefix)
            continue
        assert isinstance(about, int)
        if step == "drop oldest":
            doomed = list(model)[:about]
            dropped = blocks.drop_oldest(about)
        else:
            doomed = [prefix for prefix, at_s in model.items() if at_s < now - about]
            dropped = blocks.drop_before(now - about)
        for prefix in doomed:
            del model[prefix]
        assert dropped == len(doomed)
        assert blocks.entries() == list(model.items())
    assert blocks.entries() == list(model.items())
    assert len(blocks) == len(model)


def test_it_grows_and_shrinks_with_its_blocks() -> None:
    blocks = RecentBlocks(1)
    prefixes = np.random.default_rng(1).integers(0, 1 << 63, 50_000).astype(np.uint64)
    expected = list(dict.fromkeys(prefixes.tolist()))
    for part in np.split(prefixes, 50):
        blocks.use(part, 1.0)
    assert [prefix for prefix, _ in blocks.entries()] == expected
    assert blocks.drop_oldest(len(expected) - 3) == len(expected) - 3
    assert blocks.entries() == [(prefix, 1.0) for prefix in expected[-3:]]
    blocks.use(prefixes[:1000], 2.0)
    assert len(blocks) == 1003
    assert blocks.drop_before(2.0) == 3
    assert blocks.drop_before(3.0) == 1000
    assert blocks.entries() == []
    assert blocks.drop_oldest(1) == 0


def test_what_is_not_in_the_sample_is_ignored() -> None:
    blocks = RecentBlocks(16)
    blocks.use(np.array([1, 16, 17, 32, 33], np.uint64), 1.0)
    blocks.use(np.empty(0, np.uint64), 2.0)
    assert blocks.entries() == [(16, 1.0), (32, 1.0)]


@pytest.mark.parametrize("sample", [0, 3, 12])
def test_a_sample_is_a_power_of_two(sample: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        RecentBlocks(sample)


def test_prefixes_are_whole_numbers_of_64_bits() -> None:
    blocks = RecentBlocks(16)
    with pytest.raises(ValueError, match="dtype"):
        blocks.use(np.zeros(3, np.int32), 1.0)  # type: ignore[arg-type]
    assert len(blocks) == 0
