"""A router's spans of one request. Pure.

kvroute.route       from the request's arrival to its answer, with the receipt as attributes
  kvroute.queue     the request's wait for a worker with room, if it waited
  kvroute.hash      reading the request, and hashing its prompt
  kvroute.match     the overlap of every worker
  kvroute.cost      costs, guard and order
  kvroute.reserve   the reservation, and writing the answer
"""

from collections.abc import Mapping
from typing import Protocol

from kvroute.v1 import RouteResponse
from router.observe.tracing.receipts import attributes_of
from router.observe.tracing.spans import Kind, Trace, Value

STAGES = ("hash", "match", "cost")
"""Stages of a decision, in order; the rest of the decision's time is `reserve`."""
QUEUED_S_MIN = 0.001
"""Shortest wait in the queue that gets a span, seconds: without a wait, too, a decision begins up
to this much after its request."""


class RouteTrace:
    """The times and numbers of one request in a router, from which its spans are made."""

    __slots__ = ("_began_s", "_trace", "_worth")

    def __init__(self, trace: Trace, began_s: float, request_id: str) -> None:
        """began_s: Unix time of the request's arrival."""
        self._trace = trace
        self._began_s = began_s
        self._worth: dict[str, Value] = {"kvroute.request.id": request_id}

    def picked(self, answer: RouteResponse) -> None:
        """Adds the answer and its receipt to the span's attributes."""
        self._worth |= attributes_of(answer)

    def decided(self, decided_s: float, took_s: Mapping[str, float]) -> None:
        """Records that the request has its answer. decided_s: Unix time when the decision began.
        took_s: seconds by stage, and in `total`.
        """
        if decided_s - self._began_s >= QUEUED_S_MIN:
            self._trace.step("kvroute.queue", self._began_s, decided_s)
        at_s = decided_s
        for stage in STAGES:
            seconds = took_s.get(stage, 0.0)
            self._trace.step(f"kvroute.{stage}", at_s, at_s + seconds)
            at_s += seconds
        over_s = max(at_s, decided_s + took_s.get("total", 0.0))
        self._trace.step("kvroute.reserve", at_s, over_s)
        self._trace.end("kvroute.route", self._began_s, over_s, self._worth)

    def repeated(self, now_s: float) -> None:
        """Records that the request repeats an earlier one's id, and got that one's answer."""
        about = {**self._worth, "kvroute.repeated": True}
        self._trace.end("kvroute.route", self._began_s, now_s, about)

    def refused(self, now_s: float, reason: str) -> None:
        """Records that the request got no worker, or that its caller left."""
        about = {**self._worth, "kvroute.reason": reason}
        self._trace.end("kvroute.route", self._began_s, now_s, about, error=reason)


def rendered(
    trace: Trace, began_s: float, ended_s: float, about: Mapping[str, Value], error: str = ""
) -> None:
    """Records the span of making a prompt's tokens, beside the span of its route."""
    trace.end("kvroute.render", began_s, ended_s, about, kind=Kind.INTERNAL, error=error)


class RenderSpan(Protocol):
    """Function that ends the span of making a prompt's tokens."""

    def __call__(self, about: Mapping[str, Value], error: str = "") -> None: ...


def no_span(about: Mapping[str, Value], error: str = "") -> None:
    """Does nothing: the RenderSpan of a request that is not sampled."""
