"""What clients send, read with suspicion: requests, steps of reports, registrations."""

import uuid
from collections.abc import Iterable, Set
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from events.plane.settings import EngineSettings, UnusableEngine, read_engine
from indexer.hashing import MultimodalItem, multimodal_hash
from kvroute.v1 import fleet_pb2, router_pb2
from router.core.admission import Wait
from router.core.core import RouterCore
from router.core.progress import Progress, ProgressState, WaitStep
from router.desk.tenant import UNVERIFIED, Caller, tenant_of
from router.request.prompt import Prompt
from router.request.refusal import Reason, Refusal, Refused
from router.request.request import Request, Role
from router.reservations.reservations import Ending
from router.wire.received import BLOCK_HASHES, TEXT, TooMuch, take_apart

TEXT_MAX = 1024
"""Characters in a request's id, model, tenant and the like."""
ENTRIES_MAX = 4096
"""Entries in a request's lists and maps."""
FIELDS_MAX = 5 * ENTRIES_MAX
"""Of a request, beside its prompt."""
ASIDE_BYTES_MAX = 1 << 20
"""Bytes of them."""
_TEXTS = ("request_id", "model", "lora_name", "cache_salt", "tenant", "session_id", "policy")
_LISTS = ("required_labels", "allowed_worker_ids", "excluded_worker_ids", "multimodal_items")
_NOBODY: frozenset[str] = frozenset()
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
    """A request of a caller, checked; raises Refusal. Lowers the message's priority to what the
    caller may have."""
    message = received.message
    if caller.usage is not None and message.priority > (most := caller.allowed(message.priority)):
        message.priority = most
    given = _given(message)
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
    model = message.model or (session.model if session else "")
    if caller.usage is not None:
        for name in filter(None, (model, prompt.lora_name)) if model else (model,):
            caller.usage.check_model(name)
    return Request(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt=prompt,
        model=model,
        role=role,
        expected_output_tokens=(
            message.expected_output_tokens if message.HasField("expected_output_tokens") else None
        ),
        policy=message.policy,
        tenant=tenant_of(message.tenant, caller),
        session_id=message.session_id,
        required_labels=dict(message.required_labels) if "required_labels" in given else {},
        allowed_workers=(
            frozenset(message.allowed_worker_ids) if "allowed_worker_ids" in given else _NOBODY
        ),
        excluded_workers=(
            frozenset(message.excluded_worker_ids) if "excluded_worker_ids" in given else _NOBODY
        ),
        charged_tokens=message.charged_tokens,
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
        unobserved=message.unobserved,
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


def _given(message: router_pb2.RouteRequest) -> Set[str]:
    """Names of the fields that are set; refuses those that would cost memory or log space without
    use."""
    given = {field.name: value for field, value in message.ListFields()}
    for name, value in given.items():
        if name in _TEXTS and len(value) > TEXT_MAX:
            raise Refusal(Reason.INVALID_FIELD, f"{name} is longer than {TEXT_MAX} characters")
        if name in _LISTS and len(value) > ENTRIES_MAX:
            raise Refusal(Reason.INVALID_FIELD, f"{name} has more than {ENTRIES_MAX} entries")
    return given.keys()
