"""What a trace's ids stand for, and what is done to its clock."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.prompt import Prompt
from simulator.traffic.trace import Trace, TraceRequest, detect_tick, expand
from simulator.traffic.trace_file import SLICES, load_trace
from tests.simulator import worlds

KNOWN_TOKENS = [55451, 47716, 50610, 11019]
"""The first tokens of id 0."""
KNOWN_NAMES = [16294208416658607535, 10451216379200822465, 10905525725756348110]
"""Of the first blocks of 64 of id 0."""

BLOCK_SIZES = [1, 16, 32, 64, 128, 256, 512]


def request(
    ids: list[int], prompt_tokens: int | None = None, arrival_s: float = 0.0, **about: Any
) -> TraceRequest:
    if prompt_tokens is not None:
        about["prompt_tokens"] = prompt_tokens
    return worlds.request(arrival_s, ids, **about)


def at(*arrivals_s: float) -> Trace:
    return Trace("t", [request([i], arrival_s=when) for i, when in enumerate(arrivals_s)])


def arrivals(trace: Trace) -> list[float]:
    return [one.arrival_s for one in trace.requests]


def test_equal_ids_give_equal_tokens_whatever_stands_around_them() -> None:
    one, other = expand([7, 8], 1024), expand([9, 8], 700)
    assert (one[512:700] == other[512:]).all()
    assert (one[:512] != other[:512]).any()
    assert len(other) == 700


def test_expansion_is_the_same_today_and_tomorrow() -> None:
    assert expand([0], 4).tolist() == KNOWN_TOKENS
    assert expand([0], 512).dtype == np.uint32
    assert expand(list(range(20)), 512 * 20).max() < 1 << 16
    assert request([0]).block_hashes(64)[:3].tolist() == KNOWN_NAMES


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_partial_last_id_has_only_its_full_blocks(block_size: int) -> None:
    for tokens in (513, 700, 1023, 1024):
        names = request([3, 4], tokens).block_hashes(block_size)
        assert len(names) == tokens // block_size
        whole = request([3, 4]).block_hashes(block_size)
        assert (names == whole[: len(names)]).all()
    assert len(request([3], 5).block_hashes(16)) == 0


@pytest.mark.parametrize("block_size", [0, -1, 24, 768])
def test_a_block_size_that_neither_divides_an_id_nor_is_made_of_ids_is_refused(
    block_size: int,
) -> None:
    with pytest.raises(ValueError, match="choose a power of 2, such as 64"):
        request([1]).block_hashes(block_size)


def test_a_block_of_several_ids_is_named_by_all_of_them_in_their_order() -> None:
    def names(*ids: int, tokens: int | None = None) -> list[int]:
        named: list[int] = request(list(ids), tokens, id_tokens=16).block_hashes(64).tolist()
        return named

    both = names(1, 2, 3, 4, 5, 6, 7, 8)
    assert len(set(both)) == 2
    assert names(1, 2, 3, 4, 5, tokens=70) == both[:1]
    assert names(5, 6, 7, 8) == both[1:]
    assert names(2, 1, 3, 4) != both[:1]
    assert names(1, 2, 3) == []


@pytest.mark.parametrize("id_tokens", [8, 15, 16, 600, 1024])
def test_an_id_may_stand_for_any_number_of_tokens(id_tokens: int) -> None:
    one = request([7, 8, 9], 3 * id_tokens - 1, id_tokens=id_tokens)
    tokens = one.token_ids()
    assert len(tokens) == 3 * id_tokens - 1
    assert (tokens[id_tokens : 2 * id_tokens] == expand([8], id_tokens, id_tokens)).all()
    assert len(one.block_hashes(id_tokens)) == 2
    assert len(one.block_hashes(2 * id_tokens)) == 1


@given(
    st.lists(st.integers(0, (1 << 55) - 1), min_size=1, max_size=40, unique=True),
    st.sampled_from(BLOCK_SIZES),
)
def test_blocks_of_different_text_never_have_one_name(ids: list[int], block_size: int) -> None:
    names = request(ids).block_hashes(block_size)
    assert len(set(names.tolist())) == len(names) == len(ids) * 512 // block_size


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.integers(1, 64),
    st.integers(1, 64),
    st.sampled_from([(64, 16), (64, 64), (64, 128), (16, 32)]),
)
def test_names_agree_exactly_where_tokens_do(
    one: list[int], other: list[int], one_last: int, other_last: int, sizes: tuple[int, int]
) -> None:
    id_tokens, block_size = sizes
    a, b = (
        request(ids, id_tokens * (len(ids) - 1) + min(last, id_tokens), id_tokens=id_tokens)
        for ids, last in ((one, one_last), (other, other_last))
    )
    by_tokens = [
        Prompt.from_tokens(prompt.token_ids().tobytes()).prefixes(block_size) for prompt in (a, b)
    ]
    by_names = [
        Prompt.from_hashes(
            prompt.block_hashes(block_size), block_size, prompt.prompt_tokens
        ).prefixes(block_size)
        for prompt in (a, b)
    ]
    shared = min(map(len, by_tokens))
    assert list(map(len, by_names)) == list(map(len, by_tokens))
    assert (
        (by_names[0][:shared] == by_names[1][:shared])
        == (by_tokens[0][:shared] == by_tokens[1][:shared])
    ).all()


def test_a_tick_is_spread_in_order_over_its_length_and_never_past_the_next() -> None:
    trace = at(0, 0, 0, 0, 1, 9)
    spread = arrivals(trace.spread(3.0))
    assert spread == sorted(spread)
    for place, arrival_s in enumerate(spread[:4]):
        assert place / 4 <= arrival_s < (place + 1) / 4  # the next tick is 1 s away
    assert 1.0 <= spread[4] < 4.0
    assert 9.0 <= spread[5] < 12.0
    assert spread == arrivals(trace.spread(3.0))
    assert spread != arrivals(trace.spread(3.0, seed=1))
    assert arrivals(trace.spread(0.0)) == [0, 0, 0, 0, 1, 9]


def test_ticks_are_found_where_stamps_are_shared_and_evenly_apart() -> None:
    rng = np.random.default_rng(7)
    poisson = np.cumsum(rng.exponential(0.3, 3000))
    assert detect_tick(poisson) == 0.0
    assert detect_tick(np.floor(poisson / 3) * 3) == 3.0
    jitter = np.floor(poisson / 3) * 3
    jitter += rng.integers(-1, 2, len(poisson))[np.unique(jitter, return_inverse=True)[1]] / 1e3
    assert detect_tick(jitter) == pytest.approx(3.0, abs=0.003)
    assert detect_tick(np.floor(poisson)) == 1.0
    assert detect_tick(np.round(poisson, 3)) == 0.0
    assert detect_tick(np.repeat(poisson, 2)) == 0.0  # shared, but no even distances
    assert detect_tick(np.empty(0)) == detect_tick(np.zeros(9)) == 0.0


def test_a_found_tick_is_told() -> None:
    trace = at(*(3.0 * (i // 3) for i in range(30)))
    assert trace.spread().tick_s == 3.0
    assert at(0.1, 0.5, 0.7).spread().tick_s == 0.0
    assert arrivals(Trace("none", []).spread()) == []


def test_a_rate_makes_the_whole_clock_faster() -> None:
    trace = Trace(
        "t", [request([1], arrival_s=4.0), request([2], arrival_s=8.0, session_id="s", think_s=3.0)]
    )
    faster = trace.at_rate(2.0)
    assert arrivals(faster) == [2.0, 4.0]
    assert [one.think_s for one in faster.requests] == [None, 1.5]
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="more than 0"):
            trace.at_rate(rate)


def test_a_window_begins_at_its_start_and_leaves_out_its_end() -> None:
    assert arrivals(at(0, 5, 6, 10).window(5, 10)) == [0, 1]
    assert arrivals(at(0, 5).window()) == [0, 5]
    assert arrivals(at(0, 5).window(6)) == []


def test_the_first_turn_in_a_window_waits_for_nobody() -> None:
    turns = [
        request(
            [1], arrival_s=10.0 * turn, session_id="s", turn=turn, think_s=2.0 if turn else None
        )
        for turn in range(4)
    ]
    cut = Trace("t", turns).window(10).requests
    assert [one.think_s for one in cut] == [None, 2.0, 2.0]
    assert [one.turn for one in cut] == [1, 2, 3]


@pytest.mark.parametrize("name", SLICES)
def test_in_the_slices_an_id_always_follows_the_same_one(name: str) -> None:
    """So that equal ids mean equal prefixes, as their READMEs say."""
    before: dict[int, int] = {}
    for one in load_trace(name).requests:
        ids = one.hash_ids.tolist()
        for earlier, later in zip([-1, *ids], ids, strict=False):
            assert before.setdefault(later, earlier) == earlier
