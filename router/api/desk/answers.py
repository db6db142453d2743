"""Answers of the desk to a request: at once, or later."""

from collections.abc import Callable, Generator
from typing import TypeAlias

from typing_extensions import override

from router.api.desk.tenant import UNVERIFIED, Caller
from router.decide.waiter import Waiter
from router.fleet.reservations.reservations import Reservation
from router.observe.audit.sampling import Due
from router.observe.tracing.route_trace import RouteTrace
from router.request.refusal import Refusal
from router.request.request import Request
from router.request.wire.received import ReceivedRequest

Answered: TypeAlias = tuple[bytes, Reservation, bool]
"""A RouteResponse as bytes, its reservation, and whether the answer repeats that of an earlier
request with the same id."""
Answer: TypeAlias = Callable[["Waiting", float, bool], Answered]
"""Decides a request, given the seconds waited and whether a worker over its capacity may be picked.
Raises Refusal."""
Refuse: TypeAlias = Callable[["Waiting", Refusal], None]
"""Counts the refusal of a request that waited."""


def _nothing() -> None:
    """Does nothing: the callback for a request whose outcome no caller waits for."""


class Later:
    """A request whose answer comes later."""

    __slots__ = ("on_done", "outcome", "tells")

    def __init__(self) -> None:
        self.outcome: Answered | Refusal | None = None
        """The answer, or the refusal; None: the request is still open."""
        self.on_done: Callable[[], None] = _nothing
        """Called once, when there is an outcome, by `settle`."""
        self.tells = False
        """Whether the caller wants messages about the request's place in the queue."""

    def settle(self) -> None:
        """Calls on_done, and drops the reference to it: on_done and this request refer to each
        other, and the garbage collector frees cycles hours later only (router/app/cli/run.py).
        """
        on_done = self.on_done
        self.forget_caller()
        on_done()

    def forget_caller(self) -> None:
        """Drops the callback of the caller, which has the outcome or no longer wants it."""
        self.on_done = _nothing

    def take(self) -> Answered:
        """Returns the answer, or raises the Refusal. Only to be called after `on_done`."""
        if self.outcome is None:
            raise AssertionError("the request still waits")
        if isinstance(self.outcome, Refusal):
            raise self.outcome.copy()
        return self.outcome


class Waiting(Later):
    """A request that waits for a worker, as the Job of the admission queue
    (router/decide/core/admission.py)."""

    __slots__ = (
        "_answer", "_refuse", "caller", "due", "read", "request", "request_id", "trace", "waiter",
    )  # fmt: skip

    def __init__(
        self,
        request: bytes | ReceivedRequest,
        request_id: str,
        due: Due | None,
        read: tuple[ReceivedRequest, Request],
        answer: Answer,
        refuse: Refuse,
        *,
        caller: Caller = UNVERIFIED,
        tells: bool = False,
        trace: RouteTrace | None = None,
    ) -> None:
        """due: observers that learn how the request ends. read: the request, before and after
        reading. answer, refuse: decide it, and count its refusal. tells: whether its caller wants
        messages about its place in the queue. trace: its spans; None: it is not sampled.
        """
        super().__init__()
        self.request = request
        self.request_id = request_id
        self.due = due
        self.caller = caller
        self.read = read
        self.tells = tells
        self.trace = trace
        self._answer = answer
        self._refuse = refuse
        self.waiter: Waiter | None = None
        """The request's place in the queue; None: the request does not wait."""

    @property
    def owner(self) -> str:
        """Name of the identity that sent the request; empty: the service verified none."""
        return self.caller.owner

    def decide(self, waited_s: float, may_exceed: bool) -> Reservation:
        """Answers the request after waited_s seconds, and returns its reservation; raises Refusal.
        may_exceed: whether a worker over its capacity may be picked."""
        self.outcome = answered = self._answer(self, waited_s, may_exceed)
        self.settle()
        return answered[1]

    def refuse(self, refusal: Refusal) -> None:
        """Ends the wait with a refusal, which is counted."""
        self._refuse(self, refusal)
        self.outcome = refusal.copy()
        self.settle()

    @override
    def forget_caller(self) -> None:
        """Drops the caller's callback, and the references between the request and its place in the
        queue, since the queue keeps some ended places for a while. The wait no longer counts."""
        super().forget_caller()
        if self.waiter is not None:
            if self.caller.usage is not None:
                self.caller.usage.waiting -= 1
            self.waiter.payload = None
            self.waiter = None


Steps: TypeAlias = Generator[None, None, Answered | Later]
"""A generator that answers a request in steps, between which others may have a turn."""
