"""The prices of a step, against sums worked out by hand."""

import pytest

from simulator.cost_model import LLAMA_8B_H100, LLAMA_70B_4XH100, CostModel, PrefillChunk


def test_a_step_costs_what_the_formula_says() -> None:
    cost = CostModel(
        base_s=1.0, sequence_s=0.1, context_token_s=0.01, prefill_token_s=0.001, pair_s=1e-4
    )
    # 1 + (2 + 1) * 0.1 + 30 * 0.01 + 10 * 0.001 + 10 * (20 + 5.5) * 1e-4
    assert cost.step_s([PrefillChunk(10, 20)], 2, 30) == pytest.approx(1.6355)


def test_chunks_of_a_prompt_cost_as_many_pairs_as_the_whole() -> None:
    whole = PrefillChunk(10_000, 0).attention_pairs()
    parts = sum(PrefillChunk(1_000, 1_000 * i).attention_pairs() for i in range(10))
    assert parts == whole == 10_000 * 10_001 / 2


def test_the_presets_are_in_the_range_of_published_numbers() -> None:
    assert 0.005 < LLAMA_8B_H100.step_s([], 1, 1000) < 0.012
    assert 25_000 < 1 / LLAMA_8B_H100.prefill_token_s < 40_000
    assert 0.015 < LLAMA_70B_4XH100.step_s([], 1, 1000) < 0.030
    assert 10_000 < 1 / LLAMA_70B_4XH100.prefill_token_s < 16_000
