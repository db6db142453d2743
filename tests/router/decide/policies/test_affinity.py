"""Affinity as a term of any policy, and before any: where a session's next request goes."""

import json
import random
from typing import Any

import numpy as np
import pytest

from kvroute.v1 import router_pb2
from router.api.desk.answer_codec import answer_writer
from router.config.keys import ConfigError
from router.config.settings.routing_settings import AffinitySettings, GuardSettings, RoutingSettings
from router.decide.decision.decision import Decision
from router.decide.policies import POLICIES
from router.decide.policies.affinity import OTHER_WORKER, with_bonus
from router.decide.policies.configured import configured
from router.observe.audit.logged_decision import capture, decode, encode
from router.observe.audit.recompute_line import check_line
from router.observe.audit.recompute_receipt import check
from router.request.request import Role
from tests.stage.fleet import Fleet, prompt

BONUS = [name for name, policy in POLICIES.items() if not policy.draws]


def fleet_of(count: int = 4, policy: str = "least-loaded", **about: Any) -> Fleet:
    """Without a guard, which may move a session on from a worker with a queue."""
    guard = GuardSettings(policies=())
    fleet = Fleet(policy=policy, affinity=AffinitySettings(**about), guard=guard)
    for i in range(count):
        fleet.add(f"w{i}")
    return fleet


def decide(fleet: Fleet, **about: Any) -> Decision:
    return fleet.decide(prompt(64), **about)


def picked(decision: Decision) -> str:
    return decision.rows.workers[decision.order[0]].worker_id


def told(fleet: Fleet, decision: Decision) -> router_pb2.Receipt:
    return router_pb2.Receipt.FromString(answer_writer(fleet.core).receipt(decision))


# --- soft ---


def test_a_session_stays_until_the_rest_of_the_cost_outweighs_the_bonus() -> None:
    fleet = fleet_of(bonus={"least-loaded": 3.0})
    home = fleet.route(prompt(64), session_id="s").reservation.worker
    fleet.say(home, running=1)  # with the one that is reserved there: 2 more than the others have
    assert picked(decide(fleet, session_id="s")) == home.worker_id
    fleet.say(home, running=3)
    assert picked(decide(fleet, session_id="s")) != home.worker_id
    moved = fleet.route(prompt(64), session_id="s").reservation.worker
    fleet.say(home, running=0)
    assert picked(decide(fleet, session_id="s")) == moved.worker_id, "and goes on there"


def test_without_a_session_and_for_other_policies_there_is_no_term() -> None:
    fleet = fleet_of(bonus={"least-loaded": 3.0})
    home = fleet.route(prompt(64), session_id="s").reservation.worker.worker_id
    for about in ({}, {"session_id": "s", "policy": "dynamo-adaptive"}):
        receipt = told(fleet, decide(fleet, **about))
        assert receipt.formula == POLICIES[receipt.policy].formula
        assert "affinity" not in receipt.picked.terms
    new = told(fleet, decide(fleet, session_id="new"))
    assert (new.picked.terms["affinity"], new.picked.worker_id == home) == (0.0, False)


@pytest.mark.parametrize("name", BONUS)
def test_the_receipt_shows_the_term_and_is_worked_out_again(name: str) -> None:
    fleet = fleet_of(policy=name, bonus={name: 1e6})
    rng = random.Random(name)
    for i in range(4):
        fleet.say(next(iter(fleet.relays)), running=rng.randrange(5))
        fleet.route(prompt(96), session_id=f"other-{i}")
    home = fleet.route(prompt(64), session_id="s").reservation.worker.worker_id
    decision = decide(fleet, session_id="s")
    assert picked(decision) == home
    receipt = told(fleet, decision)
    assert receipt.picked.terms["affinity"] == 1e6
    assert receipt.runner_up.terms["affinity"] == 0.0
    assert check(receipt).complaints == []
    receipt.picked.terms["affinity"] += 1.0
    assert check(receipt).complaints, "a term that was changed shows"


@pytest.mark.parametrize("name", BONUS)
def test_a_logged_line_is_worked_out_again_and_one_of_an_older_release_too(name: str) -> None:
    fleet = fleet_of(policy=name, bonus={name: 2.0})
    fleet.route(prompt(64), session_id="s")
    content = encode(capture(decide(fleet, session_id="s"), "here", hashes=True))
    line = decode(content)
    assert line.affinity_bonus == 2.0
    assert check_line(line).complaints == []
    assert "affinity" in check_line(line).terms
    plain = encode(capture(decide(fleet), "here", hashes=True))
    assert "affinity_bonus" not in json.loads(plain), "as an older release writes lines"
    assert check_line(decode(plain)).complaints == []


