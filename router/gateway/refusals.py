"""Refusals over HTTP: the gateway's own reasons, error bodies, Retry-After. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from math import ceil
from typing import NamedTuple

import msgspec

from kvroute.client import KvRouteError, RouterUnreachable
from kvroute.client.requests.failures import Kind
from router.request.error_forms import ErrorForm
from router.request.refusal import Reason

RETRY_S_MAX = 3600
"""Longest Retry-After, in seconds."""
MESSAGE_MAX = 2000
"""Most characters of an error's message; the rest is cut."""


class GatewayRefusal(Exception):
    """A refusal by the gateway itself. param: the field of the body at fault."""

    failure = Kind.REJECTED
    """Kind of the failure, for a worker that is reserved already: it is not blamed."""

    def __init__(self, reason: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param
        self.retry_after_s: float | None = None
        self.closes = False
        """Whether the connection is closed after the answer: what follows on it can't be read."""


class Answer(NamedTuple):
    """An HTTP answer to a refused request."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class GatewayReason(StrEnum):
    """Reasons of refusals by the gateway and the picker themselves, beside those of a router."""

    http_status: int
    meaning: str
    """Sentences for docs/reference-statuses.md."""

    def __new__(cls, value: str, http_status: int, meaning: str) -> "GatewayReason":
        reason = str.__new__(cls, value)
        reason._value_ = value
        reason.http_status = http_status
        reason.meaning = meaning
        return reason

    # fmt: off
    INVALID_BODY = (
        "INVALID_BODY", 400,
        "The body can't be read or unpacked, or is no JSON object.",
    )
    MALFORMED_REQUEST = (
        "MALFORMED_REQUEST", 400,
        "The request is no HTTP, or its target no UTF-8; the connection ends.",
    )
    RESPONSE_GONE = (
        "RESPONSE_GONE", 404,
        "No worker is known to hold `previous_response_id`.",
    )
    UNKNOWN_PATH = (
        "UNKNOWN_PATH", 404,
        "The gateway has no such path.",
    )
    METHOD_NOT_ALLOWED = (
        "METHOD_NOT_ALLOWED", 405,
        "The path takes only the methods in the answer's `Allow`.",
    )
    BODY_TOO_SLOW = (
        "BODY_TOO_SLOW", 408,
        "The body was waited for over 120 s, or came after 10 s at less than 1,024 bytes a second.",
    )
    BODY_TOO_LARGE = (
        "BODY_TOO_LARGE", 413,
        "The body is over `requests.body_mib_max`.",
    )
    UNSUPPORTED_ENCODING = (
        "UNSUPPORTED_ENCODING", 415,
        "`Content-Encoding` is none of zstd, gzip and deflate, or names several encodings.",
    )
    EXPECTATION_FAILED = (
        "EXPECTATION_FAILED", 417,
        "`Expect` has another value than `100-continue`.",
    )
    TOO_MANY_REQUESTS = (
        "TOO_MANY_REQUESTS", 429,
        "The gateway (`gateway.open_max`) or the client (`gateway.client_share`) has as many open "
        "requests as it may.",
    )
    HEAD_TOO_LARGE = (
        "HEAD_TOO_LARGE", 431,
        "The request's line or a header is over 16 KiB; the connection ends.",
    )
    GATEWAY_FAULT = (
        "GATEWAY_FAULT", 500,
        "The gateway failed, or the router refuses its key (`to_router`). Its log has the cause.",
    )
    PAIR_UNSUPPORTED = (
        "PAIR_UNSUPPORTED", 501,
        "The request needs a prefill and a decode worker, and can't be split for their engine.",
    )
    WORKER_FAILED = (
        "WORKER_FAILED", 502,
        "Every worker that was tried failed before its first byte.",
    )
    ANSWER_HEAD_TOO_LARGE = (
        "ANSWER_HEAD_TOO_LARGE", 502,
        "The head of the worker's answer, 2xx or 4xx, is over 16 KiB; no other worker is tried.",
    )
    HOST_FAILED = (
        "HOST_FAILED", 503,
        "The gateway's own host has no file descriptors, memory or ports left, or no name server.",
    )
    ROUTER_UNREACHABLE = (
        "ROUTER_UNREACHABLE", 503,
        "No router can be reached, and no worker is known.",
    )
    STOPPING = (
        "STOPPING", 503,
        "This gateway stops. Another one takes the request.",
    )
    WORKER_SILENT = (
        "WORKER_SILENT", 504,
        "The worker sent no byte for `gateway.silence_s`, or fell silent to the router before its "
        "first byte.",
    )
    RESOURCE_EXHAUSTED = (
        "RESOURCE_EXHAUSTED", 413,
        "The message to the router is over the size that gRPC itself takes.",
    )
    UNAVAILABLE = (
        "UNAVAILABLE", 503,
        "The connection to the router broke.",
    )
    # fmt: on


STATUS: Mapping[str, int] = {
    reason.value: reason.http_status for table in (Reason, GatewayReason) for reason in table
}
"""Reason of a refusal -> HTTP status; a reason that isn't here is a router's fault, status 500."""

_CODES = {
    "UNKNOWN_MODEL": "model_not_found",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "TENANT_QUOTA": "rate_limit_exceeded",
    "KEY_LIMIT": "rate_limit_exceeded",
    "UNAUTHENTICATED": "invalid_api_key",
    "RESPONSE_GONE": "previous_response_not_found",
}
"""Reason of a refusal -> OpenAI's code for it; a reason that isn't here is its own code."""


def reason_of(error: KvRouteError) -> str:
    """The reason for which a request has no pick: the router's, ROUTER_UNREACHABLE, or the name of
    the gRPC status."""
    if error.reason is None and isinstance(error, RouterUnreachable):
        return "ROUTER_UNREACHABLE"
    return error.reason or error.code.name


def answer_of(
    reason: str,
    message: str,
    form: ErrorForm,
    *,
    retry_after_s: float | None = None,
    param: str | None = None,
) -> Answer:
    """The HTTP answer to a refused request. form: of its body. retry_after_s: None: 1 s with status
    503, else no Retry-After. param: field of the request's body at fault."""
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
    """The last event of a stream that fails. number: sequence number of the event, in formats whose
    events have one."""
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
