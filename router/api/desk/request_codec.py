"""Reads and checks messages of clients: requests, reported steps, registrations."""

import uuid
from collections.abc import Iterable
from math import inf
from typing import TypeAlias

import numpy as np
from google.protobuf.message import DecodeError
from xxhash import xxh3_64_digest

from events.plane.settings import EngineSettings, UnusableEngine, read_engine
from indexer.hashing import MultimodalItem, multimodal_hash
from kvroute.v1 import fleet_pb2, router_pb2
from router.api.desk.tenant import UNVERIFIED, Caller
from router.decide.core.core import RouterCore
from router.decide.core.progress import Progress, ProgressState, WaitStep
from router.fleet.reservations.reservations import FINISH_REASONS, Ending
from router.request.narrowing import Narrowing
from router.request.prompt import Prompt
from router.request.refusal import Reason, Refusal, Refused
from router.request.request import Objective, Request, Role, Wait
from router.request.tokens import MadeBy, PromptTokens
from router.request.wire import received as wire
from router.request.wire.received import (
    BLOCK_HASHES,
    ESTIMATED_TOKENS,
    TOKEN_BYTES,
    TOKEN_IDS,
    ReceivedRequest,
    TooMuch,
)

RouteMessage: TypeAlias = bytes | ReceivedRequest
"""A RouteRequest: bytes from a client, or a ReceivedRequest that this process made. len() is its
size in bytes."""
TEXT_MAX = 1024
"""Characters of a request's id, model, tenant and other short texts, at most."""
ENTRIES_MAX = 4096
"""Entries of each list or map of a request, at most."""
FIELDS_MAX = 5 * ENTRIES_MAX
"""Fields of a request beside its prompt, at most."""
ASIDE_BYTES_MAX = 1 << 20
"""Bytes of a request's fields beside its prompt, at most."""
_TEXTS = ("request_id", "model", "lora_name", "cache_salt", "tenant", "session_id", "policy")
_LISTS = (
    "required_labels", "excluded_labels", "allowed_worker_ids", "excluded_worker_ids",
    "multimodal_items",
)  # fmt: skip
_ROLES: dict[int, Role] = {
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
_OTHER_WORDS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "custom_tool_call": "tool_calls",
    "max_output_tokens": "length",
    "completed": "stop",
    "failed": "abort",
    "cancelled": "abort",
    "refusal": "content_filter",
}
"""Finish reasons of Anthropic's API, of OpenAI's Responses API and of OpenAI's older chat API ->
the entry of FINISH_REASONS that means the same."""
_FAILURES = {
    router_pb2.FAILURE_REASON_UNSPECIFIED: Ending.FAILED_UNKNOWN,
    router_pb2.FAILURE_REASON_WORKER: Ending.FAILED_WORKER,
    router_pb2.FAILURE_REASON_TIMEOUT: Ending.FAILED_TIMEOUT,
    router_pb2.FAILURE_REASON_CLIENT: Ending.FAILED_CLIENT,
    router_pb2.FAILURE_REASON_CANCELLED: Ending.FAILED_CANCELLED,
}


def receive(content: RouteMessage, prompt_tokens_max: int) -> ReceivedRequest:
    """Reads a RouteRequest; raises Refusal for invalid bytes, for a prompt of more than
    prompt_tokens_max tokens, and for more than FIELDS_MAX fields or ASIDE_BYTES_MAX bytes beside
    the prompt."""
    if isinstance(content, ReceivedRequest):
        return content
    try:
        return wire.read_request(content, FIELDS_MAX, ASIDE_BYTES_MAX, prompt_tokens_max)
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
    except ValueError as error:
        raise no_valid("RouteRequest", error) from error


def no_valid(message: str, error: Exception) -> Refusal:
    """The refusal of bytes that can't be parsed as the protobuf message with the name `message`."""
    return Refusal(Reason.INVALID_FIELD, f"the message is no valid {message}: {error}")


