"""Spans of requests; a span is made, with all its values, after its work is over. Pure.

The gateway and the picker take a request's times as it goes on, and make its spans from them at its
end; nothing is made of a request that is not sampled.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from router.observe.tracing.traceparent import SpanContext, new_trace

TEXT_MAX = 256
"""Most characters of an attribute's text; the rest is cut off."""
ATTRIBUTES_MAX = 48
"""Most attributes of a span; further ones are left out."""

Value: TypeAlias = str | int | float | bool


class Kind(Enum):
    """OpenTelemetry's kinds of spans."""

    INTERNAL = 0
    SERVER = 1
    CLIENT = 2


@dataclass(slots=True)
class Span:
    """A finished step of a request."""

    name: str
    context: SpanContext
    parent_id: int
    """Id of the parent span; 0: the trace begins with this span."""
    kind: Kind
    began_s: float
    """Unix time."""
    ended_s: float
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str = ""
    """Sentence about the step's failure; empty: it did not fail."""

    def __post_init__(self) -> None:
        self.ended_s = max(self.began_s, self.ended_s)
        kept = list(self.attributes.items())[:ATTRIBUTES_MAX]
        self.attributes = {
            name: value[:TEXT_MAX] if isinstance(value, str) else value for name, value in kept
        }
        self.error = self.error[:TEXT_MAX]


Record: TypeAlias = Callable[[Span], None]
"""Function that takes a finished span for export; never waits, never raises."""


@dataclass(frozen=True, slots=True)
class Tracing:
    """Decides which requests have spans, and takes the spans."""

    record: Record
    share: float
    """Share of the requests without a traceparent that are sampled, 0 to 1."""
    rng: random.Random
    """Draws the ids of spans, and which requests are sampled."""

    def begin(self, header: str) -> "Trace | None":
        """The trace of a request's own span; None: the request is not sampled. A request with a
        traceparent is sampled as its caller's span is."""
        parent = SpanContext.read(header) if header else None
        if parent is not None:
            if not parent.sampled:
                return None
            return Trace(self, parent.child(self.rng), parent.span_id)
        if self.share <= 0 or self.rng.random() >= self.share:
            return None
        return Trace(self, new_trace(self.rng), 0)

    def below(self, header: str) -> "Trace | None":
        """The trace below a caller's span, for a process that begins no traces; None: not
        sampled.
        """
        parent = SpanContext.read(header)
        if parent is None or not parent.sampled:
            return None
        return Trace(self, parent.child(self.rng), parent.span_id)


class Trace:
    """One request's own span, and its child spans."""

    __slots__ = ("_parent_id", "_tracing", "context")

    def __init__(self, tracing: Tracing, context: SpanContext, parent_id: int) -> None:
        self._tracing = tracing
        self.context = context
        self._parent_id = parent_id

    def child(self) -> SpanContext:
        """Context of a child span, whose work another process does."""
        return self.context.child(self._tracing.rng)

    def step(
        self,
        name: str,
        began_s: float,
        ended_s: float,
        attributes: Mapping[str, Value] | None = None,
        *,
        context: SpanContext | None = None,
        kind: Kind = Kind.INTERNAL,
        error: str = "",
    ) -> None:
        """Records a finished child span. context: as `child` returned it."""
        about = dict(attributes or {})
        own = context or self.child()
        parent_id = self.context.span_id
        self._tracing.record(Span(name, own, parent_id, kind, began_s, ended_s, about, error))

    def end(
        self,
        name: str,
        began_s: float,
        ended_s: float,
        attributes: Mapping[str, Value] | None = None,
        *,
        kind: Kind = Kind.SERVER,
        error: str = "",
    ) -> None:
        """Records the request's own span, which has ended; no `step` may follow."""
        about = dict(attributes or {})
        self._tracing.record(
            Span(name, self.context, self._parent_id, kind, began_s, ended_s, about, error)
        )
