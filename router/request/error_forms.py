"""Forms of HTTP errors that OpenAI's and Anthropic's client libraries read. Pure."""

from collections.abc import Callable
from typing import Any, NamedTuple

Json = dict[str, Any]

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorForm(NamedTuple):
    """How an error is written: as the body of an answer, and as the last event of a streamed
    answer."""

    body: Callable[[int, str, str, str | None], Json]
    """Makes the body from an HTTP status, a code, a message, and the name of the request's field at
    fault; None: no field is."""
    event: Callable[[Json, int], Json] = lambda body, number: body
    """Makes the data of a stream's last event from an error's body and the event's number."""
    event_head: bytes = b"event: error\ndata: "


def _openai(status: int, code: str, message: str, param: str | None) -> Json:
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _anthropic(status: int, code: str, message: str, param: str | None) -> Json:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _response_event(body: Json, number: int) -> Json:
    error = body["error"]
    fields = {name: error[name] for name in ("code", "message", "param")}
    # Clients that dispatch on `type` read the fields; OpenAI's library raises for `error`.
    return {"type": "error", **fields, "sequence_number": number, "error": error}


OPENAI = ErrorForm(_openai, event_head=b"data: ")
OPENAI_RESPONSES = ErrorForm(_openai, _response_event)
ANTHROPIC = ErrorForm(_anthropic)
