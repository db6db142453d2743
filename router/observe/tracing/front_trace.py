"""A gateway's or a picker's spans of one request. Pure.

POST /v1/chat/completions   from its head to the end of its answer
  kvroute.pick              until a router named a worker; the router's spans are below it
  kvroute.first_token       from then to the first byte of the answer
  kvroute.forward           the worker's answer; the engine's spans are below it
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from router.observe.tracing.spans import Kind, Trace, Tracing, Value
from router.observe.tracing.traceparent import HEADER, SpanContext


class FrontTrace:
    """Times of one request at the HTTP face that its client called."""

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
    ) -> "FrontTrace | None":
        """header: the request's traceparent, or "". None: the request is not sampled."""
        trace = tracing.begin(header)
        return None if trace is None else cls(trace, clock)

    @property
    def exemplar(self) -> dict[str, str]:
        """Labels by which a sample of a histogram names the trace."""
        return {"trace_id": f"{self._trace.context.trace_id:032x}"}

    def pick_header(self) -> str:
        """The router gets the request now: its traceparent there."""
        self._pick = self._trace.child()
        self._sent_s = self._clock()
        return self._pick.header()

    def picked(self, worker_id: str = "", error: str = "") -> None:
        """The router's answer is there: a worker, or the reason for which there is none."""
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
        """While a worker has the request: the headers by which its spans are below this one's."""
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
        """The answer begins."""
        if not self._seen:
            self._seen = True
            self._trace.step("kvroute.first_token", self._picked_s, self._clock())

    def end(self, name: str, about: Mapping[str, Value], error: str = "") -> None:
        """The request is over."""
        if self._pick is not None:
            self.picked(error=error or "left")
        self._trace.end(name, self._began_s, self._clock(), about, error=error)
