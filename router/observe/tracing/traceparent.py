"""The header `traceparent` of the W3C's Trace Context, level 1 and 2. Pure.

    00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
    version-trace id-parent's span id-flags, in lower-case hexadecimal digits

Source: https://www.w3.org/TR/trace-context-2/, section 3.2.
"""

import random
import re
from dataclasses import dataclass

HEADER = "traceparent"
CHARACTERS_MAX = 512
"""Characters of a header that is read, at most; later versions may have more parts than the
first."""
_SAMPLED = 1
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class SpanContext:
    """The ids of a span, by which other processes name it."""

    trace_id: int
    """128 bits, not 0."""
    span_id: int
    """64 bits, not 0."""
    sampled: bool

    @classmethod
    def read(cls, header: str) -> "SpanContext | None":
        """Reads the header; None: it has another form, and its request counts as one without a
        trace.
        """
        if len(header) > CHARACTERS_MAX or (parts := _FORM.fullmatch(header)) is None:
            return None
        version, trace_id, span_id, flags, rest = parts.groups()
        if version == "ff" or (version == "00" and rest is not None):
            return None
        context = cls(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))
        return context if context.trace_id and context.span_id else None

    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    def child(self, rng: random.Random) -> "SpanContext":
        """A new span of the same trace."""
        return SpanContext(self.trace_id, _bits(rng, 64), self.sampled)


def new_trace(rng: random.Random) -> SpanContext:
    """Context of the first span of a new, sampled trace."""
    return SpanContext(_bits(rng, 128), _bits(rng, 64), True)


def _bits(rng: random.Random, count: int) -> int:
    """A random number of `count` bits that is not 0."""
    while not (bits := rng.getrandbits(count)):
        pass
    return bits
