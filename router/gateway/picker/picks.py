"""Picks endpoints for requests: calls a router, reports each request's progress and end to it.

Laws:
- a fault of the picker, or of a router, refuses no request that some worker could serve: it goes
  by load, counted;
- what was reserved for a request ends with its stream;
- a request is reserved for once, however many filters ask for it (repeats.py);
- a request is under way from its headers until its answer is over: only that is counted as open,
  and only for that a stop waits. A stream without one has a bounded time (patience.py).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from kvroute.client import KvRouteError, RoutedRequest, RouterUnreachable
from kvroute.v1 import FailureReason
from router.config.settings.picker_settings import PickerSettings
from router.config.settings.request_settings import RequestSettings
from router.gateway.exchange import Blame, Exchange, Outcome
from router.gateway.output_lengths import OutputLengths
from router.gateway.picker.asking import Asking
from router.gateway.picker.counters import PROGRAM, Early, PickerCounters
from router.gateway.picker.endpoints import Endpoints
from router.gateway.picker.patience import Patience, Wait
from router.gateway.picker.repeats import Repeats
from router.gateway.picker.request_stream import Blind, Question, Reading, RequestStream
from router.gateway.refusals import GatewayRefusal, answer_of
from router.gateway.server.long_bodies import made
from router.gateway.server.pace import too_slow
from router.net.http2.frames import Status
from router.net.http2.requests import PASSED
from router.observe.tracing.gateway_trace import GatewayTrace
from router.observe.tracing.spans import Value
from router.observe.tracing.traceparent import HEADER
from router.request.bodies import errors_on

_MIB = 1 << 20
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
_ENDS = {
    Early.TIMEOUT: (Status.DEADLINE_EXCEEDED, "no request headers came in time"),
    Early.STOPPING: (Status.UNAVAILABLE, "this picker stops"),
}
_NONE_IN_SUBSET = "none of the endpoints that the gateway allows is a worker that can be picked"
REPEATED = "repeated"
"""Outcome of a stream whose request has another stream's pick."""
NOT_FOLLOWED_LOG_S = 60.0
"""Least time between two warnings of endpoints that were not followed."""
ENDED_A_TURN = 64
"""Streams that a stop ends before others have their turn."""

log = logging.getLogger("kvroute.picker")


class Channel(Protocol):
    """Interface: a stream's connection to its gateway."""

    def send(self, message: bytes) -> None: ...

    def close(self) -> None:
        """Ends this side of the stream."""

    def end(self, status: Status, about: str) -> None:
        """Ends the stream with an error."""

    def when_room(self, go_on: Callable[[], None]) -> None:
        """Calls go_on() in another turn of the loop, once the gateway has room for more. Until
        `resume` the gateway can send a window's bytes at most.
        """

    def resume(self) -> None:
        """Lets the gateway send again."""


