"""How fast waiting requests go."""

import pytest

from router.decide.queue_limits.drain_rate import WINDOW_S, DrainRate


def gone(rate: DrainRate, count: int, each_s: float, start_s: float = 0.0) -> float:
    for number in range(count):
        rate.went(start_s + (number + 1) * each_s)
    return start_s + count * each_s


def test_a_steady_pace_is_the_rate_from_the_beginning() -> None:
    rate = DrainRate()
    rate.began(0.0)
    now_s = gone(rate, 3, 0.1)
    assert rate.per_s(now_s) == pytest.approx(10.0, rel=0.05)
    now_s = gone(rate, 1000, 0.1, now_s)
    assert rate.per_s(now_s) == pytest.approx(10.0, rel=0.05)
    assert rate.wait_s(20, now_s) == pytest.approx(2.0, rel=0.05)


def test_time_without_waiting_requests_does_not_count() -> None:
    rate = DrainRate()
    rate.began(0.0)
    now_s = gone(rate, 100, 0.1)
    rate.ended(now_s)
    before = rate.per_s(now_s)
    assert rate.per_s(now_s + 3600.0) == before
    rate.began(now_s + 3600.0)
    assert rate.per_s(now_s + 3600.0) == before


def test_the_past_fades() -> None:
    rate = DrainRate()
    rate.began(0.0)
    now_s = gone(rate, 1000, 0.01)
    assert rate.per_s(now_s + WINDOW_S) == pytest.approx(rate.per_s(now_s) * 0.37, rel=0.2)


def test_before_any_request_went_nothing_is_known() -> None:
    rate = DrainRate()
    assert rate.wait_s(1, 0.0) is None
    rate.began(0.0)
    assert rate.wait_s(1, 5.0) is None


def test_a_clock_that_goes_back_changes_no_past() -> None:
    rate = DrainRate()
    rate.began(10.0)
    now_s = gone(rate, 10, 0.1, 10.0)
    before = rate.per_s(now_s)
    assert rate.per_s(now_s - 5.0) == before
