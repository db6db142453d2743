"""Answers to clients: picks, receipts, explanations, results of steps."""

import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import isnan

from kvroute.v1 import router_pb2
from router.core.core import RouterCore
from router.core.progress import Pick, ProgressResult
from router.decision.decision import Decision
from router.decision.guard import Guarded
from router.decision.handover import hand_over
from router.desk.statuses import write_status
from router.fleet.pools import heartbeat_of
from router.policies.policy import Policy
from router.request.refusal import Refusal

ROWS_MAX = 16
"""Of an Explanation, that are written at once."""
INT32_MAX = (1 << 31) - 1
_DOUBLE = struct.Struct("<d")
_QUEUE_MS = bytes([router_pb2.RouteResponse.QUEUE_MS_FIELD_NUMBER << 3 | 1])
"""The tag of a double."""
_RESULTS = {
    ProgressResult.APPLIED: router_pb2.PROGRESS_RESULT_APPLIED,
    ProgressResult.UNCHANGED: router_pb2.PROGRESS_RESULT_UNCHANGED,
    ProgressResult.UNKNOWN: router_pb2.PROGRESS_RESULT_UNKNOWN,
}


def with_queue_time(answer: bytes, waited_s: float, ahead: int) -> bytes:
    """A RouteResponse with the time that its request waited, and how many were ahead when it came:
    fields at the end of a message are read like those in their places."""
    place = router_pb2.RouteResponse(queue_ahead=ahead).SerializeToString()
    return answer + _QUEUE_MS + _DOUBLE.pack(waited_s * 1000) + place


def waiting_result(
    index: int, ahead: int, waited_s: float, expected_s: float | None
) -> router_pb2.RouteResult:
    """Where an item of a stream stands in the queue."""
    about = router_pb2.QueueProgress(ahead=ahead, waited_ms=waited_s * 1000)
    if expected_s is not None:
        about.expected_ms = expected_s * 1000
    return router_pb2.RouteResult(index=index, waiting=about)


def progress_result(result: ProgressResult) -> router_pb2.ProgressResult.ValueType:
    return _RESULTS[result]


def answer(
    pick: Pick,
    core: RouterCore,
    priority: int,
    *,
    omit_receipt: bool = False,
    watch: Callable[[router_pb2.RouteResponse], None] | None = None,
) -> bytes:
    """A RouteResponse. watch: gets the message first, receipt included."""
    if watch is None and core.answer_writer is not None:
        written = core.answer_writer.write(pick, priority, omit_receipt)
        if written is not None:
            return written
    message = router_pb2.RouteResponse()
    write_pick(message, pick, core, priority)
    if watch is not None:
        watch(message)
    if omit_receipt:
        message.ClearField("receipt")
        message.ClearField("prefill_receipt")
    return message.SerializeToString()


def write_pick(
    answer: router_pb2.RouteResponse, pick: Pick, core: RouterCore, priority: int
) -> None:
    """The answer to Route, into an empty message."""
    decision = pick.decision
    row = decision.order[0]
    source = decision.sources[row]
    heartbeat = heartbeat_of(source)
    write_receipt(answer.receipt, decision, core)
    answer.overlap_tokens.CopyFrom(answer.receipt.picked.overlap_tokens)
    answer.reservation_id = pick.reservation.id
    answer.worker_id = source.key.worker_id
    answer.address = heartbeat.address
    if heartbeat.labels:
        answer.labels.update(heartbeat.labels)
    for other in decision.order[1 : core.routing.alternatives + 1]:
        _write_alternative(answer.alternatives.add(), decision, other)
    answer.new_tokens = pick.reservation.new_tokens
    answer.lease_s = core.routing.lease_s
    if core.hot is None and not decision.request.prompt.lora_name:  # it copies tokens
        answer.hash_block_size = decision.rows.shared_block_size
    if decision.prefill is not None:
        write_receipt(answer.prefill_receipt, decision.prefill, core)
    if (hold := pick.reservation.prefill) is not None:
        _write_prefill(answer.prefill_worker, decision.computing, core, hold.room)
    if heartbeat.multi_rank:
        answer.dp_rank = source.key.dp_rank
    if heartbeat.priority_scheduling:
        higher_first = heartbeat.priority_scheduling == "higher"
        # The lowest int32 has no opposite that fits.
        answer.engine_priority = priority if higher_first else min(-priority, INT32_MAX)


