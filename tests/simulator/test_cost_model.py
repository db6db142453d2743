"""The prices of a step and of a transfer, against sums worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.identity import Tier
from simulator.engines.cost_model import (
    CostModel,
    Distance,
    KvTransfer,
    LinearCost,
    Link,
    NoLink,
    PolynomialCost,
    PrefillChunk,
    SlowedCost,
)

LINEAR = LinearCost(
    base_s=1.0, sequence_s=0.1, context_token_s=0.01, prefill_token_s=0.001, pair_s=1e-4
)
POLYNOMIAL = PolynomialCost(
    prefill_s=(0.1, 0.01, 0.001), decode_s=(0.5, 2.0, -0.75), capacity_tokens=1000
)
MODELS = pytest.mark.parametrize("model", [LINEAR, POLYNOMIAL])


def test_a_linear_step_costs_what_the_formula_says() -> None:
    # 1 + (2 + 1) * 0.1 + 30 * 0.01 + 10 * 0.001 + 10 * (20 + 5.5) * 1e-4
    assert LINEAR.step_s([PrefillChunk(10, 20)], 2, 30) == pytest.approx(1.6355)


def test_a_polynomial_step_costs_what_the_formula_says() -> None:
    chunks = [PrefillChunk(10, 900), PrefillChunk(30, 0)]
    # 0.1 + 40 * 0.01 + 1600 * 0.001
    assert POLYNOMIAL.step_s(chunks) == pytest.approx(2.1)
    # 0.5 + 0.4 * 2 - 0.16 * 0.75
    assert POLYNOMIAL.step_s([], 4, 400) == pytest.approx(1.18)
    assert POLYNOMIAL.step_s(chunks, 4, 400) == pytest.approx(2.1 + 1.18)
    assert POLYNOMIAL.step_s([], 4, 1700) == POLYNOMIAL.step_s([], 4, 1000)


def test_chunks_of_a_prompt_cost_as_many_pairs_as_the_whole() -> None:
    whole = PrefillChunk(10_000, 0).attention_pairs()
    parts = sum(PrefillChunk(1_000, 1_000 * i).attention_pairs() for i in range(10))
    assert parts == whole == 10_000 * 10_001 / 2


@MODELS
@given(steps=st.integers(0, 60), sequences=st.integers(1, 40), context=st.integers(0, 2000))
def test_a_run_costs_what_its_steps_cost(
    model: CostModel, steps: int, sequences: int, context: int
) -> None:
    one_by_one = sum(model.step_s([], sequences, context + i * sequences) for i in range(steps))
    assert model.run_s(steps, sequences, context) == pytest.approx(one_by_one)


@MODELS
@given(
    tokens=st.integers(1, 8192),
    context=st.integers(0, 100_000),
    sequences=st.integers(1, 256),
    decode_context=st.integers(0, 2000),
)
def test_more_work_never_takes_less_time(
    model: CostModel, tokens: int, context: int, sequences: int, decode_context: int
) -> None:
    less = model.step_s([PrefillChunk(tokens, context)], sequences, decode_context)
    for more in (
        model.step_s([PrefillChunk(tokens + 1, context)], sequences, decode_context),
        model.step_s([PrefillChunk(tokens, context + 1)], sequences, decode_context),
        model.step_s([PrefillChunk(tokens, context)], sequences + 1, decode_context),
        model.step_s([PrefillChunk(tokens, context)], sequences, decode_context + 1),
    ):
        assert more >= less


def test_kv_cache_moves_as_fast_as_its_link() -> None:
    kv = KvTransfer(
        bytes_per_token=1000,
        tiers={Tier.HOST: Link(1e6, latency_s=0.5)},
        distances={Distance.RACK: Link(2e6)},
    )
    model = LinearCost(1.0, 0.0, 0.0, 0.0, 0.0, kv=kv)
    assert model.load_s(4000, Tier.HOST) == pytest.approx(0.5 + 4.0)
    assert model.load_s(0, Tier.HOST) == 0.0
    assert model.load_s(4000, Tier.DEVICE) == 0.0
    assert model.transfer_s(4000, Distance.RACK) == pytest.approx(2.0)
    slowed = SlowedCost(model, 3.0)
    assert slowed.step_s([]) == 3.0 * model.step_s([])
    assert slowed.load_s(4000, Tier.HOST) == model.load_s(4000, Tier.HOST)
    assert slowed.transfer_s(4000, Distance.RACK) == model.transfer_s(4000, Distance.RACK)


def test_a_transfer_without_a_link_says_which_one_is_missing() -> None:
    linked = LinearCost(1.0, 0.0, 0.0, 0.0, 0.0, kv=KvTransfer(1000))
    with pytest.raises(NoLink, match="tier disk"):
        linked.load_s(10, Tier.DISK)
    with pytest.raises(NoLink, match="same cluster"):
        linked.transfer_s(10, Distance.CLUSTER)
    with pytest.raises(NoLink, match="no size"):
        LINEAR.transfer_s(10, Distance.RACK)
