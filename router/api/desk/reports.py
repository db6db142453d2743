"""The RPC Report: applies reported steps in slices, and returns an outcome for each.

Laws:
- the steps of a call are counted before any is read, and SLICE_STEPS at most are read without a
  turn for other calls;
- a step that can't be read is invalid, and makes no other step of its call invalid;
- steps about another replica's reservations are forwarded to that replica, which answers them;
  after a message without an answer, the call sends that replica no other message.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from time import thread_time
from typing import TypeAlias

from google.protobuf.message import DecodeError

from kvroute.v1 import router_pb2
from kvroute.v1.router_pb2 import PROGRESS_RESULT_INVALID as INVALID
from kvroute.v1.router_pb2 import PROGRESS_RESULT_UNCHANGED as UNCHANGED
from kvroute.v1.router_pb2 import PROGRESS_RESULT_UNKNOWN as UNKNOWN
from kvroute.v1.router_pb2 import ProgressOutcome
from router.api.desk import answer_codec, request_codec
from router.api.desk.counters import Metrics
from router.api.desk.stream_items import SLICE_S
from router.api.desk.tenant import Reporter
from router.cluster.replicas.replica_link import ReplicaLink
from router.decide.core.admission import Admission
from router.decide.core.core import RouterCore
from router.decide.core.progress import Progress, ProgressResult, ProgressState
from router.fleet.reservations.reservations import Ending
from router.request.refusal import Reason, Refusal
from router.request.wire.received import Pieces, TooMuch

PROGRESS_MAX = 65_536
SLICE_STEPS = 64
REPLICA_PROGRESS_MAX = 1024
"""Steps in one message to another replica, at most."""
REPLICA_BYTES_MAX = 512 * 1024
"""Bytes of the steps in one message to another replica, at most: half of what NATS takes."""
CALLER_MAX = 64
"""Characters that are kept of a caller's address which another replica passes on."""
OWNERS_MAX = 64
"""Replicas that one Report call is handed on to, at most."""
_STEP = 1
"""Number of the repeated field of ReportRequest (the steps) and ReportResponse (the outcomes)."""

_KEEPS_PRIORITY = "the request has its worker, where another priority changes nothing"

Elsewhere: TypeAlias = tuple[int, bytes]
"""A step that another replica answers: its place among the outcomes, and its bytes."""


