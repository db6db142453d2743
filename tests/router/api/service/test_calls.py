"""What stands before the handlers: sizes, counts, bytes in flight, faults; over a real socket."""

import asyncio
import gc
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from indexer.kernel import NativeIndex
from kvroute.v1 import fleet_pb2, router_pb2
from router.api.desk import reports
from router.api.desk import stream_items as route_stream
from router.api.desk.answer_codec import framed as field
from router.api.desk.desk import LONG_BYTES
from router.api.desk.methods import EXPLAIN, REPORT, ROUTE, ROUTE_STREAM
from router.api.desk.tenant import Reporter
from router.api.service import router_service
from router.api.service.calls import Guard
from router.api.service.grpc_bounds import GrpcBounds
from router.api.service.inbound import SMALL_BYTES, InFlight, Limits
from router.api.service.server import http2_server
from router.config.settings.serving_settings import GrpcSettings
from router.fleet.reservations.reservations import Ending
from router.net.listener.seldom import LOG_S
from router.request.refusal import Reason, Refusal
from router.request.wire import received
from tests.stage.http2_frames import (
    DATA,
    END_HEADERS,
    HEADERS,
    PREFACE,
    RST,
    SETTINGS,
    call_head,
    frame,
)
from tests.stage.served import Served, asked, refusal, served
from tests.stage.waiting import until

Code = grpc.StatusCode
KIB = 1024
END_STREAM, CANCEL = 1, 8
"""Of HTTP/2: a flag, and an error's code."""


def raw(stage: Served, method: str) -> Any:
    """A call of one message each way, as bytes."""
    return stage.channel.unary_unary(method)


