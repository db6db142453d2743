"""The lane and the core behind it: the same picks, answers, loads and memories from both."""

import random
from contextlib import suppress
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexer.hashing import block_hashes, pack_tokens
from indexer.identity import Tier
from kvroute.v1 import router_pb2
from router.config.settings.health_settings import CapacitySettings
from router.config.settings.routing_settings import GuardSettings
from router.core.fast_path import LONG_BYTES, Results
from router.core.progress import Progress, ProgressState
from router.desk import request_codec
from router.desk.stream_items import read_batch
from router.fleet.table import COLUMNS
from router.request.refusal import Refusal
from router.reservations.ids import ReservationIds
from router.reservations.reservations import Ending
from tests.stage.fleet import prompt
from tests.stage.served import asked
from tests.stage.twins import Side, Twins, known

SIZE = 16
NO_BLOCKS = np.empty(0, np.uint64)
GUARDED = GuardSettings(policies=("dynamo-adaptive", "dynamo-blocks", "ttft"))
BLOCKS = {"credit_decay": 0.5, "request_weight": 0.3, "host_credit": 0.7, "overlap_credit": 0.9}
ROUTINGS: list[dict[str, Any]] = [
    {"policy": "dynamo-adaptive"},
    {"policy": "dynamo-unguarded"},
    {"policy": "dynamo-blocks"},
    {"policy": "ttft"},
    {
        "policy": "ttft",
        "guard": GuardSettings(enabled=False),
        "parameters": {"ttft": {"keep": 2.0}},
    },
    {"policy": "dynamo-blocks", "guard": GUARDED, "parameters": {"dynamo-blocks": BLOCKS}},
]
"""Settings by which the fast path picks."""
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
        "policy": st.sampled_from(["", "dynamo-adaptive", "least-loaded"]),
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
def test_the_lane_is_the_core_to_the_last_bit(
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


def test_every_tie_is_drawn_alike() -> None:
    twins = Twins(alternatives=3)
    for i in range(9):
        twins.tell("add", f"w{i}")
    for i in range(200):
        answer = twins.route(asked(20, first=1000 * i, request_id=f"r{i}"))
        assert isinstance(answer, router_pb2.RouteResponse)
        assert len(answer.alternatives) == 3


@pytest.mark.parametrize("policy", ["dynamo-adaptive", "dynamo-blocks", "ttft"])
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
def test_policies_of_the_fast_path_are_weighed_alike_under_load(routing: dict[str, Any]) -> None:
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
    assert twins.sides[0].fast == 40


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
    assert twins.sides[0].fast == 2


def test_picks_that_are_drawn_take_the_general_way() -> None:
    about = {"policy": "dynamo-blocks", "parameters": {"dynamo-blocks": {"temperature": 0.5}}}
    twins = Twins(**about)
    for i in range(3):
        twins.tell("add", f"w{i}")
    for i in range(5):
        twins.route(asked(100 * i + 1, request_id=f"r{i}"))
    assert twins.sides[0].fast == 0


@pytest.mark.parametrize("policy", ["dynamo-adaptive", "dynamo-blocks", "ttft"])
def test_a_plain_request_takes_the_lane(policy: str) -> None:
    side = Side(True, {"policy": policy})
    assert side.lane is not None
    side.fleet.add("w0")
    for request in (asked(40), asked(40, omit_receipt=True, tenant="t"), asked(1)):
        assert side.lane.answer(request.SerializeToString(), side.fleet.now_s) is not None
    for about in ({"policy": "round-robin"}, {"allowed_worker_ids": ["w0"]}, {"cache_salt": "s"}):
        request = asked(40, **about)
        assert side.lane.answer(request.SerializeToString(), side.fleet.now_s) is None


def test_a_priority_that_the_engine_ignores_is_noted_on_both_ways() -> None:
    twins = Twins()
    twins.tell("add", "w0")
    native = twins.sides[0]
    for number, priority in enumerate((0, 3, -3)):
        twins.route(asked(40, request_id=f"r{number}", priority=priority))
        for side in twins.sides:
            ignored = side.fleet.core.fleet.ignored_priorities
            assert ignored.holds("m", known("w0")) is bool(priority or number)
    assert native.fast == 3, "a priority takes no request off the fast path"


def test_a_priority_that_the_engine_schedules_by_is_noted_nowhere() -> None:
    twins = Twins()
    twins.tell("add", "w0", priority_scheduling="lower")
    twins.route(asked(40, request_id="r", priority=3))
    for side in twins.sides:
        assert not len(side.fleet.core.fleet.ignored_priorities)


def test_a_drained_worker_keeps_nobody_from_the_lane() -> None:
    twins = Twins()
    for i in range(3):
        twins.tell("add", f"w{i}")
    for worker_id in ("w0", "w2"):
        for side in twins.sides:
            side.fleet.core.drain(worker_id)
        answer = twins.route(asked(40, request_id=worker_id))
        assert isinstance(answer, router_pb2.RouteResponse)
    native = twins.sides[0]
    assert native.lane is not None
    reservation = native.lane.answer(asked(40).SerializeToString(), native.fleet.now_s)
    assert reservation is not None
    assert reservation.worker.worker_id == "w1"
    answer = router_pb2.RouteResponse.FromString(reservation.answer)
    assert answer.receipt.excluded == {"drained": 2}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("lacks", "about", "asked_for", "long"),
    [
        ((), {}, "", False),
        (("unnamed_lora",), {}, "", True),
        ((), {"tells_salts": False}, "", False),
        ((), {"tells_salts": False}, "salted", True),
        ((), {"engine": "sglang"}, "itemized", True),
        ((), {}, "itemized", False),
    ],
)
def test_predictions_live_longer_where_blocks_are_left_out(
    native: bool, lacks: tuple[str, ...], about: dict[str, Any], asked_for: str, long: bool
) -> None:
    side = Side(native)
    key = side.fleet.add("w", **about)
    view = side.fleet.view
    side.fleet.cache(key, prompt(64, 9000))  # or nothing would be known of it but our picks
    side.fleet.beat(key, lacks=lacks)
    if asked_for:
        setattr(view, asked_for, True)
    for number in range(2):  # the lane goes by itself once the worker has a prediction
        told = side.route(asked(100, 1000 * number, request_id=str(number)))
        assert isinstance(told, router_pb2.RouteResponse)
    ttl_s = view.predictions._guesses[view.sources[key].slot].ttl_s
    assert ttl_s == (view._approximate_ttl_s if long else view._predicted_ttl_s)


