"""The search for the smallest fleet: what it finds, what it tries, and when sizes disagree."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.study.capacity import (
    Capacity,
    Trial,
    capacity_table,
    promised_ttft_s,
    smallest_fleet,
)
from simulator.traffic.results import Outcome, WarmUp
from tests.simulator.made_results import printed, run_of


@given(st.integers(1, 64), st.integers(1, 64))
def test_where_more_workers_wait_less_it_finds_the_smallest(needed: int, most: int) -> None:
    asked = []

    def measure(workers: int) -> float:
        asked.append(workers)
        return 0.1 if workers >= needed else 0.2 + 0.1 / workers

    found = smallest_fleet(measure, 0.1, most=most)
    assert found.workers == (needed if needed <= most else None)
    assert len(asked) == len(set(asked)) <= 2 * most.bit_length() + 1
    assert max(asked) <= most
    assert found.is_monotone
    if found.workers not in (None, most):
        assert {found.workers, found.workers + 1} <= set(asked)  # the neighbour was asked


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_whatever_the_sizes_say_the_answer_keeps_it_and_so_does_its_neighbour(
    kept: list[bool],
) -> None:
    found = smallest_fleet(
        lambda size: 0.0 if kept[size - 1] else 1 + 1 / size, 0.5, most=len(kept)
    )
    if found.workers is not None:
        assert all(kept[found.workers - 1 : found.workers + 1])
    assert [trial.workers for trial in found.trials] == sorted(
        {trial.workers for trial in found.trials}
    )


def test_a_lucky_size_between_bad_ones_is_no_answer() -> None:
    good = {4, 6, 7, 8}
    found = smallest_fleet(lambda size: 0.0 if size in good else 1 + 1 / size, 0.5, most=8)
    assert found.workers == 6
    assert not found.is_monotone


@given(st.integers(1, 16), st.floats(0.11, 10.0))
def test_the_search_ends_where_a_prompt_alone_takes_longer(busy: int, alone_s: float) -> None:
    found = smallest_fleet(lambda size: alone_s * max(1.0, busy / size), 0.1)
    assert found.workers is None
    assert found.alone_s == alone_s
    assert found.trials[-1].workers <= 4 * busy
    failing = smallest_fleet(lambda size: math.inf, 0.1)
    assert (failing.workers, failing.alone_s) == (None, None)
    assert failing.trials[-1].workers == 256


def test_no_fleet_at_all_is_refused() -> None:
    for least, most in ((0, 4), (5, 4)):
        with pytest.raises(ValueError, match="there is no fleet"):
            smallest_fleet(lambda size: 0.0, 1.0, least=least, most=most)


def test_a_request_that_was_not_served_waits_for_ever() -> None:
    outcome = np.array([Outcome.SHED] + 9 * [Outcome.SERVED])
    run = run_of(10, ttft_s=np.arange(1.0, 11.0), outcome=outcome)
    assert promised_ttft_s(run, "p50", WarmUp()) == 6.0
    assert promised_ttft_s(run, "p90", WarmUp()) == 10.0
    assert promised_ttft_s(run, "p99", WarmUp()) == math.inf
    assert promised_ttft_s(run, "mean", WarmUp()) == math.inf
    assert promised_ttft_s(run, "mean", WarmUp(until_s=1.0)) == 6.0
    with pytest.raises(ValueError, match="none is left to count"):
        promised_ttft_s(run, "p90", WarmUp(until_s=100.0))


def test_the_table_names_the_answer() -> None:
    found = Capacity(3, [Trial(2, math.inf, False), Trial(3, 0.25, True), Trial(4, 0.2, True)])
    shown = printed(capacity_table(found, "p90", 0.5))
    for text in ("p90 <= 500 ms", "failed requests", "250 ms", "kept <- smallest"):
        assert text in shown
