"""Spans in OpenTelemetry's form. Only router/tracing/export.py imports this, when tracing is on."""

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from router.tracing.spans import Kind, Span

_KINDS = {
    Kind.INTERNAL: SpanKind.INTERNAL,
    Kind.SERVER: SpanKind.SERVER,
    Kind.CLIENT: SpanKind.CLIENT,
}
_SCOPE = InstrumentationScope("kvroute")


def readable(span: Span, resource: Resource) -> ReadableSpan:
    """For an exporter."""
    own = span.context
    parent = _context(own.trace_id, span.parent_id) if span.parent_id else None
    return ReadableSpan(
        span.name,
        context=_context(own.trace_id, own.span_id),
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        kind=_KINDS[span.kind],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=_ns(span.began_s),
        end_time=_ns(span.ended_s),
        instrumentation_scope=_SCOPE,
    )


def _ns(time_s: float) -> int:
    """Unix time in nanoseconds; as a float it is exact to about a microsecond."""
    return round(time_s * 1e6) * 1000


def _context(trace_id: int, span_id: int) -> SpanContext:
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=sampled)
