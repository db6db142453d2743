"""Spans in OpenTelemetry's form. OpenTelemetry is imported on use: it is an extra."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from router.observe.tracing.spans import Kind, Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


def converter(process: str, version: str) -> "Callable[[Span], ReadableSpan]":
    """Returns a function that converts this process's spans for an exporter. process:
    `service.name`. Raises ImportError.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    resource = Resource.create({"service.name": process, "service.version": version})
    scope, sampled = InstrumentationScope("kvroute"), TraceFlags(TraceFlags.SAMPLED)
    kinds = {kind: SpanKind[kind.name] for kind in Kind}

    def context(trace_id: int, span_id: int) -> SpanContext:
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=sampled)

    def readable(span: Span) -> ReadableSpan:
        own = span.context
        return ReadableSpan(
            span.name,
            context=context(own.trace_id, own.span_id),
            parent=context(own.trace_id, span.parent_id) if span.parent_id else None,
            resource=resource,
            attributes=span.attributes,
            kind=kinds[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=_ns(span.began_s),
            end_time=_ns(span.ended_s),
            instrumentation_scope=scope,
        )

    return readable


def _ns(time_s: float) -> int:
    """Unix time in nanoseconds; as a float it is exact to about a microsecond."""
    return round(time_s * 1e6) * 1000
