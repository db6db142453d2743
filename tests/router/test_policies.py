"""Policies: golden numbers worked out by hand, degenerate fleets, laws."""

import random
from collections import Counter
from math import nan, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.candidates import COLUMNS
from router.policies import POLICIES
from router.policies.policy import Scores
from tests.router.fleet import Fleet, prompt
from tests.router.rows import rows

NAMES = sorted(POLICIES)


def score(policy: str, *args: Any) -> Scores:
    return POLICIES[policy].score(rows(*args))


def best(scores: Scores) -> list[int]:
    """The rows that tie for the lowest cost."""
    return np.flatnonzero(scores.costs == scores.costs.min()).tolist()


class TestDynamoAdaptive:
    def test_in_balance_mode_load_weighs_seven_tenths(self) -> None:
        # loads: 80/100 = 0.8, 20/100 = 0.2, 20/100 = 0.2
        # mean = 1.2 / 3 = 0.4; deviations 0.4, -0.2, -0.2
        # std = sqrt((0.16 + 0.04 + 0.04) / 3) = sqrt(0.08) = 0.2828... > 0.1 * 0.4 = 0.04
        # so alpha = 0.7
        # new shares of 1000 tokens: 200/1000 = 0.2, 1000/1000 = 1, 600/1000 = 0.6
        # slots: (4 + 1 + 0)/10 = 0.5, (0 + 0 + 2)/10 = 0.2, unknown = 0
        scores = score(
            "dynamo-adaptive",
            1000,
            {
                "active_blocks": 80,
                "total_blocks": 100,
                "overlap_tokens": 800,
                "running": 4,
                "waiting": 1,
                "total_slots": 10,
            },
            {"active_blocks": 20, "total_blocks": 100, "reserved": 2, "total_slots": 10},
            {"active_blocks": 20, "total_blocks": 100, "overlap_tokens": 400, "running": 9},
        )
        assert scores.costs == pytest.approx(
            [
                0.7 * 0.4 + 0.3 * 0.2 + 0.1 * 0.5,  # 0.28 + 0.06 + 0.05 = 0.39
                0.7 * -0.2 + 0.3 * 1.0 + 0.1 * 0.2,  # -0.14 + 0.3 + 0.02 = 0.18
                0.7 * -0.2 + 0.3 * 0.6 + 0.1 * 0.0,  # -0.14 + 0.18 = 0.04
            ]
        )
        assert scores.costs == pytest.approx([0.39, 0.18, 0.04])
        assert best(scores) == [2]
        assert scores.shared_terms == pytest.approx(
            {"load_mean": 0.4, "load_std": sqrt(0.08), "alpha": 0.7}
        )

    def test_in_an_even_fleet_new_work_weighs_seven_tenths(self) -> None:
        # loads 0.50 and 0.52; mean 0.51; deviations -0.01, 0.01; std 0.01 < 0.1 * 0.51: alpha = 0.3
        scores = score(
            "dynamo-adaptive",
            100,
            {"active_blocks": 50, "total_blocks": 100, "overlap_tokens": 32},
            {"active_blocks": 52, "total_blocks": 100, "overlap_tokens": 64},
        )
        assert scores.costs == pytest.approx(
            [
                0.3 * -0.01 + 0.7 * 0.68,  # -0.003 + 0.476 = 0.473
                0.3 * 0.01 + 0.7 * 0.36,  # 0.003 + 0.252 = 0.255
            ]
        )
        assert scores.costs == pytest.approx([0.473, 0.255])

    def test_a_deviation_of_just_a_tenth_is_still_even(self) -> None:
        # loads 0.5625 and 0.6875: mean 0.625, std 0.0625, which is just 0.1 * 0.625
        even = score(
            "dynamo-adaptive",
            10,
            {"active_blocks": 5625, "total_blocks": 10000},
            {"active_blocks": 6875, "total_blocks": 10000},
        )
        assert even.shared_terms["alpha"] == 0.3
        uneven = score(
            "dynamo-adaptive",
            10,
            {"active_blocks": 5624, "total_blocks": 10000},
            {"active_blocks": 6876, "total_blocks": 10000},
        )
        assert uneven.shared_terms["alpha"] == 0.7

    def test_an_idle_fleet_has_a_mean_of_zero_and_is_even(self) -> None:
        scores = score(
            "dynamo-adaptive",
            100,
            {"total_blocks": 100, "overlap_tokens": 50},
            {"total_blocks": 100},
        )
        assert scores.shared_terms == {"load_mean": 0.0, "load_std": 0.0, "alpha": 0.3}
        assert scores.costs == pytest.approx([0.7 * 0.5, 0.7 * 1.0])

    def test_the_queue_term_breaks_what_else_would_tie(self) -> None:
        # Same load, same prompt; (3 + 2 + 1)/8 = 0.75 and (1 + 0 + 1)/8 = 0.25 of the slots.
        scores = score(
            "dynamo-adaptive",
            100,
            {"running": 3, "waiting": 2, "reserved": 1, "total_slots": 8},
            {"running": 1, "waiting": 0, "reserved": 1, "total_slots": 8},
        )
        assert scores.costs == pytest.approx([0.7 + 0.1 * 0.75, 0.7 + 0.1 * 0.25])

    def test_an_unknown_total_is_a_load_of_zero_and_says_so(self) -> None:
        # loads: unknown = 0, 50/100 = 0.5; mean 0.25; std 0.25 > 0.025: alpha = 0.7
        scores = score(
            "dynamo-adaptive",
            10,
            {"active_blocks": 50},
            {"active_blocks": 50, "total_blocks": 100},
        )
        assert scores.costs == pytest.approx([0.7 * -0.25 + 0.3, 0.7 * 0.25 + 0.3])
        assert scores.row_terms["total_blocks_unknown"].tolist() == [1.0, 0.0]

    def test_one_worker_deviates_from_nobody(self) -> None:
        scores = score(
            "dynamo-adaptive",
            100,
            {"active_blocks": 90, "total_blocks": 100, "overlap_tokens": 96, "running": 1},
        )
        assert scores.costs == pytest.approx([0.3 * 0 + 0.7 * 0.04])

    def test_means_go_over_excluded_workers_too(self) -> None:
        fleet = Fleet()
        idle, busy = fleet.add("idle"), fleet.add("busy")
        fleet.say(busy, used_blocks=1000.0)  # full
        decision = fleet.core.decide(fleet.request(prompt(8)), fleet.now_s)
        assert decision.rows.workers == (idle, busy)
        assert decision.excluded == ["", "full"]
        # loads 0 and 1: mean 0.5
        assert decision.scores.shared_terms["load_mean"] == 0.5


