"""The yardsticks."""

from collections import Counter

import pytest

from tests.router.decide.policies.scored import best, score
from tests.stage.fleet import Fleet, prompt


class TestBaselines:
    def test_least_loaded_counts_requests_first_and_load_second(self) -> None:
        # 2 + 0.5/1.5, 2 + 0.25/1.25, 3 + 0
        scores = score(
            "least-loaded",
            10,
            {"running": 1, "waiting": 1, "active_blocks": 50, "total_blocks": 100},
            {"running": 1, "reserved": 1, "active_blocks": 25, "total_blocks": 100},
            {"running": 3, "total_blocks": 100},
        )
        assert scores.costs == pytest.approx([2 + 1 / 3, 2 + 1 / 5, 3.0])

    def test_no_load_however_large_outweighs_one_request(self) -> None:
        scores = score(
            "least-loaded", 10, {"active_blocks": 1e9, "total_blocks": 1}, {"running": 1}
        )
        assert best(scores) == [0]

    def test_round_robin_takes_whose_turn_is_longest_ago(self) -> None:
        scores = score(
            "round-robin", 10, {"last_picked": 7}, {"last_picked": 3}, {"last_picked": 5}
        )
        assert scores.costs.tolist() == [7, 3, 5]

    def test_round_robin_visits_all_evenly_as_workers_come_and_go(self) -> None:
        fleet = Fleet("w0", "w1", "w2", policy="round-robin")
        visits = Counter(fleet.picked(prompt(8)) for _ in range(9))
        assert visits == {"w0": 3, "w1": 3, "w2": 3}
        fleet.add("w3")
        assert fleet.picked(prompt(8)) == "w3"  # never picked: its turn is longest ago
        visits = Counter(fleet.picked(prompt(8)) for _ in range(8))
        assert visits == {"w0": 2, "w1": 2, "w2": 2, "w3": 2}
        fleet.core.remove("w1", 60.0, fleet.now_s)
        visits = Counter(fleet.picked(prompt(8)) for _ in range(9))
        assert visits == {"w0": 3, "w2": 3, "w3": 3}
        fleet.core.drain("w0")
        visits = Counter(fleet.picked(prompt(8)) for _ in range(4))
        assert visits == {"w2": 2, "w3": 2}
        fleet.core.undrain("w0")
        visits = Counter(fleet.picked(prompt(8)) for _ in range(6))
        assert visits == {"w0": 2, "w2": 2, "w3": 2}