class Picker:
    """State that all requests of one picker share."""

    def __init__(
        self,
        asking: Asking,
        endpoints: Endpoints,
        counters: PickerCounters,
        settings: PickerSettings,
        requests: RequestSettings,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        begin_trace: Callable[[str], GatewayTrace | None] | None = None,
        *,
        head_timeout_s: float,
    ) -> None:
        """spawn: starts a task of a request. begin_trace: makes the spans of a request from its
        traceparent or ""; None: no request has spans. head_timeout_s: see patience.py.
        """
        self.head_timeout_s = head_timeout_s
        self.begin_trace = begin_trace
        self.endpoints = endpoints
        self.counters = counters
        self.settings = settings
        self.requests = requests
        self.spawn = spawn
        self.asking = asking
        self.clock = asyncio.get_running_loop().time
        self._held_bytes = 0
        self._open = 0
        self._streams_idle: dict[PickedRequest, None] = {}
        """Streams without a request under way."""
        self.idle = asyncio.Event()
        """Set while no request is under way."""
        self.idle.set()
        self._warned_s = float("-inf")

    def request(
        self,
        channel: Channel,
        repeats: Repeats,
        deadline_s: float,
    ) -> "PickedRequest":
        """Makes the object for one stream and its request. repeats: of its connection. deadline_s:
        of the call, by the loop's clock; inf: none.
        """
        call = PickedRequest(self, channel, repeats, deadline_s)
        self._streams_idle[call] = None
        return call

    @property
    def open(self) -> int:
        """Number of requests under way."""
        return self._open

    def began(self, call: "PickedRequest") -> None:
        """Records that a stream's request has begun."""
        del self._streams_idle[call]
        self._open += 1
        self.idle.clear()
        self.counters.open.set(self._open)

    def over(self, call: "PickedRequest") -> None:
        """Records that a stream's request is over; the stream may end now."""
        self._streams_idle[call] = None
        self._open -= 1
        self.counters.open.set(self._open)
        if not self._open:
            self.idle.set()

    def left(self, call: "PickedRequest") -> None:
        """Records the end of a stream without a request under way."""
        del self._streams_idle[call]

    async def end_idle(self) -> None:
        """Ends the streams without a request under way, ENDED_A_TURN in a turn of the loop."""
        for number, call in enumerate(list(self._streams_idle)):
            if number % ENDED_A_TURN == ENDED_A_TURN - 1:
                await asyncio.sleep(0)
            call.give_up(Early.STOPPING)

    def may_hold(self, size: int) -> bool:
        """Whether `size` more bytes of bodies may be held; if so, they are counted as held."""
        if self._held_bytes + size > self.requests.bodies_mib_max * _MIB:
            return False
        self.let_go(-size)
        return True

    def let_go(self, size: int) -> None:
        """Subtracts bytes of bodies that are no longer held."""
        self._held_bytes -= size
        self.counters.held_bytes.set(self._held_bytes)

    def warn_of(self, picked: str, served: str) -> None:
        """Logs once in a while that a gateway sends requests to other endpoints than the picked
        ones.
        """
        now_s = self.clock()
        if now_s < self._warned_s + NOT_FOLLOWED_LOG_S:
            return
        self._warned_s = now_s
        log.warning(
            "the gateway sent a request to %s instead of the picked %s: does it know that endpoint?"
            " (kvroute_picker_not_followed_total counts them)",
            served,
            picked,
        )


