"""The ends of joined steps, against counting up to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engines.decode_run import DecodeRun
from simulator.engines.profile import load_profile

COST = load_profile("llama-8b-h100").cost_model(1 << 20)


@given(
    sequences=st.integers(1, 200),
    context=st.integers(1, 100_000),
    steps=st.integers(1, 60),
    share=st.floats(0.0, 1.2),
)
def test_a_run_ends_when_its_steps_do(
    sequences: int, context: int, steps: int, share: float
) -> None:
    run = DecodeRun(COST, 5.0, sequences, context)
    ends_s = [5.0]
    for step in range(steps):
        ends_s.append(ends_s[-1] + COST.step_s([], sequences, context + step * sequences))
    assert [run.end_s(n) for n in range(steps + 1)] == pytest.approx(ends_s, rel=1e-12)
    now_s = 5.0 + share * (ends_s[-1] - 5.0) + 1e-7
    assert run.ended(now_s, steps) == sum(end_s <= now_s for end_s in ends_s[1:])
    assert run.begun(now_s, steps) == sum(end_s < now_s for end_s in ends_s[:-1])


def test_at_the_very_end_of_a_step_the_next_one_has_not_begun_before() -> None:
    run = DecodeRun(COST, 1.0, 3, 100)
    assert run.ended(run.end_s(4), 9) == 4
    assert run.begun(run.end_s(4), 9) == 4
    assert run.begun(1.0, 9) == 1
