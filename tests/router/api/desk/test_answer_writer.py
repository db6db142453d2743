"""The writer of answers, and protobuf field by field: the same message for picks of every kind."""

import random
from contextlib import suppress
from typing import Any

import pytest

from indexer.kernel import NativeIndex
from kvroute.v1 import router_pb2
from router.api.desk.answer_codec import answer_writer, explanations
from router.config.settings.routing_settings import AffinitySettings, GuardSettings
from router.decide.core.progress import Pick
from router.request.refusal import Refusal
from router.request.request import Role
from tests.router.api.desk.plain_answers import write_pick, write_receipt, write_row
from tests.stage.fleet import Fleet, prompt
from tests.stage.guards import TunedGuard

POLICIES = [
    *("dynamo-adaptive", "dynamo-blocks", "dynamo-logit", "ttft", "least-loaded"),
    *("power-of-two", "conductor", "session-sticky", "round-robin"),
    "tests.router.decide.policies.own_policies:odd_terms",
]
SEEDS = range(6)


def by_protobuf(fleet: Fleet, pick: Pick, priority: int) -> router_pb2.RouteResponse:
    message = router_pb2.RouteResponse()
    write_pick(message, pick, fleet.core, priority)
    return message


def by_writer(
    fleet: Fleet, pick: Pick, priority: int, *, omit_receipt: bool = False
) -> router_pb2.RouteResponse:
    written = answer_writer(fleet.core).answer(pick, priority, omit_receipt)
    return router_pb2.RouteResponse.FromString(written)


def a_fleet(rng: random.Random, policy: str, **routing: Any) -> Fleet:
    """Workers that differ in all that an answer says of them."""
    fleet = Fleet(
        index=NativeIndex(), policy=policy, policy_per_request=True, seed=rng.random(), **routing
    )
    for number in range(rng.randint(1, 6)):
        fleet.add(
            f"w{number}",
            rng.choice([0, 0, 1]),
            address=rng.choice(["", "http://ä:1", "http://w"]),
            total_blocks=rng.choice([None, 100, 1000]),
            total_slots=rng.choice([None, 3, 100]),
            running=rng.randint(0, 3),
            waiting=rng.randint(0, 2),
            used_blocks=rng.choice([None, 0.0, 7.5]),
            labels=rng.choice([{}, {"zone": "b", "host": "a", "empty": ""}]),
            multi_rank=rng.random() < 0.3,
            priority_scheduling=rng.choice(["", "higher", "lower"]),
            sampled_at_s=rng.choice([None, fleet.now_s - 2.5]),
        )
    return fleet


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_writer_and_codec_write_the_same(policy: str, seed: int) -> None:
    rng = random.Random(f"{policy}/{seed}")
    guard = GuardSettings(policies=(policy,))
    bonus = {} if policy == "power-of-two" else {policy: rng.choice([0.0, 0.25])}
    affinity = AffinitySettings(bonus=bonus)
    alternatives = rng.randint(0, 3)
    fleet = a_fleet(rng, policy, guard=guard, affinity=affinity, alternatives=alternatives)
    keys = list(fleet.relays)
    for _ in range(40):
        first = rng.choice([0, 0, 1000])
        of = prompt(rng.choice([1, 16, 33, 200]), first)
        if rng.random() < 0.3:
            fleet.cache(rng.choice(keys), of)
        if rng.random() < 0.1:
            fleet.core.drain(rng.choice(keys).worker_id)
        if rng.random() < 0.1:
            fleet.core.undrain(rng.choice(keys).worker_id)
        if rng.random() < 0.1:
            fleet.turn(rng.choice([0.5, 2.0]), silent=keys[:1])
        request = fleet.request(
            of,
            session_id=rng.choice(["", "s", "t"]),
            excluded_workers=frozenset(rng.choice([(), (), ("w0",)])),
        )
        priority = rng.choice([0, 3, -3, -(1 << 31), (1 << 31) - 1])

        def write(pick: Pick, priority: int = priority) -> bytes:
            expected = by_protobuf(fleet, pick, priority)
            assert by_writer(fleet, pick, priority) == expected
            expected.ClearField("receipt")
            assert by_writer(fleet, pick, priority, omit_receipt=True) == expected
            return b"written"

        try:
            outcome = fleet.core.route(request, fleet.now_s, write=write)
        except Refusal:
            continue
        assert outcome.reservation.answer == b"written"


