"""Answers written field by field with protobuf: what the writer in C is compared with."""

from math import isnan

from events.engines.numbers import GAUGES
from kvroute.v1 import router_pb2
from router.decide.core.core import RouterCore
from router.decide.core.progress import Pick
from router.decide.decision.decision import Decision
from router.decide.decision.guard import Guarded
from router.decide.decision.handover import bootstrap_server, transfer_params
from router.fleet.pools import heartbeat_of

INT32_MAX = (1 << 31) - 1


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
    if (ttft_s := decision.computing.ttft_s) is not None:
        answer.estimated_ttft_ms = 1000 * ttft_s
    if not isnan(tpot_s := decision.rows.tpot_s.item(row)):
        answer.estimated_tpot_ms = 1000 * tpot_s
    if not core.keeps_tokens and not decision.request.prompt.lora_name:  # it copies tokens
        answer.hash_block_size = decision.pool.only_block_size
    if decision.prefill is not None:
        write_receipt(answer.prefill_receipt, decision.prefill, core)
    if (hold := pick.reservation.prefill) is not None:
        _write_prefill_worker(answer.prefill_worker, decision.computing, hold.room)
    if heartbeat.multi_rank:
        answer.dp_rank = source.key.dp_rank
    if heartbeat.priority_scheduling:
        higher_first = heartbeat.priority_scheduling == "higher"
        # The lowest int32 has no opposite that fits.
        answer.engine_priority = priority if higher_first else min(-priority, INT32_MAX)


def _write_prefill_worker(message: router_pb2.PrefillWorker, decision: Decision, room: int) -> None:
    source, overlap = decision.sources[decision.order[0]], decision.overlap(decision.order[0])
    heartbeat = heartbeat_of(source)
    message.worker_id = source.key.worker_id
    if heartbeat.multi_rank:
        message.dp_rank = source.key.dp_rank
    message.address, message.engine = heartbeat.address, heartbeat.engine
    message.kv_connector, message.kv_engine_id = heartbeat.kv_connector, heartbeat.kv_engine_id
    message.labels.update(heartbeat.labels)
    message.overlap_tokens.CopyFrom(router_pb2.OverlapTokens(**overlap._asdict()))
    message.new_tokens = decision.request.prompt.token_count - overlap.usable
    message.bootstrap_host, message.bootstrap_port = bootstrap_server(heartbeat)
    message.bootstrap_room = room
    params = transfer_params(heartbeat, room)
    message.prefill_kv_transfer_params, message.decode_kv_transfer_params = params


def write_receipt(receipt: router_pb2.Receipt, decision: Decision, core: RouterCore) -> None:
    """Writes the record of a decision, with or without a pick, into an empty message."""
    rows = decision.rows
    receipt.policy, receipt.formula = decision.policy.name, decision.policy.formula
    receipt.parameters.update(decision.policy.parameters)
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
        write_row(receipt.picked, decision, core, decision.order[0])
    guarded = decision.guarded
    # A worker that the guard passed over is no runner-up: it may be cheaper than the pick.
    if len(decision.order) > 1 and not (guarded and guarded.waits.passed_over[decision.order[1]]):
        write_row(receipt.runner_up, decision, core, decision.order[1])
    if guarded is not None:
        _write_guarded(receipt.guarded, guarded, decision, core)
    if decision.how is not None:
        receipt.prefill = decision.how


def _write_guarded(
    message: router_pb2.Guarded, guarded: Guarded, decision: Decision, core: RouterCore
) -> None:
    """A pick that the guard moved, into an empty message."""
    waits, picked = guarded.waits, decision.order[0]
    write_row(message.cheapest, decision, core, guarded.cheapest)
    message.request_tokens = waits.settings.request_tokens
    message.margin_tokens = waits.margin_tokens
    message.least_requests = waits.least_requests
    message.least_wait_tokens = waits.least_tokens
    message.cheapest_requests = waits.requests.item(guarded.cheapest)
    message.cheapest_wait_tokens = waits.tokens.item(guarded.cheapest)
    message.picked_requests = waits.requests.item(picked)
    message.picked_wait_tokens = waits.tokens.item(picked)


def _write_alternative(message: router_pb2.Alternative, decision: Decision, row: int) -> None:
    source = decision.sources[row]
    heartbeat = heartbeat_of(source)
    message.worker_id = source.key.worker_id
    message.address = heartbeat.address
    message.cost = decision.scores.costs.item(row)
    if heartbeat.multi_rank:
        message.dp_rank = source.key.dp_rank


def _write_overlap(overlap: router_pb2.OverlapTokens, decision: Decision, row: int) -> None:
    (overlap.raw, overlap.usable, overlap.device, overlap.host, overlap.disk, overlap.predicted) = (
        decision.tokens[:, row].tolist()
    )


def write_row(
    message: router_pb2.CandidateRow, decision: Decision, core: RouterCore, row: int
) -> None:
    source = decision.sources[row]
    rows = decision.rows
    _write_overlap(message.overlap_tokens, decision, row)
    message.worker_id, message.dp_rank = source.key
    message.new_tokens = decision.rows.new_tokens.item(row)
    message.active_blocks = rows.active_blocks.item(row)
    message.running = int(rows.running.item(row))
    message.waiting = int(rows.waiting.item(row))
    message.reserved = rows.reserved.item(row)
    message.prefill_tokens_active = int(rows.prefill_tokens_active.item(row))
    message.stream_state = source.stream.state
    message.stream_complete = core.fleet.view.complete(source)
    message.cost = decision.scores.costs.item(row)
    message.excluded = decision.excluded[row]
    message.trust = rows.trust.item(row)
    message.numbers.update(heartbeat_of(source).own_numbers)
    for name in GAUGES:
        if not isnan(number := rows.column(name).item(row)):
            message.numbers[name] = number
    if not isnan(tpot_s := rows.tpot_s.item(row)):
        message.estimated_tpot_ms = 1000 * tpot_s
    terms = message.terms
    for name, column in decision.scores.row_terms.items():
        terms[name] = column.item(row)
    sampled_at_s = core.fleet.load_of(source.key).sampled_at_s
    if sampled_at_s is not None:
        message.sample_age_s = max(0.0, decision.decided_at_s - sampled_at_s)
    if not isnan(rows.total_blocks.item(row)):
        message.total_blocks = int(rows.total_blocks.item(row))
    if not isnan(rows.total_slots.item(row)):
        message.total_slots = int(rows.total_slots.item(row))