def test_the_guard_moves_a_soft_session_on_and_a_hard_one_stays() -> None:
    for about, stays in (({"bonus": {"dynamo-adaptive": 0.2}}, False), ({"hard": True}, True)):
        fleet = Fleet("w0", "w1", "w2", "w3", affinity=AffinitySettings(**about))
        home = fleet.route(prompt(64), session_id="s").reservation.worker
        fleet.say(home, running=10)
        decision = decide(fleet, session_id="s")
        assert (picked(decision) == home.worker_id) == stays
        assert (decision.guarded is None) == stays
        assert check(told(fleet, decision)).complaints == []


def test_a_formula_of_several_clauses_keeps_them() -> None:
    policy = with_bonus(POLICIES["dynamo-adaptive"], 0.5)
    assert policy.formula.startswith("(alpha * (load - load_mean) +")
    assert "gamma * slot_ratio) - affinity; alpha = alpha_balance if " in policy.formula
    assert with_bonus(POLICIES["dynamo-adaptive"], 0.5) is policy
    assert with_bonus(policy, 0.0) is policy


# --- hard ---


@pytest.mark.parametrize("name", POLICIES)
def test_under_hard_affinity_no_other_worker_gets_the_session(name: str) -> None:
    fleet = fleet_of(policy=name, hard=True)
    home = fleet.route(prompt(64), session_id="s").reservation.worker
    fleet.say(home, running=90, used_blocks=900.0)
    decision = decide(fleet, session_id="s")
    assert [decision.rows.workers[row] for row in decision.order] == [home]
    assert decision.exclusions() == {OTHER_WORKER: 3}
    assert check(told(fleet, decision)).complaints == []
    line = decode(encode(capture(decision, "here", hashes=True)))
    assert check_line(line).complaints == []
    assert len(decide(fleet).order) == 3, "requests of no session go anywhere"
    assert decide(fleet, session_id="new").exclusions() == {}


@pytest.mark.parametrize("trouble", ["full", "drained", "silent", "gone", "excluded"])
def test_a_session_whose_worker_cannot_take_it_goes_on_elsewhere_by_cost(trouble: str) -> None:
    fleet = fleet_of(hard=True)
    home = fleet.route(prompt(64), session_id="s").reservation.worker
    fleet.say(next(key for key in fleet.relays if key != home), running=50)
    about: dict[str, Any] = {}
    match trouble:
        case "full":
            fleet.say(home, running=100)
        case "drained":
            fleet.core.drain(home.worker_id)
        case "silent":
            fleet.turn(5, silent=[home])
        case "gone":
            fleet.core.remove(home.worker_id, 3600.0, fleet.now_s)
        case "excluded":
            about = {"excluded_workers": frozenset({home.worker_id})}
    decision = decide(fleet, session_id="s", **about)
    assert OTHER_WORKER not in decision.exclusions()
    can = np.array([not reason for reason in decision.excluded])
    costs = decision.scores.costs
    assert costs[decision.order[0]] == costs[can].min()
    moved = fleet.route(prompt(64), session_id="s", **about).reservation.worker
    assert moved != home
    assert picked(decide(fleet, session_id="s")) == moved.worker_id


def test_of_a_pair_the_session_goes_on_where_it_is_decoded() -> None:
    fleet = Fleet(affinity=AffinitySettings(hard=True))
    for i in range(3):
        fleet.add(f"p{i}", role="prefill", bootstrap_host="h", bootstrap_port=1, engine="sglang")
        fleet.add(f"d{i}", role="decode", engine="sglang")
    about = {"session_id": "s", "role": Role.PAIR}
    first = fleet.route(prompt(640), **about)
    assert first.reservation.prefill is not None
    for _ in range(6):
        decision = decide(fleet, **about)
        assert picked(decision) == first.reservation.worker.worker_id
        assert decision.prefill is not None
        assert OTHER_WORKER not in decision.prefill.exclusions()


# --- what is refused ---


@pytest.mark.parametrize(
    ("about", "complaint"),
    [
        ({"bonus": {"nonesuch": 1.0}}, r"unknown policy 'nonesuch' at `\$.routing.affinity.bonus`"),
        ({"bonus": {"power-of-two": 1.0}}, r"draws .* at `\$.routing.affinity.bonus.power-of-two`"),
        ({"bonus": {"ttft": float("inf")}}, r"finite .* at `\$.routing.affinity.bonus.ttft`"),
    ],
)
def test_a_bonus_that_could_change_nothing_is_refused(about: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        configured(RoutingSettings(affinity=AffinitySettings(**about)))