def test_the_guards_move_is_written() -> None:
    fleet = Fleet(index=NativeIndex(), policy="least-loaded", guard=TunedGuard(margin=0.0))
    one, two = fleet.add("w0"), fleet.add("w1")
    of = prompt(800)
    fleet.cache(one, of)
    moved = None
    for _ in range(20):
        pick = fleet.route(of, policy="dynamo-adaptive")
        if pick.decision.guarded is not None:
            moved = by_writer(fleet, pick, 0)
            assert moved == by_protobuf(fleet, pick, 0)
    assert moved is not None
    assert moved.receipt.guarded.cheapest.worker_id == one.worker_id
    assert moved.worker_id == two.worker_id


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["", "dynamo-adaptive", "least-loaded"])
def test_answers_to_pairs_are_the_same(policy: str, seed: int) -> None:
    rng = random.Random(f"{policy}/{seed}")
    fleet = Fleet(index=NativeIndex(), policy_per_request=True, seed=rng.random())
    for number in range(rng.randint(2, 6)):
        fleet.add(
            f"w{number}",
            role=rng.choice(["prefill", "decode", "both"]),
            engine=rng.choice(["vllm", "vllm", "sglang"]),
            kv_connector=rng.choice(["", "NixlConnector"]),
            kv_engine_id=f"engine-{number}",
            labels=rng.choice([{}, {"zone": "b"}]),
            total_slots=rng.choice([None, 100]),
            bootstrap_port=8998,
        )
    hows = set()
    for _ in range(30):
        of = prompt(rng.choice([16, 200, 800]), rng.choice([0, 0, 1000]))
        if rng.random() < 0.3:
            fleet.cache(rng.choice(list(fleet.relays)), of)

        def write(pick: Pick) -> bytes:
            hows.add(pick.decision.how)
            expected = by_protobuf(fleet, pick, 1)
            assert by_writer(fleet, pick, 1) == expected
            expected.ClearField("receipt")
            expected.ClearField("prefill_receipt")
            assert by_writer(fleet, pick, 1, omit_receipt=True) == expected
            return b""

        request = fleet.request(of, role=Role.PAIR, policy=policy)
        with suppress(Refusal):
            fleet.core.route(request, fleet.now_s, write=write)
    assert None not in hows


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["dynamo-adaptive", "dynamo-logit", "ttft"])
def test_explanations_show_every_candidate_of_a_decision(policy: str, seed: int) -> None:
    rng = random.Random(f"{policy}/{seed}")
    fleet = a_fleet(rng, policy, affinity=AffinitySettings(bonus={policy: 0.25}))
    fleet.add("elsewhere", labels={"zone": "c"})
    writer = answer_writer(fleet.core)
    for role in (Role.BOTH, Role.PAIR):
        labels = rng.choice([{}, {"zone": "b"}, {"zone": "nowhere"}])
        request = fleet.request(prompt(200), role=role, required_labels=labels, session_id="s")
        fleet.core.route(fleet.request(prompt(200), session_id="s"), fleet.now_s)
        decision = fleet.core.decide(request, fleet.now_s)
        for half in filter(None, (decision, decision.prefill)):
            expected = router_pb2.Receipt()
            write_receipt(expected, half, fleet.core)
            assert router_pb2.Receipt.FromString(writer.receipt(half)) == expected
            for number in range(len(half.rows)):
                row = router_pb2.CandidateRow()
                write_row(row, half, fleet.core, number)
                assert router_pb2.CandidateRow.FromString(writer.row(half, number)) == row
        refusal = None if decision.order else fleet.core.decider.refuse(decision)
        whole = b"".join(explanations(decision, refusal, fleet.core, writer))
        explanation = router_pb2.Explanation.FromString(whole)
        assert len(explanation.candidates) == len(decision.rows) + len(decision.not_live)
        assert explanation.HasField("refusal") == (not decision.order)


def test_a_fault_while_writing_leaves_nothing_of_the_answer_behind() -> None:
    fleet = Fleet("w0", index=NativeIndex())
    writer, broken = answer_writer(fleet.core), fleet.route(prompt(40))
    whole, broken.reservation.id = broken.reservation.id, 5  # type: ignore[assignment]
    with pytest.raises(TypeError):
        writer.answer(broken, 0, omit_receipt=False)
    broken.reservation.id = whole
    answer = router_pb2.RouteResponse.FromString(writer.answer(broken, 0, omit_receipt=False))
    assert answer == by_protobuf(fleet, broken, 0)
    pick = fleet.route(prompt(40))
    assert by_writer(fleet, pick, 0) == by_protobuf(fleet, pick, 0)
