"""Ties are broken at random, evenly."""

from collections import Counter

import pytest

from router.decide.policies import POLICIES
from tests.router.decide.policies.scored import CHI_SQUARE_7, best, chi_square, score
from tests.stage.fleet import Fleet, prompt

NAMES = sorted(POLICIES.keys() - {"session-sticky"})  # each of its keys has an order of workers


class TestTies:
    @pytest.mark.parametrize("policy", NAMES)
    def test_equal_rows_tie_under_every_policy(self, policy: str) -> None:
        same = {
            "active_blocks": 17,
            "total_blocks": 70,
            "overlap_tokens": 33,
            "running": 3,
            "waiting": 2,
            "reserved": 1,
            "total_slots": 7,
            "last_picked": 4,
        }
        assert best(score(policy, 100, *[same] * 37)) == list(range(37))

    @pytest.mark.parametrize("policy", NAMES)
    def test_picks_among_ties_spread_evenly_and_so_do_second_choices(self, policy: str) -> None:
        fleet = Fleet(policy=policy)
        for i in range(8):
            fleet.add(f"w{i}")
        first: Counter[str] = Counter()
        second: Counter[str] = Counter()
        for _ in range(1600):
            decision = fleet.decide(prompt(8))
            assert decision.tied == 8
            first[decision.rows.workers[decision.order[0]].worker_id] += 1
            second[decision.rows.workers[decision.order[1]].worker_id] += 1
        assert chi_square(first, 8) < CHI_SQUARE_7
        assert chi_square(second, 8) < CHI_SQUARE_7

    def test_the_same_seed_makes_the_same_picks(self) -> None:
        def picks(seed: int) -> list[str]:
            fleet = Fleet(policy="least-loaded", seed=seed)
            for i in range(5):
                fleet.add(f"w{i}")
            return [fleet.picked(prompt(8)) for _ in range(30)]

        assert picks(1) == picks(1)
        assert picks(1) != picks(2)

    def test_a_tie_does_not_reach_beyond_the_tied(self) -> None:
        fleet = Fleet(alternatives=5)
        asked = prompt(32)
        for i in range(6):
            fleet.cache(fleet.add(f"w{i}"), asked, 16 if i in (2, 4) else 0)
        for _ in range(20):
            decision = fleet.decide(asked)
            assert decision.tied == 2
            assert set(decision.order[:2]) == {2, 4}
            assert sorted(decision.order) == [0, 1, 2, 3, 4, 5]
