"""dynamo-logit: golden numbers worked out by hand, degenerate fleets."""

import pytest

from tests.router.decide.policies.scored import best, score


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
