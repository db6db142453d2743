"""conductor: each stage of the decision, by hand."""

import pytest

from tests.router.decide.policies.scored import best, score
from tests.stage.fleet import Fleet, prompt
from tests.stage.rows import RATE


def place(host: str, rack: str = "", cluster: str = "") -> dict[str, str]:
    named = {"host": host, "rack": rack, "cluster": cluster}
    return {name: value for name, value in named.items() if value}


def test_under_a_tenth_of_the_prompt_the_least_loaded_is_picked() -> None:
    # 96 of 1000 tokens are cached: 0.096
    scores = score(
        "conductor",
        1000,
        {"overlap_tokens": 96, "running": 2},
        {"running": 1, "active_blocks": 50, "total_blocks": 100},
        {"running": 1, "active_blocks": 40, "total_blocks": 100},
    )
    assert scores.shared_terms == {"hit_ratio": 0.096}
    assert scores.costs == pytest.approx([2e6 + 2, 2e6 + 1 + 0.5 / 1.5, 2e6 + 1 + 0.4 / 1.4])
    assert best(scores) == [2]


def test_from_a_tenth_on_a_holder_wins_however_busy_the_others_are_not() -> None:
    scores = score("conductor", 160, {"overlap_tokens": 16, "running": 30}, {})
    assert scores.shared_terms == {"hit_ratio": 0.1}
    assert best(scores) == [0]


def test_of_the_holders_the_shortest_queue_wins_and_shorter_overlaps_are_none() -> None:
    scores = score(
        "conductor",
        320,
        {"overlap_tokens": 160, "waiting": 3, "reserved": 2},
        {"overlap_tokens": 160, "waiting": 5, "reserved": -1, "running": 9},
        {"overlap_tokens": 144},
    )
    assert scores.row_terms["stage"].tolist() == [0, 0, 1]
    assert scores.row_terms["queue"].tolist() == [5, 4, 0]
    assert best(scores) == [1]


def test_a_holder_may_have_a_queue_of_ten_and_not_of_eleven() -> None:
    for waiting, picked in ((10, 0), (11, 1)):
        scores = score("conductor", 160, {"overlap_tokens": 80, "waiting": waiting}, {})
        assert best(scores) == [picked], waiting


def test_when_no_holder_can_the_nearest_that_fits_is_picked() -> None:
    # Holders are a and b. Distances of c: 1 to a, 3 to b: 2; of d: 0 and 3: 1.5; of e: 2 and 3.
    # 0.7 * 2 + 0.3 * 0 = 1.4; 0.7 * 1.5 + 0.3 * 2 = 1.65; 0.7 * 2.5 + 0 = 1.75
    scores = score(
        "conductor",
        160,
        {"overlap_tokens": 80, "waiting": 11, "labels": place("h1", "r1", "c1")},
        {"overlap_tokens": 80, "excluded": "drained", "labels": place("h9", "r9", "c9")},
        {"labels": place("h2", "r1", "c1")},
        {"labels": place("h1", "r1", "c1"), "waiting": 2},
        {"labels": place("h3", "r2", "c1")},
    )
    assert scores.row_terms["stage"].tolist() == [1, 0, 1, 1, 1]  # the drained one is left out
    assert scores.row_terms["distance"].tolist() == [1.5, 1.5, 2, 1.5, 2.5]
    assert scores.costs[[0, 2, 3, 4]] - 1e6 == pytest.approx([1.05 + 3.3, 1.4, 1.65, 1.75])


def test_what_has_too_few_free_blocks_comes_last_and_then_by_load() -> None:
    # The prompt has 10 blocks, of which one worker uses 4 already.
    scores = score(
        "conductor",
        160,
        {"overlap_tokens": 80, "active_blocks": 94, "total_blocks": 100, "in_use": 4},
        {"overlap_tokens": 80, "active_blocks": 94, "total_blocks": 100},
        {"active_blocks": 91, "total_blocks": 100, "running": 1},
        {"active_blocks": 90, "total_blocks": 100},
    )
    assert scores.row_terms["stage"].tolist() == [0, 2, 2, 1]
    assert scores.costs[2] == pytest.approx(2e6 + 1 + 0.91 / 1.91)


def test_nothing_fits_so_the_least_loaded_is_picked() -> None:
    full = {"active_blocks": 99, "total_blocks": 100}
    scores = score(
        "conductor", 160, {"overlap_tokens": 80, "running": 2} | full, {"running": 1} | full
    )
    assert best(scores) == [1]


def test_an_empty_fleet_of_caches_is_under_the_least_ratio_even_if_that_is_zero() -> None:
    fleet = Fleet("w0", policy="conductor", parameters={"conductor": {"hit_ratio_min": 0}})
    decision = fleet.decide(prompt(64))
    assert decision.scores.row_terms["stage"].tolist() == [2]


def test_it_estimates_queue_cache_load_and_computation() -> None:
    # Under way: 500 + 300 * (1 + (900 - 150)/50000) = 804.5 tokens' worth; here 160 - 64 are new:
    # 500 + 96 * (1 + (160 - 48)/50000) = 596.215...; the host's 64 tokens load at 400,000 a second
    scores = score("conductor", 160, {"host_tokens": 64, "prefills": [(300, 900)]})
    own = 500 + 96 * (1 + 112 / 50_000)
    assert scores.row_terms["latency_s"] == pytest.approx([(804.5 + own) / RATE + 64 / 400_000])


def test_the_worker_nearest_to_a_drained_holder_is_picked() -> None:
    fleet = Fleet(policy="conductor")
    asked = prompt(64)
    holder = fleet.add("holder", labels={"rack": "a"})
    fleet.cache(holder, asked, 32)
    fleet.add("far", labels={"rack": "b"})
    fleet.add("near", labels={"rack": "a"})
    fleet.core.drain("holder")
    assert fleet.picked(asked) == "near"
