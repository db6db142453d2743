"""How hot prefixes are, by hand and by law."""

from math import exp, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decide.copies.prefix_rates import FADE_S, PrefixRate, PrefixRates

KEY = ("m", 1)


def hit(times: int, now_s: float = 0.0) -> PrefixRate:
    rate = PrefixRate(now_s, now_s)
    for _ in range(times):
        rate.hit(now_s)
    return rate


def test_a_prefix_counts_as_at_least_a_second_old() -> None:
    rate = hit(8)
    assert rate.rate(0.0) == 8.0
    assert rate.score(0.0) == 8.0


def test_a_young_prefix_scores_hits_by_the_root_of_its_age() -> None:
    rate = hit(1)
    for i in range(1, 9):
        rate.hit(0.5 * i)
    # 9 hits in 4 s: 9 / sqrt(4) = 4.5; some have faded by a few percent
    assert rate.score(4.0) == pytest.approx(4.5, rel=0.02)
    faded = sum(exp((0.5 * i - 4.0) / FADE_S) for i in range(9))
    window_s = FADE_S * (1 - exp(-4.0 / FADE_S))
    assert rate.score(4.0) == pytest.approx(faded / sqrt(window_s))
    assert rate.rate(4.0) == pytest.approx(faded / window_s)


def test_a_steady_prefix_keeps_its_rate_and_its_score() -> None:
    rate = hit(1)
    for i in range(1, 4001):
        rate.hit(0.5 * i)
    assert rate.rate(2000.0) == pytest.approx(2.0, rel=0.01)
    assert rate.score(2000.0) == pytest.approx(2.0 * sqrt(FADE_S), rel=0.01)


def test_a_prefix_that_nobody_asks_for_cools_down() -> None:
    rate = hit(100)
    assert rate.score(FADE_S) < 0.5 * 100 / sqrt(FADE_S)
    assert rate.score(10 * FADE_S) < 0.01


def test_the_least_lately_hit_is_forgotten_for_want_of_room() -> None:
    rates = PrefixRates(3)
    for number in (1, 2, 3, 1, 4):
        rates.hit(("m", number), 0.0)
    assert len(rates) == 3
    assert rates.forgotten == 1
    assert rates.hit(("m", 1), 0.0).score(0.0) == 3.0  # 2 was forgotten, not 1
    assert rates.hit(("m", 2), 0.0).score(0.0) == 1.0


def test_models_have_prefixes_of_their_own() -> None:
    rates = PrefixRates(3)
    rates.hit(("m", 1), 0.0)
    assert rates.hit(("n", 1), 0.0).score(0.0) == 1.0


@given(
    st.lists(st.floats(0.0, 100.0), min_size=1, max_size=50),
    st.floats(0.0, 300.0),
    st.floats(0.0, 300.0),
)
def test_without_hits_rate_and_score_only_fall(
    gaps: list[float], first_s: float, then_s: float
) -> None:
    now_s = 0.0
    rate = hit(1)
    for gap_s in gaps:
        now_s += gap_s
        rate.hit(now_s)
    early, late = sorted((now_s + first_s, now_s + first_s + then_s))
    assert 0.0 <= rate.rate(late) <= rate.rate(early) * (1 + 1e-9)
    assert 0.0 <= rate.score(late) <= rate.score(early) * (1 + 1e-9)
