"""The keywords of route(), request() and explain(), and the RouteRequest they make."""

import secrets
from collections.abc import Iterable, Mapping
from typing import TypedDict

import grpc

from kvroute.client.errors import InvalidRequest
from kvroute.client.hashes import block_hashes_of
from kvroute.client.tokens import pack_tokens
from kvroute.v1 import MultimodalItem, Phase, RouteRequest


class RouteOptions(TypedDict, total=False):
    """One request to be served. None is absent, everywhere.

    The prompt is `token_ids`, or `block_hashes` with `block_size` and `prompt_tokens`; only a
    DECODE for a known session needs neither.
    """

    model: str | None
    """Model, alias or LoRA name; absent when the fleet serves one model."""
    token_ids: Iterable[int] | None
    """list, tuple, array, numpy array, or bytes: little-endian u32 already. See pack_tokens."""
    block_hashes: Iterable[int] | None
    """XXH3-64 of each full block, LoRA name and cache salt counted in, see router.proto. numpy's
    uint64 arrays cost least."""
    block_size: int | None
    """Tokens in each block of `block_hashes`."""
    prompt_tokens: int | None
    """Tokens of the prompt behind `block_hashes`, with the tail that fills no block."""
    request_id: str | None
    """Same id, same prompt, same answer; absent: one is made up, so that a retry is no new request.
    Another try after a worker failed needs another id."""
    lora_name: str | None
    cache_salt: str | None
    multimodal_items: Iterable[MultimodalItem] | None
    expected_output_tokens: int | None
    priority: int | None
    """Higher is sooner; absent is 0."""
    tenant: str | None
    session_id: str | None
    ttft_slo_ms: int | None
    queue_timeout_ms: int | None
    """How long the router may let the request wait; the call's own deadline ends it too."""
    phase: Phase.ValueType | None
    required_labels: Mapping[str, str] | None
    allowed_worker_ids: Iterable[str] | None
    """Absent or empty: all."""
    excluded_worker_ids: Iterable[str] | None
    policy: str | None
    """Absent: the one the router is configured with."""
    omit_receipt: bool | None
    """True: the pick has no receipt, which saves the router and us a part of the work."""


def route_request(
    *,
    model: str | None = None,
    token_ids: Iterable[int] | None = None,
    block_hashes: Iterable[int] | None = None,
    block_size: int | None = None,
    prompt_tokens: int | None = None,
    request_id: str | None = None,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    multimodal_items: Iterable[MultimodalItem] | None = None,
    expected_output_tokens: int | None = None,
    priority: int | None = None,
    tenant: str | None = None,
    session_id: str | None = None,
    ttft_slo_ms: int | None = None,
    queue_timeout_ms: int | None = None,
    phase: Phase.ValueType | None = None,
    required_labels: Mapping[str, str] | None = None,
    allowed_worker_ids: Iterable[str] | None = None,
    excluded_worker_ids: Iterable[str] | None = None,
    policy: str | None = None,
    omit_receipt: bool | None = None,
) -> RouteRequest:
    """The message for these options, the prompt always as bytes or as hashes.

    Raises InvalidRequest for a prompt that can't be meant, TypeError and ValueError for values that
    don't fit their fields. What only the router can judge (lengths, names), the router judges.
    """
    message = RouteRequest(
        request_id=request_id or secrets.token_hex(16),
        model=model or "",
        lora_name=lora_name or "",
        cache_salt=cache_salt or "",
        multimodal_items=multimodal_items or (),
        expected_output_tokens=expected_output_tokens,
        priority=priority,
        tenant=tenant or "",
        session_id=session_id or "",
        ttft_slo_ms=ttft_slo_ms,
        queue_timeout_ms=queue_timeout_ms,
        phase=phase or Phase.PHASE_UNSPECIFIED,
        required_labels=required_labels or {},
        allowed_worker_ids=allowed_worker_ids or (),
        excluded_worker_ids=excluded_worker_ids or (),
        policy=policy or "",
        omit_receipt=omit_receipt or False,
    )
    if block_hashes is not None:
        if token_ids is not None:
            raise _invalid("token_ids and block_hashes are two prompts; give one")
        if block_size is None or prompt_tokens is None:
            raise _invalid("block_hashes needs block_size and prompt_tokens beside it")
        hashes = block_hashes_of(block_hashes, block_size, prompt_tokens)
        message.block_hashes.CopyFrom(hashes)
    elif block_size is not None or prompt_tokens is not None:
        raise _invalid("block_size and prompt_tokens belong to block_hashes")
    elif token_ids is not None:
        message.token_bytes = pack_tokens(token_ids)
    return message


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_PROMPT", message)
