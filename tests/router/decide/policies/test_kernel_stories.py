"""Policies by their kernels and by their functions: the same picks, answers, loads, memories."""

import random
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexer.hashing import block_hashes, pack_tokens
from indexer.identity import Tier
from kvroute.v1 import router_pb2
from router.config.settings.health_settings import CapacitySettings
from router.config.settings.routing_settings import AffinitySettings, GuardSettings
from router.decide.core.progress import Progress, ProgressState
from router.decide.decision.ranking import kernel_of
from router.decide.policies import POLICIES
from router.fleet.reservations.ids import ReservationIds
from router.fleet.reservations.reservations import Ending
from router.fleet.table import COLUMNS
from tests.stage.fleet import prompt
from tests.stage.served import asked
from tests.stage.twins import Twins, known

SIZE = 16
NO_BLOCKS = np.empty(0, np.uint64)
WITH_KERNEL = [name for name, policy in POLICIES.items() if kernel_of(policy) is not None]
GUARDED = GuardSettings(policies=tuple(WITH_KERNEL))
BLOCKS = {"credit_decay": 0.5, "request_weight": 0.3, "host_credit": 0.7, "overlap_credit": 0.9}
ROUTINGS: list[dict[str, Any]] = [
    *({"policy": name} for name in WITH_KERNEL),
    {
        "policy": "ttft",
        "guard": GuardSettings(policies=()),
        "parameters": {"ttft": {"keep": 2.0}},
    },
    {"policy": "dynamo-blocks", "guard": GUARDED, "parameters": {"dynamo-blocks": BLOCKS}},
    {"policy": "ttft", "affinity": AffinitySettings(bonus={"ttft": 0.25})},
]
"""Settings by which a kernel scores."""
CAPPED: dict[str, Any] = {
    "capacity": CapacitySettings(
        prefill_tokens_max=100, prefill_requests_max=2, decode_requests_max=1
    )
}
"""Bounds by which workers are soon full."""


WORKERS = st.fixed_dictionaries(
    {
        "total_blocks": st.sampled_from([None, 10, 100, 1000]),
        "total_slots": st.sampled_from([None, 2, 5, 100]),
        "running": st.integers(0, 3),
        "waiting": st.integers(0, 2),
        "used_blocks": st.sampled_from([None, 0.0, 7.0, 50.5]),
    },
    optional={
        "block_size": st.sampled_from([16, 16, 16, 32, 0]),
        "labels": st.just({"zone": "b", "host": "a", "empty": ""}),
        "multi_rank": st.just(True),
        "priority_scheduling": st.sampled_from(["higher", "lower"]),
        "max_model_len": st.sampled_from([40, 90, 10_000]),
        "role": st.sampled_from(["both", "both", "prefill"]),
        "sampled_at_s": st.none(),
        "events": st.just(False),
        "address": st.sampled_from(["", "http://ä:1"]),
        "model": st.sampled_from(["m", "", "n"]),
    },
)
LENGTHS = st.sampled_from([1, 15, 16, 17, 32, 48, 64, 65, 100])
REQUESTS = st.fixed_dictionaries(
    {"tokens": LENGTHS, "first": st.sampled_from([0, 0, 0, 16, 1000])},
    optional={
        "form": st.sampled_from(["hashes", "ids", "empty", "ragged"]),
        "request_id": st.sampled_from(["a", "b", "c", "ä"]),
        "model": st.sampled_from(["", "m", "m", "n", "unheard-of"]),
        "expected_output_tokens": st.sampled_from([0, 1, 30, 1 << 20]),
        "priority": st.sampled_from([0, 3, -3, -(1 << 31), (1 << 31) - 1]),
        "tenant": st.sampled_from(["t", "ö", "x" * 1024, "x" * 1025]),
        "session_id": st.just("s"),
        "queue_timeout_ms": st.just(5),
        "phase": st.sampled_from([0, 1, 2, 3, 4]),
        "omit_receipt": st.booleans(),
        "lora_name": st.sampled_from(["", "l"]),
        "excluded_worker_ids": st.just(["w0"]),
        "policy": st.sampled_from(["", *WITH_KERNEL, "least-loaded"]),
    },
)
FAULTS = st.sampled_from([Ending.FAILED_WORKER, Ending.FAILED_REFUSED])
STEPS = st.one_of(
    st.tuples(st.just("route"), REQUESTS),
    st.tuples(st.just("route"), REQUESTS),
    st.tuples(st.just("batch"), st.lists(REQUESTS, max_size=6)),
    st.tuples(st.just("cache"), st.tuples(st.integers(0, 4), LENGTHS, st.sampled_from(Tier))),
    st.tuples(
        st.just("end"), st.tuples(st.integers(1, 12), st.sampled_from(ProgressState), FAULTS)
    ),
    st.tuples(st.just("lose"), st.integers(0, 4)),
    st.tuples(st.just("drain"), st.integers(0, 4)),
    st.tuples(st.just("undrain"), st.integers(0, 4)),
    st.tuples(st.just("turn"), st.sampled_from([0.5, 1.0, 6.0])),
    st.tuples(st.just("silent"), st.integers(0, 4)),
    st.tuples(st.just("hear"), st.integers(0, 4)),
    st.tuples(
        st.just("learn"),
        st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(0, 2), st.integers(0, 20)),
    ),
    st.tuples(st.just("fill"), st.integers(0, 8193)),
)


