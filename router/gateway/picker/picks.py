"""Picks endpoints for requests: calls a router, reports each request's progress and end to it.

Laws:
- no request that some worker could serve is refused for a fault of the picker: it goes by load, and
  is counted;
- the reservation of a request ends with its stream;
- a request has one reservation, however many filters ask for it (repeats.py);
- a request is under way from its headers until its answer is over: only requests under way count as
  open, and only for them a stop waits. A stream without one has a bounded time (patience.py).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from typing_extensions import override

from kvroute.client import KvRouteError, RoutedRequest
from kvroute.v1 import FailureReason
from router.config.settings.picker_settings import PickerSettings
from router.config.settings.request_settings import RequestSettings
from router.gateway.exchange import Blame, Exchange, Outcome
from router.gateway.picker.asking import PickerAsking
from router.gateway.picker.counters import Early, PickerCounters
from router.gateway.picker.endpoints import Endpoints
from router.gateway.picker.patience import Patience, Wait
from router.gateway.picker.repeats import Repeats
from router.gateway.picker.request_stream import Blind, Reading, RequestStream
from router.gateway.refusals import GatewayRefusal, answer_of, reason_of
from router.gateway.server.long_bodies import made
from router.gateway.server.pace import too_slow
from router.net.http2.frames import Status
from router.net.http2.requests import PASSED
from router.net.listener.seldom import Seldom
from router.observe.tracing.gateway_trace import GatewayTrace
from router.observe.tracing.spans import Value
from router.observe.tracing.traceparent import HEADER
from router.request.bodies import errors_on

_MIB = 1 << 20
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
_NONE_IN_SUBSET = "none of the endpoints in the gateway's subset is a worker that can be picked"
REPEATED = "repeated"
"""Outcome of a stream whose request has another stream's pick."""
_UNOBSERVED = "unobserved"
NOT_FOLLOWED = (
    "Envoy sent a request to %s instead of the picked %s: does its cluster have that endpoint?"
    " (kvroute_picker_not_followed_total counts them)"
)
LEFT_OUT = "Envoy sent a part of a request's body after its end; it is left out"
ENDED_A_TURN = 64
"""Streams that a stop of the picker ends in one turn of the event loop."""

log = logging.getLogger("kvroute.picker")


class Channel(Protocol):
    """Interface: an ext_proc stream, as its request uses it."""

    def send(self, message: bytes) -> None: ...

    def close(self) -> None:
        """Ends this side of the stream."""

    def end(self, status: Status, about: str) -> None:
        """Ends the stream with an error."""

    def when_room(self, go_on: Callable[[], None]) -> None:
        """Calls go_on() in another turn of the loop, once Envoy has room for more. Until `resume`
        Envoy can send a window's bytes at most.
        """

    def resume(self) -> None:
        """Lets Envoy send again."""