def read_request(
    message: ReceivedRequest, core: RouterCore, now_s: float, caller: Caller = UNVERIFIED
) -> Request:
    """Reads a caller's RouteRequest into a Request; raises Refusal. Lowers the message's priority
    to the highest that the caller may have.
    """
    if caller.usage is not None and message.priority > (most := caller.allowed(message.priority)):
        message.priority = most
    if message.longest > TEXT_MAX or message.entries > ENTRIES_MAX:
        _check_sizes(message)
    role = _ROLES.get(message.phase)
    if role is None:
        raise Refusal(Reason.INVALID_FIELD, f"unknown phase {message.phase}: see kvroute.v1.Phase")
    session = None
    if role is Role.DECODE and not message.form:
        session = core.fleet.sessions.get(message.session_id)
        if session is None:
            raise Refusal(
                Reason.UNKNOWN_SESSION,
                f"no worker is known to hold session {message.session_id!r}, and the request has"
                " no prompt by which a worker could be picked",
            )
        prompt = Prompt.from_prefixes(
            session.prefixes,
            session.block_size,
            session.prompt_tokens,
            lora_name=session.lora_name,
        )
    else:
        prompt = _read_prompt(message, core)
    model = message.model or (session.model if session else "")
    if caller.usage is not None:
        for name in filter(None, (model, prompt.lora_name)) if model else (model,):
            caller.usage.identity.check_model(name)
    narrowing = None
    if message.entries or prompt.lora_name:  # few requests have them
        narrowing = Narrowing(
            lora_name=prompt.lora_name,
            required_labels=frozenset((message.required_labels or {}).items()),
            allowed_workers=frozenset(message.allowed_worker_ids or ()),
            excluded_workers=frozenset(message.excluded_worker_ids or ()),
            excluded_labels=frozenset((message.excluded_labels or {}).items()),
        ).or_none
    return Request(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt=prompt,
        model=model,
        role=role,
        expected_output_tokens=message.expected_output_tokens,
        policy=message.policy,
        tenant=caller.tenant or message.tenant,
        session_id=message.session_id,
        narrowing=narrowing,
        charged_tokens=message.charged_tokens,
        observed=message.observed,
        objective=_read_objective(message, now_s),
        resumed=session,
    )


def _read_objective(message: ReceivedRequest, now_s: float) -> Objective | None:
    ttft_ms, tpot_ms = message.ttft_slo_ms, message.tpot_slo_ms
    if ttft_ms is None and tpot_ms is None:
        return None
    if tpot_ms == 0:
        raise Refusal(
            Reason.INVALID_FIELD,
            "tpot_slo_ms is 0; it is at least 1 millisecond, or left out for no objective",
        )
    ttft_s = None if ttft_ms is None else max(ttft_ms, 1) / 1000
    return Objective(
        ttft_s=ttft_s,
        due_s=inf if ttft_s is None else now_s + ttft_s - message.waited_ms / 1000,
        tpot_s=None if tpot_ms is None else tpot_ms / 1000,
        sheddable=message.priority < 0,
    )


def read_wait(message: ReceivedRequest, now_s: float, left_s: float) -> Wait:
    """How long a request may wait in the queue, and its priority there. left_s: seconds until its
    caller's deadline."""
    timeout_ms, slo_ms = message.queue_timeout_ms, message.ttft_slo_ms
    return Wait(
        priority=message.priority,
        timeout_s=None if timeout_ms is None else timeout_ms / 1000,
        deadline_s=now_s + left_s,
        ttft_slo_s=None if slo_ms is None else slo_ms / 1000,
        waited_s=message.waited_ms / 1000,
    )


def read_refused(
    content: RouteMessage, refusal: Refusal, now_s: float, prompt_tokens_max: int
) -> Refused:
    """What the decision log gets of a refused RouteRequest; only the refusal and its time if the
    request's bytes can't be read."""
    try:
        message = receive(content, prompt_tokens_max)
    except Refusal:
        return Refused(refusal, now_s)
    return Refused(
        refusal,
        now_s,
        message.request_id[:TEXT_MAX],
        message.model[:TEXT_MAX],
        _ROLES.get(message.phase, ""),
        message.policy[:TEXT_MAX],
        _prompt_tokens(message),
        message.expected_output_tokens,
        {name: len(entries) for name in _LISTS if (entries := getattr(message, name))},
    )


def _prompt_tokens(message: ReceivedRequest) -> int:
    if message.form in (TOKEN_IDS, TOKEN_BYTES):
        return len(message.data) // 4
    return message.prompt_tokens


def read_progress(message: router_pb2.Progress) -> Progress | str:
    """Reads a reported step; for an invalid step returns a sentence that says why."""
    if len(message.reservation_id) > TEXT_MAX:
        return f"reservation_id is longer than {TEXT_MAX} characters"
    state = _STATES.get(message.state)
    if state is None:
        return f"unknown state {message.state}: expected PREFILL_DONE, RUNNING, FINISHED or FAILED"
    failure = _FAILURES.get(message.failure_reason)
    if failure is None:
        return (
            f"unknown failure_reason {message.failure_reason}: expected a kvroute.v1.FailureReason"
        )
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
        finish_reason=_finish_reason(message.finish_reason),
    )