class TestLimits:
    def test_the_defaults(self) -> None:
        limits = Limits(1 << 20)
        of = {name: limits.of(name) for name in (ROUTE, EXPLAIN, ROUTE_STREAM, REPORT, "/x/Y")}
        assert [(one.bytes_max // KIB, one.key) for one in of.values()] == [
            (8192, "routing.prompt_tokens_max"),
            (8192, "routing.prompt_tokens_max"),
            (16384, "routing.prompt_tokens_max"),
            (1024, ""),
            (256, ""),
        ]
        assert limits.largest == 33 << 20, "a body of a chat, and what is beside it"

    def test_longer_prompts_have_room(self) -> None:
        limits = Limits(4 << 20)
        assert limits.of(ROUTE).bytes_max == limits.of(EXPLAIN).bytes_max == 21 << 20
        assert limits.of(ROUTE_STREAM).bytes_max == 22 << 20
        endless = Limits(1 << 40)
        assert endless.largest == endless.of(ROUTE).bytes_max == 64 << 20


class TestSizes:
    @pytest.mark.parametrize(
        ("method", "key"),
        [
            (ROUTE, " (routing.prompt_tokens_max)"),
            (EXPLAIN, " (routing.prompt_tokens_max)"),
            (REPORT, ""),
            ("/kvroute.v1.Fleet/ListWorkers", ""),
            ("/kvroute.v1.Fleet/RegisterWorker", ""),
            ("/grpc.health.v1.Health/Check", ""),
        ],
    )
    async def test_a_message_over_the_limit_is_refused_with_the_key(
        self, method: str, key: str
    ) -> None:
        async with served("w0", bounds=GrpcBounds(report_kib_max=3, other_kib_max=3)) as stage:
            most = 8192 * KIB if key else 3 * KIB
            # A field that nobody knows, and that protobuf would have kept.
            at_the_limit = field(9, bytes(most - (5 if key else 3)))
            assert len(at_the_limit) == most
            over = await refusal(raw(stage, method)(at_the_limit + b"\x00"))
            assert (over.code, over.reason) == (Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
            assert over.retry_s is None
            assert over.message.endswith(f"{most + 1} bytes, the limit is {most}{key}")
            service, name = method.split("/")[1:]
            labels = {"method": f"{service.rpartition('.')[2]}/{name}"}
            labels["reason"] = "MESSAGE_TOO_LARGE"
            assert stage.metric("calls_refused_total", **labels) == 1
            call = raw(stage, method)(at_the_limit)
            assert await call.code() is not Code.RESOURCE_EXHAUSTED

    async def test_batches_and_streams_have_their_limit(self) -> None:
        async with served(bounds=GrpcBounds(other_kib_max=2)) as stage:
            call = stage.channel.stream_stream(ROUTE_STREAM)()
            await call.write(bytes(16_384 * KIB + 1))
            over = await refusal(call.read())
            assert over.reason == "MESSAGE_TOO_LARGE"
            assert "routing.prompt_tokens_max" in over.message
            name = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            call = stage.channel.stream_stream(name)()
            await call.write(bytes(3 * KIB))
            over = await refusal(call.read())
            assert over.reason == "MESSAGE_TOO_LARGE"

    async def test_over_the_largest_limit_it_is_refused_before_its_bytes_have_come(
        self, empty: Served
    ) -> None:
        refused = await refusal(raw(empty, ROUTE)(bytes(33 * KIB * KIB + 1)))
        assert (refused.code, refused.reason) == (Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")


HOSTILE: list[tuple[str, str, bytes, str]] = [
    # what, the method, its message, part of the refusal
    ("empty steps", REPORT, b"\x0a\x00" * (1 << 19), "at most 65536 are taken"),
    ("unknown fields", REPORT, b"\x10\x01" * (1 << 19), "at most 65536 are taken"),
    ("tokens", ROUTE, field(3, field(1, b"\x01" * (2 << 20))), "more than 1048576 tokens"),
    ("loose tokens", ROUTE, field(3, b"\x08\x01" * (2 << 20)), "more than 1048576 tokens"),
    ("hashes", ROUTE, field(5, b"\x09abcdefgh" * 500_000), "INVALID"),
    ("empty prompts", ROUTE, b"\x1a\x00" * (1 << 20), "more than 20480 fields"),
    ("empty images", ROUTE, b"\x42\x00" * (1 << 20), "more than 20480 fields"),
    ("empty labels", EXPLAIN, b"\x82\x01\x00" * (1 << 20), "more than 20480 fields"),
    ("ids of workers", EXPLAIN, b"\x8a\x01\x01a" * (1 << 20), "more than 20480 fields"),
    ("a long model", ROUTE, field(2, b"m" * (2 << 20)), "more than 1048576 bytes"),
    ("groups", ROUTE, b"\x0b\x0c" * (1 << 20), "more than 20480 fields"),
    ("a deep group", ROUTE, b"\x0b" * 1000 + b"\x0c" * 1000, "no valid RouteRequest"),
    ("labels", "/kvroute.v1.Fleet/RegisterWorker", b"\x3a\x00" * (1 << 16), "8192 fields"),
]


@pytest.mark.parametrize(
    ("method", "message", "sentence"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE]
)
async def test_what_is_too_much_is_refused_by_its_bytes(
    method: str, message: bytes, sentence: str, monkeypatch: pytest.MonkeyPatch, stage: Served
) -> None:
    built: list[int] = []

    class Watched:
        """In the place of the class of a message, which would build objects."""

        @staticmethod
        def FromString(content: bytes) -> Any:  # protobuf's name
            built.append(len(content))
            return router_pb2_RouteRequest.FromString(content)

    router_pb2_RouteRequest = router_pb2.RouteRequest
    before = stage.state()
    monkeypatch.setattr(router_pb2, "RouteRequest", Watched)
    refused = await refusal(raw(stage, method)(message))
    monkeypatch.undo()
    if sentence != "INVALID":
        assert sentence in refused.message
    assert refused.code is Code.INVALID_ARGUMENT
    assert sum(built) < 100, "protobuf got nothing of it"
    assert stage.state() == before


class TestBytesInFlight:
    def test_they_never_exceed_the_bound_but_for_one_alone(self) -> None:
        in_flight = InFlight(3 * SMALL_BYTES)
        big = SMALL_BYTES + 1
        with in_flight.hold(4 * SMALL_BYTES):
            assert in_flight.bytes == 4 * SMALL_BYTES
        assert in_flight.bytes == 0
        with in_flight.hold(big):
            with in_flight.hold(3 * SMALL_BYTES - big):
                assert in_flight.bytes == in_flight.bytes_max
                with in_flight.hold(SMALL_BYTES):
                    assert in_flight.bytes == in_flight.bytes_max, "small ones don't count"
            more = in_flight.hold(3 * SMALL_BYTES - big + 1)
            with pytest.raises(Refusal, match="are being handled") as caught, more:
                pass
            assert caught.value.retry_after_s
        assert in_flight.bytes == 0

    async def test_a_message_over_the_bound_is_to_be_sent_again(self) -> None:
        async with served("w0", bounds=GrpcBounds(in_flight_mib_max=1)) as stage:
            in_flight = stage.guard.in_flight
            long = asked(200_000)
            with in_flight.hold(900 * KIB):
                assert stage.metric("held_bytes", what="messages", port="") == 900 * KIB
                assert stage.metric("held_bytes_max", what="messages") == 1 << 20
                refused = await refusal(stage.router.Route(long))
                assert (refused.code, refused.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_BYTES")
                assert refused.retry_s
                call = stage.router.RouteStream()
                await call.write(
                    router_pb2.RouteBatch(items=[router_pb2.RouteItem(index=1, request=long)])
                )
                assert (await refusal(call.read())).reason == "TOO_MANY_BYTES"
                assert (await stage.route(100)).worker_id == "w0"
            assert (await stage.router.Route(long)).worker_id == "w0"
            assert in_flight.bytes == 0


class Broken(Exception):
    """Nobody expects it."""


ERRORS = [
    Broken("odd"),
    ValueError("odd"),
    KeyError("odd"),
    RecursionError("odd"),
    MemoryError("odd"),
    OverflowError("odd"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd"),
    TimeoutError("odd"),
    OSError("odd"),
    AssertionError("odd"),
    StopAsyncIteration("odd"),
    StopIteration("odd"),
    asyncio.CancelledError("odd"),
    ExceptionGroup("odd", [Broken("odd")]),
]


def breaks(error: BaseException) -> Callable[..., Any]:
    def broken(*_: object, **__: object) -> Any:
        raise error

    return broken


async def one_message(call: Any, request: Any = None) -> Any:
    if request is not None:
        await call.write(request)
    return await call.read()


BOUNDARIES: dict[str, tuple[str, str, Callable[[Served], Any]]] = {
    # method -> what of the router breaks; the metric's label; the call
    "Route": ("lora_of", "Router/Route", lambda s: s.router.Route(asked())),
    "long Route": ("block_sizes", "Router/Route", lambda s: s.router.Route(asked(300_000))),
    "Explain": ("lora_of", "Router/Explain", lambda s: s.router.Explain(asked())),
    "Report": (
        "report",
        "Router/Report",
        lambda s: s.router.Report(
            router_pb2.ReportRequest(progress=[router_pb2.Progress(reservation_id="x", state=1)])
        ),
    ),
    "ListWorkers": ("load_of", "Fleet/ListWorkers", lambda s: s.call("ListWorkers")),
    "WatchWorkers": (
        "load_of",
        "Fleet/WatchWorkers",
        lambda s: one_message(s.call("WatchWorkers")),
    ),
    "DrainWorker": ("drain", "Fleet/DrainWorker", lambda s: s.call("DrainWorker", worker_id="w0")),
    "UndrainWorker": (
        "undrain",
        "Fleet/DrainWorker",
        lambda s: s.call("DrainWorker", worker_id="w0", undrain=True),
    ),
    "RemoveWorker": (
        "remove",
        "Fleet/RemoveWorker",
        lambda s: s.call("RemoveWorker", worker_id="w0"),
    ),
}


@pytest.mark.parametrize("name", BOUNDARIES)
async def test_whatever_a_handler_raises_ends_its_call_and_no_other(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attribute, label, call = BOUNDARIES[name]
    async with served("w0") as stage, asyncio.timeout(60):
        for n, error in enumerate(ERRORS, 1):
            core = stage.fleet.core
            owner = core if hasattr(core, attribute) else core.fleet
            monkeypatch.setattr(owner, attribute, breaks(error))
            refused = await refusal(call(stage))
            assert (refused.code, refused.reason) == (Code.INTERNAL, "INTERNAL"), error
            assert "odd" not in refused.message
            assert stage.metric("calls_refused_total", method=label, reason="INTERNAL") == n
            monkeypatch.undo()
            assert (await stage.route()).worker_id == "w0"
            stage.fleet.now_s += 0.001  # a fleet command is newer than the one before
        faults = [one for one in caplog.records if "ends with INTERNAL" in one.getMessage()]
        assert len(faults) == 1, "logged once in a while"
        answered = await call(stage)
        assert answered is not grpc.aio.EOF


class _Kept:
    """Can be referred to weakly, as bytes can't."""


@pytest.mark.interpreted
async def test_of_an_aborted_call_nothing_waits_for_a_look_for_cycles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[weakref.ref[_Kept]] = []

    def refuse(*_: object) -> Any:
        kept = _Kept()
        left.append(weakref.ref(kept))
        raise Refusal(Reason.INVALID_FIELD, "odd")

    monkeypatch.setattr(reports, "_pieces", refuse)
    monkeypatch.setattr(router_service, "read_batch", refuse)
    monkeypatch.setattr(received, "read_request", refuse)
    async with served() as stage, asyncio.timeout(60):
        gc.disable()
        try:
            told = await refusal(stage.router.Report(router_pb2.ReportRequest()))
            assert told.reason == "INVALID_FIELD"
            stream = stage.router.RouteStream()
            told = await refusal(one_message(stream, router_pb2.RouteBatch()))
            assert told.reason == "INVALID_FIELD"
            long = asked()
            long.token_bytes = bytes(4 * LONG_BYTES)
            for request in (asked(), long):
                told = await refusal(stage.router.Route(request))
                assert told.reason == "INVALID_FIELD"
            assert len(left) == 4
            while any(one() is not None for one in left):  # noqa: ASYNC110  # the server's tasks end
                await asyncio.sleep(0)
        finally:
            gc.enable()


async def test_whatever_a_registration_raises_ends_its_call_and_no_other() -> None:
    request = fleet_pb2.RegisterWorkerRequest(worker_id="w", engine="vllm", address="http://w:1")
    async with served("w0") as stage, asyncio.timeout(60):
        for error in ERRORS:
            stage.on_register = breaks(error)
            refused = await refusal(stage.workers.RegisterWorker(request))
            assert (refused.code, refused.reason) == (Code.INTERNAL, "INTERNAL"), error
            stage.on_register = lambda: None
            assert (await stage.route()).worker_id == "w0"
        await stage.workers.RegisterWorker(request)
        assert [one.id for one in stage.registered] == ["w"]


async def test_a_fault_ends_one_stream_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served("w0") as stage, asyncio.timeout(60):
        other = stage.router.RouteStream()
        batch = router_pb2.RouteBatch(items=[router_pb2.RouteItem(index=1, request=asked())])
        for error in ERRORS:
            monkeypatch.setattr(router_service, "read_batch", breaks(error))
            broken = stage.router.RouteStream()
            refused = await refusal(one_message(broken, batch))
            assert (refused.code, refused.reason) == (Code.INTERNAL, "INTERNAL"), error
            monkeypatch.undo()
            (result,) = (await one_message(other, batch)).results
            assert result.response.worker_id == "w0"


async def test_health_outlives_faults_too(monkeypatch: pytest.MonkeyPatch, empty: Served) -> None:
    health = health_pb2_grpc.HealthStub(empty.channel)
    call = health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert (await refusal(call)).code is Code.NOT_FOUND, "its own refusals stay its own"
    answer = await health.Check(health_pb2.HealthCheckRequest(service="liveness"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_faults_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    from prometheus_client import CollectorRegistry

    from router.api.desk.counters import Metrics

    now_s = 100.0
    metrics = Metrics(CollectorRegistry())
    guard = Guard(Limits(1), InFlight(1), metrics, lambda: now_s)
    for _ in range(5):
        guard.fault(ROUTE, Broken("odd"))
        guard.fault(REPORT, Broken("odd"))
    assert len(caplog.records) == 2
    now_s += LOG_S
    guard.fault(ROUTE, Broken("odd"))
    assert len(caplog.records) == 3


async def test_a_stream_of_requests_with_one_answer_is_refused_when_it_is_mounted(
    empty: Served,
) -> None:
    async def count(requests: object, context: object) -> bytes:
        raise AssertionError

    handlers = {"Count": grpc.stream_unary_rpc_method_handler(count)}
    server = http2_server(GrpcSettings(), 1024, None)
    with pytest.raises(NotImplementedError, match="Count"):
        empty.guard.add(server, "a.B", handlers)


class TestUnsent:
    """Calls that end before their answer is out."""

    async def test_a_deadline_that_passed_meanwhile_leaves_nothing_reserved(self) -> None:
        async with served("w0", index=NativeIndex()) as stage:
            timeout_s = 0.2

            def slow() -> float:
                until = time.monotonic() + 2 * timeout_s  # gRPC rounds a deadline up
                while time.monotonic() < until:
                    pass
                return stage.fleet.now_s

            stage.desk._clock = slow
            assert (
                await refusal(stage.router.Route(asked(), timeout=timeout_s))
            ).code is Code.DEADLINE_EXCEEDED
            await until(lambda: stage.fleet.core.endings.total() == 1, "it has ended")
            assert stage.fleet.core.endings == {Ending.FAILED_CANCELLED: 1}
            assert stage.fleet.loads() == {}
            assert stage.metric("failures_total", what="answer", kind="", policy="") == 1

    async def test_a_call_given_up_as_its_answer_comes_leaves_nothing_reserved(self) -> None:
        content = asked().SerializeToString()
        message = b"\0" + struct.pack(">I", len(content)) + content
        async with served(index=NativeIndex()) as stage, asyncio.timeout(60):
            stage.fleet.add("w0", total_slots=None)
            reader, writer = await asyncio.open_connection("127.0.0.1", stage.server.port)
            writer.write(PREFACE + frame(SETTINGS))
            writer.write(frame(HEADERS, END_HEADERS, 1, call_head(ROUTE.encode())))
            writer.write(frame(DATA, END_STREAM, 1, message))
            await reader.readuntil(b"grpc-status")
            assert stage.fleet.core.endings.total() == 0
            writer.write(frame(RST, 0, 1, struct.pack(">I", CANCEL)))
            await until(lambda: stage.fleet.core.endings.total() == 1, "it has ended")
            writer.close()
            assert stage.fleet.core.endings == {Ending.FAILED_CANCELLED: 1}
            assert stage.fleet.loads() == {}
            assert stage.metric("failures_total", what="answer", kind="", policy="") == 1

    async def test_an_answer_that_another_caller_has_is_kept(self, stage: Served) -> None:
        first = await stage.route(request_id="x")
        again = await stage.route(request_id="x")
        assert again == first
        reservation = stage.fleet.core.reservations.get(first.reservation_id)
        assert reservation is not None
        stage.desk.unsent(reservation)
        assert reservation.ended is None

    async def test_a_long_request_that_is_cancelled_reserves_nothing(self) -> None:
        async with served("w0", index=NativeIndex()) as stage:
            calls: list[Any] = []
            ended = asyncio.Event()
            sizes = stage.fleet.core.fleet.block_sizes

            def cancels(model: str) -> Any:
                calls[-1].cancel()
                return Slow(sizes(model), ended)

            stage.fleet.core.fleet.block_sizes = cancels  # type: ignore[method-assign]
            calls.append(stage.route(300_000))
            with pytest.raises(asyncio.CancelledError):
                await calls[-1]
            await ended.wait()
            assert stage.fleet.core.endings.total() == 0
            assert stage.fleet.loads() == {}


class Slow:
    """Block sizes without an end, until nobody asks for more."""

    def __init__(self, sizes: Any, ended: asyncio.Event) -> None:
        self._size = next(iter(sizes))
        self._ended = ended

    def __iter__(self) -> Iterator[int]:
        try:
            while True:
                yield self._size
        finally:
            self._ended.set()


class TestSteps:
    """How much is done without a turn for other calls."""

    async def test_a_long_request_is_hashed_and_decided_in_steps(self) -> None:
        async with served(index=NativeIndex()) as stage:
            stage.fleet.add("w0", total_blocks=None)
            request = asked(LONG_BYTES // 4 + 1)
            steps = stage.desk.steps(request.SerializeToString())
            taken = 0
            while True:
                try:
                    next(steps)
                except StopIteration as done:
                    answer, _, _ = done.value
                    break
                taken += 1
                assert stage.fleet.loads() == {}, "only the last step reserves"
            assert taken == 3, "read; hashed; put in a chain"
            assert router_pb2.RouteResponse.FromString(answer).worker_id == "w0"
            assert isinstance(stage.desk.item(asked(100).SerializeToString()), tuple)

    async def test_a_report_is_read_in_slices(
        self, monkeypatch: pytest.MonkeyPatch, empty: Served
    ) -> None:
        monkeypatch.setattr(reports, "SLICE_S", 1e9)  # by the count alone
        since_turn: list[int] = [0]
        longest = 0
        core_report = empty.fleet.core.report

        def report(*about: Any) -> Any:
            nonlocal longest
            since_turn[0] += 1
            longest = max(longest, since_turn[0])
            return core_report(*about)

        async def turns() -> None:
            while True:
                since_turn[0] = 0
                await asyncio.sleep(0)

        empty.fleet.core.report = report  # type: ignore[method-assign]
        ticker = asyncio.create_task(turns())
        steps = [router_pb2.Progress(reservation_id=f"x{i}", state=1) for i in range(500)]
        answer = await empty.router.Report(router_pb2.ReportRequest(progress=steps))
        ticker.cancel()
        assert [one.reservation_id for one in answer.outcomes] == [
            one.reservation_id for one in steps
        ]
        assert longest == reports.SLICE_STEPS

    async def test_a_replica_that_does_not_answer_is_asked_once_and_others_have_their_turns(
        self,
    ) -> None:
        turns = 0
        turns_when_asked: list[int] = []

        class Away:
            """Another replica, which owns every reservation."""

            def owner(self, _reservation_id: str) -> str:
                return "b"

            async def forward(self, _owner: str, _report: bytes) -> None:
                turns_when_asked.append(turns)

        async def tick() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with served(replicas=Away()) as stage:
            count = 2 * reports.REPLICA_PROGRESS_MAX
            steps = [router_pb2.Progress(reservation_id=f"b-{i}", state=1) for i in range(count)]
            report = router_pb2.ReportRequest(progress=steps).SerializeToString()
            ticker = asyncio.create_task(tick())
            content = await stage.reports.report(report, Reporter(host="a caller"))
            ticker.cancel()
        (when_asked,) = turns_when_asked
        assert turns - when_asked >= count // reports.SLICE_STEPS
        answer = router_pb2.ReportResponse.FromString(content)
        assert [one.reservation_id for one in answer.outcomes] == [f"b-{i}" for i in range(count)]
        message = "replica b, which made the reservation, does not answer"
        assert {one.message for one in answer.outcomes} == {message}

    async def test_cancels_without_answers_give_others_a_turn(self, stage: Served) -> None:
        items = stage.texts.items()
        items._clock = items._cpu_clock = iter(range(1000)).__next__
        batch = router_pb2.RouteBatch(
            items=[router_pb2.RouteItem(index=i, cancel=True) for i in range(20)]
        )
        told = list(items.decide(route_stream.read_batch(batch.SerializeToString())))
        assert told.count(None) == 20
        assert told[-1] == b""
