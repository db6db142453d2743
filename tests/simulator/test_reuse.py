"""The ceiling of reuse, against a cache that remembers every block by its whole prefix."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.prompt import Prompt
from simulator.traffic.reuse import Ceiling, reusable_blocks, reuse_ceiling
from simulator.traffic.trace import TraceRequest
from simulator.traffic.trace_file import load_trace


def request(ids: list[int], last_tokens: int = 512, id_tokens: int = 512) -> TraceRequest:
    tokens = id_tokens * (len(ids) - 1) + last_tokens
    return TraceRequest(0.0, tokens, 1, np.array(ids, np.uint64), id_tokens=id_tokens)


def test_the_ceiling_counts_usable_leading_blocks_over_full_ones() -> None:
    assert reuse_ceiling([], 128) == Ceiling(0.0, 0.0)
    assert reuse_ceiling([request([1], 100)], 128) == Ceiling(0.0, 0.0)
    # 4 full blocks, then again: 3 usable of 4, since one token must be computed
    again = reuse_ceiling([request([1]), request([1])], 128)
    assert again == Ceiling(3 / 8, 3 * 128 / 1024)
    # one token more makes the fourth usable
    assert reuse_ceiling([request([1]), request([1, 2], 1)], 128).blocks == 4 / 8
    # equal blocks behind a different one are not the same prefix
    assert reuse_ceiling([request([1, 2]), request([3, 2])], 128).blocks == 0.0


def test_a_block_size_that_ids_dont_divide_into_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 48"):
        reuse_ceiling([request([1])], 48)


def slow(requests: list[TraceRequest], block_size: int) -> list[int]:
    seen: set[int] = set()
    found = []
    for one in requests:
        names = one.block_hashes(block_size)
        prefixes = Prompt.from_hashes(names, block_size, one.prompt_tokens).prefixes(block_size)
        run = 0
        for prefix in prefixes[: (one.prompt_tokens - 1) // block_size].tolist():
            if prefix not in seen:
                break
            run += 1
        found.append(run)
        seen.update(prefixes.tolist())
    return found


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 128)),
        max_size=12,
    ),
    st.sampled_from([(128, 16), (128, 128), (128, 256), (128, 512)]),
)
def test_it_finds_what_a_cache_of_every_block_would(
    prompts: list[tuple[list[int], int]], sizes: tuple[int, int]
) -> None:
    id_tokens, block_size = sizes
    requests = [request(ids, last_tokens, id_tokens) for ids, last_tokens in prompts]
    assert reusable_blocks(requests, block_size).tolist() == slow(requests, block_size)
    assert reusable_blocks(requests, block_size, 10_000).tolist() == slow(requests, block_size)


def slow_pooled(requests: list[TraceRequest], cache_blocks: int) -> list[int]:
    """Blocks of one id each, least recently used first."""
    cache: list[int] = []
    found = []
    for one in requests:
        names = one.block_hashes(one.id_tokens)
        prompt = Prompt.from_hashes(names, one.id_tokens, one.prompt_tokens)
        prefixes = prompt.prefixes(one.id_tokens).tolist()
        usable = prefixes[: (one.prompt_tokens - 1) // one.id_tokens]
        found.append(next((i for i, one in enumerate(usable) if one not in cache), len(usable)))
        cache = [one for one in cache if one not in prefixes] + prefixes[::-1]
        cache = cache[max(0, len(cache) - cache_blocks) :]
    return found


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), max_size=12), st.integers(1, 20)
)
def test_one_cache_of_a_size_evicts_what_was_used_longest_ago(
    prompts: list[list[int]], cache_blocks: int
) -> None:
    requests = [request(ids, 128, 128) for ids in prompts]
    assert reusable_blocks(requests, 128, cache_blocks).tolist() == slow_pooled(
        requests, cache_blocks
    )


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "largest", "last_s", "tick_s", "ceiling"),
    [
        ("conversation", 350, 3_324_529, 32_756, 741, 3.0, 0.390),
        ("synthetic", 667, 10_078_511, 134_773, 1014, 0.0, 0.663),
        ("agentic", 244, 17_380_297, 303_560, 1369, 0.0, 0.909),
    ],
)
def test_the_slices_are_what_their_readme_says(
    name: str,
    requests: int,
    prompt_tokens: int,
    largest: int,
    last_s: float,
    tick_s: float,
    ceiling: float,
) -> None:
    trace = load_trace(name).spread()
    assert len(trace.requests) == requests
    assert sum(one.prompt_tokens for one in trace.requests) == prompt_tokens
    assert max(one.prompt_tokens for one in trace.requests) == largest
    assert trace.requests[-1].arrival_s == pytest.approx(last_s, abs=max(0.5, tick_s))
    assert trace.tick_s == pytest.approx(tick_s)
    assert round(reuse_ceiling(trace.requests, 64).blocks, 3) == ceiling
    assert trace.is_closed_loop == (name == "agentic")
