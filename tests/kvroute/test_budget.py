"""The retry budget: never above its share, never stuck."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.client.requests.budget import SLOTS, RetryBudget, RetryBudgetPolicy

laws = settings(derandomize=True, deadline=None, max_examples=100, database=None)
STEPS = st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=60)


@laws
@given(
    steps=STEPS,
    share=st.floats(0, 1),
    least_per_s=st.floats(0, 2),
    window_s=st.floats(0.5, 20),
)
def test_retries_are_a_share_of_the_requests_in_each_window(
    steps: list[tuple[float, bool]], share: float, least_per_s: float, window_s: float
) -> None:
    budget = RetryBudget(RetryBudgetPolicy(share, least_per_s, window_s))
    slot_s = window_s / SLOTS
    now_s = 1e6
    requests: list[float] = []
    retries: list[float] = []

    def may(for_requests_s: float, for_retries_s: float) -> bool:
        recent = sum(one > now_s - for_requests_s for one in requests)
        tried = sum(one > now_s - for_retries_s for one in retries)
        return tried + 1 <= share * recent + least_per_s * window_s

    for passed_s, wants_retry in steps:
        now_s += passed_s
        if not wants_retry:
            budget.request(now_s)
            requests.append(now_s)
        elif budget.take(now_s):
            assert may(window_s, window_s - 1e-6)  # slots begin at rounded times
            retries.append(now_s)
        else:
            assert not may(window_s - slot_s, window_s + slot_s)


def test_retries_at_the_ends_of_a_window_are_no_two_windows_worth() -> None:
    budget = RetryBudget(RetryBudgetPolicy(share=0))
    assert sum(budget.take(0.99) for _ in range(200)) == 100
    assert not budget.take(10.0)
    assert not budget.take(10.98)
    assert sum(budget.take(11.0) for _ in range(200)) == 100


def test_the_default_is_a_fifth_and_ten_a_second() -> None:
    budget = RetryBudget(RetryBudgetPolicy())
    for _ in range(500):
        budget.request(0.0)
    assert sum(budget.take(1.0) for _ in range(1000)) == 100 + 100
    assert not budget.take(9.9)
    assert not budget.take(11.9)
    assert sum(budget.take(12.0) for _ in range(1000)) == 100, "of no request, the least"


def test_a_budget_of_nothing_allows_nothing() -> None:
    budget = RetryBudget(RetryBudgetPolicy(share=0, least_per_s=0))
    budget.request(0.0)
    assert not budget.take(0.0)


def test_a_clock_that_goes_back_neither_raises_nor_gives_credit() -> None:
    budget = RetryBudget(RetryBudgetPolicy(share=1, least_per_s=0))
    budget.request(100.0)
    assert budget.take(50.0)
    assert not budget.take(0.0)


def test_memory_is_bounded() -> None:
    budget = RetryBudget(RetryBudgetPolicy())
    for i in range(10_000):
        budget.request(i * 0.7)
    assert len(budget._slots) <= SLOTS + 1


@pytest.mark.parametrize(
    "settings", [{"share": -0.1}, {"share": 1.1}, {"least_per_s": -1}, {"window_s": 0}]
)
def test_numbers_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="is wanted"):
        RetryBudgetPolicy(**settings)
