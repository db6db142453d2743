"""Points of the last hour: differences of totals, within bounds."""

import random
from itertools import pairwise

import pytest

from router.decide.core.tally import TIERS, PickTally
from router.decide.queue.views import OTHER
from router.fleet.health.time_check import TimeCheck
from router.observe.views.history import NAMES_MAX, POINT_S, POINTS_MAX, History, Totals, Waiting

NOBODY = Waiting()


def test_a_point_is_the_difference_of_two_readings() -> None:
    history = History(100.0, Totals(picks=50, prompt_tokens=1000, taken_tokens=1000))
    totals = Totals(
        picks=250,
        prompt_tokens=3000,
        reachable_tokens=1500,
        taken_tokens=2000,
        predicted=4,
        predicted_s=2.0,
        measured=2,
        measured_s=3.0,
    )
    point = history.add(110.0, totals, Waiting({"normal": 3}, {"acme": 2, "zeta": 1}))
    assert point is not None
    assert point.picks_per_s == 20.0
    assert (point.hit_taken, point.hit_reachable) == (0.5, 0.75)
    assert (point.ttft_predicted_s, point.ttft_measured_s) == (0.5, 1.5)
    assert point.bands == {"normal": 3}
    assert point.tenants == {"acme": 2, "zeta": 1}
    assert history.points == (point,)


def test_a_ratio_without_a_denominator_is_unknown_rather_than_zero() -> None:
    history = History(0.0, Totals(picks=7, prompt_tokens=10, taken_tokens=10))
    point = history.add(10.0, Totals(picks=7, prompt_tokens=10, taken_tokens=10), NOBODY)
    assert point is not None
    assert point.picks_per_s == 0.0
    assert point.hit_taken is point.hit_reachable is None
    assert point.ttft_predicted_s is point.ttft_measured_s is None


def test_a_reading_before_its_time_changes_nothing() -> None:
    history = History(0.0, Totals())
    assert history.add(POINT_S - 0.5, Totals(picks=10), NOBODY) is None
    assert history.points == ()
    point = history.add(POINT_S, Totals(picks=30), NOBODY)
    assert point is not None
    assert point.picks_per_s == 3.0


def test_a_late_reading_makes_one_longer_point() -> None:
    history = History(0.0, Totals())
    point = history.add(40.0, Totals(picks=80), NOBODY)
    assert point is not None
    assert point.picks_per_s == 2.0
    assert not history.is_due(49.0)
    assert history.is_due(50.0)


def test_the_oldest_point_goes_at_the_bound() -> None:
    history = History(0.0, Totals())
    for i in range(1, POINTS_MAX + 2):
        history.add(i * POINT_S, Totals(picks=i), NOBODY)
    assert len(history.points) == POINTS_MAX
    assert history.points[0].at_s == 2 * POINT_S
    assert history.points[-1].at_s == (POINTS_MAX + 1) * POINT_S


def test_tenants_beyond_the_bound_are_counted_together() -> None:
    history = History(0.0, Totals())
    tenants = {f"tenant-{i:02}": i for i in range(1, NAMES_MAX + 4)} | {OTHER: 5}
    point = history.add(POINT_S, Totals(), Waiting({}, tenants))
    assert point is not None
    assert len(point.tenants) == NAMES_MAX + 1
    assert point.tenants[OTHER] == 5 + 1 + 2 + 3
    assert sum(point.tenants.values()) == sum(tenants.values())


@pytest.mark.parametrize("seed", range(5))
def test_points_in_sum_are_all_picks(seed: int) -> None:
    rng = random.Random(seed)
    history, now_s, picks = History(0.0, Totals()), 0.0, 0
    counted = 0
    for _ in range(POINTS_MAX):
        now_s += rng.uniform(0.1, 25.0)
        picks += rng.randrange(100)
        if history.add(now_s, Totals(picks=picks), NOBODY) is not None:
            counted = picks
    times = [0.0, *(point.at_s for point in history.points)]
    spans = [after - before for before, after in pairwise(times)]
    assert min(spans) >= POINT_S
    total = sum(p.picks_per_s * s for p, s in zip(history.points, spans, strict=True))
    assert total == pytest.approx(counted)


def test_totals_are_those_of_picks_and_first_tokens() -> None:
    tally, check = PickTally(), TimeCheck()
    history = History(0.0, Totals.of(tally, check))
    taken = [0] * len(TIERS)
    taken[0], taken[-1] = 300, 100  # of the fastest tier, and predicted
    tally.tokens += (1000, 600, *taken)
    tally.picks += 5
    tally.predicted(0.5, 0.25)
    tally.predicted(1.5, 0.25)
    check.on_pick("first", 0.5)
    check.on_done("first", 0.75)
    check.on_pick("second", 1.5)  # without a first token yet
    point = history.add(10.0, Totals.of(tally, check), NOBODY)
    assert point is not None
    assert point.picks_per_s == 0.5
    assert (point.hit_taken, point.hit_reachable) == (0.4, 0.6)
    assert (point.ttft_predicted_s, point.ttft_measured_s) == (1.0, 0.75)
