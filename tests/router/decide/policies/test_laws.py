"""Laws that hold for every policy."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_numbers

from router.decide.policies import POLICIES
from router.decide.policies.policy import Policy, Scores
from router.fleet.table import COLUMNS
from tests.stage.fleet import Fleet, prompt
from tests.stage.rows import rows


def variant(name: str, **numbers: float) -> Policy:
    policy = POLICIES[name]
    return replace(policy, settings=with_numbers(policy.settings, **numbers))


VARIANTS = {
    **POLICIES,
    "dynamo-adaptive at fixed alpha": variant(
        "dynamo-adaptive", alpha_balance=0.4, alpha_cache=0.4
    ),
    "dynamo-blocks drawn": variant(
        "dynamo-blocks", temperature=0.5, credit_decay=0.7, request_weight=3.0
    ),
}
NAMES = sorted(VARIANTS)
FORMULAS = {
    name: compile(policy.formula.split(";")[0], "formula", "eval")
    for name, policy in VARIANTS.items()
}
PROMPT = 960

counts = st.integers(0, 200).map(float)
totals = st.integers(1, 200).map(float) | st.just(nan)
tokens = st.integers(0, 60).map(lambda blocks: 16.0 * blocks)
names = st.sampled_from(["", "a", "b"])
worker_rows = st.fixed_dictionaries(
    {
        "device_tokens": tokens,
        "host_tokens": st.integers(0, 10).map(lambda blocks: 16.0 * blocks),
        "disk_tokens": st.integers(0, 10).map(lambda blocks: 16.0 * blocks),
        "active_blocks": counts,
        "total_blocks": totals,
        "running": counts,
        "waiting": counts,
        "reserved": st.integers(-50, 50).map(float),
        "total_slots": totals,
        "last_picked": counts,
        "prefill_tokens_active": counts,
        "external": counts,
        "prefills": st.lists(st.sampled_from([(10, 50), (400, 960)]), max_size=3),
        "in_use": st.integers(0, 60),
        "recent_blocks": st.integers(0, 12).map(lambda samples: 16 * samples),
        "excluded": st.sampled_from(["", "", "", "drained"]),
        "labels": st.fixed_dictionaries({"host": names, "rack": names, "cluster": names}),
    }
)
FleetRows = list[dict[str, Any]]


def named(fleet: FleetRows) -> FleetRows:
    """Workers keep their names wherever they stand, and hold no more than the prompt has."""
    for i, worker in enumerate(fleet):
        worker["worker_id"] = f"w{i}"
        worker["device_tokens"] = min(
            worker["device_tokens"], PROMPT - 16 - worker["host_tokens"] - worker["disk_tokens"]
        )
        worker["labels"] = {name: value for name, value in worker["labels"].items() if value}
    return fleet


fleets = st.lists(worker_rows, min_size=1, max_size=12).map(named)
LAW = settings(derandomize=True, deadline=None, max_examples=25)


def scored(*fleets: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[Scores]]]:
    """Each policy, and its scores of each fleet. Fleets are drawn once for all policies: to draw
    one takes longer than to score it."""
    candidates = [rows(PROMPT, *fleet) for fleet in fleets]
    for name in NAMES:
        note(name)
        yield name, [VARIANTS[name].score(one) for one in candidates]


@LAW
@given(fleets, st.randoms(use_true_random=False))
def test_permuting_workers_permutes_costs_and_chances(fleet: FleetRows, rng: random.Random) -> None:
    order = list(range(len(fleet)))
    rng.shuffle(order)
    for _, (scores, permuted) in scored(fleet, [fleet[i] for i in order]):
        assert permuted.costs == pytest.approx(scores.costs[order])
        if scores.chances is not None:
            assert permuted.chances == pytest.approx(scores.chances[order])


@LAW
@given(fleets, st.data())
def test_more_overlap_never_makes_a_worker_worse_nor_another_better(
    fleet: FleetRows, data: st.DataObject
) -> None:
    i = data.draw(st.integers(0, len(fleet) - 1))
    tier = data.draw(st.sampled_from(["device_tokens", "host_tokens", "disk_tokens"]))
    held = sum(fleet[i][name] for name in ("device_tokens", "host_tokens", "disk_tokens"))
    richer = [dict(worker) for worker in fleet]
    richer[i][tier] += 16.0 * data.draw(st.integers(0, int(PROMPT - 16 - held) // 16))
    others = [j for j in range(len(fleet)) if j != i]
    for policy, (before, after) in scored(fleet, richer):
        close = 1e-12 * abs(before.costs[i])
        assert after.costs[i] <= before.costs[i] + close
        if policy != "conductor":  # whose holders decide what the others are compared by
            assert after.costs[others].tolist() == before.costs[others].tolist()
        if before.chances is not None and after.chances is not None:
            assert after.chances[i] >= before.chances[i] - 1e-12


@LAW
@given(fleets, st.data())
def test_more_load_never_makes_a_worker_better(fleet: FleetRows, data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(fleet) - 1))
    busier = [dict(worker) for worker in fleet]
    for name in ("active_blocks", "running", "waiting", "reserved", "prefill_tokens_active"):
        busier[i][name] += data.draw(st.sampled_from([0, 1, 7, 100]))
    busier[i]["recent_blocks"] += data.draw(st.sampled_from([0, 16, 160]))
    if data.draw(st.booleans()):
        busier[i]["prefills"] = [*busier[i]["prefills"], (300, 900)]
    for policy, (before, after) in scored(fleet, busier):
        if policy == "dynamo-adaptive":
            continue
        assert after.costs[i] >= before.costs[i] - 1e-12 * abs(before.costs[i])
        if before.chances is not None and after.chances is not None:
            assert after.chances[i] <= before.chances[i] + 1e-12


@LAW
@given(fleets)
def test_costs_and_terms_are_finite_whatever_is_unknown(fleet: FleetRows) -> None:
    can = rows(PROMPT, *fleet).can_take
    for _, (scores,) in scored(fleet):
        assert scores.costs.shape == (len(fleet),)
        assert np.isfinite(scores.costs).all()
        assert all(np.isfinite(column).all() for column in scores.row_terms.values())
        assert all(np.isfinite(term) for term in scores.shared_terms.values())
        if scores.chances is not None:
            assert (scores.chances >= 0).all()
            if can.any():
                assert scores.chances[can].sum() == pytest.approx(1)
            assert not scores.chances[~can].any()


@LAW
@given(fleets)
def test_a_formula_is_arithmetic_over_parameters_and_terms(fleet: FleetRows) -> None:
    for policy, (scores,) in scored(fleet):
        entry = VARIANTS[policy]
        code = FORMULAS[policy]
        for i, cost in enumerate(scores.costs):
            terms = {name: column[i] for name, column in scores.row_terms.items()}
            known = {**entry.parameters, **scores.shared_terms, **terms}
            assert eval(code, {}, known) == pytest.approx(cost, abs=1e-12)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_says_its_formula_and_changes_no_row(policy: str) -> None:
    entry = POLICIES[policy]
    assert entry.name == policy
    assert entry.summary
    assert entry.formula
    frozen = rows(100, {"running": 3, "overlap_tokens": 16}, {"total_blocks": 5})
    for name in (*COLUMNS, "overlap_tokens", "new_tokens"):
        getattr(frozen, name).setflags(write=False)
    entry.score(frozen)  # writing to a column would raise


@settings(LAW, max_examples=15)
@given(st.integers(0, 2**8 - 1), st.integers(0, 2**8 - 1), st.integers(0, 2**8 - 1))
@pytest.mark.parametrize("policy", NAMES)
def test_no_policy_picks_a_worker_that_is_excluded_or_full(
    policy: str, unwanted: int, full: int, holders: int
) -> None:
    fleet = Fleet()
    fleet.core.policies[policy] = VARIANTS[policy]
    asked = prompt(64)
    for i in range(8):
        key = fleet.add(f"w{i}")
        if holders >> i & 1:
            fleet.cache(key, asked, 32)
        if full >> i & 1:
            fleet.say(key, used_blocks=1000.0)
    names = frozenset(f"w{i}" for i in range(8) if unwanted >> i & 1)
    request = fleet.request(asked, policy=policy, excluded_workers=names)
    can = [i for i in range(8) if not (unwanted | full) >> i & 1]
    for _ in range(4):
        decision = fleet.core.decide(request, fleet.now_s)
        assert len(decision.order) == min(3, len(can))
        assert set(decision.order) <= set(can)
