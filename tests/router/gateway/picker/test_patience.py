"""How long a stream may be without the next step of its request."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from kvroute.ext_proc.v3 import ext_proc_pb2 as pb
from router.config.settings.picker_settings import PickerSettings
from router.config.settings.request_settings import RequestSettings
from router.gateway.exchange import Exchange
from router.gateway.picker import picks
from router.gateway.picker.calls import PROCESS
from router.gateway.picker.counters import Early, PickerCounters
from router.gateway.picker.held_body import SMALL_BYTES
from router.gateway.picker.patience import Patience
from router.gateway.picker.picks import PickedRequest, Picker
from router.gateway.picker.repeats import Repeats
from router.gateway.picker.request_stream import Reading
from router.gateway.server.pace import BODY_S, GRACE_S, PACE_BYTES_PER_S, wait_s
from router.net.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    Status,
    frame,
    literal,
)
from router.net.http2.requests import PASSED
from router.net.http2.sockets import Http2Protocol
from router.net.listener.http_bounds import HttpBounds
from router.net.listener.seldom import LOG_S
from tests.router.gateway.picker.test_server import BODY, CHAT, USAGE, asked, worker
from tests.stage.garbage import freed_at_once
from tests.stage.http2_frames import call_head
from tests.stage.picker import (
    Stage,
    a_picker,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from tests.stage.tcp import exchanged
from tests.stage.waiting import DEADLINE_S

HEAD_S = 20.0


class Endpoints:
    """One that is always the least loaded."""

    def least_loaded(self, _subset: frozenset[str] | None) -> str:
        return "10.0.0.1:8000"


class ToldChannel:
    """To a gateway that the test is."""

    call: PickedRequest

    def __init__(self, told: "Told") -> None:
        self.told = told

    def send(self, message: bytes) -> None:
        self.told.sent.append(pb.ProcessingResponse.FromString(message))

    def close(self) -> None:
        self.told.closed += 1
        self.call.left()

    def end(self, status: Status, about: str) -> None:
        self.told.ends.append((status, about))
        self.call.reset()
        self.call.left()

    def when_room(self, go_on: Callable[[], None]) -> None:
        go_on()

    def resume(self) -> None: ...


class Told:
    """A picker whose clock is the test's, and what became of its streams."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.sent: list[pb.ProcessingResponse] = []
        self.closed = 0
        self.ends: list[tuple[Status, str]] = []
        self.registry = CollectorRegistry()
        nobody: Any = None
        one: Any = Endpoints()
        self.picker = Picker(
            nobody,
            one,
            PickerCounters(self.registry),
            PickerSettings(),
            RequestSettings(),
            lambda work: work.close() or nobody,
            head_timeout_s=HEAD_S,
        )
        self.picker.clock = lambda: self.now_s

    def open(self, deadline_s: float = inf) -> PickedRequest:
        channel = ToldChannel(self)
        channel.call = PickedRequest(self.picker, channel, Repeats(), deadline_s)
        return channel.call

    def sample(self, family: str, **labels: str) -> float:
        return self.registry.get_sample_value(family, labels) or 0.0

    def early(self, reason: Early) -> float:
        return self.sample("kvroute_picker_streams_without_request_total", reason=reason)


@pytest.fixture
async def told() -> Told:
    return Told()


def tell(call: PickedRequest, *messages: pb.ProcessingRequest) -> None:
    for message in messages:
        call.message(message.SerializeToString())


async def test_headers_are_waited_for_and_then_the_stream_ends(told: Told) -> None:
    call = told.open()
    assert call.due_s() == told.now_s + HEAD_S
    told.now_s += HEAD_S
    call.late()
    ((status, _),) = told.ends
    assert status is Status.DEADLINE_EXCEEDED
    assert told.early(Early.TIMEOUT) == 1
    assert told.sample("kvroute_picker_requests_total", outcome="cancelled") == 0


async def test_a_body_is_waited_for_by_what_has_come_of_it(told: Told) -> None:
    call = told.open()
    told.now_s += 5
    tell(call, request_headers(CHAT))
    assert call.due_s() == told.now_s + GRACE_S
    tell(call, request_body(bytes(7 * PACE_BYTES_PER_S), last=False))
    assert call.due_s() == told.now_s + GRACE_S + 7
    tell(call, request_body(bytes(1000 * PACE_BYTES_PER_S), last=False))
    assert call.due_s() == told.now_s + BODY_S
    told.now_s += BODY_S
    call.late()
    (refused,) = told.sent
    assert refused.immediate_response.status.code == 408
    assert b"BODY_TOO_SLOW" in refused.immediate_response.body
    assert told.closed == 1
    assert told.sample("kvroute_refusals_total", program="picker", reason="BODY_TOO_SLOW") == 1
    assert told.sample("kvroute_picker_requests_total", outcome="refused") == 1
    assert told.sample("kvroute_held_bytes", what="picker_bodies", port="") == 0


