"""Prices are found again from measured steps, and what can't be found is said."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engines.calibration import (
    PRICES,
    CalibrationError,
    Measurement,
    calibrate,
    read_measurements,
)
from simulator.engines.cost_model import CostModel, LinearCost, PrefillChunk
from simulator.engines.profile import load_profile

DATA = Path(__file__).parent / "data"


def measured(cost: CostModel, count: int, noise: float, seed: int = 0) -> list[Measurement]:
    """Steps of all kinds, their time off by a normal factor of this deviation."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        prefill: list[PrefillChunk] = []
        if i % 3:
            tokens = int(10 ** rng.uniform(0, 3.9))
            prefill = [PrefillChunk(tokens, int(rng.integers(0, 60_000)))]
        decodes = int(rng.integers(1, 200)) if i % 3 != 1 else 0
        context = decodes * int(rng.integers(10, 8_000))
        found.append(
            Measurement(
                seconds=cost.step_s(prefill, decodes, context) * max(0.1, rng.normal(1, noise)),
                prefill_tokens=sum(chunk.token_count for chunk in prefill),
                pairs=sum(chunk.attention_pairs() for chunk in prefill),
                sequences=decodes + len(prefill),
                context_tokens=context,
            )
        )
    return found


def prices(cost: LinearCost) -> list[float]:
    return [getattr(cost, name) for name in PRICES]


@pytest.mark.parametrize("name", ["llama-8b-h100", "llama-70b-4xh100"])
def test_exact_measurements_give_the_prices_back(name: str) -> None:
    cost = load_profile(name).cost_model()
    assert isinstance(cost, LinearCost)
    found = calibrate(measured(cost, 60, noise=0.0))
    assert prices(found.cost) == pytest.approx(prices(cost))
    assert found.error_max < 1e-9
    assert found.free == ()


def test_noisy_measurements_give_them_back_nearly_and_tell_how_noisy_they_were() -> None:
    cost = load_profile("llama-8b-h100").cost_model()
    assert isinstance(cost, LinearCost)
    found = calibrate(measured(cost, 600, noise=0.05))
    for name in ("base_s", "context_token_s", "prefill_token_s", "pair_s"):
        assert getattr(found.cost, name) == pytest.approx(getattr(cost, name), rel=0.1)
    # The mean of |x| of a normal variable is 0.8 of its deviation.
    assert found.error_mean == pytest.approx(0.04, rel=0.15)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), noise=st.floats(0, 0.5))
def test_no_price_is_negative_and_no_other_prices_fit_better(seed: int, noise: float) -> None:
    measurements = measured(LinearCost(0.005, 0.0, 1e-8, 1e-5, 0.0), 30, noise, seed)
    found = calibrate(measurements)
    assert min(prices(found.cost)) >= 0
    work = np.array([one.work() for one in measurements])
    seconds = np.array([one.seconds for one in measurements])
    best = np.square(found.relative_errors).sum()
    rng = np.random.default_rng(seed)
    for _ in range(50):
        other = np.array(prices(found.cost)) * rng.uniform(0.8, 1.2, len(PRICES))
        assert np.square(work @ other / seconds - 1).sum() >= best * (1 - 1e-9)


def test_work_that_costs_nothing_is_told() -> None:
    found = calibrate(measured(LinearCost(0.01, 0.0, 1e-8, 1e-5, 1e-9), 200, noise=0.2, seed=3))
    assert all(getattr(found.cost, name) == 0.0 for name in found.free)
    assert "sequence_s" in found.free


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(CalibrationError, match="at least as many measurements, got 4"):
        calibrate(measured(LinearCost(1, 1, 1, 1, 1), 4, noise=0.0))


def test_missing_kinds_of_work_are_named() -> None:
    only_decodes = [
        Measurement(0.01 + i / 1e3, sequences=i, context_tokens=i * i) for i in range(20)
    ]
    with pytest.raises(CalibrationError, match="work whose price is prefill_token_s"):
        calibrate(only_decodes)


def test_work_that_always_comes_together_is_refused() -> None:
    one_chunk = [
        Measurement(0.01, prefill_tokens=i, pairs=2.0 * i, sequences=i % 7, context_tokens=i**3)
        for i in range(1, 20)
    ]
    with pytest.raises(CalibrationError, match="can't separate the prices"):
        calibrate(one_chunk)


def test_a_calibration_becomes_a_section_of_a_profile() -> None:
    cost = load_profile("llama-8b-h100").cost_model()
    section = calibrate(measured(cost, 60, noise=0.0)).section("a test")
    assert section.source == "a test"
    assert section.base_ms == pytest.approx(8.39, abs=0.01)
    written = msgspec.json.decode(msgspec.json.encode(section))
    assert written["kind"] == "linear"
    again = section.cost_model(load_profile("llama-8b-h100").kv.transfer())
    chunk = PrefillChunk(1000, 500)
    assert again.step_s([chunk], 5, 9000) == pytest.approx(cost.step_s([chunk], 5, 9000))


def test_measurements_are_read_line_by_line() -> None:
    lines = ['{"seconds": 0.5, "prefill_tokens": 3, "pairs": 6, "sequences": 1}\n', "\n"]
    assert read_measurements(lines) == [Measurement(0.5, 3, 6.0, 1)]
    with pytest.raises(CalibrationError, match=r"line 2: .*seconds"):
        read_measurements(['{"seconds": 1}', '{"seconds": 0}'])
    with pytest.raises(CalibrationError, match=r"line 1: .*tokens"):
        read_measurements(['{"seconds": 1, "tokens": 5}'])


def test_a_real_engines_steps_are_told_by_prices_from_other_steps() -> None:
    """vLLM 0.32 on CPU: every fifth of the steps that tests/real_engines/measure_steps.py saw."""
    with (DATA / "vllm_0_32_cpu_steps.jsonl").open(encoding="utf-8") as lines:
        steps = read_measurements(lines)
    found = calibrate(steps[::2])
    assert found.free == ()
    others = steps[1::2]
    predicted = np.array([one.work() for one in others]) @ np.array(prices(found.cost))
    seconds = np.array([one.seconds for one in others])
    assert np.abs(predicted / seconds - 1).mean() < 0.1
    assert predicted.sum() == pytest.approx(seconds.sum(), rel=0.05)
