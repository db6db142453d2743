"""Past decisions that are looked up by an id, in the form of sampled ones (ShownDecision): their
rows are those of the receipt. Pure."""

from collections.abc import Iterator

from kvroute.v1 import router_pb2
from router.fleet.reservations.reservations import Reservation
from router.observe.views.decisions import CandidateRow, GuardMove, ShownDecision, finite


def shown_of(reservation: Reservation) -> Iterator[ShownDecision]:
    """The decision of a reservation; of a pair, first the decision about the prefill worker. It has
    no rows without a receipt, which a request can leave out (omit_receipt)."""
    answer = router_pb2.RouteResponse.FromString(reservation.answer)
    if answer.HasField("prefill_receipt"):
        yield _shown(reservation, answer, answer.prefill_receipt)
    yield _shown(reservation, answer, answer.receipt)


def _shown(
    reservation: Reservation, answer: router_pb2.RouteResponse, receipt: router_pb2.Receipt
) -> ShownDecision:
    model = reservation.fingerprint[2]
    rows = [receipt.picked] if receipt.HasField("picked") else []
    guard = None
    if receipt.HasField("guarded"):
        guard = _guard(receipt.guarded)
        rows.append(receipt.guarded.cheapest)
    elif receipt.HasField("runner_up"):
        rows.append(receipt.runner_up)
    return ShownDecision(
        number=0,
        at_s=receipt.decided_at_s or reservation.opened_at_s,
        request_id=reservation.request_id,
        reservation_id=reservation.id,
        state=reservation.ended or "open",
        model=model,
        policy=receipt.policy,
        formula=receipt.formula,
        parameters=dict(receipt.parameters),
        shared_terms=dict(receipt.terms),
        prompt_tokens=reservation.prompt_tokens,
        candidates=receipt.candidates,
        excluded=dict(receipt.excluded),
        tied=receipt.tied,
        rows=[_row(row) for row in rows],
        guard=guard,
        pair=receipt.prefill,
        waited_s=answer.queue_ms / 1000,
    )


def _row(row: router_pb2.CandidateRow) -> CandidateRow:
    return CandidateRow(
        worker_id=row.worker_id,
        dp_rank=row.dp_rank,
        cost=finite(row.cost),
        terms={name: finite(term) for name, term in row.terms.items()},
        usable_tokens=row.overlap_tokens.usable,
        new_tokens=row.new_tokens,
        active_blocks=row.active_blocks,
        running=row.running,
        waiting=row.waiting,
        reserved=max(0, round(row.reserved)),
        ttft_s=None,
        excluded=row.excluded,
    )


def _guard(guarded: router_pb2.Guarded) -> GuardMove:
    return GuardMove(
        1,
        guarded.margin_tokens,
        guarded.least_requests,
        guarded.least_wait_tokens,
        guarded.cheapest_requests,
        guarded.cheapest_wait_tokens,
        guarded.picked_requests,
        guarded.picked_wait_tokens,
    )
