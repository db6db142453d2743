"""Receipts recomputed: every policy's formula is what its code does."""

import random
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.v1 import router_pb2
from router.decide.policies import POLICIES
from router.observe.audit.recompute_receipt import FORMULA_MAX, FormulaError, check, evaluate
from tests.stage.fleet import Fleet, prompt


def receipt_of(policy: str, seed: int) -> router_pb2.Receipt:
    """Of a fleet in which workers differ in all that policies look at."""
    rng = random.Random(seed)
    fleet = Fleet(seed=seed, policy=policy)
    for i in range(5):
        labels = {"host": f"h{i}", "rack": f"r{i % 2}", "cluster": "c"}
        key = fleet.add(
            f"w{i}", running=rng.randrange(8), waiting=rng.randrange(4), labels=labels,
            used_blocks=float(rng.randrange(900)), total_slots=rng.choice([16, 100, None]),
        )  # fmt: skip
        fleet.cache(key, prompt(512), rng.randrange(0, 513))
    for i in range(20):
        fleet.route(prompt(rng.choice([64, 512, 700])), session_id=f"s{i}")
    return fleet.answer(prompt(512), session_id="s").receipt


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_every_policys_receipt_is_worked_out_to_the_same_costs(policy: str, seed: int) -> None:
    verdict = check(receipt_of(policy, seed))
    assert verdict.complaints == []
    # A worker that the guard passed over is no runner-up.
    assert len(verdict.rows) == 2 or verdict.moved_from


@pytest.mark.parametrize("policy", POLICIES)
def test_an_operators_number_takes_the_place_of_none_of_ours(policy: str) -> None:
    receipt = receipt_of(policy, 1)
    before = check(receipt).rows
    for name in ("new_tokens", "prompt_tokens", "block_size", "active_blocks"):
        receipt.picked.numbers[name] = 1e6
    for name in (*receipt.parameters, *receipt.terms, *receipt.picked.terms):
        receipt.picked.numbers[name] = 1e6
    assert [row.cost for row in check(receipt).rows] == [row.cost for row in before]


def test_a_receipt_that_was_tampered_with_is_found_out() -> None:
    receipt = receipt_of("dynamo-adaptive", 1)
    receipt.picked.terms["load"] += 0.01
    receipt.picked.terms["load_deviation"] += 0.01
    (complaint,) = check(receipt).complaints
    assert receipt.picked.worker_id in complaint


def test_a_pick_that_was_not_the_cheapest_is_found_out() -> None:
    receipt = receipt_of("least-loaded", 1)
    receipt.picked.terms["active_slots"] += 100
    receipt.picked.cost += 100
    assert check(receipt).complaints == ["the runner-up is cheaper than the pick"]


def test_a_drawn_pick_needs_a_chance() -> None:
    receipt = receipt_of("power-of-two", 1)
    receipt.picked.terms["chance"] = 0.0
    assert check(receipt).complaints == ["the pick was drawn by chances, and its chance was 0"]


def test_a_receipt_without_a_pick_is_refused() -> None:
    with pytest.raises(FormulaError, match="no row"):
        check(router_pb2.Receipt(policy="round-robin", formula="0"))


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("1 + 2 * x", 7.0),
        ("-x ** 2 / 2", -4.5),
        ("1e6 * (x if x > 2 else y)", 3e6),
        ("max(x - y, 0) + min(x, y, 1)", 0.0 + 1.0),
        ("alpha * x; alpha = 0.7 if beta > 1 and not y < 2 else 0.3; beta = x - 1", 2.1),
        ("abs(-x) if x == 3 or y != 4 else 1", 3.0),
    ],
)
def test_formulas_are_arithmetic(formula: str, value: float) -> None:
    assert evaluate(formula, {"x": 3.0, "y": 4.0, "alpha": 99.0}) == pytest.approx(value)


@pytest.mark.parametrize(
    ("formula", "why"),
    [
        ("z + 1", "uses z"),
        ("__import__('os').getcwd()", "not arithmetic"),
        ("x.real", "not arithmetic"),
        ("[x for x in y]", "not arithmetic"),
        ("'a' * 3", "not arithmetic"),
        ("x < y < 3", "not arithmetic"),
        ("x / 0", "division"),
        ("(-1) ** 0.5", "a complex number"),
        ("9.0 ** 9999", "out of range"),
        ("max(x)", "too few"),
        ("max()", "too few"),
        ("x +", "formula can.t be read"),
        ("x; y", "defines no name"),
        ("x; 1 = y", "defines no name"),
        ("(" * 300 + "x" + ")" * 300, "formula can.t be read"),
        ("x + " * FORMULA_MAX + "x", "more than"),
        ("9" * 400, "too large"),
        ("-" * 1500 + "x", "recursion"),
        ("x; y = " + "-" * 1500 + "x", "recursion"),
    ],
)
def test_what_is_no_arithmetic_is_refused(formula: str, why: str) -> None:
    with pytest.raises(FormulaError, match=why):
        evaluate(formula, {"x": 3.0, "y": 4.0})


@given(st.text(max_size=40), st.dictionaries(st.sampled_from("xyz"), st.floats(), max_size=3))
def test_no_text_does_harm(formula: str, numbers: dict[str, Any]) -> None:
    with suppress(FormulaError):
        assert isinstance(evaluate(formula, numbers), float)