class PickedRequest:
    """One request of Envoy: the Driver of its RequestStream."""

    def __init__(
        self,
        picker: Picker,
        channel: Channel,
        repeats: Repeats,
        deadline_s: float,
    ) -> None:
        """See Picker.request."""
        self._channel, self._deadline_s = channel, deadline_s
        self.send: Callable[[bytes], None] = channel.send
        self.close: Callable[[], None] = channel.close
        self._since_s = picker.clock()
        """Time since which the gateway is waited for."""
        self._is_open = False
        """Whether the request is under way."""
        self._early: Early | None = Early.LEFT
        """Why the stream ended without a request; None: it has one."""
        self._patience = Patience(self.due_s, self.late)
        self._repeats = repeats
        self._repeated: tuple[str, str, str] | None = None
        """What is known of its pick among them."""
        self._picker = picker
        self._task: asyncio.Task[None] | None = None
        """That gets the pick."""
        self._routed: RoutedRequest | None = None
        self._endpoint = ""
        self._question: Question | None = None
        self._exchange: Exchange | None = None
        self._outcome = "cancelled"
        self._trace: GatewayTrace | None = None
        self._held = 0
        self._flows = False
        """Whether the gateway can't send, since the body is being passed on."""
        self._gone = False
        requests = picker.requests
        self.stream = RequestStream(
            self,
            body_bytes_max=requests.body_mib_max * _MIB,
            may_hold=self._may_hold,
            low_first=requests.priority == "lower",
        )

    def left(self) -> None:
        """Records that the stream is over on both sides."""
        if self._gone:
            return
        self._gone = True
        self._patience.stop()
        self._repeats.left(self._repeated)
        self.let_go()
        self.stream.let_go()
        self.send, self.close = _to_nobody, _to_nobody  # these refer to the stream, and it to this
        self._channel = _CLOSED
        picker = self._picker
        self._over()
        picker.left(self)
        if self._early is not None:
            picker.counters.early.labels(self._early).inc()
            return
        picker.counters.requests.labels(self._outcome).inc()
        if (trace := self._trace) is not None:
            about: dict[str, Value] = {
                "kvroute.outcome": self._outcome,
                "kvroute.endpoint": self._endpoint,
            }
            trace.end("kvroute.picker", about, "" if self._outcome == "finished" else self._outcome)

    def _over(self) -> None:
        """Records that the request is no longer under way."""
        if self._is_open:
            self._is_open = False
            self._since_s = self._picker.clock()
            self._picker.over(self)

    # Its time

    def await_deadline(self) -> None:
        """See router.net.http2.sockets.Timed."""
        if not self._gone:
            self._patience.await_deadline()

    def due_s(self) -> float:
        """When the stream is late, by the loop's clock; inf: never."""
        wait = self.stream.wait
        if wait is Wait.NOTHING:
            return self._deadline_s
        most_s = self.stream.body_wait_s if wait is Wait.BODY else self._picker.head_timeout_s
        return min(self._since_s + most_s, self._deadline_s)

    def late(self) -> None:
        """Ends the stream, which is late."""
        now_s = self._picker.clock()
        if now_s >= self._deadline_s:
            self._early = self._early and Early.TIMEOUT
            self._channel.end(Status.DEADLINE_EXCEEDED, PASSED)
        elif self.stream.wait is Wait.BODY:
            self._refuse("BODY_TOO_SLOW", too_slow(now_s - self._since_s))
        else:
            self.give_up(Early.TIMEOUT)

    def give_up(self, why: Early) -> None:
        """Ends a stream without a request under way, unless it has ended."""
        if self._gone:
            return
        if self._early is None:  # its request is over
            self.close()
            return
        self._early = why
        self._channel.end(*_ENDS[why])

    def malformed(self, about: str) -> None:
        """Ends the stream after a message that can't be read, or is out of order."""
        self._early = self._early and Early.MALFORMED
        self._channel.end(Status.INVALID_ARGUMENT, about)

    def _may_hold(self, size: int) -> bool:
        held = self._picker.may_hold(size)
        self._held += size if held else 0
        return held

    def let_go(self) -> None:
        """See Driver."""
        if self._held:
            self._picker.let_go(self._held)
            self._held = 0
        if self._flows:
            self._flows = False
            self._channel.resume()

    def when_room(self) -> None:
        """See Driver."""
        self._flows = True
        self._channel.when_room(self.stream.flow)

    # The pick

    def began(self) -> None:
        """See Driver."""
        self._early, self._is_open = None, True
        self._since_s = self._picker.clock()
        self._picker.began(self)
        if self._patience.is_set:  # else its first turn is not over
            self._patience.await_deadline()

    def ask(self, question: Question, reading: Reading | None) -> None:
        """See Driver."""
        self._question = question
        if question.observed:
            self._task = self._picker.spawn(self._observe(question, reading))
            return
        known = self._repeats.take(question.path, question.headers, self._picker.clock())
        if known is not None:
            self._outcome = REPEATED
            self.stream.picked(known.endpoints, known.headers)
            return
        if (begin := self._picker.begin_trace) is not None:
            self._trace = begin(question.headers.get(HEADER, ""))
        if reading is None:
            reason = question.blind.value if question.blind is not None else "unknown_path"
            self._blind(reason)
        elif question.subset is not None and not self._picker.endpoints.among(question.subset):
            self._refuse("NO_ELIGIBLE_WORKER", _NONE_IN_SUBSET)
        else:
            self._task = self._picker.spawn(self._pick(question, reading))

    def _blind(self, reason: str) -> None:
        """Names the least loaded endpoint; nothing is reserved."""
        picker = self._picker
        picker.counters.by_load.labels(PROGRAM, reason).inc()
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

    async def _pick(self, question: Question, reading: Reading) -> None:
        picker = self._picker
        began_s = picker.clock()
        try:
            try:
                exchange = await made(*reading)
            except GatewayRefusal:
                # The engine's own words about it are the best.
                self._blind(Blind.INVALID_BODY.value)
                return
            del reading  # and the pieces of the body with it
            self._exchange = exchange
            self.stream.read(exchange)
            try:
                routed = await picker.asking.routed(question, exchange, self._trace)
            except KvRouteError as error:
                self._refuse(_reason_of(error), error.message, error.retry_after_s)
                return
            if self.stream.is_over:  # while the answer came
                await routed.failed(FailureReason.FAILURE_REASON_CANCELLED, wait=False)
                return
            self._routed = routed
            endpoints, headers = await picker.asking.endpoints_of(routed.pick)
            if not endpoints:
                await routed.failed(FailureReason.FAILURE_REASON_CANCELLED, wait=False)
                self._blind("no_endpoint")
                return
            trace = self._trace
            picker.counters.pick.observe(
                picker.clock() - began_s, trace.exemplar if trace is not None else None
            )
            self._endpoint = endpoints[0]
            self._answer(",".join(endpoints), headers)
        except Exception:
            log.exception("a request was not routed, and goes by load")
            self._blind("fault")

    async def _observe(self, question: Question, reading: Reading | None) -> None:
        """Has a request decided that another router serves; one without a prompt is not."""
        outcome = "blind"
        try:
            if reading is not None:
                exchange = await made(*reading)
                await self._picker.asking.observe(question, exchange)
                outcome = "observed"
        except GatewayRefusal:
            pass  # a body that no router can read
        except KvRouteError as error:
            self._refuse(_reason_of(error), error.message, error.retry_after_s)
            return
        except Exception:
            log.exception("a request was not decided, which another router serves")
        self._outcome = outcome
        self.stream.decided()

    def _answer(self, endpoints: str, headers: Mapping[str, str]) -> None:
        if (question := self._question) is not None and not self._gone:
            now_s = self._picker.clock()
            self._repeated = self._repeats.answered(
                question.path, question.headers, endpoints, headers, now_s
            )
        self.stream.picked(endpoints, headers)

    def _refuse(self, reason: str, message: str, retry_after_s: float | None = None) -> None:
        self._outcome = "refused"
        self._picker.counters.refusals.labels(PROGRAM, reason).inc()
        form = errors_on(self.stream.path)
        answer = answer_of(reason, message, form, retry_after_s=retry_after_s)
        self.stream.refused(answer, reason)

    # The answer

    def served(self, endpoint: str) -> None:
        """See Driver."""
        routed, exchange = self._routed, self._exchange
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
            moved = await self._picker.asking.routed(
                self._question, exchange, self._trace, only=(worker_id,)
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
        self._over()
        self.await_deadline()
        if outcome is None or self._outcome == REPEATED:
            if self._task is not None and self._outcome == "cancelled":  # its body is being read
                self._task.cancel()
            return
        blame = outcome.blame
        self._outcome = "finished" if blame is None else _OUTCOMES[blame]
        if routed is None:  # no pick yet, or the load is being moved
            if self._task is not None and not self._task.done():
                self._task.cancel()
        elif observed and (exchange := self._exchange) is not None:
            lengths = self._picker.asking.lengths
            _ = self._picker.spawn(_report(routed, exchange, outcome, lengths))
        else:
            self._outcome = "unobserved"
            _unobserved(routed, self._picker)


def _reason_of(error: KvRouteError) -> str:
    if error.reason is None and isinstance(error, RouterUnreachable):
        return "ROUTER_UNREACHABLE"
    return error.reason or error.code.name


def _unobserved(routed: RoutedRequest, picker: Picker) -> None:
    """Reports to the router that the picker will see nothing of the answer."""
    spawn, loop = picker.spawn, asyncio.get_running_loop()
    _ = spawn(routed.unobserved())
    loop.call_later(picker.settings.unobserved_s, lambda: spawn(routed.finished(wait=False)))


async def _report(
    routed: RoutedRequest, exchange: Exchange, outcome: Outcome, lengths: OutputLengths
) -> None:
    """Sends the last report of a request whose answer the picker saw."""
    routed.prompt_tokens = outcome.usage.prompt_tokens
    routed.finish_reason = outcome.finish_reason
    if outcome.blame is not None:
        routed.output_tokens = outcome.output_tokens
        await routed.failed(_REASONS[outcome.blame], wait=False)
        return
    if exchange.has_body:
        lengths.add(exchange.facts.model, outcome.output_tokens)
    await routed.finished(
        output_tokens=outcome.output_tokens,
        cached_tokens=outcome.usage.cached_tokens,
        wait=False,
    )


def _to_nobody(*_: object) -> None:
    """Takes the place of a stream that is over."""


class _Closed:
    """The Channel of a stream that is over."""

    send = close = end = when_room = resume = staticmethod(_to_nobody)


_CLOSED = _Closed()
