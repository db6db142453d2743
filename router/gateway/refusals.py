"""The one table from reasons of refusals to HTTP: status, error body, Retry-After. Pure."""

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

import msgspec

from kvroute.client.requests.failures import Kind
from router.request.error_forms import ErrorForm

RETRY_S_MAX = 3600
"""Longest Retry-After."""
MESSAGE_MAX = 2000
"""Characters of a message."""


class FrontRefusal(Exception):
    """A request that the gateway itself refuses. param: the body's field at fault."""

    failure = Kind.REJECTED
    """While a worker is reserved for it: that one has no part in it."""

    def __init__(self, reason: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param
        self.retry_after_s: float | None = None
        self.closes = False
        """Whether the connection ends: what follows on it can't be read."""


class Answer(NamedTuple):
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


STATUS: Mapping[str, int] = {
    # the router's, as in router/request/refusal.py
    "EMPTY_PROMPT": 400,
    "MALFORMED_PROMPT": 400,
    "PROMPT_TOO_LONG": 400,
    "INVALID_FIELD": 400,
    "UNKNOWN_POLICY": 400,
    "MODEL_REQUIRED": 400,
    "MALFORMED_BODY": 400,
    "TEMPLATE_REFUSED": 400,
    "UNSUPPORTED_CONTENT": 400,
    "UNAUTHENTICATED": 401,
    "POLICY_NOT_ALLOWED": 403,
    "PERMISSION_DENIED": 403,
    "UNKNOWN_MODEL": 404,
    "UNKNOWN_WORKER": 404,
    "UNKNOWN_SESSION": 404,
    "REQUEST_ID_REUSED": 409,
    "WORKER_EXISTS": 409,
    "OVERTAKEN": 409,
    "MESSAGE_TOO_LARGE": 413,
    "ALL_WORKERS_FULL": 429,
    "QUEUE_FULL": 429,
    "TENANT_QUOTA": 429,
    "KEY_LIMIT": 429,
    "QUEUE_TIMEOUT": 429,
    "WAIT_TOO_LONG": 429,
    "TOO_MANY_RESERVATIONS": 429,
    "TOO_MANY_BYTES": 429,
    "TOO_MANY_WATCHES": 429,
    "RENDER_QUEUE_FULL": 429,
    "INTERNAL": 500,
    "NO_TOKENIZER": 503,
    "RENDERER_UNAVAILABLE": 503,
    "NO_WORKER": 503,
    "NO_ELIGIBLE_WORKER": 503,
    "DRAINING": 503,
    "NO_BROKER": 503,
    "CANCELLED": 503,
    "DEADLINE_EXCEEDED": 504,
    # the gateway's own
    "INVALID_BODY": 400,
    "MALFORMED_REQUEST": 400,
    "RESPONSE_GONE": 404,
    "UNKNOWN_PATH": 404,
    "METHOD_NOT_ALLOWED": 405,
    "BODY_TOO_SLOW": 408,
    "BODY_TOO_LARGE": 413,
    "UNSUPPORTED_ENCODING": 415,
    "EXPECTATION_FAILED": 417,
    "TOO_MANY_REQUESTS": 429,
    "HEAD_TOO_LARGE": 431,
    "GATEWAY_FAULT": 500,
    "PAIR_UNSUPPORTED": 501,
    "WORKER_FAILED": 502,
    "ANSWER_HEAD_TOO_LARGE": 502,
    "HOST_FAILED": 503,
    "ROUTER_UNREACHABLE": 503,
    "STOPPING": 503,
    "WORKER_SILENT": 504,
    # gRPC's own, without a reason
    "RESOURCE_EXHAUSTED": 413,  # a message over the size that gRPC takes
    "UNAVAILABLE": 503,
}
"""Reason -> HTTP status; a reason that isn't here is a fault of a router, 500."""

_CODES = {
    "UNKNOWN_MODEL": "model_not_found",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "TENANT_QUOTA": "rate_limit_exceeded",
    "KEY_LIMIT": "rate_limit_exceeded",
    "UNAUTHENTICATED": "invalid_api_key",
    "RESPONSE_GONE": "previous_response_not_found",
}
"""Reasons for which OpenAI has a code that clients know; others are their own code."""


def answer_of(
    reason: str,
    message: str,
    form: ErrorForm,
    *,
    retry_after_s: float | None = None,
    param: str | None = None,
) -> Answer:
    """The answer to a request that is refused."""
    status = STATUS.get(reason, 500)
    headers = {"Content-Type": "application/json", "X-Kvroute-Reason": reason}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if retry_after_s is None and status == 503:
        retry_after_s = 1.0
    if retry_after_s is not None:
        headers["Retry-After"] = str(min(max(1, ceil(retry_after_s)), RETRY_S_MAX))
    return Answer(status, headers, _encoded(_error(reason, message, form, param)))


def error_event(reason: str, message: str, form: ErrorForm, *, number: int = 0) -> bytes:
    """The last event of a stream that can't go on. number: of the event, where events have one."""
    data = form.event(_error(reason, message, form), number)
    return form.event_head + _encoded(data) + b"\n\n"


def _error(
    reason: str, message: str, form: ErrorForm, param: str | None = None
) -> dict[str, object]:
    status, code = STATUS.get(reason, 500), _CODES.get(reason, reason)
    return form.body(status, code, message[:MESSAGE_MAX], param)


def _encoded(body: dict[str, object]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:  # a lone surrogate in a message
        return msgspec.json.encode(_without_surrogates(body))


def _without_surrogates(value: object) -> object:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {name: _without_surrogates(inner) for name, inner in value.items()}
    return value
