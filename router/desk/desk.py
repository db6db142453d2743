"""The desk: the one way in for every face, be it gRPC, HTTP or a test.

    request's bytes -> sampled? -> fast path, or read -> core -> answer's bytes
                                                                 counted, peers informed

A face brings bytes and takes bytes: it measures messages, keeps deadlines and writes statuses.
What `route` answers holds a reservation: a face whose caller is gone ends it by `cancel` or
`unsent`.

Laws:
- every request is counted once, by its outcome; every refusal has a Reason;
- a fault of the router's own ends one request with INTERNAL, and no other.
"""

from collections.abc import Callable, Generator
from functools import partial

from kvroute.v1 import router_pb2
from router.audit.sampling import Due, Watch
from router.copies.hot_prefixes import HotPrefixes
from router.core.core import RouterCore
from router.core.fast_path import Batch, Results
from router.core.progress import Progress, ProgressState, Repeated
from router.desk import codec
from router.desk.counters import Metrics, StageClock
from router.desk.methods import ROUTE, ROUTE_STREAM
from router.desk.stream_items import Answered, RouteItems, Steps
from router.request.refusal import Refusal
from router.request.request import Request
from router.reservations.reservations import Ending, Reservation

LONG_BYTES = 512 * 1024
"""A request up to this size is read, hashed and picked for in one step."""
RUN_ITEMS = 16
"""Plain items that the fast path answers at once, at most."""