async def test_a_part_of_few_bytes_counts_as_more_while_it_is_held(told: Told) -> None:
    call = told.open()
    tell(call, request_headers(CHAT), *[request_body(b"", last=False)] * 3)
    tell(call, request_body(bytes(SMALL_BYTES + 1), last=False))
    held = told.sample("kvroute_held_bytes", what="picker_bodies", port="")
    assert held == 4 * SMALL_BYTES + 1
    assert call.body_wait_s == wait_s(SMALL_BYTES + 1)
    call.reset()
    call.left()
    assert told.sample("kvroute_held_bytes", what="picker_bodies", port="") == 0


async def test_what_a_client_may_cause_at_will_is_logged_seldom(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Exchange:
        raise RuntimeError("odd")

    for count in (1, 2):
        for _ in range(3):
            call = told.open()
            tell(call, request_headers(CHAT), *[request_body(BODY)] * 3)
            await call._pick(Reading(1, broken))
        levels = sorted(each.levelname for each in caplog.records)
        assert levels == ["ERROR"] * count + ["WARNING"] * count
        told.now_s += LOG_S
    assert told.sample("kvroute_by_load_total", program="picker", reason="fault") == 6


async def test_the_pace_of_a_body_that_a_gateway_sends_whole_is_not_seen(told: Told) -> None:
    call = told.open()
    message = request_headers(CHAT)
    message.protocol_config.request_body_mode = pb.BODY_SEND_MODE_BUFFERED
    tell(call, message)
    assert call.due_s() == told.now_s + BODY_S


async def test_an_engine_may_be_silent_as_long_as_it_computes(told: Told) -> None:
    call, other = told.open(), told.open()
    tell(call, request_headers("/v1/models", last=True))  # picked
    tell(other, request_headers(CHAT), request_body(BODY))  # waits for its pick
    assert call.due_s() == other.due_s() == inf
    tell(call, response_headers(), response_body(b"a"))
    assert call.due_s() == inf
    assert told.picker.open == 2
    tell(call, response_body(b"", last=True))
    assert call.due_s() == told.now_s + HEAD_S, "what is left is the gateway's end"
    assert told.picker.open == 1
    told.now_s += HEAD_S
    call.late()
    assert (told.closed, told.ends) == (1, [])


async def test_the_callers_deadline_counts_at_any_time(told: Told) -> None:
    calls = [told.open(told.now_s + 1) for _ in range(4)]
    tell(calls[1], request_headers(CHAT))
    tell(calls[2], request_headers(CHAT), request_body(BODY))
    tell(calls[3], request_headers("/v1/models", last=True))
    assert {call.due_s() for call in calls} == {told.now_s + 1}
    told.now_s += 1
    for call in calls:
        call.late()
    assert told.ends == [(Status.DEADLINE_EXCEEDED, PASSED)] * 4
    assert told.early(Early.TIMEOUT) == 1
    assert told.picker.open == 0


async def test_a_stream_without_a_request_is_not_under_way(told: Told) -> None:
    call = told.open()
    assert told.picker.open == 0
    assert told.picker.idle.is_set()
    tell(call, request_headers(CHAT))
    assert told.sample("kvroute_open_requests", program="picker") == 1
    assert not told.picker.idle.is_set()
    call.reset()
    assert told.picker.idle.is_set()
    call.left()
    assert told.sample("kvroute_open_requests", program="picker") == 0


async def test_many_idle_streams_end_in_many_turns(told: Told) -> None:
    for _ in range(picks.ENDED_A_TURN + 1):
        told.open()
    turns: list[int] = []
    asyncio.get_running_loop().call_soon(lambda: turns.append(len(told.ends)))
    await told.picker.end_idle()
    assert turns == [picks.ENDED_A_TURN - 1]
    assert [status for status, _ in told.ends] == [Status.UNAVAILABLE] * (picks.ENDED_A_TURN + 1)
    assert told.early(Early.STOPPING) == picks.ENDED_A_TURN + 1
    await told.picker.end_idle()


def _times(*due: float) -> Callable[[], float]:
    each: Iterator[float] = iter(due)
    return lambda: next(each)


async def test_a_timer_that_was_too_early_is_set_again_and_one_that_was_stopped_is_not() -> None:
    now_s = asyncio.get_running_loop().time()
    late = asyncio.Event()
    patience = Patience(_times(now_s, now_s + 0.01, now_s + 0.01, now_s), late.set)
    patience.await_deadline()
    await asyncio.wait_for(late.wait(), DEADLINE_S)
    late.clear()
    over = Patience(_times(now_s), late.set)
    over.await_deadline()
    over.stop()
    over.await_deadline()  # never
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not late.is_set()


async def test_a_timer_is_set_again_for_an_earlier_time_alone() -> None:
    now_s = asyncio.get_running_loop().time()
    late = asyncio.Event()
    patience = Patience(_times(now_s + 1e6, now_s + 2e6, now_s, now_s), late.set)
    patience.await_deadline()
    patience.await_deadline()  # stays at the first time, which looks again
    patience.await_deadline()
    await asyncio.wait_for(late.wait(), DEADLINE_S)


async def code(call: Any) -> grpc.StatusCode:
    """With which a stream ended."""
    async with asyncio.timeout(DEADLINE_S):
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        ended: grpc.StatusCode = await call.code()
        return ended


async def begun(stage: Stage) -> Any:
    """A stream whose request is picked for."""
    call, _ = await asked(stage)
    return call


async def counted(stage: Stage, reason: Early) -> None:
    await stage.counted("kvroute_picker_streams_without_request_total", reason=reason)


async def test_a_stream_without_a_message_ends_on_the_port() -> None:
    async with a_picker(worker(), http=HttpBounds(head_timeout_s=0.2)) as stage:
        await stage.channel.channel_ready()
        assert await code(stage.call()) == grpc.StatusCode.DEADLINE_EXCEEDED
        await counted(stage, Early.TIMEOUT)


async def test_a_body_that_stops_ends_with_408_on_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.gateway.server.pace.GRACE_S", 0.05)
    async with a_picker(worker()) as stage:
        call = await stage.sent(request_headers(CHAT), request_body(BODY[:9], last=False))
        assert (await call.read()).immediate_response.status.code == 408
        assert await call.read() is grpc.aio.EOF
        assert stage.sample("kvroute_open_requests", program="picker") == 0


async def test_a_gateways_own_end_and_what_is_no_message_are_counted_apart(stage: Stage) -> None:
    call = stage.call()
    await call.done_writing()
    assert await code(call) == grpc.StatusCode.OK
    await counted(stage, Early.LEFT)
    call = await stage.sent(request_body(BODY))
    assert await code(call) == grpc.StatusCode.INVALID_ARGUMENT
    await counted(stage, Early.MALFORMED)
    assert stage.sample("kvroute_picker_requests_total", outcome="cancelled") == 0


async def test_a_stop_waits_for_requests_and_for_no_stream_without_one() -> None:
    async with a_picker(worker(), drain_timeout_s=300.0) as stage:
        idle = stage.call()
        over = await begun(stage)
        await over.write(response_headers())
        await over.write(response_body(USAGE, last=True))
        call = await begun(stage)
        await stage.until_open(1)
        stopping = asyncio.create_task(stage.picker.stop())
        assert await code(idle) == grpc.StatusCode.UNAVAILABLE
        assert await code(over) == grpc.StatusCode.OK
        await counted(stage, Early.STOPPING)
        assert not stopping.done()
        await call.write(response_headers())
        await call.write(response_body(USAGE, last=True))
        assert await code(call) == grpc.StatusCode.OK
        await stopping


@pytest.mark.parametrize(
    ("text", "status"), [(b"20m", Status.DEADLINE_EXCEEDED), (b"20", Status.INTERNAL)]
)
async def test_the_deadline_of_a_call_is_that_of_its_headers(
    text: bytes, status: Status, stage: Stage
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.picker.port)
    head = call_head(PROCESS.encode()) + literal(b"grpc-timeout", text)
    writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, head))
    await asyncio.wait_for(reader.readuntil(literal(b"grpc-status", b"%d" % status)), DEADLINE_S)
    writer.close()


async def test_streams_that_end_without_a_request_are_freed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also those of a connection that breaks in the turn in which it opened them."""
    caplog.set_level("ERROR", "kvroute.http2")  # a record would keep the fault, and its frames
    async with a_picker(worker()) as stage, freed_at_once(PickedRequest, Http2Protocol):
        opened = frame(HEADERS, END_HEADERS, 1, call_head(PROCESS.encode()))
        for rest in (frame(DATA, END_STREAM, 1), frame(DATA, 0, 0)):  # the second is of no stream
            settings = frame(SETTINGS, 0, 0)
            await exchanged(stage.picker.port, PREFACE, settings, opened, rest, ends=True)
