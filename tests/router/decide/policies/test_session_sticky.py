"""session-sticky: who keeps whom, and when somebody has too many."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as with_numbers

from router.decide.policies import POLICIES
from tests.router.decide.policies.scored import CHI_SQUARE_7, chi_square, score
from tests.stage.fleet import Fleet, prompt
from tests.stage.rows import rows


def fleet_of(count: int, **about: Any) -> Fleet:
    fleet = Fleet(policy="session-sticky", **about)
    for i in range(count):
        fleet.add(f"w{i}")
    return fleet


def homes(fleet: Fleet, sessions: int = 800) -> dict[int, str]:
    """Where each session would go. Nothing is reserved."""
    found = {}
    for i in range(sessions):
        decision = fleet.decide(prompt(8), session_id=f"s{i}")
        found[i] = decision.rows.workers[decision.order[0]].worker_id
    return found


def test_a_session_stays_whatever_it_asks_and_sessions_spread_evenly() -> None:
    fleet = fleet_of(8)
    held = fleet.route(prompt(64), session_id="a").reservation
    first = held.worker.worker_id
    fleet.report(held, "finished")
    for i in range(3):  # turn by turn: of requests at once, the others go elsewhere
        held = fleet.route(prompt(32, 1000 * i), session_id="a").reservation
        assert held.worker.worker_id == first
        fleet.report(held, "finished")
    assert chi_square(Counter(homes(fleet_of(8)).values()), 8) < CHI_SQUARE_7


def test_the_order_is_the_same_in_every_replica() -> None:
    assert homes(fleet_of(8, seed=1, replica="a"), 50) == homes(
        fleet_of(8, seed=2, replica="b"), 50
    )


def test_a_worker_that_leaves_gives_its_sessions_to_all_others_and_takes_no_other_along() -> None:
    fleet = fleet_of(8)
    before = homes(fleet)
    fleet.core.drain("w3")
    after = homes(fleet)
    moved = Counter(after[i] for i in before if before[i] == "w3")
    assert all(before[i] == after[i] for i in before if before[i] != "w3")
    assert len(moved) == 7
    fleet.core.undrain("w3")
    assert homes(fleet) == before


def test_without_a_session_prompts_that_start_alike_share_a_worker() -> None:
    fleet = fleet_of(8)
    picks = {fleet.decide(prompt(16 + 8 * i)).order[0] for i in range(20)}
    assert len(picks) == 1
    starts = Counter(str(fleet.decide(prompt(16, 100 * i)).order[0]) for i in range(400))
    assert chi_square(starts, 8) < CHI_SQUARE_7


def test_nobody_has_more_than_a_quarter_over_the_mean() -> None:
    # Requests 5 + 1 more over 4 workers: the mean is 1.5, a quarter more is 1.875: so 2 at most.
    scores = score("session-sticky", 8, {"running": 4}, {"running": 1}, {}, {"reserved": -2})
    assert scores.shared_terms == {"share": 2}
    assert scores.row_terms["over"].tolist() == [1, 0, 0, 0]
    assert scores.costs == pytest.approx(scores.row_terms["distance"] + [1, 0, 0, 0])
    fleet = fleet_of(8)
    picks = Counter(fleet.picked(prompt(8), session_id="hot") for _ in range(80))
    assert max(picks.values()) <= 1.25 * 10 + 1
    assert max(picks.values()) >= 12, "the session's own worker is filled first"


def test_a_session_stays_while_its_worker_has_room_by_the_sources_ceiling() -> None:
    fleet = fleet_of(2)
    first = fleet.picked(prompt(8), session_id="a")
    assert fleet.picked(prompt(8), session_id="a") == first, "2 of 2 requests: ceil(1.25 * 2 / 2)"
    assert fleet.picked(prompt(8), session_id="a") != first, "3 of 3: ceil(1.25 * 3 / 2) = 2"


@pytest.mark.parametrize(
    ("requests", "workers", "factor", "share"),
    [(0, 8, 1.25, 1), (7, 8, 1.25, 2), (3, 5, 1.25, 1), (11, 15, 1.25, 1), (9, 11, 1.1, 1)],
)
def test_the_share_is_the_ceiling_and_no_rounding_error_more(
    requests: int, workers: int, factor: float, share: int
) -> None:
    policy = POLICIES["session-sticky"]
    policy = replace(policy, settings=with_numbers(policy.settings, load_factor=factor))
    scores = policy.score(rows(8, {"running": requests}, *[{}] * (workers - 1)))
    assert scores.shared_terms == {"share": share}


def test_a_lone_worker_is_never_over_its_share() -> None:
    scores = score("session-sticky", 8, {"running": 1000})
    assert scores.row_terms["over"].tolist() == [0]
