"""Between the wire's messages and our own types. Reads what clients send with suspicion."""

import struct
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import isnan

import numpy as np
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from events.feed.fleet_view import Source
from events.plane.facts import Heartbeat
from events.plane.settings import EngineSettings, UnusableEngine, read_engine
from indexer.hashing import MultimodalItem, multimodal_hash
from indexer.identity import Tier
from kvroute.v1 import fleet_pb2, router_pb2
from router.core.admission import Wait
from router.core.core import RouterCore
from router.core.progress import Pick, Progress, ProgressResult, ProgressState, WaitStep
from router.decision.decision import Decision
from router.decision.guard import Guarded
from router.decision.handover import hand_over
from router.desk.statuses import STATUS
from router.desk.tenant import UNVERIFIED, Caller, tenant_of
from router.fleet.pools import heartbeat_of
from router.policies.policy import Policy
from router.request.prompt import Prompt
from router.request.refusal import Reason, Refusal, Refused
from router.request.request import Request, Role
from router.reservations.reservations import Ending
from router.wire.received import BLOCK_HASHES, TEXT, TooMuch, take_apart

DOMAIN = "kvroute"
TEXT_MAX = 1024
"""Characters in a request's id, model, tenant and the like."""
ENTRIES_MAX = 4096
"""Entries in a request's lists and maps."""
FIELDS_MAX = 5 * ENTRIES_MAX
"""Of a request, beside its prompt."""
ASIDE_BYTES_MAX = 1 << 20
"""Bytes of them."""
ROWS_MAX = 16
"""Of an Explanation, that are written at once."""
MESSAGE_BYTES_MAX = 1024
"""Of a status message. It travels twice in the trailers, once percent-encoded, and gRPC drops
trailers over 8 KiB together with the status in them."""
INT32_MAX = (1 << 31) - 1

_DOUBLE = struct.Struct("<d")
_QUEUE_MS = bytes([router_pb2.RouteResponse.QUEUE_MS_FIELD_NUMBER << 3 | 1])
"""The tag of a double."""

_TEXTS = ("request_id", "model", "lora_name", "cache_salt", "tenant", "session_id", "policy")
_LISTS = ("required_labels", "allowed_worker_ids", "excluded_worker_ids", "multimodal_items")
_ROLES = {
    router_pb2.PHASE_UNSPECIFIED: Role.BOTH,
    router_pb2.PHASE_AGGREGATED: Role.BOTH,
    router_pb2.PHASE_PREFILL_DECODE: Role.PAIR,
    router_pb2.PHASE_PREFILL: Role.PREFILL,
    router_pb2.PHASE_DECODE: Role.DECODE,
}
_STATES = {
    router_pb2.PROGRESS_STATE_PREFILL_DONE: ProgressState.PREFILL_DONE,
    router_pb2.PROGRESS_STATE_RUNNING: ProgressState.RUNNING,
    router_pb2.PROGRESS_STATE_FINISHED: ProgressState.FINISHED,
    router_pb2.PROGRESS_STATE_FAILED: ProgressState.FAILED,
}
_FAILURES = {
    router_pb2.FAILURE_REASON_UNSPECIFIED: Ending.FAILED_UNKNOWN,
    router_pb2.FAILURE_REASON_WORKER: Ending.FAILED_WORKER,
    router_pb2.FAILURE_REASON_TIMEOUT: Ending.FAILED_TIMEOUT,
    router_pb2.FAILURE_REASON_CLIENT: Ending.FAILED_CLIENT,
    router_pb2.FAILURE_REASON_CANCELLED: Ending.FAILED_CANCELLED,
}
_RESULTS = {
    ProgressResult.APPLIED: router_pb2.PROGRESS_RESULT_APPLIED,
    ProgressResult.UNCHANGED: router_pb2.PROGRESS_RESULT_UNCHANGED,
    ProgressResult.UNKNOWN: router_pb2.PROGRESS_RESULT_UNKNOWN,
}


@dataclass(frozen=True, slots=True)
class Received:
    """A RouteRequest whose prompt protobuf has not seen."""

    message: router_pb2.RouteRequest
    """What is beside the prompt."""
    form: int = 0
    """TOKEN_IDS, TOKEN_BYTES, BLOCK_HASHES; TEXT or more: a prompt without tokens; 0: none."""
    data: bytes = b""
    """Little-endian, u32 of tokens or u64 of hashes; or the bytes of the prompt without tokens."""
    block_size: int = 0
    """Of hashes, and so is the next one."""
    prompt_tokens: int = 0


