"""Laws of what open answers have yet to take of a KV cache."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.reservations.outputs import ExpectedOutputs

NOW_S = 100.0

ages = st.integers(0, 20)
expectations = st.integers(2, 60)
requests = st.lists(st.tuples(ages, expectations), max_size=8)


def outputs_of(requests: list[tuple[int, int]]) -> ExpectedOutputs:
    outputs = ExpectedOutputs()
    for number, (age_s, tokens) in enumerate(requests):
        outputs.add(f"r{number}", NOW_S - age_s, tokens)
    return outputs


def peak_step_by_step(requests: list[tuple[int, int]], pace: int, new_tokens: int) -> int:
    """All grow by a token a step; one that has brought out all goes, unless it had at the start."""
    grown = [min(tokens, pace * age_s) for age_s, tokens in requests]
    over = [has == tokens for has, (_, tokens) in zip(grown, requests, strict=True)]
    peak = sum(grown)
    for step in range(1, new_tokens + 1):
        alive = [
            tokens if was_over else has + step
            for has, was_over, (_, tokens) in zip(grown, over, requests, strict=True)
            if was_over or has + step <= tokens
        ]
        peak = max(peak, sum(alive) + step)
    return peak


@given(requests, st.integers(0, 5), st.integers(0, 80))
def test_the_peak_is_that_of_a_simulation_step_by_step(
    requests: list[tuple[int, int]], pace: int, new_tokens: int
) -> None:
    # Nobody has reached the end, so that the pace can be told from what is held.
    requests = [(age_s, max(tokens, pace * age_s + 1)) for age_s, tokens in requests]
    held = sum(pace * age_s for age_s, _ in requests)
    peak = outputs_of(requests).peak_tokens(held, new_tokens, NOW_S)
    assert peak == pytest.approx(peak_step_by_step(requests, pace, new_tokens))


@given(requests, st.floats(0, 2000), st.integers(0, 80))
def test_the_peak_lies_between_what_is_held_and_the_sum_of_all(
    requests: list[tuple[int, int]], held: float, new_tokens: int
) -> None:
    outputs = outputs_of(requests)
    peak = outputs.peak_tokens(held, new_tokens, NOW_S)
    assert held - 1e-6 <= peak <= held + outputs.tokens + new_tokens + 1e-6
    assert peak >= new_tokens


def test_what_nobody_here_can_have_grown_to_is_held_by_others_and_stays() -> None:
    outputs = outputs_of([(10, 20)])
    assert outputs.peak_tokens(500.0, 5, NOW_S) == pytest.approx(480 + 20 + 5)


def test_an_answer_that_is_longer_than_expected_holds_what_was_expected() -> None:
    outputs = outputs_of([(10, 20), (0, 30)])
    assert outputs.peak_tokens(20.0, 10, NOW_S) == pytest.approx(20 + 10 + 10)


def test_answers_that_began_together_peak_together_and_staggered_ones_do_not() -> None:
    together = outputs_of([(0, 160)] * 4).peak_tokens(0.0, 160, NOW_S)
    staggered = outputs_of([(age_s, 160) for age_s in (0, 4, 8, 12)])
    held = sum(10 * age_s for age_s in (0, 4, 8, 12))
    assert together == 5 * 160
    assert staggered.peak_tokens(held, 160, NOW_S) < 3.5 * 160


@given(requests)
def test_the_sum_is_that_of_open_requests_and_ends_at_nothing(
    requests: list[tuple[int, int]],
) -> None:
    outputs = outputs_of(requests)
    assert outputs.tokens == sum(tokens for _, tokens in outputs)
    for number in range(len(requests) + 1):
        outputs.drop(f"r{number}")
        outputs.drop(f"r{number}")
    assert outputs.tokens == 0
    assert not list(outputs)


def test_a_single_token_is_nothing_to_reckon_with() -> None:
    outputs = ExpectedOutputs()
    outputs.add("r", NOW_S, 1)
    assert not list(outputs)
    assert outputs.peak_tokens(16.0, 5, NOW_S) == 21