class Reports:
    """Applies reported steps in the core, or passes them to the replica that owns their
    reservations.
    """

    def __init__(
        self,
        core: RouterCore,
        metrics: Metrics,
        clock: Callable[[], float],
        admission: Admission,
        on_change: Callable[[], None] = lambda: None,
        on_prompt_tokens: Callable[[str, int], None] = lambda _id, _tokens: None,
        replicas: Callable[[], ReplicaLink | None] = lambda: None,
    ) -> None:
        """admission: the queue of requests that wait. on_change: called when reservations of this
        router may have changed. on_prompt_tokens: called with a reservation's id and its engine's
        count of the prompt's tokens. replicas: the link to other replicas, once there is one."""
        self._replicas = replicas
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._admission = admission
        self._on_change = on_change
        self._on_prompt_tokens = on_prompt_tokens

    async def report(self, content: bytes, caller: Reporter) -> bytes:
        """Applies the steps of a ReportRequest and returns the ReportResponse, both as bytes;
        raises Refusal for invalid bytes and for more than PROGRESS_MAX steps."""
        replicas = self._replicas()
        pieces = _pieces(content, PROGRESS_MAX)
        outcomes: list[bytes] = []
        elsewhere: dict[str, list[Elsewhere]] = {}
        began_s = thread_time()
        while steps := pieces.take(SLICE_STEPS):
            for piece in steps:
                outcome = self._step(piece, caller)
                if (
                    replicas is not None
                    and outcome.result == UNKNOWN
                    and (owner := replicas.owner(outcome.reservation_id))
                ):
                    elsewhere.setdefault(owner, []).append((len(outcomes), piece))
                outcomes.append(answer_codec.framed(_STEP, outcome.SerializeToString()))
                if thread_time() - began_s >= SLICE_S:
                    await asyncio.sleep(0)
                    began_s = thread_time()
            if len(pieces):
                await asyncio.sleep(0)  # other calls have a turn
                began_s = thread_time()
        if replicas is not None and elsewhere:
            owners = islice(elsewhere.items(), OWNERS_MAX)  # nobody's clients know as many
            calls = (self._ask(replicas, owner, mine, caller, outcomes) for owner, mine in owners)
            await asyncio.gather(*calls)
        return b"".join(outcomes)

    def of_replica(self, payload: bytes) -> bytes:
        """Applies steps about this router's reservations that another replica forwards, a
        ReportRequest as bytes; returns the ReportResponse as bytes, empty if the payload can't be
        read.
        """
        request = router_pb2.ReportRequest()
        try:
            _pieces(payload, REPLICA_PROGRESS_MAX)
            request.ParseFromString(payload)
        except (DecodeError, Refusal):
            self._core.fleet.view.dropped["malformed"] += 1
            return b""
        # Routers of releases without owners forward steps of identities that they don't name.
        names_owner = request.HasField("owner")
        caller = Reporter(request.owner, request.caller[:CALLER_MAX], for_all=not names_owner)
        outcomes = [self.step(step, caller) for step in request.progress]
        return router_pb2.ReportResponse(outcomes=outcomes).SerializeToString()

    def step(self, message: router_pb2.Progress, caller: Reporter) -> ProgressOutcome:
        """Applies one reported step to a request of this router, and returns its outcome: UNKNOWN
        for a request that this router doesn't know or that the caller may not report on.
        """
        if not self._may(message, caller):
            self._metrics.calls_refused.labels("Router/Report", Reason.PERMISSION_DENIED).inc()
            reservation_id = message.reservation_id[: request_codec.TEXT_MAX]
            return ProgressOutcome(reservation_id=reservation_id, result=UNKNOWN)
        if message.request_id:
            return self._of_waiting(message, caller)
        if message.HasField("priority"):
            return self._of_running(message, caller)
        return self._of_reservation(message, caller)

    def _may(self, message: router_pb2.Progress, caller: Reporter) -> bool:
        """Whether a caller may report on the request that a step names."""
        if caller.for_all:
            return True
        reservations = self._core.reservations
        if message.request_id:
            named = reservations.of_request(message.request_id)
            owners = self._admission.owners(message.request_id)
        else:
            named, owners = reservations.get(message.reservation_id), set()
        if named is not None:
            owners.add(named.owner)
        return all(map(caller.may, owners))

    async def _ask(
        self,
        replicas: ReplicaLink,
        owner: str,
        mine: Sequence[Elsewhere],
        caller: Reporter,
        outcomes: list[bytes],
    ) -> None:
        """Forwards steps to the replica that owns their reservations, and puts its outcomes into
        their places in `outcomes`; steps without an answer have the outcome UNKNOWN."""
        named = None if caller.for_all else caller.owner
        about = router_pb2.ReportRequest(caller=caller.host, owner=named).SerializeToString()
        answers = True
        for steps in _by_size(mine):
            answer = None
            if answers:
                payload = b"".join(answer_codec.framed(_STEP, piece) for _, piece in steps) + about
                answer = await replicas.forward(owner, payload)
                answers = answer is not None
            replies = _outcomes(answer, len(steps))
            for i, ((place, piece), outcome) in enumerate(zip(steps, replies, strict=True)):
                if i % SLICE_STEPS == 0:
                    await asyncio.sleep(0)  # other calls have a turn
                if outcome is None:
                    step = router_pb2.Progress.FromString(piece)
                    why = f"replica {owner}, which made the reservation, does not answer"
                    outcome = _outcome(step, UNKNOWN, why)
                outcomes[place] = answer_codec.framed(_STEP, outcome.SerializeToString())

    def _step(self, piece: bytes, caller: Reporter) -> ProgressOutcome:
        try:
            step = router_pb2.Progress.FromString(piece)
        except DecodeError as error:
            return ProgressOutcome(
                result=INVALID, message=f"the step is no valid Progress: {error}"
            )
        return self.step(step, caller)

    def _of_waiting(self, message: router_pb2.Progress, caller: Reporter) -> ProgressOutcome:
        """Applies a step that names its request by request_id: the request waits in the queue, or
        did."""
        step = request_codec.read_wait_step(message)
        if isinstance(step, str):
            return ProgressOutcome(result=INVALID, message=step)
        now_s = self._clock()
        reservation = self._core.reservations.of_request(step.request_id)
        if step.priority is None:
            result = ProgressResult.APPLIED
            if not self._admission.cancel(step.request_id, now_s):
                cancelled = Progress(
                    reservation.id if reservation is not None else "",
                    ProgressState.FAILED,
                    failure=Ending.FAILED_CANCELLED,
                )
                result = self._core.report(cancelled, now_s, caller.host)
            self._on_change()
            return ProgressOutcome(result=answer_codec.RESULTS[result])
        most = caller.priority_max
        priority = step.priority if most is None else min(step.priority, most)
        result = self._admission.reprioritize(step.request_id, priority, now_s)
        if result is ProgressResult.UNKNOWN and reservation and reservation.ended is None:
            return ProgressOutcome(result=UNCHANGED, message=_KEEPS_PRIORITY)
        self._on_change()
        return ProgressOutcome(result=answer_codec.RESULTS[result])

    def _of_running(self, message: router_pb2.Progress, caller: Reporter) -> ProgressOutcome:
        """Applies a step that gives a priority to a request with a reservation: the request has its
        worker, and the priority changes nothing."""
        if message.state or len(message.reservation_id) > request_codec.TEXT_MAX:
            outcome = self._of_reservation(message, caller)
            outcome.message = outcome.message or _KEEPS_PRIORITY
            return outcome
        if self._core.reservations.get(message.reservation_id) is not None:
            return _outcome(message, UNCHANGED, _KEEPS_PRIORITY)
        return _outcome(message, UNKNOWN)

    def _of_reservation(self, message: router_pb2.Progress, caller: Reporter) -> ProgressOutcome:
        progress = request_codec.read_progress(message)
        if isinstance(progress, str):
            reservation_id = message.reservation_id[: request_codec.TEXT_MAX]
            return ProgressOutcome(reservation_id=reservation_id, result=INVALID, message=progress)
        reservation = self._core.reservations.get(progress.reservation_id)
        unknown_before = reservation is None or reservation.cached_tokens is None
        if reservation is not None and message.HasField("prompt_tokens"):
            self._admission.measured(
                *(reservation.id, message.prompt_tokens, progress.cached_tokens or 0, self._clock())
            )
        result = self._core.report(progress, self._clock(), caller.host)
        self._on_change()
        if reservation is not None and message.HasField("prompt_tokens"):
            self._on_prompt_tokens(progress.reservation_id, message.prompt_tokens)
        if reservation is not None and unknown_before and reservation.cached_tokens is not None:
            self._metrics.cache_reported(reservation.predicted_tokens, reservation.cached_tokens)
        return _outcome(message, answer_codec.RESULTS[result])


