"""Endpoints for requests: asks a router, reports to it, and says what became of each request.

Laws:
- a fault of the picker, or of a router, refuses no request that some worker could serve: it goes
  by load, counted;
- what was reserved for a request ends with its stream;
- a request is reserved for once, however many filters ask for it (repeats.py).
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from kvroute.client import KvRouteError, Pick, RoutedRequest, RouterUnreachable
from kvroute.v1 import FailureReason, Phase
from router.config.settings.picker_settings import PickerSettings
from router.front.exchange import Blame, Exchange, Outcome, goes_by_load
from router.front.gateway.roster import Roster
from router.front.openai_body import PATHS, shape_of
from router.front.output_lengths import OutputLengths
from router.front.picker.counters import PickerCounters
from router.front.picker.endpoints import Endpoints
from router.front.picker.repeats import Repeats
from router.front.picker.request_stream import Question, RequestStream
from router.front.refusals import Shape, answer_of
from router.front.routers import Router
from router.tracing.front_trace import FrontTrace
from router.tracing.spans import Value
from router.tracing.traceparent import HEADER

_MIB = 1 << 20
_OBJECTIVES = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
_MODELS = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
_REASONS = {
    Blame.WORKER: FailureReason.FAILURE_REASON_WORKER,
    Blame.TIMEOUT: FailureReason.FAILURE_REASON_TIMEOUT,
    Blame.CLIENT: FailureReason.FAILURE_REASON_CLIENT,
    Blame.CANCELLED: FailureReason.FAILURE_REASON_CANCELLED,
}
_OUTCOMES = {
    Blame.WORKER: "failed",
    Blame.TIMEOUT: "failed",
    Blame.CLIENT: "worker_refused",
    Blame.CANCELLED: "cancelled",
}
_NONE_IN_SUBSET = "none of the endpoints that the gateway allows is a worker that can be picked"
REPEATED = "repeated"
"""Outcome of a stream whose request has another stream's pick."""
NOT_FOLLOWED_LOG_S = 60.0
"""Least time between two warnings of endpoints that were not followed."""

log = logging.getLogger("kvroute.picker")


class Picker:
    """What all requests of one picker share."""

    def __init__(
        self,
        client: Router,
        roster: Roster,
        endpoints: Endpoints,
        counters: PickerCounters,
        settings: PickerSettings,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        begin_trace: Callable[[str], FrontTrace | None] | None = None,
    ) -> None:
        """spawn: runs what a request waits for. begin_trace: the spans of a request, by its
        traceparent or ""; None: no request has spans."""
        self.begin_trace = begin_trace
        self.client = client
        self.roster = roster
        self.endpoints = endpoints
        self.counters = counters
        self.settings = settings
        self.spawn = spawn
        self.lengths = OutputLengths()
        self.clock = asyncio.get_running_loop().time
        self._held_bytes = 0
        self._open = 0
        self.idle = asyncio.Event()
        """Set while no request is open."""
        self.idle.set()
        self._warned_s = float("-inf")

    def request(
        self,
        send: Callable[[bytes], None],
        close: Callable[[], None],
        repeats: Repeats | None = None,
    ) -> "PickedRequest":
        """One request. send: a message to Envoy. close: ends this side of its stream. repeats: of
        its connection; None: it is alone on one."""
        self._open += 1
        self.idle.clear()
        self.counters.open.set(self._open)
        return PickedRequest(self, send, close, Repeats() if repeats is None else repeats)

    @property
    def open(self) -> int:
        """Open requests."""
        return self._open

    def left(self) -> None:
        """A request's stream is over."""
        self._open -= 1
        self.counters.open.set(self._open)
        if not self._open:
            self.idle.set()

    def may_hold(self, size: int) -> bool:
        """Whether bodies may grow by so many bytes; they do, then."""
        if self._held_bytes + size > self.settings.bodies_mib_max * _MIB:
            return False
        self.let_go(-size)
        return True

    def let_go(self, size: int) -> None:
        """Bytes of bodies are held no longer."""
        self._held_bytes -= size
        self.counters.held_bytes.set(self._held_bytes)

    def warn_of(self, picked: str, served: str) -> None:
        """Says once in a while that a gateway does not follow picks."""
        now_s = self.clock()
        if now_s < self._warned_s + NOT_FOLLOWED_LOG_S:
            return
        self._warned_s = now_s
        log.warning(
            "the gateway sent a request to %s instead of the picked %s: does it know that endpoint?"
            " (kvroute_epp_not_followed_total counts them)",
            served,
            picked,
        )