class Picker:
    """State that all requests of one picker share."""

    def __init__(
        self,
        asking: PickerAsking,
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
        traceparent or ""; None: no request has spans. head_timeout_s: seconds for a request's
        headers, see patience.py.
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
        self.open = 0
        """Requests under way."""
        self._streams_idle: dict[PickedRequest, None] = {}
        """Streams without a request under way."""
        self.idle = asyncio.Event()
        """Set while no request is under way."""
        self.idle.set()
        self.not_followed = Seldom(log)
        self.left_out = Seldom(log)
        self.faults = Seldom(log, logging.ERROR)

    def opened(self, call: "PickedRequest") -> None:
        """Records a stream, whose request has not begun."""
        self._streams_idle[call] = None

    def began(self, call: "PickedRequest") -> None:
        """Records that a stream's request has begun."""
        del self._streams_idle[call]
        self.open += 1
        self.idle.clear()
        self.counters.open.set(self.open)

    def over(self, call: "PickedRequest") -> None:
        """Records that a stream's request is over; the stream may end now."""
        self._streams_idle[call] = None
        self.open -= 1
        self.counters.open.set(self.open)
        if not self.open:
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
        self.counters.body_bytes.set(self._held_bytes)


class PickedRequest(RequestStream):
    """One request of Envoy: gets its pick from a router, reports its steps, bounds its waits."""

    def __init__(
        self,
        picker: Picker,
        channel: Channel,
        repeats: Repeats,
        deadline_s: float,
    ) -> None:
        """repeats: picks of the same connection. deadline_s: end of the call's time, by the loop's
        clock; inf: none."""
        super().__init__(
            channel.send,
            channel.close,
            body_bytes_max=picker.requests.body_mib_max * _MIB,
            low_first=picker.requests.priority == "lower",
        )
        self._channel, self._deadline_s = channel, deadline_s
        self._since_s = picker.clock()
        """When the wait for Envoy's next message began, by the loop's clock."""
        self._is_open = False
        """Whether the request is under way."""
        self._early: Early | None = Early.LEFT
        """Why the stream ended without a request; None: it has one."""
        self._patience = Patience(self.due_s, self.late)
        self._repeats = repeats
        self._repeated: tuple[str, str, str] | None = None
        """Key of the request's pick in `repeats`; None: its pick is not there."""
        self._picker = picker
        self._task: asyncio.Task[None] | None = None
        """Task that gets the pick."""
        self._routed: RoutedRequest | None = None
        self._endpoint = ""
        self._outcome = "cancelled"
        self._trace: GatewayTrace | None = None
        self._held = 0
        self._holds_back = False
        """Whether Envoy is kept from sending, since the body is being passed on."""
        self._gone = False
        picker.opened(self)

    def left(self) -> None:
        """Records that the stream is over on both sides."""
        if self._gone:
            return
        self._gone = True
        self._patience.stop()
        self._repeats.left(self._repeated)
        self.drop()
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
        """Sets a timer for the stream's next deadline: see router.net.http2.sockets.Timed."""
        if not self._gone:
            self._patience.await_deadline()

    def due_s(self) -> float:
        """Time at which the stream is late, by the loop's clock; inf: never."""
        if self.wait is Wait.NOTHING:
            return self._deadline_s
        most_s = self.body_wait_s if self.wait is Wait.BODY else self._picker.head_timeout_s
        return min(self._since_s + most_s, self._deadline_s)

    def late(self) -> None:
        """Ends the stream, whose time is over: a slow body is refused, another wait is an error."""
        now_s = self._picker.clock()
        if now_s >= self._deadline_s:
            self._early = self._early and Early.TIMEOUT
            self._channel.end(Status.DEADLINE_EXCEEDED, PASSED)
        elif self.wait is Wait.BODY:
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

    @override
    def may_hold(self, size: int) -> bool:
        held = self._picker.may_hold(size)
        self._held += size if held else 0
        return held

    @override
    def let_go(self) -> None:
        if self._held:
            self._picker.let_go(self._held)
            self._held = 0
        if self._holds_back:
            self._holds_back = False
            self._channel.resume()

    @override
    def left_out(self) -> None:
        self._picker.left_out.log(self._picker.clock(), LEFT_OUT)

    @override
    def when_room(self) -> None:
        self._holds_back = True
        self._channel.when_room(self.flow)

    # The pick

    @override
    def began(self) -> None:
        self._early, self._is_open = None, True
        self._since_s = self._picker.clock()
        self._picker.began(self)
        if self._patience.is_set:  # else its first turn is not over
            self._patience.await_deadline()

    @override
    def ask(self, body: Reading | Blind) -> None:
        if self.observed:
            self._task = self._picker.spawn(self._observe(body))
            return
        known = self._repeats.take(self.path, self.headers, self._picker.clock())
        if known is not None:
            self._outcome = REPEATED
            self.picked(known.endpoints, known.headers)
            return
        if (begin := self._picker.begin_trace) is not None:
            self._trace = begin(self.headers.get(HEADER, ""))
        if isinstance(body, Blind):
            self._blind(body.value)
        elif self.subset is not None and not self._picker.endpoints.among(self.subset):
            self._refuse("NO_ELIGIBLE_WORKER", _NONE_IN_SUBSET)
        else:
            self._task = self._picker.spawn(self._pick(body))

    def _blind(self, reason: str) -> None:
        """Names the least loaded endpoint to Envoy, without a router and a reservation. reason:
        label of the counter."""
        picker = self._picker
        picker.counters.went_by_load(reason)
        self._outcome = "blind"
        endpoint = picker.endpoints.least_loaded(self.subset)
        if endpoint:
            self._answer(endpoint, {})
        elif self.subset is not None:
            self._refuse("NO_ELIGIBLE_WORKER", _NONE_IN_SUBSET)
        else:
            self.unpicked()

    async def _pick(self, reading: Reading) -> None:
        picker = self._picker
        began_s = picker.clock()
        try:
            try:
                exchange = await made(*reading)
            except GatewayRefusal:
                # The engine's own error about the body is the best.
                self._blind(Blind.INVALID_BODY.value)
                return
            del reading  # and the pieces of the body with it
            self.read(exchange)
            try:
                routed = await picker.asking.routed(self, exchange, self._trace)
            except KvRouteError as error:
                self._refuse(reason_of(error), error.message, error.retry_after_s)
                return
            if self.is_over:  # while the answer came
                await routed.failed(FailureReason.FAILURE_REASON_CANCELLED, wait=False)
                return
            self._routed = routed
            endpoints, headers = await picker.asking.endpoints_of(routed.pick)
            if not endpoints:
                await routed.failed(FailureReason.FAILURE_REASON_CANCELLED, wait=False)
                self._blind("no_endpoint")
                return
            picker.counters.picked(picker.clock() - began_s, self._trace)
            self._endpoint = endpoints[0]
            self._answer(",".join(endpoints), headers)
        except Exception as error:
            self._fault("a request was not routed, and goes by load", error)
            self._blind("fault")

    async def _observe(self, body: Reading | Blind) -> None:
        """Has a router decide about a request that another router serves; without a body to read
        the request is only counted."""
        outcome = "blind"
        try:
            if isinstance(body, Reading):
                exchange = await made(*body)
                await self._picker.asking.decided(self, exchange)
                outcome = "observed"
        except GatewayRefusal:
            pass  # a body that no router can read
        except KvRouteError as error:
            self._refuse(reason_of(error), error.message, error.retry_after_s)
            return
        except Exception as error:
            self._fault("no decision was made about a request that another router serves", error)
        self._outcome = outcome
        self.decided()

    def _fault(self, words: str, error: Exception) -> None:
        """Logs a fault of the picker's own, seldom: a client's bytes may cause it at will."""
        self._picker.faults.log(self._picker.clock(), words, error=error)

    def _answer(self, endpoints: str, headers: Mapping[str, str]) -> None:
        if not self._gone:
            now_s = self._picker.clock()
            self._repeated = self._repeats.answered(
                self.path, self.headers, endpoints, headers, now_s
            )
        self.picked(endpoints, headers)

    def _refuse(self, reason: str, message: str, retry_after_s: float | None = None) -> None:
        self._outcome = "refused"
        self._picker.counters.refused(reason)
        form = errors_on(self.path)
        self.refused(answer_of(reason, message, form, retry_after_s=retry_after_s), reason)

    # The answer

    @override
    def served(self, endpoint: str) -> None:
        routed, exchange = self._routed, self._exchange
        if routed is None or exchange is None or endpoint == self._endpoint:
            return
        picker = self._picker
        worker_id = picker.endpoints.worker_at(endpoint)
        picker.counters.not_followed.labels("known" if worker_id else "unknown").inc()
        picker.not_followed.log(picker.clock(), NOT_FOLLOWED, endpoint, self._endpoint)
        self._routed = None
        _ = self._picker.spawn(self._moved(routed, exchange, worker_id))

    async def _moved(
        self, routed: RoutedRequest, exchange: Exchange, worker_id: str | None
    ) -> None:
        """Moves a request's reservation from the picked worker to the one that serves the request.
        worker_id: None: the serving endpoint is no known worker, and nothing is reserved."""
        await routed.failed(FailureReason.FAILURE_REASON_CANCELLED, wait=False)
        if worker_id is None:
            return
        try:
            moved = await self._picker.asking.routed(self, exchange, self._trace, only=(worker_id,))
        except KvRouteError as error:
            log.info("worker %s serves a request without a reservation: %s", worker_id, error)
            return
        if exchange.outcome is not None:  # the answer is over
            self._report(moved, exchange, exchange.outcome)
            return
        self._routed = moved
        if self._seen_first:  # it came meanwhile, and its report had no reservation
            _ = self._picker.spawn(moved.prefill_done(measured=False))

    @override
    def first_token(self) -> None:
        if self._routed is not None:
            _ = self._picker.spawn(self._routed.prefill_done())

    @override
    def progress(self, output_tokens: int) -> None:
        if self._routed is not None:
            self._routed.output_tokens = output_tokens

    @override
    def ended(self, outcome: Outcome | None, *, observed: bool) -> None:
        routed, self._routed = self._routed, None
        self._over()
        self.await_deadline()
        if outcome is None or self._outcome == REPEATED:
            if self._task is not None and self._outcome == "cancelled":  # its body is being read
                self._task.cancel()
            return
        blame = outcome.blame
        self._outcome = "finished" if blame is None else _OUTCOMES[blame]
        if not observed:
            self._outcome = _UNOBSERVED
        if routed is not None and self._exchange is not None:
            self._report(routed, self._exchange, outcome)
        elif self._task is not None and not self._task.done():  # no pick yet
            self._task.cancel()

    def _report(self, routed: RoutedRequest, exchange: Exchange, outcome: Outcome) -> None:
        """Reports how a request that is over ended."""
        picker = self._picker
        if self._outcome == _UNOBSERVED:
            _unobserved(routed, picker)
        else:
            _ = picker.spawn(picker.asking.report(exchange, outcome, routed))


def _unobserved(routed: RoutedRequest, picker: Picker) -> None:
    """Reports to the router that the picker will see nothing of the answer, and the request's end
    after picker.unobserved_s."""
    spawn, loop = picker.spawn, asyncio.get_running_loop()
    _ = spawn(routed.unobserved())
    loop.call_later(picker.settings.unobserved_s, lambda: spawn(routed.finished(wait=False)))


def _to_nobody(*_: object) -> None:
    """Does nothing, in the place of a method of a stream that is over."""


class _Closed:
    """The Channel of a stream that is over."""

    send = close = end = when_room = resume = staticmethod(_to_nobody)


_CLOSED = _Closed()
