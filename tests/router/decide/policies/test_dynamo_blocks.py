"""dynamo-blocks: golden numbers worked out by hand, degenerate fleets."""

from collections import Counter
from dataclasses import replace
from math import exp
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as with_numbers

from router.decide.policies import POLICIES
from router.decide.policies.policy import Scores
from tests.router.decide.policies.scored import best, score
from tests.stage.fleet import Fleet, prompt
from tests.stage.rows import rows


def configured(numbers: dict[str, float], prompt_tokens: int, *workers: dict[str, Any]) -> Scores:
    policy = POLICIES["dynamo-blocks"]
    changed = replace(policy, settings=with_numbers(policy.settings, **numbers))
    return changed.score(rows(prompt_tokens, *workers))


def test_blocks_to_prefill_less_what_is_cached_and_blocks_in_use() -> None:
    # A prompt of 1600 tokens is 100 blocks of 16.
    # a: raw (800 + 1600)/16 = 150; credit 640/16 * 1 + 160/16 * 0.75 + 320/16 * 0.25
    #    = 40 + 7.5 + 5 = 52.5; to prefill 97.5; active 30, and 100 blocks of which 20 are in use
    # b: raw 1600/16 = 100; credit 0; active 10, and 100 new ones
    # c: raw (160 + 1600)/32 = 55; credit 320/32 = 10; active 5, and ceil(1600/32) = 50
    scores = score(
        "dynamo-blocks",
        1600,
        {
            "prefill_tokens_active": 800,
            "device_tokens": 640,
            "host_tokens": 160,
            "disk_tokens": 320,
            "active_blocks": 30,
            "in_use": 20,
        },
        {"active_blocks": 10},
        {"prefill_tokens_active": 160, "device_tokens": 320, "active_blocks": 5, "block_size": 32},
    )
    assert scores.costs.tolist() == [97.5 + 30 + 80, 100 + 10 + 100, 45 + 5 + 50]
    assert best(scores) == [2]
    assert scores.chances is None


def test_the_scale_weighs_prefill_and_the_weight_counts_requests() -> None:
    workers = {"running": 3, "waiting": 1, "active_blocks": 8}, {"device_tokens": 80}
    scores = configured({"prefill_load_scale": 4, "request_weight": 2.5}, 160, *workers)
    assert scores.costs.tolist() == [4 * 10 + 18 + 2.5 * 4, 4 * 5 + 10]


def test_more_credit_than_prefill_is_no_gain() -> None:
    scores = configured({"overlap_credit": 3}, 160, {"device_tokens": 80}, {"device_tokens": 48})
    assert scores.costs.tolist() == [0 + 10, 10 - 9 + 10]


def test_credit_decays_with_the_backlog_above_the_least_loaded() -> None:
    # Backlogs over the least of those that can be picked (160): 320/160 = 2 requests, 0, and that
    # of the drained one is not below none. Credits 10/(1 + 0.5 * 2) = 5, 10, 10.
    scores = configured(
        {"credit_decay": 0.5},
        320,
        {"prefill_tokens_active": 800, "device_tokens": 160},
        {"prefill_tokens_active": 160, "device_tokens": 160},
        {"prefill_tokens_active": 0, "device_tokens": 160, "excluded": "drained"},
    )
    assert scores.row_terms["credit"].tolist() == [10 / (1 + 0.5 * 640 / 320), 10, 10]
    assert scores.costs.tolist() == [70 - 5 + 20, 30 - 10 + 20, 20 - 10 + 20]


def test_a_decay_of_an_all_excluded_fleet_is_a_number() -> None:
    scores = configured({"credit_decay": 1}, 16, {"excluded": "drained", "device_tokens": 16})
    assert scores.costs.tolist() == [0 + 1]


def test_above_zero_degrees_chances_fall_with_the_cost_normalised_by_its_range() -> None:
    # costs 20, 30, 40: normalised 0, 0.5, 1; at 0.5 degrees exp(0), exp(-1), exp(-2)
    workers = {}, {"active_blocks": 10}, {"active_blocks": 20}, {"excluded": "no"}
    scores = configured({"temperature": 0.5}, 160, *workers)
    weights = np.array([1, exp(-1), exp(-2), 0])
    assert scores.chances == pytest.approx(weights / weights.sum())


def test_equal_costs_have_equal_chances_at_every_temperature() -> None:
    for temperature in (0.001, 1, 1000):
        scores = configured({"temperature": temperature}, 160, {}, {}, {"active_blocks": 0})
        assert scores.chances == pytest.approx([1 / 3] * 3)


def test_hardly_above_zero_degrees_the_lowest_cost_wins() -> None:
    scores = configured({"temperature": 1e-9}, 160, {"active_blocks": 1}, {}, {"active_blocks": 9})
    assert scores.chances == pytest.approx([0, 1, 0])


def test_picks_are_drawn_and_their_chance_is_in_the_receipt() -> None:
    numbers = {"dynamo-blocks": {"temperature": 1.0}}
    fleet = Fleet(policy="dynamo-blocks", parameters=numbers)
    fleet.say(fleet.add("busy"), used_blocks=100.0)
    fleet.add("idle")
    picks: Counter[str] = Counter()
    for _ in range(600):
        decision = fleet.decide(prompt(16))
        assert decision.scores.row_terms["chance"] == pytest.approx(
            [exp(-1) / (1 + exp(-1)), 1 / (1 + exp(-1))]
        )
        # by the order of their names: busy, then idle
        draw, (busy, _) = decision.scores.shared_terms["draw"], decision.scores.chances
        assert decision.order[0] == (0 if draw < busy else 1)
        picks[decision.rows.workers[decision.order[0]].worker_id] += 1
    assert picks["busy"] == pytest.approx(600 * 0.269, abs=55)  # five standard deviations
    assert picks.total() == 600
