"""dynamo-adaptive, and dynamo-unguarded, which has the published weights: golden numbers worked
out by hand, degenerate fleets."""

from math import sqrt

import pytest

from tests.router.decide.policies.scored import best, score
from tests.stage.fleet import Fleet, prompt


class TestDynamoAdaptive:
    def test_in_balance_mode_load_weighs_seven_tenths(self) -> None:
        # loads: 80/100 = 0.8, 20/100 = 0.2, 20/100 = 0.2
        # mean = 1.2 / 3 = 0.4; deviations 0.4, -0.2, -0.2
        # std = sqrt((0.16 + 0.04 + 0.04) / 3) = sqrt(0.08) = 0.2828... > 0.1 * 0.4 = 0.04
        # so alpha = 0.7
        # new shares of 1000 tokens: 200/1000 = 0.2, 1000/1000 = 1, 600/1000 = 0.6
        # slots: (4 + 1 + 0)/10 = 0.5, (0 + 0 + 2)/10 = 0.2, unknown = 0
        scores = score(
            "dynamo-unguarded",
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
            "dynamo-unguarded",
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
            "dynamo-unguarded",
            10,
            {"active_blocks": 5625, "total_blocks": 10000},
            {"active_blocks": 6875, "total_blocks": 10000},
        )
        assert even.shared_terms["alpha"] == 0.3
        uneven = score(
            "dynamo-unguarded",
            10,
            {"active_blocks": 5624, "total_blocks": 10000},
            {"active_blocks": 6876, "total_blocks": 10000},
        )
        assert uneven.shared_terms["alpha"] == 0.7

    def test_an_idle_fleet_has_a_mean_of_zero_and_is_even(self) -> None:
        scores = score(
            "dynamo-unguarded",
            100,
            {"total_blocks": 100, "overlap_tokens": 50},
            {"total_blocks": 100},
        )
        assert scores.shared_terms == {"load_mean": 0.0, "load_std": 0.0, "alpha": 0.3}
        assert scores.costs == pytest.approx([0.7 * 0.5, 0.7 * 1.0])

    def test_the_queue_term_breaks_what_else_would_tie(self) -> None:
        # Same load, same prompt; (3 + 2 + 1)/8 = 0.75 and (1 + 0 + 1)/8 = 0.25 of the slots.
        scores = score(
            "dynamo-unguarded",
            100,
            {"running": 3, "waiting": 2, "reserved": 1, "total_slots": 8},
            {"running": 1, "waiting": 0, "reserved": 1, "total_slots": 8},
        )
        assert scores.costs == pytest.approx([0.7 + 0.1 * 0.75, 0.7 + 0.1 * 0.25])

    def test_load_weighs_less_in_the_default_than_in_the_published_formula(self) -> None:
        idle = score("dynamo-adaptive", 100, {"total_blocks": 100}, {"total_blocks": 100})
        assert idle.shared_terms["alpha"] == 0.2
        busy = {"active_blocks": 50, "total_blocks": 100}
        uneven = score("dynamo-adaptive", 100, {"total_blocks": 100}, busy)
        assert uneven.shared_terms["alpha"] == 0.3
        assert uneven.costs == pytest.approx([0.3 * -0.25 + 0.7, 0.3 * 0.25 + 0.7])

    def test_prompts_that_a_worker_has_still_to_compute_count_as_new_work_does(self) -> None:
        rows = (
            {"prefill_tokens_active": 150, "overlap_tokens": 80},
            {"prefill_tokens_active": 0, "overlap_tokens": 0},
        )
        scores = score("dynamo-adaptive", 100, *rows)
        assert scores.costs == pytest.approx([0.8 * (0.2 + 1.5), 0.8 * 1.0])
        assert scores.row_terms["queue_share"].tolist() == [1.5, 0.0]
        assert best(scores) == [1]
        assert score("dynamo-unguarded", 100, *rows).costs == pytest.approx([0.7 * 0.2, 0.7])

    def test_tokens_that_have_to_go_for_its_blocks_count_as_new_ones(self) -> None:
        # 1000 tokens are 62.5 blocks. There is room for all beside 112 recent ones of 200; for half
        # of them, 31.25, of 143.25; for none where all are recent; and who knows of the last one.
        recent = {"recent_blocks": 112}
        rows = (
            {**recent, "total_blocks": 200},
            {**recent, "total_blocks": 143.25},
            {**recent, "total_blocks": 100},
            recent,
        )
        scores = score("dynamo-adaptive", 1000, *rows)
        assert scores.row_terms["evicted_share"] == pytest.approx([0, 0.5, 1, 0])
        assert scores.costs == pytest.approx([0.8, 1.5 * 0.8, 2 * 0.8, 0.8])
        assert score("dynamo-unguarded", 1000, *rows).costs == pytest.approx([0.7] * 4)

    def test_tokens_that_count_for_later_prompts_do_not_count_for_this_one(self) -> None:
        rows = ({"overlap_tokens": 80}, {"invested_tokens": 60})
        scores = score("dynamo-adaptive", 100, *rows)
        assert scores.row_terms["invested_share"].tolist() == [0, 0.6]
        assert scores.costs == pytest.approx([0.8 * 0.2, 0.8 * 0.4])

    def test_an_unknown_total_is_a_load_of_zero_and_says_so(self) -> None:
        # loads: unknown = 0, 50/100 = 0.5; mean 0.25; std 0.25 > 0.025: alpha = 0.7
        scores = score(
            "dynamo-unguarded",
            10,
            {"active_blocks": 50},
            {"active_blocks": 50, "total_blocks": 100},
        )
        assert scores.costs == pytest.approx([0.7 * -0.25 + 0.3, 0.7 * 0.25 + 0.3])
        assert scores.row_terms["total_blocks_unknown"].tolist() == [1.0, 0.0]

    def test_one_worker_deviates_from_nobody(self) -> None:
        scores = score(
            "dynamo-unguarded",
            100,
            {"active_blocks": 90, "total_blocks": 100, "overlap_tokens": 96, "running": 1},
        )
        assert scores.costs == pytest.approx([0.3 * 0 + 0.7 * 0.04])

    def test_means_go_over_excluded_workers_too(self) -> None:
        fleet = Fleet()
        idle, busy = fleet.add("idle"), fleet.add("busy")
        fleet.say(busy, used_blocks=1000.0)  # full
        decision = fleet.decide(prompt(8))
        assert decision.rows.workers == (idle, busy)
        assert decision.excluded == ["", "full"]
        # loads 0 and 1: mean 0.5
        assert decision.scores.shared_terms["load_mean"] == 0.5
