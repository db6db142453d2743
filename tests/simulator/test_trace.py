"""Reading traces: expansion, ticks, the ceiling, and what a bad line gets."""

import json
from typing import Any

import numpy as np
import pytest

from simulator.trace import (
    TraceError,
    TraceRequest,
    expand,
    load_slice,
    read_trace,
    reuse_ceiling,
)

KNOWN_TOKENS = [55451, 47716, 50610, 11019]
"""The first tokens of id 0."""


def line(timestamp: float, input_length: int, hash_ids: list[int], **others: Any) -> str:
    known = {"timestamp": timestamp, "input_length": input_length, "output_length": 5}
    return json.dumps(known | {"hash_ids": hash_ids} | others)


def test_equal_ids_give_equal_tokens_whatever_stands_around_them() -> None:
    one, other = expand([7, 8], 1024), expand([9, 8], 700)
    assert (one[512:700] == other[512:]).all()
    assert (one[:512] != other[:512]).any()
    assert len(other) == 700


def test_expansion_is_the_same_today_and_tomorrow() -> None:
    assert expand([0], 4).tolist() == KNOWN_TOKENS
    assert expand([0], 512).dtype == np.uint32
    assert expand(list(range(20)), 512 * 20).max() < 1 << 16


def test_a_tick_is_spread_in_order_over_its_length_and_never_past_the_next() -> None:
    lines = [line(0, 10, [i]) for i in range(4)] + [line(1000, 10, [9]), line(9000, 10, [10])]
    arrivals = [one.arrival_s for one in read_trace(lines, tick_s=3.0)]
    assert arrivals == sorted(arrivals)
    for place, arrival_s in enumerate(arrivals[:4]):
        assert place / 4 <= arrival_s < (place + 1) / 4  # the next tick is 1 s away
    assert 1.0 <= arrivals[4] < 4.0
    assert 9.0 <= arrivals[5] < 12.0
    assert arrivals == [one.arrival_s for one in read_trace(lines, tick_s=3.0)]
    assert arrivals != [one.arrival_s for one in read_trace(lines, tick_s=3.0, seed=1)]


def test_without_ticks_arrivals_are_the_timestamps_and_compression_divides_them() -> None:
    lines = [line(0, 10, [1]), "", line(5000, 10, [2])]
    assert [one.arrival_s for one in read_trace(lines, compression=2.0)] == [0.0, 2.5]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "line 2: "),
        ("[]", "line 2: "),
        (line(0, 0, []), "line 2: .*input_length"),
        (line(0, 513, [1]), "line 2: input_length 513 needs 2 hash_ids of 512 tokens"),
        (line(0, 10, [-1]), "line 2: .*hash_ids"),
        (line(-5, 10, [1]), "line 2: .*timestamp"),
        ('{"timestamp": 0, "input_length": 3, "hash_ids": [1]}', "line 2: .*output_length"),
    ],
)
def test_a_bad_line_is_named_by_its_number(bad: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        list(read_trace([line(0, 10, [1]), bad]))


def test_time_that_goes_back_is_a_bad_line() -> None:
    with pytest.raises(TraceError, match="line 2: timestamp 1 is before the last, 2"):
        list(read_trace([line(2, 10, [1]), line(1, 10, [1])]))


def test_other_fields_are_ignored_and_an_answer_has_at_least_one_token() -> None:
    [request] = read_trace([line(0, 3, [1], output_length=0, session_id="s")])
    assert request.output_tokens == 1
    assert len(request.token_ids) == 3


def request(token_ids: list[int]) -> TraceRequest:
    return TraceRequest(0.0, np.array(token_ids, np.uint32), 1)


def test_the_ceiling_counts_usable_leading_blocks_over_full_ones() -> None:
    chain = list(range(16))
    assert reuse_ceiling([], 4) == 0.0
    assert reuse_ceiling([request([1, 2, 3])], 4) == 0.0
    # 4 full blocks, then again: 3 usable of 4, since one token must be computed
    assert reuse_ceiling([request(chain), request(chain)], 4) == 3 / 8
    # one token more makes the fourth usable
    assert reuse_ceiling([request(chain), request([*chain, 99])], 4) == 4 / 8
    # equal blocks behind a different one are not the same prefix
    assert reuse_ceiling([request(chain), request([99, *chain[1:]])], 4) == 0.0


def test_the_slice_that_ships_is_what_its_readme_says() -> None:
    trace = load_slice()
    assert len(trace) == 350
    assert sum(len(one.token_ids) for one in trace) == 3_324_529
    assert max(len(one.token_ids) for one in trace) == 32_756
    assert 741.0 <= trace[-1].arrival_s < 744.0
    assert round(reuse_ceiling(trace, 64), 3) == 0.390
