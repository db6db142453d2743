"""Writes, in slices, the answers of RPCs that list requests: ListQueue lists requests that wait in
this router, and FindDecisions those with a given id that this router remembers.

Law: SLICE_ROWS requests at most are written without a turn for other calls. ListQueue lists
requests that waited when the call came; its sums are taken one step later.
"""

from collections.abc import Generator, Hashable

from kvroute.v1 import fleet_pb2
from router.api.desk import answer_codec
from router.api.desk.request_codec import TEXT_MAX
from router.decide.core.admission import Admission
from router.decide.core.pool import Pool
from router.decide.queue.views import Row, rows, sums
from router.fleet.reservations.reservations import Reservation, Reservations
from router.net.keys.identity import ANYBODY, EVERYTHING, Identity
from router.request.refusal import Reason, Refusal

LIMIT, LIMIT_MAX = 100, 4096
"""Number of requests in a list: if the caller names no number, and at most."""
TENANTS_MAX = 64
"""Tenants in a ListQueueResponse, at most: those with the most waiting requests."""
SLICE_ROWS = 64
"""Requests that are written without a turn for other calls: about 0.5 ms."""
_REQUESTS = 1
"""Number of the repeated field of a ListQueueResponse that has the listed requests."""
_ANSWER = fleet_pb2.PastDecision.ANSWER_FIELD_NUMBER
_DECISIONS = fleet_pb2.FindDecisionsResponse.DECISIONS_FIELD_NUMBER


def listed(
    admission: Admission,
    request: fleet_pb2.ListQueueRequest,
    now_s: float,
    identity: Identity = ANYBODY,
) -> Generator[None, None, bytes]:
    """A ListQueueResponse, as bytes, with the waiting requests of those models that an identity may
    use. A generator that yields between steps.
    """
    sees_all = identity.models == EVERYTHING
    model = admission.base_model(request.model) if request.model else ""

    def wanted(pool: Hashable) -> bool:
        if not isinstance(pool, Pool):
            return sees_all and not model
        return (not model or pool.model == model) and identity.may_use(pool.model)

    limit, held = min(request.limit or LIMIT, LIMIT_MAX), admission.fleet_turns.holds
    waiting = rows(admission.queue, now_s, limit, wanted, held)
    yield
    totals = sums(admission.queue, now_s, wanted)
    rest = fleet_pb2.ListQueueResponse(waiting=totals.count)
    for band, depth in totals.bands.items():
        rest.bands.add(band=band, count=depth.count, oldest_s=depth.oldest_s)
    elsewhere = admission.fleet_turns.elsewhere(model)
    narrowed = not sees_all and not identity.may_use(model)
    if not narrowed and any(depth.count for depth in elsewhere):
        for band, depth in zip(admission.queue.bands, elsewhere, strict=True):
            rest.replica_bands.add(band=band, count=depth.count, oldest_s=depth.oldest_s)
    for tenant, count in totals.largest_tenants(TENANTS_MAX):
        rest.tenants.add(tenant=tenant, count=count)
    parts = [rest.SerializeToString()]
    for number, row in enumerate(waiting, 1):
        if number % SLICE_ROWS == 0:
            yield
        parts.append(answer_codec.framed(_REQUESTS, _written(row).SerializeToString()))
    return b"".join(parts)


def _written(row: Row) -> fleet_pb2.QueuedRequest:
    model, role = row.pool if isinstance(row.pool, Pool) else ("", "")
    return fleet_pb2.QueuedRequest(
        place=row.place,
        model=model,
        role=role,
        request_id=row.request_id,
        band=row.band,
        tenant=row.tenant,
        priority=row.priority,
        waited_s=row.waited_s,
        expires_in_s=row.expires_in_s,
        held_by=row.held_by,
        behind=row.behind,
    )


def past_decisions(
    reservations: Reservations, wanted: str, now_s: float
) -> Generator[None, None, bytes]:
    """A FindDecisionsResponse, as bytes, with the reservations that have the id `wanted` or whose
    request or client has it; raises Refusal for an invalid id. A generator that yields between
    steps.
    """
    if not 0 < len(wanted) <= TEXT_MAX:
        raise Refusal(
            Reason.INVALID_FIELD,
            f"id has {len(wanted)} characters; 1 to {TEXT_MAX} are wanted",
            metadata={"field": "id"},
        )
    known = yield from reservations.find(wanted)
    return b"".join(answer_codec.framed(_DECISIONS, _past(each, now_s)) for each in known)


def _past(reservation: Reservation, now_s: float) -> bytes:
    """A reservation as a PastDecision message, in bytes."""
    rest = fleet_pb2.PastDecision(
        request_id=reservation.request_id,
        state=reservation.ended or "open",
        age_s=max(0.0, now_s - reservation.opened_at_s),
        output_tokens=reservation.output_tokens,
        cached_tokens=reservation.cached_tokens,
    )
    return answer_codec.framed(_ANSWER, reservation.answer) + rest.SerializeToString()