def test_an_answer_without_a_receipt_is_the_same_otherwise() -> None:
    twins = Twins(guard=GuardSettings(enabled=False))  # the second one follows the first
    for i in range(3):
        twins.tell("add", f"w{i}", labels={"a": "b"})
    whole = twins.route(asked(50, request_id="whole"))
    assert isinstance(whole, router_pb2.RouteResponse)
    assert whole.HasField("receipt")
    bare = twins.route(asked(50, request_id="bare", omit_receipt=True))
    assert isinstance(bare, router_pb2.RouteResponse)
    assert not bare.HasField("receipt")
    assert bare.labels == whole.labels
    assert bare.overlap_tokens.predicted == 48


@pytest.mark.parametrize(
    ("strained", "picks"), [(False, 0), (True, 3)], ids=["full", "over what was learned"]
)
def test_a_pick_counts_once_in_every_stage_and_a_refusal_in_none(
    strained: bool, picks: int
) -> None:
    twins = Twins()
    twins.tell("add", "w0", total_slots=None if strained else 2, running=2)
    for _ in range(3):  # requests wait at two running ones: as many slots are learned
        for side in twins.sides:
            side.fleet.now_s += 0.1
        twins.tell("say", known("w0"), running=2, waiting=1, used_blocks=6.0)
    for i in range(3):
        answer = twins.route(asked(40, request_id=f"r{i}"))
        assert isinstance(answer, router_pb2.RouteResponse if strained else Status)
    for side in twins.sides:
        assert side.fleet.core.strained_picks == picks
        stages = side.metrics.tally.stages.values()
        assert [int(took.counts.sum()) for took in stages] == [picks] * 4


FLAG = b"\xa0\x01\x00"
"""RouteRequest.omit_receipt, false."""
TENANT = b"\x5a\x80\x08" + 1024 * b"t"
"""RouteRequest.tenant, as long as may be."""