class PickedRequest:
    """One request: the Driver of a RequestStream."""

    def __init__(
        self,
        picker: Picker,
        send: Callable[[bytes], None],
        close: Callable[[], None],
        repeats: Repeats,
    ) -> None:
        self._repeats = repeats
        self._repeated: tuple[str, str, str] | None = None
        """What is known of its pick among them."""
        self._picker = picker
        self.send, self.close = send, close
        self._task: asyncio.Task[None] | None = None
        """That gets the pick."""
        self._routed: RoutedRequest | None = None
        self._endpoint = ""
        self._question: Question | None = None
        self._outcome = "cancelled"
        self._trace: FrontTrace | None = None
        self._held = 0
        self._gone = False
        settings = picker.settings
        self.stream = RequestStream(
            self,
            body_bytes_max=settings.body_mib_max * _MIB,
            may_hold=self._may_hold,
            low_first=settings.priority == "lower",
        )

    def left(self) -> None:
        """The stream is over, on both sides."""
        if self._gone:
            return
        self._gone = True
        self._repeats.left(self._repeated)
        self._let_go()
        self.stream.let_go()
        self.send, self.close = _to_nobody, _to_nobody  # these refer to the stream, and it to this
        self._picker.counters.requests.labels(self._outcome).inc()
        if (trace := self._trace) is not None:
            about: dict[str, Value] = {
                "kvroute.outcome": self._outcome,
                "kvroute.endpoint": self._endpoint,
            }
            trace.end("kvroute.epp", about, "" if self._outcome == "finished" else self._outcome)
        self._picker.left()

    def _may_hold(self, size: int) -> bool:
        held = self._picker.may_hold(size)
        self._held += size if held else 0
        return held

    def _let_go(self) -> None:
        self._picker.let_go(self._held)
        self._held = 0

    # The pick

    def ask(self, question: Question) -> None:
        """See Driver."""
        self._question = question
        known = self._repeats.take(question.path, question.headers, self._picker.clock())
        if known is not None:
            self._outcome = REPEATED
            self.stream.picked(known.endpoints, known.headers)
            self._let_go()
            return
        if (begin := self._picker.begin_trace) is not None:
            self._trace = begin(question.headers.get(HEADER, ""))
        if question.exchange is None:
            reason = question.blind.value if question.blind is not None else "unknown_path"
            self._blind(reason)
        elif question.subset is not None and not self._picker.endpoints.among(question.subset):
            self._refuse("NO_ELIGIBLE_WORKER", _NONE_IN_SUBSET)
        else:
            self._task = self._picker.spawn(self._pick(question, question.exchange))

    def _blind(self, reason: str) -> None:
        """Names the least loaded endpoint; nothing is reserved."""
        picker = self._picker
        picker.counters.by_load.labels(reason).inc()
        self._outcome = "blind"
        question = self._question
        subset = question.subset if question is not None else None
        endpoint = picker.endpoints.least_loaded(subset)
        if endpoint:
            self._answer(endpoint, {})
        elif subset is not None:
            self._refuse("NO_ELIGIBLE_WORKER", _NONE_IN_SUBSET)
        else:
            self.stream.unpicked()
            self._let_go()

    async def _pick(self, question: Question, exchange: Exchange) -> None:
        picker = self._picker
        began_s = picker.clock()
        try:
            routed = await self._routed_to(question, exchange)
            if routed is None:
                return
            if self.stream.is_over:  # while the answer came
                await routed.failed(FailureReason.FAILURE_REASON_CANCELLED, wait=False)
                return
            self._routed = routed
            endpoints, headers = await self._endpoints_of(routed.pick)
            if not endpoints:
                await routed.failed(FailureReason.FAILURE_REASON_CANCELLED, wait=False)
                self._blind("no_endpoint")
                return
            trace = self._trace
            picker.counters.pick.observe(
                picker.clock() - began_s, trace.exemplar if trace is not None else None
            )
            self._answer(endpoints, headers)
        except Exception:
            log.exception("a request was not routed, and goes by load")
            picker.counters.faults.inc()
            self._blind("fault")

    async def _routed_to(self, question: Question, exchange: Exchange) -> RoutedRequest | None:
        """The request with its worker; None: it was refused, and the client has its answer."""
        by_load = not exchange.has_body
        while True:
            try:
                return await self._route(question, exchange, by_load)
            except KvRouteError as error:
                if self._trace is not None:
                    self._trace.picked(error=error.reason or error.code.name)
                if by_load or not goes_by_load(error.reason, error.code.name):
                    self._refused(error)
                    return None
                reason = error.reason or error.code.name
                self._picker.counters.by_load.labels(reason).inc()
                by_load = True

    async def _route(
        self,
        question: Question,
        exchange: Exchange,
        by_load: bool,
        only: tuple[str, ...] = (),
    ) -> RoutedRequest:
        picker, settings = self._picker, self._picker.settings
        model = _first(question.headers, _MODELS) or exchange.facts.model
        options = exchange.question(
            by_load=by_load,
            salt=uuid.uuid4().hex,
            tokens_max=picker.roster.estimate_max(model),
            output_tokens=picker.lengths.mean(model),
        )
        options |= _more_options(question.headers, settings.objectives)
        if model:
            options["model"] = model
        if only:
            options["allowed_worker_ids"] = only
        elif question.subset is not None:
            options["allowed_worker_ids"] = picker.endpoints.among(question.subset)
        if settings.pairs == "llm-d" and picker.roster.pair_engines(model):
            options["phase"] = Phase.PHASE_PREFILL_DECODE
        trace = self._trace
        if trace is not None:
            options["traceparent"] = trace.pick_header()
        routed = picker.client.request(timeout_s=settings.route_timeout_s, **options)
        entered = await routed.__aenter__()
        if trace is not None:
            trace.picked(entered.pick.worker_id)
        return entered

    async def _endpoints_of(self, pick: Pick) -> tuple[str, Mapping[str, str]]:
        """The endpoints to name, and headers for the worker."""
        endpoints = self._picker.endpoints
        self._endpoint = await endpoints.of(pick.address)
        named = [self._endpoint] if self._endpoint else []
        for other in pick.alternatives[: self._picker.settings.fallbacks if named else 0]:
            endpoint = await endpoints.of(other.address)
            if endpoint and endpoint not in named and other.dp_rank is None:
                named.append(endpoint)
        headers = dict(pick.headers)
        if pick.prefill_worker is not None:
            headers["x-prefiller-host-port"] = await endpoints.of(pick.prefill_worker.address)
        return ",".join(named), headers

    def _answer(self, endpoints: str, headers: Mapping[str, str]) -> None:
        if (question := self._question) is not None and not self._gone:
            now_s = self._picker.clock()
            self._repeated = self._repeats.answered(
                question.path, question.headers, endpoints, headers, now_s
            )
        self.stream.picked(endpoints, headers)
        self._let_go()

    def _refused(self, error: KvRouteError) -> None:
        reason = error.reason or error.code.name
        if error.reason is None and isinstance(error, RouterUnreachable):
            reason = "ROUTER_UNREACHABLE"
        self._refuse(reason, error.message, error.retry_after_s)

    def _refuse(self, reason: str, message: str, retry_after_s: float | None = None) -> None:
        self._outcome = "refused"
        self._picker.counters.refusals.labels(reason).inc()
        path = self._question.path if self._question is not None else ""
        shape = shape_of(PATHS[path]) if path in PATHS else Shape.OPENAI
        answer = answer_of(reason, message, shape, retry_after_s=retry_after_s)
        self.stream.refused(answer, reason)
        self._let_go()

    # The answer

    def served(self, endpoint: str) -> None:
        """See Driver."""
        routed, exchange = self._routed, self._question.exchange if self._question else None
        if routed is None or exchange is None or endpoint == self._endpoint:
            return
        picker = self._picker
        worker_id = picker.endpoints.worker_at(endpoint)
        picker.counters.not_followed.labels("known" if worker_id else "unknown").inc()
        picker.warn_of(self._endpoint, endpoint)
        self._routed = None
        _ = self._picker.spawn(self._moved(routed, exchange, worker_id))

    async def _moved(
        self, routed: RoutedRequest, exchange: Exchange, worker_id: str | None
    ) -> None:
        """The request runs elsewhere than where its load is reserved."""
        await routed.failed(FailureReason.FAILURE_REASON_CANCELLED, wait=False)
        if worker_id is None or self._question is None:
            return
        try:
            moved = await self._route(
                self._question, exchange, not exchange.has_body, only=(worker_id,)
            )
        except KvRouteError as error:
            log.info("%s serves a request, and nothing is reserved there: %s", worker_id, error)
            return
        if self.stream.is_over:
            await moved.failed(FailureReason.FAILURE_REASON_CANCELLED, wait=False)
        else:
            self._routed = moved

    def first_token(self) -> None:
        """See Driver."""
        if self._routed is not None:
            _ = self._picker.spawn(self._routed.prefill_done())

    def progress(self, output_tokens: int) -> None:
        """See Driver."""
        if self._routed is not None:
            self._routed.output_tokens = output_tokens

    def ended(self, outcome: Outcome | None, *, observed: bool) -> None:
        """See Driver."""
        routed, self._routed = self._routed, None
        if outcome is None or self._outcome == REPEATED:
            return
        blame = outcome.blame
        self._outcome = "finished" if blame is None else _OUTCOMES[blame]
        if routed is None:  # no pick yet, or the load is being moved
            if self._task is not None and not self._task.done():
                self._task.cancel()
        elif observed:
            _ = self._picker.spawn(self._report(routed, outcome))
        else:
            self._outcome = "unobserved"
            _ = self._picker.spawn(routed.unobserved())
            loop = asyncio.get_running_loop()
            spawn, wait_s = self._picker.spawn, self._picker.settings.unobserved_s
            loop.call_later(wait_s, lambda: spawn(routed.finished(wait=False)))

    async def _report(self, routed: RoutedRequest, outcome: Outcome) -> None:
        routed.prompt_tokens = outcome.usage.prompt_tokens
        if outcome.blame is not None:
            routed.output_tokens = outcome.output_tokens
            await routed.failed(_REASONS[outcome.blame], wait=False)
            return
        exchange = self._question.exchange if self._question is not None else None
        if exchange is not None and exchange.has_body:
            self._picker.lengths.add(exchange.facts.model, outcome.output_tokens)
        await routed.finished(
            output_tokens=outcome.output_tokens,
            cached_tokens=outcome.usage.cached_tokens,
            wait=False,
        )


def _to_nobody(*_: object) -> None:
    """Takes the place of a stream that is over."""


def _more_options(headers: Mapping[str, str], objectives: Mapping[str, int]) -> dict[str, Any]:
    """Options of a route that only a gateway's headers have."""
    options: dict[str, Any] = {}
    priority = objectives.get(_first(headers, _OBJECTIVES))
    if priority is not None:
        options["priority"] = priority
    return options


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := headers.get(name))), "")