def receive(content: bytes, prompt_tokens_max: int) -> Received:
    """A RouteRequest; raises Refusal for bytes that are none, or too much of anything."""
    try:
        rest, form, data, block_size, prompt_tokens = take_apart(
            content, FIELDS_MAX, ASIDE_BYTES_MAX, prompt_tokens_max
        )
        message = router_pb2.RouteRequest.FromString(rest)
        return Received(message, form, data, block_size, prompt_tokens)
    except TooMuch as error:
        if error.what == "tokens":
            raise Refusal(
                Reason.PROMPT_TOO_LONG,
                f"the prompt has more than {prompt_tokens_max} tokens, which is the limit"
                " (routing.prompt_tokens_max)",
            ) from error
        most = FIELDS_MAX if error.what == "fields" else ASIDE_BYTES_MAX
        raise Refusal(
            Reason.INVALID_FIELD,
            f"the request has more than {most} {error.what} beside its prompt",
        ) from error
    except (ValueError, DecodeError) as error:
        raise Refusal(Reason.INVALID_FIELD, f"no RouteRequest: {error}") from error


def read_request(received: Received, core: RouterCore, caller: Caller = UNVERIFIED) -> Request:
    """A request of a caller, checked; raises Refusal."""
    message = received.message
    _check_sizes(message)
    role = _ROLES.get(message.phase)
    if role is None:
        raise Refusal(Reason.INVALID_FIELD, f"unknown phase {message.phase}")
    session = None
    if role is Role.DECODE and not received.form:
        session = core.fleet.sessions.get(message.session_id)
        if session is None:
            raise Refusal(
                Reason.UNKNOWN_SESSION,
                f"nobody is known to hold session {message.session_id!r}, and there is no prompt",
            )
        prompt = Prompt.from_prefixes(
            session.prefixes,
            session.block_size,
            session.prompt_tokens,
            lora_name=session.lora_name,
        )
    else:
        prompt = _read_prompt(received, core)
    return Request(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt=prompt,
        model=message.model or (session.model if session else ""),
        role=role,
        expected_output_tokens=(
            message.expected_output_tokens if message.HasField("expected_output_tokens") else None
        ),
        policy=message.policy,
        tenant=tenant_of(message.tenant, caller),
        session_id=message.session_id,
        required_labels=dict(message.required_labels),
        allowed_workers=frozenset(message.allowed_worker_ids),
        excluded_workers=frozenset(message.excluded_worker_ids),
        resumed=session,
    )


def read_wait(message: router_pb2.RouteRequest, now_s: float, left_s: float) -> Wait:
    """What a request says of its wait. left_s: until its caller's deadline."""
    return Wait(
        priority=message.priority,
        timeout_s=message.queue_timeout_ms / 1000 if message.HasField("queue_timeout_ms") else None,
        deadline_s=now_s + left_s,
        ttft_slo_s=message.ttft_slo_ms / 1000 if message.HasField("ttft_slo_ms") else None,
        waited_s=message.waited_ms / 1000,
    )


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


def read_refused(content: bytes, refusal: Refusal, now_s: float, prompt_tokens_max: int) -> Refused:
    """The fields of a refused RouteRequest, for the log; almost none if its bytes can't be read."""
    try:
        received = receive(content, prompt_tokens_max)
    except Refusal:
        return Refused(refusal, now_s)
    message = received.message
    expects = message.HasField("expected_output_tokens")
    return Refused(
        refusal,
        now_s,
        message.request_id[:TEXT_MAX],
        message.model[:TEXT_MAX],
        _ROLES.get(message.phase, ""),
        message.policy[:TEXT_MAX],
        _prompt_tokens(received),
        message.expected_output_tokens if expects else None,
        len(message.required_labels),
        len(message.allowed_worker_ids),
        len(message.excluded_worker_ids),
    )


def _prompt_tokens(received: Received) -> int:
    if received.form == BLOCK_HASHES:
        return received.prompt_tokens
    return 0 if received.form >= TEXT else len(received.data) // 4


def read_progress(message: router_pb2.Progress) -> Progress | str:
    """A step, or why it can't be one."""
    if len(message.reservation_id) > TEXT_MAX:
        return f"reservation_id is longer than {TEXT_MAX} characters"
    state = _STATES.get(message.state)
    if state is None:
        return f"unknown state {message.state}"
    failure = _FAILURES.get(message.failure_reason)
    if failure is None:
        return f"unknown failure_reason {message.failure_reason}"
    if message.refused and failure is Ending.FAILED_WORKER:
        failure = Ending.FAILED_REFUSED
    return Progress(
        reservation_id=message.reservation_id,
        state=state,
        output_tokens=message.output_tokens,
        cached_tokens=message.cached_tokens if message.HasField("cached_tokens") else None,
        failure=failure,
        failed_worker_id=message.failed_worker_id,
    )