def write_receipt(receipt: router_pb2.Receipt, decision: Decision, core: RouterCore) -> None:
    """Writes the record of a decision, with or without a pick, into an empty message."""
    rows = decision.rows
    receipt.MergeFrom(_policy_part(decision.policy))
    for name, value in decision.scores.shared_terms.items():
        receipt.terms[name] = value
    receipt.prompt_tokens = rows.prompt_tokens
    receipt.candidates = len(rows) + len(decision.not_live)
    if excluded := decision.exclusions():
        receipt.excluded.update(excluded)
    receipt.tied = decision.tied
    receipt.decided_at_s = decision.decided_at_s
    receipt.best_overlap_tokens = decision.best_overlap_tokens()
    receipt.replica = core.replica
    if decision.order:
        receipt.block_size = int(rows.block_size.item(decision.order[0]))
        _write_row(receipt.picked, decision, core, decision.order[0])
    guarded = decision.guarded
    # A worker that the guard passed over is no runner-up: it may be cheaper than the pick.
    if len(decision.order) > 1 and not (guarded and guarded.waits.passes_over(decision.order[1])):
        _write_row(receipt.runner_up, decision, core, decision.order[1])
    if guarded is not None:
        _write_guarded(receipt.guarded, guarded, decision, core)
    if decision.how is not None:
        receipt.prefill = decision.how


@lru_cache(maxsize=256)
def _policy_part(policy: Policy) -> router_pb2.Receipt:
    """What is the same in all receipts of a policy."""
    return router_pb2.Receipt(
        policy=policy.name, formula=policy.formula, parameters=policy.parameters
    )


def explanations(decision: Decision, refusal: Refusal | None, core: RouterCore) -> Iterator[bytes]:
    """Every candidate of a decision that was not made: parts that are one Explanation in a row.

    A part has ROWS_MAX candidates at most, so that other calls have a turn between two of them.
    """
    explanation = router_pb2.Explanation()
    write_receipt(explanation.receipt, decision, core)
    for row in _cheapest_first(decision):
        _write_row(explanation.candidates.add(), decision, core, row)
        if len(explanation.candidates) >= ROWS_MAX:
            yield explanation.SerializeToString()
            explanation.Clear()
    if decision.prefill is not None:
        write_receipt(explanation.prefill_receipt, decision.prefill, core)
        for row in _cheapest_first(decision.prefill):
            _write_row(explanation.prefill_candidates.add(), decision.prefill, core, row)
            if len(explanation.prefill_candidates) >= ROWS_MAX:
                yield explanation.SerializeToString()
                explanation.Clear()
    for source, reason in decision.not_live:
        if len(explanation.candidates) >= ROWS_MAX:
            yield explanation.SerializeToString()
            explanation.Clear()
        explanation.candidates.add(
            worker_id=source.key.worker_id,
            dp_rank=source.key.dp_rank,
            stream_state=source.stream.state,
            stream_complete=core.fleet.view.complete(source),
            excluded=reason,
        )
    if refusal is not None:
        explanation.refusal.CopyFrom(write_status(refusal))
    else:
        source = decision.sources[decision.order[0]]
        explanation.worker_id = source.key.worker_id
        if heartbeat_of(source).multi_rank:
            explanation.dp_rank = source.key.dp_rank
        if decision.computing is not decision:
            _write_prefill(explanation.prefill_worker, decision.computing, core, 0)
    yield explanation.SerializeToString()


def _cheapest_first(decision: Decision) -> list[int]:
    """All rows, the excluded ones last."""
    costs = decision.scores.costs
    return sorted(
        range(len(decision.rows)), key=lambda row: (decision.excluded[row] != "", costs[row])
    )


