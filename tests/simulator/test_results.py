"""From columns to numbers: what counts, what is left out, and runs in which nothing came."""

import math

import numpy as np
import pytest

from simulator.traffic.results import (
    NO_WORKER,
    Outcome,
    Slo,
    WarmUp,
    aggregate,
    distribution,
    load_cv,
)
from tests.simulator.made_results import run_of


def test_rates_weigh_requests_by_their_length_and_leave_out_what_was_not_served() -> None:
    run = run_of(
        3,
        prompt_tokens=np.array([100, 300, 16]),
        cached_tokens=np.array([80, 0, 16]),
        outcome=np.array([Outcome.SERVED, Outcome.SERVED, Outcome.FAILED]),
    )
    numbers = aggregate(run)
    assert (numbers.requests, numbers.served, numbers.failed, numbers.shed) == (3, 2, 1, 0)
    assert numbers.token_hit_rate == 80 / 400
    assert numbers.block_hit_rate == 5 / 24


@pytest.mark.parametrize("warm_up", [WarmUp(until_s=2.0), WarmUp(requests=2), WarmUp(1.5, 1)])
def test_requests_of_the_warm_up_are_run_but_not_counted(warm_up: WarmUp) -> None:
    run = run_of(
        4,
        ttft_s=np.array([9.0, 9.0, 1.0, 3.0]),
        preemptions=np.array([5, 0, 1, 0]),
        in_flight=np.array([[1, 0], [1, 0], [1, 1], [1, 1]]),
    )
    numbers = aggregate(run, warm_up=warm_up)
    assert numbers.requests == 2
    assert numbers.ttft_ms.mean == 2000.0
    assert numbers.preemptions == 1
    assert numbers.load_cv == 0.0


def test_a_request_that_was_never_sent_does_not_count() -> None:
    run = run_of(3, arrival_s=np.array([0.0, 1.0, np.nan]), outcome=np.array([0, 0, 1]))
    assert aggregate(run).requests == 2
    assert aggregate(run, warm_up=WarmUp(requests=3)).requests == 0


def test_percentiles_are_those_of_the_served() -> None:
    ttft_s = np.arange(101) / 1e3
    numbers = aggregate(run_of(101, ttft_s=ttft_s))
    found = numbers.ttft_ms
    assert (found.mean, found.p50, found.p90, found.p99) == pytest.approx((50, 50, 90, 99))


def test_goodput_wants_both_promises_kept_and_one_token_has_no_gap_to_be_late_in() -> None:
    run = run_of(
        4,
        ttft_s=np.array([0.1, 0.1, 0.9, 0.1]),
        itl_s=np.array([0.01, 0.2, 0.01, np.nan]),
    )
    span_s = 3 + 1.0
    assert aggregate(run).goodput_rps == 4 / span_s
    assert aggregate(run, slo=Slo(ttft_s=0.5)).goodput_rps == 3 / span_s
    assert aggregate(run, slo=Slo(ttft_s=0.5, itl_s=0.05)).goodput_rps == 2 / span_s


def test_a_run_without_requests_has_numbers_too() -> None:
    numbers = aggregate(run_of(0))
    assert numbers.requests == 0
    assert numbers.block_hit_rate == numbers.goodput_rps == numbers.load_cv == 0.0
    assert math.isnan(numbers.ttft_ms.p99)


def test_a_run_in_which_all_failed_has_numbers_too() -> None:
    nothing = np.full(2, np.nan)
    run = run_of(
        2,
        queue_s=nothing,
        ttft_s=nothing,
        itl_s=nothing,
        e2e_s=nothing,
        worker=np.full(2, NO_WORKER),
        outcome=np.array([Outcome.FAILED, Outcome.SHED]),
    )
    numbers = aggregate(run)
    assert (numbers.requests, numbers.served, numbers.failed, numbers.shed) == (2, 0, 1, 1)
    assert numbers.goodput_rps == 0.0
    assert math.isnan(numbers.e2e_ms.mean)


def test_nan_takes_part_in_no_mean() -> None:
    assert distribution(np.array([1.0, np.nan, 3.0])).mean == 2.0


def test_load_spread_is_averaged_over_the_time_with_load() -> None:
    assert load_cv(np.array([[2, 2], [0, 0], [4, 0]])) == 0.5
    assert load_cv(np.array([[0, 0]])) == 0.0
    assert load_cv(np.empty((0, 3), np.int64)) == 0.0