class TestDynamoLogit:
    def test_twice_the_cached_share_less_usage_less_queue(self) -> None:
        # overlap shares 320/400 = 0.8, 0, 160/400 = 0.4; usage 0.5, 0.1, unknown = 0
        # waiting 3, 1, 0 and on their way 1, 0, 2: queues 4, 1, 2; longest 4: 1, 0.25, 0.5
        scores = score(
            "dynamo-logit",
            400,
            {
                "overlap_tokens": 320,
                "active_blocks": 50,
                "total_blocks": 100,
                "waiting": 3,
                "reserved": 1,
            },
            {"active_blocks": 10, "total_blocks": 100, "waiting": 1},
            {"overlap_tokens": 160, "active_blocks": 10, "reserved": 2},
        )
        assert scores.costs == pytest.approx(
            [
                -(2 * 0.8 - 0.5 - 1.0),  # -0.1
                -(2 * 0.0 - 0.1 - 0.25),  # 0.35
                -(2 * 0.4 - 0.0 - 0.5),  # -0.3
            ]
        )
        assert scores.costs == pytest.approx([-0.1, 0.35, -0.3])
        assert scores.shared_terms == {"waiting_max": 4.0}

    def test_when_nobody_waits_the_queue_counts_for_nothing(self) -> None:
        scores = score("dynamo-logit", 100, {"overlap_tokens": 32}, {"running": 5})
        assert scores.costs == pytest.approx([-0.64, 0.0])
        assert scores.row_terms["queue_share"].tolist() == [0.0, 0.0]

    def test_an_all_zero_fleet_is_a_tie(self) -> None:
        assert best(score("dynamo-logit", 100, {}, {}, {})) == [0, 1, 2]

    def test_requests_that_ended_since_the_sample_are_no_queue_below_none(self) -> None:
        # Five were running at the sample and have ended since: reserved is -5.
        scores = score(
            "dynamo-logit", 100, {"running": 5, "reserved": -5}, {}, {"waiting": 1, "reserved": 0}
        )
        assert scores.costs.tolist() == [0.0, 0.0, 1.0]

    def test_requests_that_ended_since_the_sample_shorten_the_queue(self) -> None:
        scores = score("dynamo-logit", 100, {"waiting": 4, "reserved": -2}, {"waiting": 4})
        assert scores.costs == pytest.approx([0.5, 1.0])


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

    def test_random_makes_no_difference(self) -> None:
        assert score("random", 10, {"running": 9}, {}).costs.tolist() == [0, 0]

    def test_round_robin_visits_all_evenly_as_workers_come_and_go(self) -> None:
        fleet = Fleet(policy="round-robin")
        for i in range(3):
            fleet.add(f"w{i}")
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

    def test_random_spreads_evenly(self) -> None:
        fleet = Fleet(policy="random")
        for i in range(8):
            fleet.add(f"w{i}", total_blocks=None, total_slots=None)
        assert chi_square(Counter(fleet.picked(prompt(8)) for _ in range(1600)), 8) < CHI_SQUARE_7


