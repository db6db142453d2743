"""Spans that a test keeps, and looks up."""

import random

from router.observe.tracing.spans import Span, Tracing
from router.observe.tracing.traceparent import SpanContext

PARENT = SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, sampled=True)
"""The example of the W3C's recommendation."""


class Kept:
    """The spans of a test, in the order of their ends."""

    def __init__(self, share: float = 0.0, seed: int = 7) -> None:
        self.spans: list[Span] = []
        self.tracing = Tracing(self.spans.append, share, random.Random(seed))

    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def one(self, name: str) -> Span:
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def tree(self) -> dict[str, str]:
        """Each span's name -> that of the span above it; "" for one that is not here."""
        by_id = {span.context.span_id: span.name for span in self.spans}
        return {span.name: by_id.get(span.parent_id, "") for span in self.spans}
