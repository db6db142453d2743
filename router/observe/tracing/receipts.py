"""A pick and its receipt as a span's attributes. Pure."""

from kvroute.v1 import Receipt, RouteResponse
from router.observe.tracing.spans import Value

EXCLUDED_MAX = 8
"""Most reasons of exclusion that a span names, each with its number of candidates."""
TERMS_MAX = 16
"""Most terms of the picked worker's cost that a span has."""


def attributes_of(answer: RouteResponse) -> dict[str, Value]:
    """Attributes of an answer and its receipt, by their names in a span."""
    about: dict[str, Value] = {
        "kvroute.worker.id": answer.worker_id,
        "kvroute.reservation.id": answer.reservation_id,
        "kvroute.overlap_tokens": answer.overlap_tokens.usable,
        "kvroute.overlap_tokens.raw": answer.overlap_tokens.raw,
        "kvroute.overlap_tokens.predicted": answer.overlap_tokens.predicted,
        "kvroute.new_tokens": answer.new_tokens,
    }
    if answer.HasField("dp_rank"):
        about["kvroute.worker.dp_rank"] = answer.dp_rank
    if answer.HasField("prefill_worker"):
        about["kvroute.prefill_worker.id"] = answer.prefill_worker.worker_id
    if answer.HasField("receipt"):
        about |= _receipt(answer.receipt)
    return about


def _receipt(receipt: Receipt) -> dict[str, Value]:
    about: dict[str, Value] = {
        "kvroute.policy": receipt.policy,
        "kvroute.prompt_tokens": receipt.prompt_tokens,
        "kvroute.candidates": receipt.candidates,
        "kvroute.tied": receipt.tied,
        "kvroute.best_overlap_tokens": receipt.best_overlap_tokens,
        "kvroute.cost": receipt.picked.cost,
        "kvroute.trust": receipt.picked.trust,
        "kvroute.stream_state": receipt.picked.stream_state,
        "kvroute.waiting": receipt.picked.waiting,
        "kvroute.running": receipt.picked.running,
        "kvroute.reserved": receipt.picked.reserved,
    }
    for name, number in receipt.picked.numbers.items():
        about[f"kvroute.number.{name}"] = number
    for name, term in sorted(receipt.picked.terms.items())[:TERMS_MAX]:
        about[f"kvroute.term.{name}"] = term
    if receipt.HasField("runner_up"):
        about["kvroute.runner_up.id"] = receipt.runner_up.worker_id
        about["kvroute.runner_up.cost"] = receipt.runner_up.cost
    if receipt.HasField("guarded"):
        about["kvroute.guarded.cheapest.id"] = receipt.guarded.cheapest.worker_id
    for reason, count in sorted(receipt.excluded.items())[:EXCLUDED_MAX]:
        about[f"kvroute.excluded.{reason}"] = count
    return about
