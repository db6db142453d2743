"""The road of one request, from its bytes to its reservation and its answer."""

from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

from kvroute.v1 import router_pb2
from router.api.desk import request_codec
from router.api.desk.desk import LONG_BYTES
from router.request.refusal import Refusal
from tests.stage.fleet import prompt
from tests.stage.served import asked
from tests.stage.twins import Side, known

FLAG = b"\xa0\x01\x00"
"""RouteRequest.omit_receipt, false."""
TENANT = b"\x5a\x80\x08" + 1024 * b"t"
"""RouteRequest.tenant, as long as may be."""


class Timed:
    timed = True


def test_a_priority_that_the_engine_ignores_is_noted() -> None:
    side = Side()
    side.fleet.add("w0")
    ignored = side.fleet.core.fleet.ignored_priorities
    for number, priority in enumerate((0, 3, -3)):
        side.route(asked(40, request_id=f"r{number}", priority=priority))
        assert (ignored.get("m") == known("w0")) is bool(priority or number)


def test_a_priority_that_the_engine_schedules_by_is_noted_nowhere() -> None:
    side = Side()
    side.fleet.add("w0", priority_scheduling="lower")
    side.route(asked(40, request_id="r", priority=3))
    assert not len(side.fleet.core.fleet.ignored_priorities)


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
    lacks: tuple[str, ...], about: dict[str, Any], asked_for: str, long: bool
) -> None:
    side = Side()
    key = side.fleet.add("w", **about)
    view = side.fleet.view
    side.fleet.cache(key, prompt(64, 9000))  # or nothing would be known of it but our picks
    side.fleet.beat(key, lacks=lacks)
    if asked_for:
        setattr(view, asked_for, True)
    for number in range(2):
        told = side.route(asked(100, 1000 * number, request_id=str(number)))
        assert isinstance(told, router_pb2.RouteResponse)
    ttl_s = view.predictions._guesses[view.sources[key].slot].ttl_s
    assert ttl_s == (view._approximate_ttl_s if long else view._predicted_ttl_s)


def test_an_answer_without_a_receipt_is_the_same_otherwise() -> None:
    side = Side(about={"policy": "dynamo-unguarded"})  # the second one follows the first
    for i in range(3):
        side.fleet.add(f"w{i}", labels={"a": "b"})
    whole = side.route(asked(50, request_id="whole"))
    assert isinstance(whole, router_pb2.RouteResponse)
    assert whole.HasField("receipt")
    bare = side.route(asked(50, request_id="bare", omit_receipt=True))
    assert isinstance(bare, router_pb2.RouteResponse)
    assert not bare.HasField("receipt")
    assert bare.labels == whole.labels
    assert bare.overlap_tokens.predicted == 48


@pytest.mark.parametrize(
    ("over_estimate", "picks"), [(False, 0), (True, 3)], ids=["full", "over what was learned"]
)
def test_a_pick_counts_once_in_every_stage_and_a_refusal_in_none(
    over_estimate: bool, picks: int
) -> None:
    side = Side()
    key = side.fleet.add("w0", total_slots=None if over_estimate else 2, running=2)
    for _ in range(3):  # requests wait at two running ones: as many slots are learned
        side.fleet.now_s += 0.1
        side.fleet.say(key, running=2, waiting=1, used_blocks=6.0)
    for i in range(3):
        answer = side.route(asked(40, request_id=f"r{i}"))
        assert isinstance(answer, router_pb2.RouteResponse if over_estimate else Status)
    assert side.fleet.core.over_estimate_picks == picks
    stages = side.metrics.tally.stages.values()
    assert [int(took.counts.sum()) for took in stages] == [picks] * 4


@pytest.mark.parametrize(
    ("piece", "most"),
    [(FLAG, request_codec.FIELDS_MAX), (TENANT, request_codec.ASIDE_BYTES_MAX // len(TENANT))],
)
def test_what_stands_beside_a_prompt_has_bounds(piece: bytes, most: int) -> None:
    side = Side()
    side.fleet.add("w0")
    bare = router_pb2.RouteRequest(token_bytes=bytes(256)).SerializeToString()
    answer, _, _ = side.desk.route(bare + most * piece)
    assert router_pb2.RouteResponse.FromString(answer).worker_id == "w0"
    with pytest.raises(Refusal, match="beside its prompt"):
        side.desk.route(bare + (most + 1) * piece)
    assert len(side.fleet.core.reservations) == 1


def test_long_items_of_a_batch_are_answered_as_short_ones() -> None:
    side = Side()
    side.fleet.add("w0", total_blocks=1_000_000)
    items = [
        router_pb2.RouteItem(index=i, request=asked(tokens, request_id=f"r{i}"))
        for i, tokens in enumerate((40, LONG_BYTES // 4, 40))
    ]
    results = side.decide(router_pb2.RouteBatch(items=items))
    assert [(one.index, one.response.worker_id) for one in results] == [(i, "w0") for i in range(3)]


@pytest.mark.parametrize("part", ["view", "sessions", "rates"])
def test_a_pick_that_fails_half_way_leaves_nothing_reserved(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = Side(about={"policy": "ttft"})
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
    side = Side()
    key = side.fleet.add("w0")
    before = side.fleet.loads(), repr(side.fleet.core.reservations)
    side.fleet.view.sources[key].stream.state = 7  # type: ignore[assignment]  # breaks the receipt
    refused = side.route(asked(40))
    assert isinstance(refused, Status)
    assert refused.code == 13
    assert (side.fleet.loads(), len(side.fleet.core.reservations)) == (before[0], 0)


@given(st.binary(max_size=60))
def test_any_bytes_are_answered_or_refused(content: bytes) -> None:
    side = Side()
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


def test_policies_that_watch_know_the_picks_of_calls_and_of_streams() -> None:
    side = Side(about={"watched": Timed()})
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
        side.fleet.report(held, "finished")
    assert core.fleet.rates._workers[key].open == {}
