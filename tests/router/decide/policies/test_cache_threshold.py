"""cache-threshold: costs worked out by hand on both sides of the threshold."""

import pytest

from router.decide.policies import POLICIES
from router.decide.policies.cache_threshold import ThresholdParameters, score
from tests.router.decide.policies.scored import best
from tests.stage.fleet import Fleet, prompt
from tests.stage.rows import rows

HOLDER = {"running": 4, "overlap_tokens": 64}
IDLE = {"active_blocks": 50, "total_blocks": 100}


def costs(cache_threshold: float, *workers: dict[str, float]) -> list[float]:
    made: list[float] = score(
        rows(100, *workers), ThresholdParameters(cache_threshold=cache_threshold)
    ).costs.tolist()
    return made


def test_above_the_threshold_new_tokens_decide() -> None:
    # queues 4 and 0 + 0.5 / 1.5
    assert costs(0.63, HOLDER, IDLE) == pytest.approx([36 + 4 / 5, 100 + (1 / 3) / (4 / 3)])


@pytest.mark.parametrize("threshold", [0.64, 1.0])
def test_at_the_threshold_and_below_it_the_queue_decides(threshold: float) -> None:
    assert costs(threshold, HOLDER, IDLE) == pytest.approx([4, 1 / 3])


def test_of_equally_long_prefixes_the_less_loaded_worker_is_cheaper() -> None:
    made = POLICIES["cache-threshold"].score(rows(100, HOLDER, HOLDER | {"running": 3}, IDLE))
    assert best(made) == [1]
    assert made.shared_terms == {"best_share": 0.64, "by_cache": 1.0}


@pytest.mark.parametrize("cannot", [{"excluded": "no"}, {"full": 1.0}])
def test_a_prefix_on_a_worker_that_cannot_be_picked_counts_for_nothing(
    cannot: dict[str, object],
) -> None:
    table = rows(100, HOLDER | cannot, {"running": 2, "overlap_tokens": 16}, IDLE)
    if "full" in cannot:
        table.full[0] = 1.0
    made = POLICIES["cache-threshold"].score(table)
    assert made.shared_terms == {"best_share": 0.16, "by_cache": 0.0}
    assert best(made) == [2]


def test_a_fleet_follows_the_prefix_until_it_is_too_short() -> None:
    fleet = Fleet(policy="cache-threshold")
    fleet.cache(fleet.add("holder", running=1), prompt(3200))
    fleet.add("idle")
    for tokens, expected in ((4800, "holder"), (6400, "idle"), (8000, "idle")):
        decision = fleet.decide(prompt(tokens))
        assert decision.sources[decision.order[0]].key.worker_id == expected, tokens
