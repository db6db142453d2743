"""The header of the W3C's Trace Context."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.observe.tracing.traceparent import SpanContext, new_trace
from tests.stage.traces import PARENT

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_the_example_of_the_recommendation_is_read_and_written() -> None:
    assert SpanContext.read(HEADER) == PARENT
    assert PARENT.header() == HEADER


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        HEADER.upper(),
        HEADER + "-more",  # version 00 has four parts
        HEADER + "0",
        "ff" + HEADER[2:],
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        HEADER.replace("a", "g"),
        " " + HEADER,
        "01" + HEADER[2:] + "-" + "x" * 600,
    ],
)
def test_a_header_of_another_form_is_none(header: str) -> None:
    assert SpanContext.read(header) is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert SpanContext.read("cc" + HEADER[2:] + "-what-comes") == PARENT


@pytest.mark.parametrize(
    ("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)]
)
def test_the_flag_sampled_is_one_bit_of_eight(flags: str, sampled: bool) -> None:
    context = SpanContext.read(HEADER[:-2] + flags)
    assert context is not None
    assert context.sampled is sampled


@given(st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1), st.booleans())
def test_what_is_written_is_read(trace_id: int, span_id: int, sampled: bool) -> None:
    context = SpanContext(trace_id, span_id, sampled)
    assert SpanContext.read(context.header()) == context


@given(st.text(max_size=80))
def test_any_text_is_read_or_none(text: str) -> None:
    SpanContext.read(text)


def test_children_are_of_the_same_trace_and_differ() -> None:
    rng = random.Random(7)
    first = new_trace(rng)
    children = {first.child(rng) for _ in range(1000)}
    assert len(children) == 1000
    assert {child.trace_id for child in children} == {first.trace_id}
    assert first.sampled