def read_wait_step(message: router_pb2.Progress) -> WaitStep | str:
    """A step that names a request by its id, or why it can't be one."""
    if message.reservation_id:
        return "a step names a reservation_id or a request_id, not both"
    if len(message.request_id) > TEXT_MAX:
        return f"request_id is longer than {TEXT_MAX} characters"
    if message.state == router_pb2.PROGRESS_STATE_FAILED:
        if message.failure_reason != router_pb2.FAILURE_REASON_CANCELLED:
            return "a request that waits fails by failure_reason CANCELLED alone"
        return WaitStep(message.request_id, None)
    if message.state != router_pb2.PROGRESS_STATE_UNSPECIFIED:
        return "of a request that waits the state is FAILED (with CANCELLED), or not set"
    if not message.HasField("priority"):
        return "a step of a request that waits has a priority, or the state FAILED"
    return WaitStep(message.request_id, message.priority)


def progress_result(result: ProgressResult) -> router_pb2.ProgressResult.ValueType:
    return _RESULTS[result]


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


@cache
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


def write_status(refusal: Refusal) -> Status:
    """A refusal with its details: ErrorInfo always, RetryInfo where another try makes sense."""
    details: list[AnyMessage] = []
    info = AnyMessage()
    info.Pack(ErrorInfo(reason=refusal.reason, domain=DOMAIN, metadata=refusal.metadata))
    details.append(info)
    if refusal.retry_after_s is not None:
        retry = AnyMessage()
        delay = Duration()
        delay.FromMilliseconds(round(refusal.retry_after_s * 1000))
        retry.Pack(RetryInfo(retry_delay=delay))
        details.append(retry)
    code, _ = STATUS[refusal.reason].value
    return Status(code=code, message=_shortened(refusal.message), details=details)


def write_worker(source: Source, core: RouterCore, now_s: float) -> fleet_pb2.WorkerStatus:
    """One worker for ListWorkers."""
    stream = source.stream
    load = core.fleet.load_of(source.key)
    excluded = core.fleet.excluded(source)
    report = core.fleet.cache_reports.get(source.key)
    index = core.fleet.view.index
    status = fleet_pb2.WorkerStatus(
        worker_id=source.key.worker_id,
        dp_rank=source.key.dp_rank,
        schedulable=not excluded,
        unschedulable_reason=excluded,
        drained=source.key.worker_id in core.fleet.drained,
        last_resort=core.fleet.last_resort(source),
        stream_state=stream.state,
        stream_complete=core.fleet.view.complete(source),
        stream_reason=stream.reason,
        blocks_device=index.count(source.slot, Tier.DEVICE),
        blocks_host=index.count(source.slot, Tier.HOST),
        blocks_disk=index.count(source.slot, Tier.DISK),
        blocks_predicted=index.predicted(source.slot),
        blocks_forgotten=index.told(source.slot) - index.count(source.slot),
        approximate=source.approximate,
        running=load.running,
        waiting=load.waiting,
        reserved=load.requests,
        active_blocks=load.active_blocks(),
        prefill_tokens_active=load.prefill_tokens_active,
        reserved_by_peers=load.peers.requests,
        beat_age_s=max(0.0, now_s - stream.last_beat_s),
        hit_ratio=report.reported / report.predicted if report and report.predicted else 0.0,
        warnings=[warning.sentence for warning in core.fleet.warnings(source, now_s)],
        outcomes={
            ending.value: count for ending, count in core.fleet.outcomes_of(source.key).items()
        },
    )
    standing = core.fleet.outliers.standing(source.key)
    if standing is not None and standing.cause is not None:
        ejection = status.ejection
        ejection.reason = standing.cause
        ejection.until.FromNanoseconds(int(standing.until_s * 1e9))
        ejection.probing = standing.probing
        ejection.times = standing.times
        ejection.replica = standing.replica
    status.stream_changed_at.FromNanoseconds(int(stream.changed_at_s * 1e9))
    if load.sampled_at_s is not None:
        status.sample_age_s = max(0.0, now_s - load.sampled_at_s)
    if source.heartbeat is not None:
        _write_heartbeat(status, source, source.heartbeat, core)
    return status


