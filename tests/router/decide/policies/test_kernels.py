"""Policies that have a kernel in C: the same costs as their functions in numpy, to the last bit."""

import random

import numpy as np
import pytest

from indexer.hashing import pack_tokens
from indexer.kernel import NativeIndex
from router.config.settings.routing_settings import AffinitySettings
from router.decide.decision.decision import Decision
from router.decide.decision.guard import Waits
from router.decide.decision.ranking import KERNELS, Kernel, kernel_of
from router.decide.policies import POLICIES
from router.request.prompt import Prompt
from router.request.refusal import Refusal
from router.request.request import Role
from tests.stage.fleet import Fleet, prompt
from tests.stage.guards import TunedGuard

WITH_KERNEL = [name for name, policy in POLICIES.items() if kernel_of(policy) is not None]
SEEDS = range(3, 11)


def a_fleet(rng: random.Random, policy: str) -> Fleet:
    """Workers of every load, some of them full, and some that say nothing of it, as the last."""
    parameters = {"dynamo-blocks": {"credit_decay": rng.choice([0.0, 0.5]), "host_credit": 0.7}}
    fleet = Fleet(
        index=NativeIndex(),
        policy=policy,
        seed=rng.random(),
        parameters=parameters,
        guard=TunedGuard(policies=(policy,), margin=rng.choice([0.0, 0.05, 1.0])),
        affinity=AffinitySettings(bonus={policy: rng.choice([0.0, 0.25])}),
    )
    count = rng.choice([2, 7, 70])
    for number in range(count):
        is_last = number == count - 1
        fleet.add(
            f"w{number}",
            total_blocks=None if is_last else rng.choice([None, 100, 1000]),
            total_slots=None if is_last else rng.choice([None, 3, 100]),
            running=rng.randint(0, 3),
            waiting=rng.randint(0, 2),
            used_blocks=rng.choice([None, 0.0, 7.5]),
            sampled_at_s=rng.choice([None, fleet.now_s - 2.5]),
        )
    return fleet


def check(decision: Decision) -> None:
    costs, scores = decision.ranking.costs, decision.scores
    assert costs.tobytes() == scores.costs.tobytes()
    seconds = decision.ranking.seconds
    assert (seconds is None) == (scores.ttft_s is None)
    can = np.array([not reason for reason in decision.excluded])
    if seconds is not None and scores.ttft_s is not None:
        assert seconds.tobytes() == scores.ttft_s.tobytes()
        assert decision.ranking.shortest_s == seconds[can].min()
    assert decision.tied == np.count_nonzero(costs[can] == costs[can].min())
    assert decision.guard is not None
    passed_over = can & Waits.of(decision.rows, can, decision.guard).passed_over
    first = decision.order[0] if decision.guarded is None else decision.guarded.cheapest
    assert costs[first] == costs[can].min()
    assert (decision.guarded is not None) == passed_over[first]
    by_cost = np.flatnonzero(can)[np.argsort(costs[can], kind="stable")]
    if passed_over[first]:
        by_cost = sorted(by_cost, key=lambda row: passed_over[row])
    found, wanted = decision.order, [int(row) for row in by_cost[: len(decision.order)]]
    assert costs[found].tolist() == costs[wanted].tolist()
    if passed_over[first]:
        assert passed_over[found].tolist() == passed_over[wanted].tolist()


def test_each_kernel_is_that_of_a_policy() -> None:
    assert set(KERNELS) == {POLICIES[name].function for name in WITH_KERNEL}


@pytest.mark.parametrize("kind", [-1, 0, len(KERNELS) + 1])
def test_a_kind_without_a_kernel_is_refused(kind: int) -> None:
    with pytest.raises(ValueError, match=f"no kernel {kind}"):
        Kernel(kind, ())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", WITH_KERNEL)
def test_a_kernel_gives_what_the_function_gives(policy: str, seed: int) -> None:
    rng = random.Random(f"{policy}/{seed}")
    fleet = a_fleet(rng, policy)
    keys, decided = list(fleet.relays), 0
    for _ in range(60):
        of = prompt(rng.choice([1, 16, 33, 200, 800]), rng.choice([0, 0, 1000]))
        if rng.random() < 0.3:
            fleet.cache(rng.choice(keys), of)
        excluded = frozenset(rng.choice([(), (), ("w0",)]))
        about = {"session_id": rng.choice(["", "s"]), "excluded_workers": excluded}
        try:
            decision = fleet.decide(of, **about)
            if decision.order:
                check(decision)
                decided += 1
            fleet.route(of, **about)
        except Refusal:
            fleet.turn(1.0)
    assert decided > 0


def test_a_kernel_counts_what_is_computed_for_later_prompts() -> None:
    fleet, invested = Fleet(index=NativeIndex(), policy="dynamo-adaptive"), 0
    for name in ("a", "b", "c"):
        fleet.add(name, running=3 * (name == "c"))
    for number in range(20):
        of = Prompt.from_tokens(pack_tokens([*range(3200), *range(5000 + number, 5033 + number)]))
        decision = fleet.decide(of)
        check(decision)
        invested += decision.invested_tokens is not None
        fleet.route(of)
        fleet.turn(0.5)
    assert invested > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_both_halves_of_a_pair_have_what_the_functions_give(seed: int) -> None:
    rng = random.Random(seed)
    fleet, decided = Fleet(index=NativeIndex(), seed=seed), 0
    for number in range(12):
        fleet.add(
            f"w{number}",
            role=rng.choice(["prefill", "decode", "both"]),
            kv_connector="NixlConnector",
            labels={name: rng.choice("ab") for name in ("host", "rack", "cluster")},
            total_blocks=rng.choice([None, 60, 1000]),
            total_slots=rng.choice([None, 0, 3, 100]),
            running=rng.randint(0, 2),
            used_blocks=rng.choice([None, 0.0, 7.5]),
        )
    for _ in range(40):
        of = prompt(rng.choice([1, 16, 33, 200, 800]), rng.choice([0, 0, 1000]))
        if rng.random() < 0.3:
            fleet.cache(rng.choice(list(fleet.relays)), of)
        about = {"role": Role.PAIR, "expected_output_tokens": rng.choice([None, 5, 300])}
        try:
            decision = fleet.decide(of, **about)
            for half in filter(None, (decision, decision.prefill)):
                assert half.ranking.costs.tobytes() == half.scores.costs.tobytes()
                decided += 1
            fleet.route(of, **about)
        except Refusal:
            fleet.turn(1.0)
    assert decided > 10


def test_a_pool_of_several_block_sizes_has_its_costs_by_the_function() -> None:
    fleet = Fleet(index=NativeIndex(), policy="dynamo-blocks")
    small, large = fleet.add("small", block_size=16), fleet.add("large", block_size=32)
    fleet.cache(large, prompt(320))
    decision = fleet.decide(prompt(320))
    assert decision.rows.workers == (small, large)
    assert decision.ranking.costs.tolist() == decision.scores.costs.tolist()
    assert decision.order == [1, 0]
