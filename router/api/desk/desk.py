"""The desk: takes the requests of every service (gRPC, gateway, picker) to the decision core.

    request's bytes -> read -> core    -> answer's bytes, counted, replicas informed
                               no room -> waits
    report, heartbeat, replica, time -> core -> `dispatch` -> answers to requests that wait

A service brings bytes and takes bytes: it measures messages, keeps deadlines and writes statuses.
An answer of `route` holds a reservation, unless the request is observed (served by another router).
A service whose caller is gone ends the reservation by `cancel` or `unsent`, and a wait by `leave`.

Laws:
- every request is counted once, by its outcome; every refusal has a Reason;
- while a worker that may take a request has room, and no other request waits for it, the request is
  answered at once;
- a fault of the router's own ends one request with INTERNAL, and no other.
"""

from collections.abc import Callable, Generator
from math import inf
from typing import TypeAlias

from kvroute.v1 import router_pb2
from router.api.desk import answer_codec, request_codec
from router.api.desk.answers import Answered, Later, Steps, Waiting
from router.api.desk.counters import Metrics
from router.api.desk.methods import ROUTE
from router.api.desk.request_codec import RouteMessage
from router.api.desk.tenant import UNVERIFIED, Caller
from router.decide.core.admission import Admission
from router.decide.core.core import RouterCore
from router.decide.core.progress import Pick, Progress, ProgressState, Repeated
from router.decide.core.watched import PickObserver
from router.fleet.reservations.reservations import Ending, Reservation
from router.observe.audit.sampling import Due, Watch
from router.observe.tracing.route_trace import RenderSpan, RouteTrace, no_span, rendered
from router.observe.tracing.spans import Tracing
from router.request.refusal import Reason, Refusal
from router.request.request import Request
from router.request.wire.received import ReceivedRequest

Read: TypeAlias = tuple[ReceivedRequest, Request]
WAITING_BYTES = 2560
"""Bytes, about, that the objects of a waiting request take up beside its message."""
LONG_BYTES = 512 * 1024
"""Bytes up to which a request is read, hashed and decided in one step; longer requests take several
steps."""