def _finish_reason(said: str) -> str:
    """The entry of FINISH_REASONS for an engine's finish reason: `other` for an unknown reason,
    empty if the engine gave none."""
    reason = _OTHER_WORDS.get(said, said)
    return reason if reason in FINISH_REASONS or not reason else "other"


def read_wait_step(message: router_pb2.Progress) -> WaitStep | str:
    """Reads a step that names a request by its request_id; for an invalid step returns a sentence
    that says why.
    """
    if message.reservation_id:
        return "a step has both a reservation_id and a request_id: send one of them"
    if len(message.request_id) > TEXT_MAX:
        return f"request_id is longer than {TEXT_MAX} characters"
    if message.state == router_pb2.PROGRESS_STATE_FAILED:
        if message.failure_reason != router_pb2.FAILURE_REASON_CANCELLED:
            return "a step with a request_id and the state FAILED needs failure_reason CANCELLED"
        return WaitStep(message.request_id, None)
    if message.state != router_pb2.PROGRESS_STATE_UNSPECIFIED:
        return "a step with a request_id has the state FAILED (with CANCELLED) or no state"
    if not message.HasField("priority"):
        return "a step with a request_id needs a priority or the state FAILED"
    return WaitStep(message.request_id, message.priority)


def read_registration(message: fleet_pb2.RegisterWorkerRequest) -> EngineSettings:
    """Reads the settings of an engine that this router is to run a relay for; raises Refusal, which
    names the invalid field.

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


def _read_prompt(message: ReceivedRequest, core: RouterCore) -> Prompt:
    lora_name = message.lora_name or core.fleet.lora_of(message.model)
    if not message.form:
        raise Refusal(
            Reason.EMPTY_PROMPT,
            "the request has no prompt: set token_ids, token_bytes, block_hashes or"
            " estimated_tokens",
        )
    if message.form == ESTIMATED_TOKENS:
        return Prompt.from_length(message.prompt_tokens, lora_name=lora_name)
    if message.form == BLOCK_HASHES:
        return Prompt.from_hashes(
            np.frombuffer(message.data, np.uint64),
            message.block_size,
            message.prompt_tokens,
            lora_name=lora_name,
        )
    if message.made is not None:
        return _made_prompt(message, message.made, lora_name)
    if message.form not in (TOKEN_IDS, TOKEN_BYTES):
        raise Refusal(
            Reason.NO_TOKENIZER,
            "this router makes no tokens of text and bodies: send token_ids, token_bytes,"
            " block_hashes or estimated_tokens",
        )
    return Prompt.from_tokens(
        message.data,
        lora_name=lora_name,
        cache_salt=message.cache_salt,
        items=_read_items(message.multimodal_items) if message.multimodal_items else (),
    )


def _made_prompt(message: ReceivedRequest, made: PromptTokens, lora_name: str) -> Prompt:
    """The prompt of a request whose text or body was made into tokens, or whose length was
    estimated.
    """
    if made.made_by is MadeBy.ESTIMATE:
        digest = xxh3_64_digest(message.data)
        return Prompt.from_length(made.count, lora_name=lora_name, digest=digest)
    if message.multimodal_items:
        items = _read_items(message.multimodal_items)
    else:
        items = [
            MultimodalItem(multimodal_hash(item.id), item.first_token, item.token_count)
            for item in made.items
        ]
    return Prompt.from_tokens(
        made.token_bytes, lora_name=lora_name, cache_salt=message.cache_salt, items=items
    )


def _read_items(items: Iterable[bytes]) -> list[MultimodalItem]:
    read = []
    for i, content in enumerate(items):
        try:
            item = router_pb2.MultimodalItem.FromString(content)
        except DecodeError as error:
            raise no_valid("RouteRequest", error) from error
        which = item.WhichOneof("content")
        if which is None:
            raise Refusal(
                Reason.INVALID_FIELD, f"multimodal_items[{i}] has neither a hash nor an id"
            )
        content_hash = item.hash if which == "hash" else multimodal_hash(item.id)
        read.append(MultimodalItem(content_hash, item.first_token, item.token_count))
    return read


def _check_sizes(message: ReceivedRequest) -> None:
    """Raises Refusal for a text over TEXT_MAX characters, and for more than ENTRIES_MAX entries:
    they would cost memory and space in logs without use."""
    for name in _TEXTS:
        if len(getattr(message, name)) > TEXT_MAX:
            raise Refusal(Reason.INVALID_FIELD, f"{name} is longer than {TEXT_MAX} characters")
    for name in _LISTS:
        if len(getattr(message, name) or ()) > ENTRIES_MAX:
            raise Refusal(Reason.INVALID_FIELD, f"{name} has more than {ENTRIES_MAX} entries")