def _write_guarded(
    message: router_pb2.Guarded, guarded: Guarded, decision: Decision, core: RouterCore
) -> None:
    """A pick that the guard moved, into an empty message."""
    waits, picked = guarded.waits, decision.order[0]
    _write_row(message.cheapest, decision, core, guarded.cheapest)
    message.request_tokens = waits.settings.request_tokens
    message.margin_tokens = waits.margin_tokens
    message.least_requests = waits.least_requests
    message.least_wait_tokens = waits.least_tokens
    message.cheapest_requests = waits.requests.item(guarded.cheapest)
    message.cheapest_wait_tokens = waits.tokens.item(guarded.cheapest)
    message.picked_requests = waits.requests.item(picked)
    message.picked_wait_tokens = waits.tokens.item(picked)


def _write_prefill(
    message: router_pb2.PrefillWorker, decision: Decision, core: RouterCore, room: int
) -> None:
    """Writes the prefill worker of a pair and its hand-over into an empty message.

    room: the bootstrap room; 0: the message is shown to people, and no request uses it.
    """
    row = decision.order[0]
    source = decision.sources[row]
    heartbeat = heartbeat_of(source)
    message.worker_id = source.key.worker_id
    if heartbeat.multi_rank:
        message.dp_rank = source.key.dp_rank
    message.address = heartbeat.address
    message.engine = heartbeat.engine
    message.kv_connector = heartbeat.kv_connector
    message.kv_engine_id = heartbeat.kv_engine_id
    message.labels.update(heartbeat.labels)
    _write_overlap(message.overlap_tokens, decision, row)
    message.new_tokens = decision.rows.prompt_tokens - message.overlap_tokens.usable
    how = hand_over(heartbeat, room)
    message.bootstrap_host = how.bootstrap_host
    message.bootstrap_port = how.bootstrap_port
    if room:
        message.bootstrap_room = room
        message.prefill_kv_transfer_params = how.prefill_kv_transfer_params
        message.decode_kv_transfer_params = how.decode_kv_transfer_params


def framed(number: int, message: bytes) -> bytes:
    """A message as a field of another one, of a number under 16."""
    size = len(message)
    head = bytearray((number << 3 | 2,))
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + message


def _write_alternative(message: router_pb2.Alternative, decision: Decision, row: int) -> None:
    source = decision.sources[row]
    heartbeat = heartbeat_of(source)
    message.worker_id = source.key.worker_id
    message.address = heartbeat.address
    message.cost = decision.scores.costs.item(row)
    if heartbeat.multi_rank:
        message.dp_rank = source.key.dp_rank


def _write_overlap(overlap: router_pb2.OverlapTokens, decision: Decision, row: int) -> None:
    (
        overlap.raw,
        overlap.usable,
        overlap.device,
        overlap.host,
        overlap.disk,
        overlap.predicted,
    ) = decision.tokens[:, row].tolist()


def _write_row(
    message: router_pb2.CandidateRow, decision: Decision, core: RouterCore, row: int
) -> None:
    source = decision.sources[row]
    kept = decision.rows.row(row)
    _write_overlap(message.overlap_tokens, decision, row)
    message.worker_id, message.dp_rank = source.key
    message.new_tokens = decision.rows.new_tokens.item(row)
    message.active_blocks = kept.active_blocks
    message.running = int(kept.running)
    message.waiting = int(kept.waiting)
    message.reserved = kept.reserved
    message.prefill_tokens_active = int(kept.prefill_tokens_active)
    message.stream_state = source.stream.state
    message.stream_complete = core.fleet.view.complete(source)
    message.cost = decision.scores.costs.item(row)
    message.excluded = decision.excluded[row]
    message.trust = kept.trust
    terms = message.terms
    for name, column in decision.scores.row_terms.items():
        terms[name] = column.item(row)
    sampled_at_s = core.fleet.load_of(source.key).sampled_at_s
    if sampled_at_s is not None:
        message.sample_age_s = max(0.0, decision.decided_at_s - sampled_at_s)
    if not isnan(kept.total_blocks):
        message.total_blocks = int(kept.total_blocks)
    if not isnan(kept.total_slots):
        message.total_slots = int(kept.total_slots)