class Desk:
    """Takes requests to the decision core and counts their outcomes. Requests of calls and items of
    streams pass the same steps here, from their bytes to their end."""

    def __init__(
        self,
        core: RouterCore,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        fault: Callable[..., Refusal],
        admission: Admission,
        soon: Callable[[Callable[[], None]], object],
        watch: Watch | None = None,
        on_change: Callable[[], None] = lambda: None,
        tracing: Tracing | None = None,
    ) -> None:
        """fault: counts and logs an error of the router itself in an RPC, with its effect; returns
        the refusal for the caller, where there is no other answer. admission: the queue of requests
        that wait. soon: schedules a function after other tasks had a turn. watch: observers of a
        share of the decisions; None: there are none. on_change: called when reserved load may have
        changed. tracing: spans of requests whose callers' spans are sampled; None: no spans.
        """
        self._core = core
        self._writer = answer_codec.answer_writer(core)
        self._metrics = metrics
        self._clock = clock
        self._fault = fault
        self._watch = watch
        self._on_change = on_change
        self.admission = admission
        self._soon = soon
        self._is_due = False
        """Whether `_dispatch_again` was given to `soon` and has yet to run."""
        self.tracing = tracing
        core.on_observer_fault = self._observer_failed

    def route(
        self, request: RouteMessage, left_s: float = inf, caller: Caller = UNVERIFIED
    ) -> Answered | Waiting:
        """Answers a request at once or later; raises Refusal, which is counted.

        left_s: seconds until the caller's deadline; 0 or less: it has passed. caller: as the port
        verified it.
        """
        now_s, due = self._clock(), None
        try:
            due = None if self._watch is None else self._watch.take()
            if left_s <= 0:
                raise _too_late()
            if caller.usage is not None:  # a text was counted before its tokens were made
                caller.usage.request(rate=isinstance(request, bytes) or request.made is None)
            received = request_codec.receive(request, self._core.routing.prompt_tokens_max)
            read = received, request_codec.read_request(received, self._core, now_s, caller)
            return self._decided(request, read, now_s, left_s, due, caller)
        except Refusal as refusal:
            self.refused(refusal, request, now_s, due)
            raise
        except Exception as error:  # a fault of ours, which ends one request and no other
            raise self.refused(self._fault(ROUTE, error), request, now_s, due) from error

    def item(
        self, request: RouteMessage | None, left_s: float = inf, caller: Caller = UNVERIFIED
    ) -> Answered | Waiting | Steps:
        """Answers the request of a call or of a stream's item: as `route` does, or as `steps` does
        if it has more than LONG_BYTES. request None: the item holds none, and is refused.
        """
        if request is None:
            raise self.refused(
                Refusal(Reason.INVALID_FIELD, "the item has neither a request nor a cancel"), b""
            )
        if len(request) <= LONG_BYTES:
            return self.route(request, left_s, caller)
        return self.steps(request, left_s, caller)

    def steps(
        self, request: RouteMessage, left_s: float = inf, caller: Caller = UNVERIFIED
    ) -> Steps:
        """Decides a request of more than LONG_BYTES as `route` does, in as many steps as its length
        needs; the last step reserves.
        """
        now_s, due = self._clock(), None
        try:
            due = None if self._watch is None else self._watch.take()
            if left_s <= 0:
                raise _too_late()
            if caller.usage is not None:  # a text was counted before its tokens were made
                caller.usage.request(rate=isinstance(request, bytes) or request.made is None)
            read = yield from self._read(request, caller)
            read_s = self._clock()
            return self._decided(request, read, read_s, left_s - (read_s - now_s), due, caller)
        except GeneratorExit:
            self.refused(caller_left(), request, now_s, due)
            raise
        except Refusal as refusal:
            self.refused(refusal, request, now_s, due)
            raise
        except Exception as error:  # a fault of ours, which ends one request and no other
            raise self.refused(self._fault(ROUTE, error), request, now_s, due) from error

    def changed(self) -> None:
        """Records that reserved load, and so the room of workers, or the queue may have changed:
        calls on_change, and answers requests that wait."""
        self._on_change()
        self.dispatch()

    def dispatch(self) -> None:
        """Answers requests that wait, as far as workers have room, and ends waits that are over: a
        slice of them now, the rest soon. Called when room may have come: by an arrival, a report, a
        heartbeat, another replica, time."""
        if len(self.admission) and self.admission.dispatch(self._clock()) and not self._is_due:
            self._is_due = True
            self._soon(self._dispatch_again)

    def leave(self, later: Later) -> None:
        """Ends the wait of a request whose caller left, or the reservation that it got since."""
        if isinstance(later, Waiting) and later.waiter is not None:
            self.admission.queue.cancel(later.waiter, self._clock())
            self._refused_waiting(later, caller_left())
        later.forget_caller()
        if isinstance(later.outcome, tuple) and not later.outcome[2]:
            self.unsent(later.outcome[1])

    def outlook(self, waiting: Later) -> router_pb2.QueueProgress | None:
        """Place of a waiting request in the queue, and its expected wait; None: it waits no
        longer.
        """
        if not isinstance(waiting, Waiting):
            return None
        waiter, now_s = waiting.waiter, self._clock()
        if waiting.outcome is not None or waiter is None or not waiter.waits:
            return None
        ahead, expected_s = self.admission.queue.outlook(waiter, now_s)
        return router_pb2.QueueProgress(
            ahead=ahead,
            waited_ms=1000 * (now_s - waiter.arrived_s),
            expected_ms=None if expected_s is None else 1000 * expected_s,
        )

    def close(self) -> None:
        """Refuses all waiting requests, since the router stops."""
        stops = Refusal(Reason.DRAINING, "this router stops: send the request to another router")
        self.admission.close(stops, self._clock())
        self._on_change()

    def explain(
        self, request: RouteMessage, caller: Caller = UNVERIFIED
    ) -> Generator[None, None, list[bytes]]:
        """The decision that `route` would make, as the parts of an Explanation; raises Refusal. A
        generator that yields between steps.
        """
        received, parsed = yield from self._read(request, caller)
        waits = self.admission.may_wait(request_codec.read_wait(received, 0.0, inf))
        decision = self._core.decide(parsed, self._clock(), may_exceed=not waits)
        decision.keep()  # other requests have their turn between its parts
        self._metrics.requests.labels("explained", "").inc()
        refusal_instead = None if decision.order else self._core.decider.refuse(decision)
        yield
        parts = []
        for part in answer_codec.explanations(decision, refusal_instead, self._core, self._writer):
            parts.append(part)
            yield
        return parts

    def cancel(self, reservation: Reservation) -> None:
        """Ends a reservation whose caller left before it had the answer."""
        failed = Progress(reservation.id, ProgressState.FAILED, failure=Ending.FAILED_CANCELLED)
        self._core.report(failed, self._clock())
        self._on_change()

    def unsent(self, reservation: Reservation) -> None:
        """Ends the reservation of an answer that could not be sent, or that its caller gave up;
        counts the answer as unsent."""
        if not reservation.shared and reservation.ended is None:
            self._metrics.answers_unsent += 1
            self.cancel(reservation)

    def failed(self, error: Exception, request: RouteMessage) -> Refusal:
        """Counts a request that failed by an error of the router itself before the desk; returns
        the refusal for the caller."""
        return self.refused(self._fault(ROUTE, error), request)

    def render_span(self, request: ReceivedRequest) -> RenderSpan:
        """Begins the span of making the tokens of a request's text; returns the function that ends
        it."""
        tracing, began_s = self.tracing, self._clock()
        trace = tracing.below(request.traceparent) if tracing and request.traceparent else None
        if trace is None:
            return no_span
        return lambda about, error="": rendered(trace, began_s, self._clock(), about, error)

    def _read(
        self, request: RouteMessage, caller: Caller = UNVERIFIED
    ) -> Generator[None, None, tuple[ReceivedRequest, Request]]:
        """Reads a request, and hashes its prompt, in steps; raises Refusal."""
        received = request_codec.receive(request, self._core.routing.prompt_tokens_max)
        yield
        parsed = request_codec.read_request(received, self._core, self._clock(), caller)
        for size in self._core.fleet.block_sizes(parsed.model):
            yield from parsed.prompt.hashed(size)
            yield
        return received, parsed

    def refused(
        self,
        refusal: Refusal,
        request: RouteMessage,
        now_s: float | None = None,
        due: Due | None = None,
    ) -> Refusal:
        """Counts a refused request, here or before it came to the desk, and returns its refusal.
        now_s: None: the present. due: observers of the decision.

        Callers catch Refusal apart from other errors: `raise refusal from refusal`, and a frame
        that keeps one, are cycles, which hold the request until the garbage collector's next full
        run.
        """
        if refusal.reason is Reason.CANCELLED:  # which its caller wanted
            self._metrics.requests.labels("cancelled", "").inc()
        else:
            self._metrics.requests.labels("refused", refusal.reason).inc()
        if due is not None:
            at_s = self._clock() if now_s is None else now_s
            most = self._core.routing.prompt_tokens_max
            due.refused(request_codec.read_refused(request, refusal, at_s, most))
        return refusal

    def _observer_failed(self, observer: PickObserver, error: Exception) -> None:
        what = type(observer).__name__
        self._fault(ROUTE, error, f"{what} missed a pick; the request has its answer")

    def _dispatch_again(self) -> None:
        self._is_due = False
        self.dispatch()

    def _decided(
        self,
        request: RouteMessage,
        read: Read,
        now_s: float,
        left_s: float,
        due: Due | None,
        caller: Caller,
    ) -> Answered | Waiting:
        """Answers a request that was read, or puts it into the queue; raises Refusal."""
        received, parsed = read
        answers: list[Answered] = []
        trace = self._traced(read, now_s) if received.traceparent else None

        def decide(may_exceed: bool) -> Reservation:
            answers.append(self._any(read, now_s, due, may_exceed, caller, trace))
            return answers[0][1]

        def waits() -> Waiting:
            return Waiting(
                request,
                parsed.request_id,
                due,
                read,
                self._answer_waiting,
                self._refused_waiting,
                caller=caller,
                tells=received.queue_progress,
                trace=trace,
            )

        waiter = None
        try:
            if parsed.observed:  # it takes no room, and so waits for none
                decide(True)
            else:
                waiter = self.admission.route(
                    parsed,
                    request_codec.read_wait(received, now_s, left_s),
                    now_s,
                    len(request) + parsed.prompt.hash_bytes + WAITING_BYTES,
                    waits,
                    decide,
                )
        except Refusal as refusal:
            if trace is not None:
                trace.refused(now_s, refusal.reason)
            if parsed.observed:
                refusal.retry_after_s = None  # one look is enough
            raise
        if waiter is None:
            self._on_change()
            return answers[0]
        waiting: Waiting = waiter.payload  # type: ignore[assignment]  # made by `waits`
        waiting.waiter = waiter
        if caller.usage is not None:
            caller.usage.waiting += 1  # until `Waiting.forget_caller`
        self.changed()
        return waiting

    def _answer_waiting(self, waiting: Waiting, waited_s: float, may_exceed: bool) -> Answered:
        """Decides a request that has waited for waited_s seconds; raises Refusal, which is not
        counted here."""
        now_s = self._clock()
        if waiting.due is not None:
            waiting.due.waited_s = waited_s
        try:
            about = waiting.caller, waiting.trace
            answered = self._any(waiting.read, now_s, waiting.due, may_exceed, *about)
        except Refusal:
            raise
        except Exception as error:  # a fault of ours, which ends one request and no other
            raise self._fault(ROUTE, error) from error
        self._on_change()
        content, reservation, repeated = answered
        if not repeated:
            waiting.caller.owns(reservation)
            reservation.waited_s = waited_s
            ahead = 0 if waiting.waiter is None else waiting.waiter.ahead
            content = reservation.answer = answer_codec.with_queue_time(content, waited_s, ahead)
        return content, reservation, repeated

    def _refused_waiting(self, waiting: Waiting, refusal: Refusal) -> None:
        if waiting.trace is not None:
            waiting.trace.refused(self._clock(), refusal.reason)
        now_s = self._clock()
        if waiting.due is not None and waiting.waiter is not None:
            waiting.due.waited_s = now_s - waiting.waiter.arrived_s
        self.refused(refusal, waiting.request, now_s, waiting.due)

    def _traced(self, read: Read, now_s: float) -> RouteTrace | None:
        """The spans of a request; None: it is not sampled."""
        if self.tracing is None:
            return None
        received, parsed = read
        trace = self.tracing.below(received.traceparent)
        return None if trace is None else RouteTrace(trace, now_s, parsed.request_id)

    def _any(
        self,
        read: Read,
        now_s: float,
        due: Due | None,
        may_exceed: bool,
        caller: Caller,
        trace: RouteTrace | None = None,
    ) -> Answered:
        """Answers a request, if a worker may be picked, or as an earlier request with its id was
        answered; raises Refusal. may_exceed: whether a worker over its capacity may be picked."""
        request, parsed = read
        counts, answer = self._metrics.counts, self._writer.answer
        priority, omit_receipt = request.priority, request.omit_receipt

        def write(pick: Pick) -> bytes:
            if trace is not None:  # which gets the answer with its receipts
                whole = answer(pick, priority, omit_receipt=False)
                trace.picked(router_pb2.RouteResponse.FromString(whole))
            return answer(pick, priority, omit_receipt)

        counts.begin()
        outcome = self._core.route(parsed, now_s, counts, due, may_exceed=may_exceed, write=write)
        reservation = outcome.reservation
        if isinstance(outcome, Repeated):
            self._metrics.requests.labels("repeated", "").inc()
            if trace is not None:
                trace.repeated(now_s)
            return reservation.answer, reservation, True
        counts.picked(outcome)
        if trace is not None:
            trace.decided(now_s, counts.took_s)
        if parsed.observed:
            return reservation.answer, reservation, False
        if caller.owner:
            caller.owns(reservation)
        if request.priority:
            self._core.fleet.note_priority(outcome.decision.sources[outcome.decision.order[0]])
        if caller.usage is not None:
            caller.usage.reserved(reservation)
        return reservation.answer, reservation, False


def caller_left() -> Refusal:
    """The refusal of a request whose caller left before its answer; nobody gets it."""
    return Refusal(Reason.CANCELLED, "the caller left before the answer")


def _too_late() -> Refusal:
    """The refusal of a request whose caller's deadline has passed."""
    return Refusal(
        Reason.DEADLINE_EXCEEDED, "the caller's deadline passed before the request's turn"
    )