class Desk:
    """Takes requests to the core, and counts what comes of them."""

    def __init__(
        self,
        core: RouterCore,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        fault: Callable[[str, Exception], Refusal],
        watch: Watch | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """fault: counts and logs what the router did wrong at a method, and says what its caller
        gets. watch: sees a share of the decisions; may be another one later. on_change: called
        when what is reserved here may have changed.
        """
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._fault = fault
        self.watch = watch
        self.on_change = on_change
        if core.lane is not None:
            core.lane.tally = metrics.tally

    def items(self) -> RouteItems:
        """For one stream of requests."""
        return RouteItems(self.steps, self.cancel, self.run)

    def route(self, request: bytes) -> Answered:
        """One request, answered at once; raises Refusal, counted."""
        now_s = self._clock()
        due = self.watch.take() if self.watch is not None else None
        try:
            if due is not None or (answered := self._plain(request, now_s)) is None:
                received = codec.receive(request, self._core.routing.prompt_tokens_max)
                mark = self._metrics.stage_clock()
                asked = codec.read_request(received, self._core)
                answered = self._any(received.message, asked, now_s, mark, due)
            self.on_change()
            return answered
        except Refusal as refusal:
            self._refused(refusal, request, now_s, due)
            raise
        except Exception as error:  # a fault of ours, which ends one request and no other
            raise self._refused(self._fault(ROUTE, error), request, now_s, due) from error

    def steps(self, request: bytes) -> Steps:
        """One request, answered in as many steps as its length asks for."""
        if len(request) <= LONG_BYTES:
            return self.route(request)
        return (yield from self._long(request))

    def explain(self, request: bytes) -> Generator[None, None, list[bytes]]:
        """What `route` would decide, in steps: the parts of an ExplainResponse; raises Refusal."""
        _, asked = yield from self._read(request)
        decision = self._core.decide(asked, self._clock())
        self._metrics.requests.labels("explained", "").inc()
        refusal_instead = None if decision.order else self._core.decider.refuse(decision)
        yield
        parts = []
        for part in codec.explanations(decision, refusal_instead, self._core):
            parts.append(part)
            yield
        return parts

    def run(self, batch: Batch, results: Results, waited_s: float) -> dict[int, Reservation]:
        """Plain items at the front of what is left of a batch, answered by the lane."""
        answered: dict[int, Reservation] = {}
        watch = self.watch
        if watch is not None and watch.left < RUN_ITEMS:
            return answered  # one by one, so that the item that is due is seen
        if (lane := self._core.lane) is not None:
            now_s = self._clock()
            hot = self._core.hot
            places: list[tuple[Reservation, int]] | None = [] if hot is not None else None
            try:
                lane.answers(batch, results, int(waited_s * 1000), now_s, answered, places)
            except Refusal:
                pass  # of the item that is next: the general way comes to it again
            except Exception as error:  # ours; the next item is tried once more by itself
                self._fault(ROUTE_STREAM, error)
            for reservation, place in places or ():
                if hot is not None:
                    self._count(hot, reservation, partial(batch.request_of, place), now_s)
            if watch is not None:
                watch.passed(len(answered))
            self.on_change()
        return answered

    def cancel(self, reservation: Reservation) -> None:
        """Ends a reservation whose caller left before it had the answer."""
        failed = Progress(reservation.id, ProgressState.FAILED, failure=Ending.FAILED_CANCELLED)
        self._core.report(failed, self._clock())
        self.on_change()

    def unsent(self, reservation: Reservation) -> None:
        """The answer of a call could not be sent: nobody knows of what it reserved."""
        if not reservation.shared:
            self._metrics.answers_unsent.inc()
            self.cancel(reservation)

    def _long(self, request: bytes) -> Steps:
        """One long request, answered in steps; raises Refusal, counted. The last step reserves."""
        now_s = self._clock()
        due = self.watch.take() if self.watch is not None else None
        try:
            received, asked = yield from self._read(request)
            mark = self._metrics.stage_clock()
            answered = self._any(received.message, asked, self._clock(), mark, due)
            self.on_change()
            return answered
        except Refusal as refusal:
            self._refused(refusal, request, now_s, due)
            raise
        except Exception as error:  # a fault of ours, which ends one request and no other
            raise self._refused(self._fault(ROUTE, error), request, now_s, due) from error

    def _read(self, request: bytes) -> Generator[None, None, tuple[codec.Received, Request]]:
        """Reads a request, and hashes its prompt, in steps; raises Refusal."""
        received = codec.receive(request, self._core.routing.prompt_tokens_max)
        yield
        asked = codec.read_request(received, self._core)
        for size in self._core.fleet.block_sizes(asked.model):
            yield from asked.prompt.hashed(size)
            yield
        asked.prompt.fingerprint()
        yield
        return received, asked

    def _refused(self, refusal: Refusal, request: bytes, now_s: float, due: Due | None) -> Refusal:
        """Counts a request that got no worker. Returns what it was given.

        Callers have a clause of their own for refusals: `raise refusal from refusal`, and a frame
        that keeps one, are cycles, which hold the request until a full look for cycles.
        """
        self._metrics.requests.labels("refused", refusal.reason).inc()
        if due is not None:
            due.refused(
                codec.read_refused(request, refusal, now_s, self._core.routing.prompt_tokens_max)
            )
        return refusal

    def _plain(self, request: bytes, now_s: float) -> Answered | None:
        """A request answered by the lane; None when it takes the general way."""
        lane = self._core.lane
        if lane is None or (reservation := lane.answer(request, now_s)) is None:
            return None
        if (hot := self._core.hot) is not None:
            self._count(hot, reservation, lambda: request, now_s)
        return reservation.answer, reservation, False

    def _count(
        self,
        hot: HotPrefixes,
        reservation: Reservation,
        request: Callable[[], bytes],
        now_s: float,
    ) -> None:
        """The lane answered a plain request, which every worker may see."""
        hot.on_pick(
            reservation,
            True,
            lambda: (
                codec.read_request(
                    codec.receive(request(), self._core.routing.prompt_tokens_max), self._core
                ).prompt
            ),
            now_s,
        )

    def _any(
        self,
        request: router_pb2.RouteRequest,
        asked: Request,
        now_s: float,
        mark: StageClock,
        due: Due | None,
    ) -> Answered:
        """A request answered the general way."""
        outcome = self._core.route(asked, now_s, mark, due)
        reservation = outcome.reservation
        if isinstance(outcome, Repeated):
            self._metrics.requests.labels("repeated", "").inc()
            return reservation.answer, reservation, True
        answer = router_pb2.RouteResponse()
        try:
            codec.write_pick(answer, outcome, self._core, request.priority)
            if request.omit_receipt:
                answer.ClearField("receipt")
                answer.ClearField("prefill_receipt")
            reservation.answer = answer.SerializeToString()
        except BaseException:
            self._core.withdraw(reservation, now_s)
            raise
        self._metrics.picked(outcome)
        mark.total()
        return reservation.answer, reservation, False
