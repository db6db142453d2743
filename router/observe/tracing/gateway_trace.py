"""A gateway's or a picker's spans of one request. Pure.

POST /v1/chat/completions   from its head to the end of its answer
  kvroute.pick              until a router named a worker; the router's spans are below it
  kvroute.first_token       from the end of kvroute.pick to the first byte of the answer
  kvroute.forward           the worker's answer; the engine's spans are below it
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from router.observe.tracing.spans import Kind, Trace, Tracing, Value
from router.observe.tracing.traceparent import HEADER, SpanContext


class GatewayTrace:
    """The times of one request in the gateway or the picker, from which its spans are made."""

    def __init__(self, trace: Trace, clock: Callable[[], float]) -> None:
        """clock: Unix time."""
        self._trace = trace
        self._clock = clock
        self._began_s = self._sent_s = self._picked_s = clock()
        self._pick: SpanContext | None = None
        self._seen = False

    @classmethod
    def begin(
        cls, tracing: Tracing, clock: Callable[[], float], header: str
    ) -> "GatewayTrace | None":
        """Begins the trace of a request. header: its traceparent, or "". None: the request is not
        sampled.
        """
        trace = tracing.begin(header)
        return None if trace is None else cls(trace, clock)

    @property
    def exemplar(self) -> dict[str, str]:
        """Labels for a histogram's exemplar, which name the trace."""
        return {"trace_id": f"{self._trace.context.trace_id:032x}"}

    def pick_header(self) -> str:
        """Records that the router is called now; returns the traceparent for the call."""
        self._pick = self._trace.child()
        self._sent_s = self._clock()
        return self._pick.header()

    def picked(self, worker_id: str = "", error: str = "") -> None:
        """Records the router's answer: a worker, or the error."""
        if self._pick is None:
            return
        self._picked_s = self._clock()
        about: dict[str, Value] = {"kvroute.worker.id": worker_id} if worker_id else {}
        self._trace.step(
            "kvroute.pick", self._sent_s, self._picked_s, about,
            context=self._pick, kind=Kind.CLIENT, error=error,
        )  # fmt: skip
        self._pick = None

    @contextmanager
    def forwarding(self, worker_id: str, address: str) -> Iterator[dict[str, str]]:
        """A context for the time in which a worker has the request: records `kvroute.forward`. Its
        value is the headers that make the engine's spans children of that span.
        """
        own, began_s, error = self._trace.child(), self._clock(), ""
        try:
            yield {HEADER: own.header()}
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            about: dict[str, Value] = {"kvroute.worker.id": worker_id, "server.address": address}
            self._trace.step(
                "kvroute.forward", began_s, self._clock(), about,
                context=own, kind=Kind.CLIENT, error=error,
            )  # fmt: skip

    def first_byte(self) -> None:
        """Records the first byte of the answer."""
        if not self._seen:
            self._seen = True
            self._trace.step("kvroute.first_token", self._picked_s, self._clock())

    def end(self, name: str, about: Mapping[str, Value], error: str = "") -> None:
        """Records the end of the request, and its own span. about: the span's attributes. error:
        what went wrong, or ""."""
        if self._pick is not None:
            self.picked(error=error or "left")
        self._trace.end(name, self._began_s, self._clock(), about, error=error)
