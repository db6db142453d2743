"""AnswerWriter and the codec of answers: the same message from both, for picks of every kind."""

import random
from typing import Any

import pytest

from indexer.kernel import NativeIndex
from kvroute.v1 import router_pb2
from router.config.settings.routing_settings import AffinitySettings, GuardSettings
from router.core.progress import Pick
from router.desk.answer_codec import write_pick
from router.request.refusal import Refusal
from router.request.request import Role
from tests.stage.fleet import Fleet, prompt

POLICIES = [
    *("dynamo-adaptive", "dynamo-blocks", "dynamo-logit", "ttft", "least-loaded", "random"),
    *("power-of-two", "conductor", "session-sticky", "round-robin"),
    "tests.router.policies.own_policies:odd_terms",
]
SEEDS = range(6)


def by_codec(fleet: Fleet, pick: Pick, priority: int) -> router_pb2.RouteResponse:
    message = router_pb2.RouteResponse()
    write_pick(message, pick, fleet.core, priority)
    return message


def by_writer(
    fleet: Fleet, pick: Pick, priority: int, *, omit_receipt: bool = False
) -> router_pb2.RouteResponse | None:
    writer = fleet.core.answer_writer
    assert writer is not None
    written = writer.write(pick, priority, omit_receipt)
    return None if written is None else router_pb2.RouteResponse.FromString(written)


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
    guard = GuardSettings(policies=(policy,), margin=0.05)
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
        try:
            pick = fleet.route(
                of,
                session_id=rng.choice(["", "s", "t"]),
                excluded_workers=frozenset(rng.choice([(), (), ("w0",)])),
            )
        except Refusal:
            continue
        priority = rng.choice([0, 3, -3, -(1 << 31), (1 << 31) - 1])
        expected = by_codec(fleet, pick, priority)
        assert by_writer(fleet, pick, priority) == expected
        expected.ClearField("receipt")
        assert by_writer(fleet, pick, priority, omit_receipt=True) == expected


def test_the_guards_move_is_written() -> None:
    fleet = Fleet(index=NativeIndex(), policy="least-loaded", guard=GuardSettings(margin=0.0))
    one, two = fleet.add("w0"), fleet.add("w1")
    of = prompt(800)
    fleet.cache(one, of)
    moved = None
    for _ in range(20):
        pick = fleet.route(of, policy="dynamo-adaptive")
        if pick.decision.guarded is not None:
            moved = by_writer(fleet, pick, 0)
            assert moved == by_codec(fleet, pick, 0)
    assert moved is not None
    assert moved.receipt.guarded.cheapest.worker_id == one.worker_id
    assert moved.worker_id == two.worker_id


def test_the_answer_to_a_pair_is_left_to_the_codec() -> None:
    fleet = Fleet(index=NativeIndex())
    fleet.add("p", role="prefill")
    fleet.add("d", role="decode")
    pick = fleet.route(prompt(800), role=Role.PAIR)
    assert by_writer(fleet, pick, 0) is None
    assert by_codec(fleet, pick, 0).prefill_worker.worker_id == "p"


def test_a_fault_while_writing_leaves_nothing_of_the_answer_behind() -> None:
    fleet = Fleet(index=NativeIndex())
    fleet.add("w0")
    broken = fleet.route(prompt(40))
    broken.reservation.id = 5  # type: ignore[assignment]
    with pytest.raises(TypeError):
        by_writer(fleet, broken, 0)
    pick = fleet.route(prompt(40))
    assert by_writer(fleet, pick, 0) == by_codec(fleet, pick, 0)