@pytest.mark.parametrize(
    ("piece", "most"),
    [(FLAG, request_codec.FIELDS_MAX), (TENANT, request_codec.ASIDE_BYTES_MAX // len(TENANT))],
)
def test_both_ways_have_the_same_bounds_beside_the_prompt(piece: bytes, most: int) -> None:
    for native in (True, False):
        side = Side(native)
        side.fleet.add("w0")
        bare = router_pb2.RouteRequest(token_bytes=bytes(256)).SerializeToString()
        answer, _, _ = side.desk.route(bare + most * piece)
        assert router_pb2.RouteResponse.FromString(answer).worker_id == "w0"
        assert side.fast == native
        with pytest.raises(Refusal, match="beside its prompt"):
            side.desk.route(bare + (most + 1) * piece)
        assert (side.fast, len(side.fleet.core.reservations)) == (native, 1)


def test_a_long_item_is_left_to_the_general_way() -> None:
    twins = Twins()
    twins.tell("add", "w0", total_blocks=1_000_000)
    fits = LONG_BYTES // 4 - 20  # tokens; beside them are an id of two letters and a few tags
    items = [
        router_pb2.RouteItem(index=i, request=asked(tokens, request_id=f"r{i}"))
        for i, tokens in enumerate((40, fits, LONG_BYTES // 4, 40))
    ]
    content = router_pb2.RouteBatch(items=items)
    results = twins.decide(content)
    assert [one.response.worker_id for one in results] == ["w0"] * 4
    side = Side(True)
    side.fleet.add("w0", total_blocks=1_000_000)
    batch, taken = read_batch(content.SerializeToString()), Results()
    assert set(side.desk.run(batch, taken, 0.0)) == {0, 1}
    assert side.desk.run(batch, taken, 0.0) == {}
    assert len(batch) == 2


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("part", ["view", "sessions", "rates"])
def test_a_pick_that_fails_half_way_leaves_nothing_reserved(
    native: bool, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = Side(native, {"policy": "ttft"})
    side.fleet.add("w0")
    core, request = side.fleet.core, asked(40, request_id="r", session_id="s")
    owner, name = {
        "view": (core.fleet.view, "predict"),
        "sessions": (core.fleet.sessions, "put"),
        "rates": (core.fleet.rates, "on_pick"),
    }[part]

    def out_of_memory(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, out_of_memory)
        refused = side.route(request)
    assert isinstance(refused, Status)
    assert refused.code == 13
    assert side.fleet.loads() == {}
    assert (len(core.reservations), side.requests("refused", "INTERNAL")) == (0, 1)
    assert isinstance(side.route(request), router_pb2.RouteResponse)
    assert (len(core.reservations), int(side.metrics.tally.picks[0])) == (1, 1)


def test_an_answer_that_can_t_be_written_reserves_nothing() -> None:
    side = Side(True)
    key = side.fleet.add("w0")
    before = side.fleet.loads(), repr(side.fleet.core.reservations)
    side.fleet.view.sources[key].stream.state = 7  # type: ignore[assignment]  # breaks the receipt
    refused = side.route(asked(40))
    assert isinstance(refused, Status)
    assert refused.code == 13
    assert (side.fleet.loads(), len(side.fleet.core.reservations)) == (before[0], 0)


@given(st.binary(max_size=60))
def test_any_bytes_are_answered_or_refused(content: bytes) -> None:
    side = Side(True)
    side.fleet.add("w0")
    try:
        router_pb2.RouteRequest.FromString(content)
    except DecodeError:
        with pytest.raises(Refusal):
            side.desk.route(content)
        return
    with suppress(Refusal):
        side.desk.route(content)
    assert side.requests("refused", "INTERNAL") == 0


class Timed:
    timed = True


@pytest.mark.parametrize("native", [True, False])
def test_policies_that_watch_know_the_picks_of_all_ways(native: bool) -> None:
    side = Side(native, {"watched": Timed()})
    key = side.fleet.add("w0")
    core = side.fleet.core
    side.route(asked(1600, request_id="one"))
    items = [
        router_pb2.RouteItem(index=0, request=asked(1600, first=5000 * i, request_id=f"b{i}"))
        for i in (1, 2)  # of equal index, too
    ]
    side.decide(router_pb2.RouteBatch(items=items))
    core.route(side.fleet.request(prompt(1600, 50_000)), side.fleet.now_s)
    assert sum(one.open_tokens for one in core.fleet.rates._workers.values()) == 4 * 1600
    assert len(core.fleet.rates._workers[key].open) == 4
    assert core.fleet.working_sets._count > 0
    for held in list(core.reservations._open):
        core.report(Progress(held, ProgressState.FINISHED), side.fleet.now_s)
    assert core.fleet.rates._workers[key].open == {}
