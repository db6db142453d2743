"""Consistent hashing with bounded loads: the bound holds, and little moves."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.client.fallback.bounded_hash import (
    blocks_key,
    bound,
    ranked,
    session_key,
    text_key,
    tokens_key,
    worker_seed,
)

NAMES = [f"worker-{i}" for i in range(12)]
laws = settings(derandomize=True, deadline=None, max_examples=100, database=None)
KEYS = st.integers(0, (1 << 64) - 1)


def seeds(names: list[str]) -> list[int]:
    return [worker_seed(name, 0) for name in names]


@laws
@given(st.lists(KEYS, max_size=100), st.integers(1, 12), st.randoms(use_true_random=False))
def test_no_worker_goes_over_the_bound_while_requests_come_and_go(
    keys: list[int], count: int, rng: random.Random
) -> None:
    open_requests = [0] * count
    for key in keys:
        place, *_ = ranked(key, seeds(NAMES[:count]), open_requests)
        open_requests[place] += 1
        assert open_requests[place] <= bound(sum(open_requests) - 1, count)
        if rng.random() < 0.4:
            busy = [i for i, load in enumerate(open_requests) if load]
            open_requests[rng.choice(busy)] -= 1


@laws
@given(KEYS, st.lists(st.integers(0, 1000), min_size=1, max_size=12))
def test_some_worker_is_always_below_the_bound_and_none_that_is_not_is_picked(
    key: int, open_requests: list[int]
) -> None:
    count = len(open_requests)
    places = ranked(key, seeds(NAMES[:count]), open_requests, count)
    most = bound(sum(open_requests), count)
    assert places
    assert set(places) == {i for i, load in enumerate(open_requests) if load < most}


@laws
@given(st.lists(KEYS, min_size=1, max_size=50), st.integers(0, 11))
def test_a_worker_that_leaves_moves_only_its_own_keys(keys: list[int], gone: int) -> None:
    rest = [name for i, name in enumerate(NAMES) if i != gone]
    for key in keys:
        before = NAMES[ranked(key, seeds(NAMES), [0] * 12)[0]]
        after = rest[ranked(key, seeds(rest), [0] * 11)[0]]
        assert before == after or before == NAMES[gone]


@laws
@given(st.lists(KEYS, max_size=40), st.permutations(NAMES))
def test_the_order_of_the_workers_makes_no_difference(keys: list[int], names: list[str]) -> None:
    for key in keys:
        one = NAMES[ranked(key, seeds(NAMES), [0] * 12)[0]]
        assert names[ranked(key, seeds(names), [0] * 12)[0]] == one


def test_keys_spread_evenly() -> None:
    taken = Counter(
        ranked(session_key(f"session {i}"), seeds(NAMES), [0] * 12)[0] for i in range(6000)
    )
    assert len(taken) == 12
    assert max(taken.values()) < 1.2 * 500
    assert min(taken.values()) > 0.8 * 500


def test_the_bound_has_its_ceiling() -> None:
    # Two workers, a session's first request still runs: its second stays.
    key = session_key("s")
    first, _ = ranked(key, seeds(NAMES[:2]), [0, 0], 2)
    loads = [0, 0]
    loads[first] = 1
    assert bound(1, 2) == 2
    assert ranked(key, seeds(NAMES[:2]), loads)[0] == first
    assert [bound(m, 4) for m in (0, 3, 4, 7, 100)] == [1, 2, 2, 3, 32]


def test_without_workers_there_is_no_place() -> None:
    assert ranked(1, [], []) == []


def test_a_key_is_of_the_prompt_s_beginning_alone() -> None:
    begin = bytes(range(256)) * 16
    assert tokens_key(begin + b"one") == tokens_key(begin + b"another")
    assert tokens_key(begin[:-4] + b"diff") != tokens_key(begin)
    assert text_key(begin + b"one") == text_key(begin) != tokens_key(begin)
    assert blocks_key([1, 2]) != blocks_key([2, 1])


def test_keys_and_seeds_are_the_same_in_every_process_and_release() -> None:
    assert session_key("user-42") == 0x2EAC7BF0EF07E93B
    assert tokens_key(bytes(8)) == 0x4617DA1E2BF5A6A3
    assert worker_seed("gpu-a", 1) == 0xE53D2BBEE618544B
    assert ranked(session_key("user-42"), seeds(NAMES), [0] * 12, 4) == [8, 4, 10, 0]