def request_of(about: dict[str, Any], number: int) -> router_pb2.RouteRequest:
    fields = {"request_id": f"request-{number}"} | about
    form, tokens, first = fields.pop("form", "tokens"), fields.pop("tokens"), fields.pop("first")
    content = pack_tokens(range(first, first + tokens))
    match form:
        case "hashes":
            fields["block_hashes"] = router_pb2.BlockHashes(
                hashes=block_hashes(content, SIZE).tolist(), block_size=SIZE, prompt_tokens=tokens
            )
        case "ids":
            fields["token_ids"] = router_pb2.TokenIds(ids=range(first, first + tokens))
        case "empty":
            fields["token_bytes"] = b""
        case "ragged":
            fields["token_bytes"] = content[:-1]
        case _:
            fields["token_bytes"] = content
    return router_pb2.RouteRequest(**fields)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    workers=st.lists(WORKERS, min_size=1, max_size=5),
    steps=st.lists(STEPS, max_size=25),
    routing=st.sampled_from([*ROUTINGS, CAPPED]),
    seed=st.integers(0, 5),
    alternatives=st.sampled_from([0, 1, 2, 16]),
    reservations_max=st.sampled_from([2, 5, 20_000]),
)
def test_a_story_goes_by_kernels_as_by_functions_to_the_last_bit(
    workers: list[dict[str, Any]],
    steps: list[tuple[str, Any]],
    routing: dict[str, Any],
    seed: int,
    alternatives: int,
    reservations_max: int,
) -> None:
    twins = Twins(
        seed=seed, alternatives=alternatives, reservations_max=reservations_max, **routing
    )
    for i, about in enumerate(workers):
        twins.tell("add", f"w{i}", **about)
    keys = [known(f"w{i}") for i in range(len(workers))]
    upcoming = ReservationIds("here", random.Random("here").randbytes)  # as a Fleet has them
    ids = [upcoming.next() for _ in range(12)]
    for number, (kind, about) in enumerate(steps):
        match kind:
            case "route":
                twins.route(request_of(about, number))
            case "batch":
                items = [
                    router_pb2.RouteItem(index=i, request=request_of(one, 1000 * (1 + number) + i))
                    for i, one in enumerate(about)
                ]
                items += [router_pb2.RouteItem(index=i, cancel=True) for i in range(0, 6, 2)]
                twins.decide(router_pb2.RouteBatch(items=items))
            case "cache":
                worker, tokens, tier = about
                if worker < len(keys) and workers[worker].get("block_size", 16) == SIZE:
                    twins.tell("cache", keys[worker], prompt(100), tokens, tier)
            case "end":
                ordinal, state, fault = about
                twins.report(Progress(ids[ordinal - 1], state, 3, 16, failure=fault))
            case "lose":
                if about < len(keys):
                    twins.tell("tell", keys[about], lost=True)
                    twins.tell("beat", keys[about])
            case "drain" | "undrain":
                for side in twins.sides:
                    getattr(side.fleet.core, kind)(f"w{about}")
            case "turn":
                twins.tell("turn", about)
            case "learn":  # two samples of which a router may learn slots, or what was preempted
                worker, running, waiting, preemptions = about
                for _ in range(2 * (worker < len(keys))):
                    for side in twins.sides:
                        side.fleet.now_s += 0.1
                    twins.tell(
                        "say",
                        keys[worker],
                        running=running,
                        waiting=waiting,
                        used_blocks=6.0,
                        preemptions=preemptions,
                    )
            case "hear":
                if about < len(keys):
                    twins.hear(keys[about])
            case "fill":  # the history of a worker's load
                for side in twins.sides:
                    load = side.fleet.core.fleet.load_of(keys[0])
                    for _ in range(about):
                        load.open(NO_BLOCKS, False, 0, side.fleet.now_s)
                        load.close(NO_BLOCKS, False, side.fleet.now_s)
            case "silent":
                twins.tell("turn", 4.0, silent=keys[about : about + 1])
        twins.compare()


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_a_cost_that_is_no_number_is_never_picked(value: float) -> None:
    twins = Twins()
    for i in range(4):
        twins.tell("add", f"w{i}")
    twins.tell("say", known("w2"), total_slots=1, running=1)
    for side in twins.sides:
        side.fleet.core.fleet.pools.refresh()
        side.fleet.core.fleet.pools.columns[COLUMNS.index("slot_ratio"), 1:3] = value
    answer = twins.route(asked(100, request_id="r"))
    assert isinstance(answer, router_pb2.RouteResponse)
    assert answer.worker_id in {"w0", "w3"}
    assert answer.receipt.excluded == {"full": 1, "cost is not a number": 1}


