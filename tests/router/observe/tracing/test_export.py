"""Spans on their way to a collector: a real OTLP receiver, and what becomes of them without one."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from prometheus_client import CollectorRegistry

from router.app.processes.process_tracing import ProcessTracing
from router.config.keys import ConfigError
from router.config.settings.tracing_settings import TracingSettings
from router.observe.tracing.export import BATCH_MAX, SpanExport
from router.observe.tracing.spans import Kind, Span
from tests.stage.traces import PARENT
from tests.stage.waiting import until


def span(name: str = "a", parent_id: int = 0, **more: Any) -> Span:
    return Span(name, PARENT, parent_id, Kind.SERVER, 1_800_000_000.25, 1_800_000_000.5, **more)


class Receiver(service_grpc.TraceServiceServicer):
    """A collector that keeps what comes."""

    def __init__(self) -> None:
        self.requests: list[service_pb2.ExportTraceServiceRequest] = []
        self.target = ""

    async def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return service_pb2.ExportTraceServiceResponse()

    def spans(self) -> list[trace_pb2.Span]:
        return [
            one
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for one in scope.spans
        ]


@asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    server, receives = grpc.aio.server(), Receiver()
    service_grpc.add_TraceServiceServicer_to_server(receives, server)
    receives.target = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield receives
    finally:
        await server.stop(None)


async def test_a_collector_gets_spans_as_they_were_made() -> None:
    registry = CollectorRegistry()
    async with receiver() as collector:
        process = ProcessTracing(TracingSettings(collector.target), "kvroute-router", registry)
        assert process.spans is not None
        process.start()
        process.spans.record(span("a", 7, attributes={"text": "x", "whole": 3, "real": 0.5}))
        process.spans.record(span("b", error="NO_WORKER"))
        await process.stop()
        first, second = collector.spans()
        (resource,) = collector.requests[0].resource_spans
    assert {each.key: each.value.string_value for each in resource.resource.attributes}[
        "service.name"
    ] == "kvroute-router"
    assert first.name == "a"
    assert first.trace_id.hex() == f"{PARENT.trace_id:032x}"
    assert first.span_id.hex() == f"{PARENT.span_id:016x}"
    assert first.parent_span_id.hex() == f"{7:016x}"
    assert first.kind == trace_pb2.Span.SPAN_KIND_SERVER
    assert first.end_time_unix_nano - first.start_time_unix_nano == 250_000_000
    values = {each.key: each.value for each in first.attributes}
    assert (values["text"].string_value, values["whole"].int_value) == ("x", 3)
    assert values["real"].double_value == 0.5
    assert first.status.code == trace_pb2.Status.STATUS_CODE_UNSET
    assert second.parent_span_id == b""
    assert second.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert second.status.message == "NO_WORKER"
    assert (
        registry.get_sample_value("kvroute_records_total", {"what": "spans", "result": "exported"})
        == 2
    )


async def test_what_is_over_the_bound_is_dropped_and_counted() -> None:
    export = SpanExport(lambda batch: True, spans_max=3)
    for number in range(5):
        export.record(span(str(number)))
    assert len(export) == 3
    await export.flush()
    assert export.counts == {"exported": 3, "failed": 0, "dropped": 2}
    export.record(span())
    assert len(export) == 1


async def test_batches_are_bounded() -> None:
    sizes: list[int] = []

    def send(batch: Sequence[Span]) -> bool:
        sizes.append(len(batch))
        return True

    export = SpanExport(send, spans_max=10_000)
    for _ in range(BATCH_MAX + 1):
        export.record(span())
    await export.flush()
    assert sizes == [BATCH_MAX, 1]


@pytest.mark.parametrize("raises", [False, True])
async def test_a_collector_that_takes_none_costs_spans_and_one_line(
    raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    away = True

    def send(batch: Sequence[Span]) -> bool:
        if away and raises:
            raise OSError("no collector")
        return not away

    export = SpanExport(send, spans_max=10)
    for _ in range(3):
        export.record(span())
        await export.flush()
    assert export.counts["failed"] == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    away = False
    export.record(span())
    await export.flush()
    assert export.counts["exported"] == 1
    assert len(export) == 0


async def test_the_end_waits_for_a_slow_collector_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.observe.tracing.export.LAST_S", 0.05)
    over = threading.Event()

    def send(batch: Sequence[Span]) -> bool:
        return over.wait(60.0)

    export = SpanExport(send, spans_max=2000)
    for _ in range(BATCH_MAX + 5):
        export.record(span())
    try:
        await export.stop()
        assert export.counts["failed"] == BATCH_MAX + 5
        assert len(export) == 0
    finally:
        over.set()


async def test_spans_are_sent_as_time_goes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.observe.tracing.export.EVERY_S", 0.01)
    export = SpanExport(lambda batch: True, spans_max=10)
    task = asyncio.create_task(export.run())
    export.record(span())
    await until(lambda: export.counts["exported"] == 1, "the span is sent")
    task.cancel()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (TracingSettings("collector:4317"), r"no http://host:port.*tracing\.endpoint"),
        (TracingSettings("http://collector:4317/v1/traces"), r"tracing\.endpoint"),
        (TracingSettings("https://c:4317", ca_file="/none"), r"No such file.*tracing\.ca_file"),
        (TracingSettings("https://c:4317", ca_file="/dev/null"), r"is empty.*tracing\.ca_file"),
    ],
)
def test_a_collector_that_can_not_be_is_a_mistake(settings: TracingSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProcessTracing(settings, "kvroute-router", CollectorRegistry())


async def test_without_a_collector_there_is_nothing() -> None:
    registry = CollectorRegistry()
    process = ProcessTracing(TracingSettings(), "kvroute-router", registry)
    process.start()
    await process.stop()
    assert process.spans is None
    assert not list(registry.collect())