CHI_SQUARE_7 = 24.3
"""7 degrees of freedom: exceeded by one fair die in a thousand. The seeds are fixed."""


def chi_square(counts: Counter[str], kinds: int) -> float:
    expected = counts.total() / kinds
    seen = [*counts.values(), *[0] * (kinds - len(counts))]
    return sum((count - expected) ** 2 / expected for count in seen)


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

    def test_picks_among_ties_spread_evenly_and_so_do_second_choices(self) -> None:
        fleet = Fleet()
        for i in range(8):
            fleet.add(f"w{i}")
        first: Counter[str] = Counter()
        second: Counter[str] = Counter()
        for _ in range(1600):
            decision = fleet.core.decide(fleet.request(prompt(8)), fleet.now_s)
            assert decision.tied == 8
            first[decision.rows.workers[decision.order[0]].worker_id] += 1
            second[decision.rows.workers[decision.order[1]].worker_id] += 1
        assert chi_square(first, 8) < CHI_SQUARE_7
        assert chi_square(second, 8) < CHI_SQUARE_7

    def test_the_same_seed_makes_the_same_picks(self) -> None:
        def picks(seed: int) -> list[str]:
            fleet = Fleet(policy="random", seed=seed)
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
            decision = fleet.core.decide(fleet.request(asked), fleet.now_s)
            assert decision.tied == 2
            assert set(decision.order[:2]) == {2, 4}
            assert sorted(decision.order) == [0, 1, 2, 3, 4, 5]


counts = st.integers(0, 200).map(float)
totals = st.integers(1, 200).map(float) | st.just(nan)
worker_rows = st.fixed_dictionaries(
    {
        "overlap_tokens": st.integers(0, 60).map(lambda blocks: 16.0 * blocks),
        "active_blocks": counts,
        "total_blocks": totals,
        "running": counts,
        "waiting": counts,
        "reserved": st.integers(-50, 50).map(float),
        "total_slots": totals,
        "last_picked": counts,
    }
)
fleets = st.lists(worker_rows, min_size=1, max_size=12)
LAW = settings(derandomize=True, deadline=None, max_examples=60)


class TestLaws:
    @LAW
    @given(fleets, st.randoms(use_true_random=False))
    @pytest.mark.parametrize("policy", NAMES)
    def test_permuting_workers_permutes_costs(
        self, policy: str, fleet: list[dict[str, float]], rng: random.Random
    ) -> None:
        order = list(range(len(fleet)))
        rng.shuffle(order)
        costs = score(policy, 960, *fleet).costs
        permuted = score(policy, 960, *[fleet[i] for i in order]).costs
        assert permuted == pytest.approx(costs[order])

    @LAW
    @given(fleets, st.data())
    @pytest.mark.parametrize("policy", NAMES)
    def test_more_overlap_never_makes_a_worker_worse_nor_another_better(
        self, policy: str, fleet: list[dict[str, float]], data: st.DataObject
    ) -> None:
        i = data.draw(st.integers(0, len(fleet) - 1))
        more = data.draw(st.integers(int(fleet[i]["overlap_tokens"]) // 16, 60))
        richer = [dict(worker) for worker in fleet]
        richer[i]["overlap_tokens"] = 16.0 * more
        before = score(policy, 960, *fleet).costs
        after = score(policy, 960, *richer).costs
        assert after[i] <= before[i]
        others = [j for j in range(len(fleet)) if j != i]
        assert after[others].tolist() == before[others].tolist()

    @LAW
    @given(fleets)
    @pytest.mark.parametrize("policy", NAMES)
    def test_costs_and_terms_are_finite_whatever_is_unknown(
        self, policy: str, fleet: list[dict[str, float]]
    ) -> None:
        scores = score(policy, 960, *fleet)
        assert scores.costs.shape == (len(fleet),)
        assert np.isfinite(scores.costs).all()
        assert all(np.isfinite(column).all() for column in scores.row_terms.values())
        assert all(np.isfinite(term) for term in scores.shared_terms.values())

    @pytest.mark.parametrize("policy", NAMES)
    def test_a_policy_says_its_formula_and_changes_no_row(self, policy: str) -> None:
        entry = POLICIES[policy]
        assert entry.name == policy
        assert entry.summary
        assert entry.formula
        frozen = rows(100, {"running": 3, "overlap_tokens": 16}, {"total_blocks": 5})
        for name in (*COLUMNS, "overlap_tokens", "new_tokens"):
            getattr(frozen, name).setflags(write=False)
        entry.score(frozen)  # writing to a column would raise