@pytest.mark.parametrize("seconds", [(0.01, 0.05, 0.02), (0.01, nan, 0.02)])
@pytest.mark.parametrize("policy", WITH_KERNEL)
def test_the_time_between_tokens_counts_alike(policy: str, seconds: tuple[float, ...]) -> None:
    """Where it is known of all workers, and where it is not."""
    twins = Twins(policy=policy)
    for i in range(len(seconds)):
        twins.tell("add", f"w{i}")
        twins.tell("say", known(f"w{i}"), running=i, used_blocks=100.0 * i)
    for side in twins.sides:
        side.fleet.core.fleet.pools.refresh()
        side.fleet.core.fleet.pools.columns[COLUMNS.index("tpot_s"), : len(seconds)] = seconds
    answer = twins.route(asked(100, request_id="r"))
    assert isinstance(answer, router_pb2.RouteResponse)


def test_every_tie_is_drawn_alike() -> None:
    twins = Twins(alternatives=3)
    for i in range(9):
        twins.tell("add", f"w{i}")
    for i in range(200):
        answer = twins.route(asked(20, first=1000 * i, request_id=f"r{i}"))
        assert isinstance(answer, router_pb2.RouteResponse)
        assert len(answer.alternatives) == 3


@pytest.mark.parametrize("policy", WITH_KERNEL)
def test_a_thousand_workers_are_weighed_alike(policy: str) -> None:
    rng = np.random.default_rng(5)
    twins = Twins(policy=policy, guard=GUARDED)
    for i in range(1000):
        twins.tell("add", f"w{i}", total_blocks=int(rng.integers(900, 1100)), total_slots=7)
    for side in twins.sides:
        core = side.fleet.core
        for i in range(0, 1000, 3):
            side.fleet.say(known(f"w{i}"), used_blocks=float(i % 89) / 7, running=i % 8)
        core.fleet.pools.refresh()
    for i in range(20):
        twins.route(asked(500, first=160 * (i % 7), request_id=f"r{i}"))


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_workers_are_weighed_alike_under_load(routing: dict[str, Any]) -> None:
    """Shared beginnings, all tiers, requests that end, workers that come and go."""
    twins = Twins(alternatives=2, **routing)
    for i in range(6):
        twins.tell("add", f"w{i}", total_blocks=[400, None, 300][i % 3], waiting=i % 3, running=i)
    for i, tier in enumerate(Tier):
        twins.tell("cache", known(f"w{i}"), prompt(800), 160 * (1 + i), tier)
    moved = 0
    held: list[str] = []
    for i in range(40):
        answer = twins.route(asked(800 + i, first=400 * (i % 3), request_id=f"r{i}"))
        assert isinstance(answer, router_pb2.RouteResponse)
        moved += answer.receipt.HasField("guarded")
        held.append(answer.reservation_id)
        twins.tell("turn", 0.25)
        if i % 4 == 3:
            twins.report(Progress(held[i // 2], ProgressState.PREFILL_DONE, 1, 16))
            twins.report(Progress(held.pop(i // 4), ProgressState.FINISHED, 3))
        if i == 20:
            twins.tell("turn", 40.0, silent=[known("w5")])  # it is forgotten
            twins.tell("add", "w6", used_blocks=30.0)
        if i % 10 == 5:
            twins.hear(known(f"w{i % 4}"))
    guard = twins.sides[0].fleet.core.routing.guard
    assert bool(moved) == guard.looks_at(routing["policy"])
    by_kernel, by_function = twins.sides
    assert by_kernel.by_kernel >= 40
    assert not by_function.by_kernel


def test_a_pick_of_the_last_slot_is_compared_with_workers_as_they_were() -> None:
    twins = Twins(policy="ttft")
    twins.tell("add", "w0", total_slots=1)
    twins.tell("add", "w1", total_slots=9, waiting=3)
    for i in range(2):
        answer = twins.route(asked(400, first=1000 * i, request_id=f"r{i}"))
        assert isinstance(answer, router_pb2.RouteResponse)
        assert answer.worker_id == f"w{i}"
        for side in twins.sides:
            tally = side.metrics.tally
            assert (tally.ttfts, tally.ttft_best_s) == (i + 1, tally.ttft_s)