def _write_heartbeat(
    status: fleet_pb2.WorkerStatus, source: Source, heartbeat: Heartbeat, core: RouterCore
) -> None:
    """Writes a worker's place, model and engine, and the capacity that follows from them."""
    status.address = heartbeat.address
    status.engine = heartbeat.engine
    status.engine_version = heartbeat.engine_version
    status.model = heartbeat.model
    status.model_aliases.extend(heartbeat.model_aliases)
    status.lora_names.extend(heartbeat.lora_names)
    status.max_model_len = heartbeat.max_model_len
    status.block_size = heartbeat.block_size
    status.engine_block_size = heartbeat.engine_block_size
    status.role = heartbeat.role
    status.kv_connector = heartbeat.kv_connector
    status.bootstrap_host = heartbeat.bootstrap_host
    status.bootstrap_port = heartbeat.bootstrap_port
    status.labels.update(heartbeat.labels)
    status.prefill_rate = core.fleet.rates.rate(source.key, heartbeat.model)
    status.prefills_measured = core.fleet.rates.samples(source.key)
    if heartbeat.total_blocks:
        status.total_blocks = heartbeat.total_blocks
    if heartbeat.total_slots:
        status.total_slots = heartbeat.total_slots
    if (slots := core.fleet.capacities.slots(source.key, heartbeat)) is not None:
        status.slots_estimated = slots
    status.block_share = core.fleet.capacities.block_share(source.key, heartbeat)
    status.preemptions = heartbeat.preemptions
    if heartbeat.token_budget is not None:
        status.token_budget = heartbeat.token_budget


def take_ages(status: fleet_pb2.WorkerStatus) -> fleet_pb2.WorkerStatus:
    """Takes what changes with every look out of a status; both in a row are the status again."""
    ages = fleet_pb2.WorkerStatus()
    for name in ("beat_age_s", "sample_age_s"):
        if status.HasField(name):
            setattr(ages, name, getattr(status, name))
            status.ClearField(name)
    return ages


def framed(number: int, message: bytes) -> bytes:
    """A message as a field of another one, of a number under 16."""
    size = len(message)
    head = bytearray((number << 3 | 2,))
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + message


def read_registration(message: fleet_pb2.RegisterWorkerRequest) -> EngineSettings:
    """An engine to run a relay for; raises Refusal, which names the field.

    A field that is not set, or an empty text, leaves the setting at its default.
    """
    given: dict[str, object] = {field.name: value for field, value in message.ListFields()}
    given |= {"labels": dict(message.labels), "model_aliases": tuple(message.model_aliases)}
    given["id"] = given.pop("worker_id", "")
    try:
        return read_engine({"engine": "", "address": "", **given})
    except UnusableEngine as error:
        name = "worker_id" if error.key == "id" else error.key
        raise Refusal(
            Reason.INVALID_FIELD,
            f"{name}: {error.sentence}" if name else error.sentence,
            metadata={"field": name} if name else {},
        ) from error


def _read_prompt(received: Received, core: RouterCore) -> Prompt:
    message = received.message
    lora_name = message.lora_name or core.fleet.lora_of(message.model)
    if not received.form:
        raise Refusal(
            Reason.EMPTY_PROMPT,
            "the request has no prompt: set token_ids, token_bytes or block_hashes",
        )
    if received.form >= TEXT:
        raise Refusal(
            Reason.NO_TOKENIZER,
            "this router makes no tokens of text and bodies: send token_ids, token_bytes or"
            " block_hashes",
        )
    if received.form == BLOCK_HASHES:
        return Prompt.from_hashes(
            np.frombuffer(received.data, np.uint64),
            received.block_size,
            received.prompt_tokens,
            lora_name=lora_name,
        )
    return Prompt.from_tokens(
        received.data,
        lora_name=lora_name,
        cache_salt=message.cache_salt,
        items=_read_items(message.multimodal_items),
    )


def _read_items(items: Iterable[router_pb2.MultimodalItem]) -> list[MultimodalItem]:
    read = []
    for i, item in enumerate(items):
        which = item.WhichOneof("content")
        if which is None:
            raise Refusal(
                Reason.INVALID_FIELD, f"multimodal_items[{i}] has neither a hash nor an id"
            )
        content_hash = item.hash if which == "hash" else multimodal_hash(item.id)
        read.append(MultimodalItem(content_hash, item.first_token, item.token_count))
    return read


def _check_sizes(message: router_pb2.RouteRequest) -> None:
    """Refuses what would cost memory or log space without use."""
    for name in _TEXTS:
        if len(getattr(message, name)) > TEXT_MAX:
            raise Refusal(Reason.INVALID_FIELD, f"{name} is longer than {TEXT_MAX} characters")
    for name in _LISTS:
        if len(getattr(message, name)) > ENTRIES_MAX:
            raise Refusal(Reason.INVALID_FIELD, f"{name} has more than {ENTRIES_MAX} entries")


def _shortened(message: str) -> str:
    encoded = message.encode()
    if len(encoded) <= MESSAGE_BYTES_MAX:
        return message
    return encoded[: MESSAGE_BYTES_MAX - 3].decode(errors="ignore") + "…"


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