def _outcome(
    step: router_pb2.Progress, result: router_pb2.ProgressResult.ValueType, why: str = ""
) -> ProgressOutcome:
    """The outcome of a step that names its reservation. why: the outcome's message."""
    return ProgressOutcome(reservation_id=step.reservation_id, result=result, message=why)


def _pieces(content: bytes, most: int) -> Pieces:
    try:
        return Pieces(content, _STEP, most)
    except TooMuch as error:
        raise Refusal(
            Reason.INVALID_FIELD,
            f"the call reports too many steps; at most {most} are taken, so send several calls",
        ) from error
    except ValueError as error:
        raise request_codec.no_valid("ReportRequest", error) from error


def _by_size(mine: Sequence[Elsewhere]) -> list[list[Elsewhere]]:
    """Splits steps into messages within REPLICA_PROGRESS_MAX steps and REPLICA_BYTES_MAX bytes."""
    messages: list[list[Elsewhere]] = []
    size = 0
    for step in mine:
        size += len(step[1])
        if not messages or len(messages[-1]) >= REPLICA_PROGRESS_MAX or size > REPLICA_BYTES_MAX:
            messages.append([])
            size = len(step[1])
        messages[-1].append(step)
    return messages


def _outcomes(answer: bytes | None, count: int) -> Sequence[ProgressOutcome | None]:
    """The outcomes in another replica's answer about `count` steps; None for each step if the
    answer is missing or unusable."""
    response = router_pb2.ReportResponse()
    if answer:
        with suppress(DecodeError):
            response.ParseFromString(answer)
    if len(response.outcomes) != count:
        return [None] * count
    return response.outcomes
