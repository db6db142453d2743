"""Weighted shares."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.decide.queue_turns.shares import OVERDRAWN_MAX, Shares

COSTS = st.lists(st.integers(1, 1000), min_size=40, max_size=120)
WEIGHTS = {"blue": 1.0, "red": 2.0, "green": 5.0}


def entered(*flows: str) -> Shares[str]:
    shares: Shares[str] = Shares()
    for flow in flows:
        shares.enter(flow)
    return shares


def turns_of(shares: Shares[str], count: int, **weights: float) -> list[str]:
    """Whose turns come next, where each request costs 10. weights: 1 by default."""
    turns = []
    for _ in range(count):
        flow = next(iter(shares))
        shares.charge(flow, 10.0, weights.get(flow, 1.0))
        turns.append(flow)
    return turns


@settings(max_examples=25)
@given(costs=COSTS)
def test_over_any_window_shares_differ_by_one_largest_request_of_each(costs: list[int]) -> None:
    shares = entered(*WEIGHTS)
    served: list[dict[str, float]] = [dict.fromkeys(WEIGHTS, 0.0)]
    largest = dict.fromkeys(WEIGHTS, 0.0)
    for cost in costs:
        flow = next(iter(shares))
        shares.charge(flow, cost, WEIGHTS[flow])
        largest[flow] = max(largest[flow], cost)
        served.append(served[-1] | {flow: served[-1][flow] + cost})
    for start in range(0, len(served), 7):
        for end in served[start:]:
            got = {flow: (end[flow] - served[start][flow]) / WEIGHTS[flow] for flow in WEIGHTS}
            for one in WEIGHTS:
                for other in WEIGHTS:
                    bound = largest[one] / WEIGHTS[one] + largest[other] / WEIGHTS[other]
                    assert abs(got[one] - got[other]) <= bound + 1e-6


def test_equal_requests_of_weights_1_and_3_go_in_these_turns() -> None:
    shares = entered("blue", "red")
    turns = turns_of(shares, 8, red=3.0)
    assert turns.count("blue") == 2
    assert turns[:2] == ["blue", "red"], "equal starts go in the order of arrival"


def test_a_flow_that_comes_late_gets_its_share_and_nothing_for_the_past() -> None:
    shares = entered("blue")
    for _ in range(100):
        shares.charge("blue", 10.0, 1.0)
    shares.enter("red")
    assert turns_of(shares, 10).count("red") in (5, 6)


def test_a_flow_that_leaves_overdrawn_comes_back_behind() -> None:
    shares = entered("blue", "red")
    shares.charge("blue", 100.0, 1.0)
    shares.leave("blue")
    shares.enter("blue")
    assert list(shares) == ["red", "blue"]
    for _ in range(9):
        shares.charge("red", 10.0, 1.0)
    assert next(iter(shares)) == "red", "90 of 100"


def test_a_flow_without_room_keeps_a_claim_of_one_largest_request() -> None:
    shares = entered("blue", "red")
    for _ in range(1000):
        shares.charge("red", 10.0, 1.0)  # blue had the turn, and no room
    assert turns_of(shares, 6) == ["blue", "blue", "red", "blue", "red", "blue"]


def test_nothing_is_remembered_of_a_time_without_waiting_requests() -> None:
    shares = entered("blue", "red")
    shares.charge("blue", 1000.0, 1.0)
    for flow in ("blue", "red"):
        shares.leave(flow)
    assert (len(shares), len(shares._finishes)) == (0, 0)
    shares.enter("blue")
    shares.enter("red")
    assert list(shares) == ["blue", "red"]


def test_overdrawn_flows_are_remembered_to_a_bound() -> None:
    shares = entered("stays")
    for number in range(OVERDRAWN_MAX + 10):
        shares.enter(str(number))
        shares.charge(str(number), 1e9, 1.0)
        shares.leave(str(number))
        assert len(shares._finishes) <= OVERDRAWN_MAX
    assert list(shares) == ["stays"]


def test_a_flow_that_does_not_wait_has_nothing_to_pay() -> None:
    with pytest.raises(KeyError):
        entered("blue").charge("red", 1.0, 1.0)
