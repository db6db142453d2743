"""The answer of the RPC FindDecisions: remembered decisions about the requests with an id."""

from collections.abc import Generator

from kvroute.v1 import fleet_pb2
from router.api.desk import answer_codec
from router.api.desk.request_codec import TEXT_MAX
from router.fleet.reservations.reservations import Reservation, Reservations
from router.request.refusal import Reason, Refusal

_ANSWER = fleet_pb2.PastDecision.ANSWER_FIELD_NUMBER
_DECISIONS = fleet_pb2.FindDecisionsResponse.DECISIONS_FIELD_NUMBER


def past_decisions(
    reservations: Reservations, wanted: str, now_s: float
) -> Generator[None, None, bytes]:
    """A FindDecisionsResponse; raises Refusal for an invalid id. A generator that yields between
    steps.
    """
    if not 0 < len(wanted) <= TEXT_MAX:
        raise Refusal(
            Reason.INVALID_FIELD,
            f"id has {len(wanted)} characters; 1 to {TEXT_MAX} are wanted",
            metadata={"field": "id"},
        )
    known = yield from reservations.find(wanted)
    return b"".join(answer_codec.framed(_DECISIONS, _written(each, now_s)) for each in known)


def _written(reservation: Reservation, now_s: float) -> bytes:
    """A PastDecision."""
    rest = fleet_pb2.PastDecision(
        request_id=reservation.request_id,
        state=reservation.ended or "open",
        age_s=max(0.0, now_s - reservation.opened_at_s),
        output_tokens=reservation.output_tokens,
        cached_tokens=reservation.cached_tokens,
    )
    return answer_codec.framed(_ANSWER, reservation.answer) + rest.SerializeToString()
