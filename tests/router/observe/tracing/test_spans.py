"""Which requests have spans, and the bounds of a span."""

import random

from router.observe.tracing.spans import ATTRIBUTES_MAX, TEXT_MAX, Kind, Span, Tracing
from tests.stage.traces import PARENT, Kept


def test_a_request_is_sampled_as_its_callers_span_is() -> None:
    kept = Kept(share=1.0)
    sampled = kept.tracing.begin(PARENT.header())
    assert sampled is not None
    assert sampled.context.trace_id == PARENT.trace_id
    assert sampled.context.span_id != PARENT.span_id
    assert kept.tracing.begin(PARENT.header()[:-1] + "0") is None


def test_a_share_of_the_requests_without_a_traceparent_is_sampled() -> None:
    tracing = Tracing(lambda span: None, 0.1, random.Random(7))
    begun = [tracing.begin(header) for header in ("", "no traceparent") * 5000]
    assert 900 < sum(trace is not None for trace in begun) < 1100
    assert all(Kept(share=0.0).tracing.begin("") is None for _ in range(100))


def test_a_router_begins_no_trace() -> None:
    kept = Kept(share=1.0)
    assert kept.tracing.below("") is None
    assert kept.tracing.below("00-1-2-01") is None
    assert kept.tracing.below(PARENT.header()) is not None


def test_steps_are_below_their_request_and_it_is_below_its_caller() -> None:
    kept = Kept()
    trace = kept.tracing.below(PARENT.header())
    assert trace is not None
    given = trace.child()
    trace.step("inner", 1.0, 2.0, {"a": 1}, context=given, kind=Kind.CLIENT, error="broke")
    trace.end("outer", 0.0, 3.0)
    inner, outer = kept.spans
    assert inner.context == given
    assert inner.parent_id == outer.context.span_id
    assert outer.parent_id == PARENT.span_id
    assert (inner.kind, inner.error, inner.attributes) == (Kind.CLIENT, "broke", {"a": 1})


def test_a_span_is_bounded_and_ends_after_its_beginning() -> None:
    about = {f"key-{i}": "x" * 1000 for i in range(100)}
    span = Span("a", PARENT, 0, Kind.INTERNAL, 5.0, 4.0, about, "e" * 1000)
    assert len(span.attributes) == ATTRIBUTES_MAX
    assert {len(str(value)) for value in span.attributes.values()} == {TEXT_MAX}
    assert len(span.error) == TEXT_MAX
    assert span.ended_s == span.began_s
