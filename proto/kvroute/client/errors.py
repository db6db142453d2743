"""Errors of a client's calls: a class for each kind of answer that callers treat differently."""

from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from typing_extensions import override

DOMAIN = "kvroute"
"""google.rpc.ErrorInfo.domain of the router's own answers."""

_MESSAGE_MAX = 500
"""Characters kept of an error that is not the router's."""
_DETAILS_KEY = "grpc-status-details-bin"
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class UnusableAnswer(Exception):
    """Raised by a caller inside a request, when an engine's answer makes no sense.

    Counts against the worker, and attempts() tries another worker. A KeyError counts against no
    worker, since a bug in the caller's own code looks the same.
    """


class KvRouteError(Exception):
    """A call got no usable answer.

    code: the gRPC status. reason: ErrorInfo's reason, None when something else than the router
    answered (a proxy, gRPC itself). message: a sentence for a person. retry_after_s: seconds after
    which the router accepts the same request again, from RetryInfo; None: no RetryInfo came.
    metadata: that of ErrorInfo.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str | None,
        message: str,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.metadata: Mapping[str, str] = dict(metadata or {})

    @override
    def __str__(self) -> str:
        return f"{self.reason or self.code.name}: {self.message}"

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.code, self.reason, self.message, self.retry_after_s, self.metadata)
        return type(self), arguments


class InvalidRequest(KvRouteError, ValueError):
    """The request can't be served as it is: an empty or too long prompt, an unknown policy."""


class NoTokens(InvalidRequest):
    """The router can't make the prompt's tokens, and the request requires them."""


class NotFound(KvRouteError):
    """The request names a thing that the router doesn't know."""


class UnknownModel(NotFound):
    """No such model, alias or LoRA in the fleet."""


class UnknownSession(NotFound):
    """The request decodes for a session that no worker is known to hold."""


class UnknownWorker(NotFound):
    """The command is for a worker that the router doesn't know."""


class AlreadyExists(KvRouteError):
    """The id of the request, or of the worker, is in use."""


class DuplicateRequest(AlreadyExists):
    """The request id was used with another prompt."""


class WorkerExists(AlreadyExists):
    """A worker of that id is registered already."""


class Unavailable(KvRouteError):
    """The router or its workers can't serve the call now; the retries within the deadline are used
    up.
    """


class NoWorker(Unavailable):
    """The router answers, but no worker can take the request at the moment."""


class RouterUnreachable(Unavailable):
    """No router answered: the connection was refused or reset, the router's name has no address, a
    proxy reported so, or the answer could not be read."""


class Overloaded(KvRouteError):
    """All workers are full, or a limit is reached; worth another try only with `retry_after_s`."""


class ClientOverloaded(Overloaded):
    """This client holds as many unanswered requests as it may; the router got no request."""


class DeadlineExceeded(KvRouteError, TimeoutError):
    """The time given to the call is over."""


class PermissionDenied(KvRouteError):
    """The caller's key lacks the right to this call."""


class Unauthenticated(PermissionDenied):
    """The caller's token is missing or not accepted."""


class ClientClosed(KvRouteError):
    """The client was closed before or during the call."""

    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.CANCELLED, None, "the client is closed")

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


_BY_REASON: dict[str, type[KvRouteError]] = {
    "UNKNOWN_MODEL": UnknownModel,
    "UNKNOWN_SESSION": UnknownSession,
    "UNKNOWN_WORKER": UnknownWorker,
    "REQUEST_ID_REUSED": DuplicateRequest,
    "WORKER_EXISTS": WorkerExists,
    "NO_TOKENIZER": NoTokens,
    "UNSUPPORTED_CONTENT": NoTokens,
    "NO_WORKER": NoWorker,
    "NO_ELIGIBLE_WORKER": NoWorker,
}
_BY_CODE: dict[grpc.StatusCode, type[KvRouteError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}


CUT = frozenset((
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
))  # fmt: skip
"""Statuses of gRPC and of proxies for a connection that broke or carried no gRPC. The router's own
errors with these statuses have a reason."""


def error_from_status(status: Status) -> KvRouteError:
    """The error that a google.rpc.Status means, such as `Explanation.refusal`. Never raises."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    if code is grpc.StatusCode.OK:  # an error can't be OK
        code = grpc.StatusCode.UNKNOWN
    return _error(code, status.message, status)


def unreachable(message: str) -> RouterUnreachable:
    """The error for a failure to reach a router that the client itself detected."""
    return RouterUnreachable(grpc.StatusCode.UNAVAILABLE, None, message)


def unreadable(call: str) -> RouterUnreachable:
    """The error for an answer of the RPC `call` that is no message, for which gRPC returns None:
    RouterUnreachable, since another router may answer."""
    return unreachable(f"the answer to {call} can't be read")


def broken_by(failure: Exception) -> KvRouteError:
    """The error for calls that waited for a task of this client, when the task raised `failure`."""
    if isinstance(failure, KvRouteError):
        return failure
    if isinstance(failure, grpc.aio.AioRpcError):
        return error_from_call(failure)
    message = f"the call broke in the client: {type(failure).__name__}: {failure}"
    return KvRouteError(grpc.StatusCode.UNKNOWN, None, message[:_MESSAGE_MAX])


def error_from_call(failure: grpc.aio.AioRpcError) -> KvRouteError:
    """The KvRouteError for a failed gRPC call. Details that can't be read are left out. Never
    raises.
    """
    for key, value in failure.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                status = Status.FromString(value)
            except DecodeError:
                break
            return _error(failure.code(), failure.details() or status.message, status)
    return _error(failure.code(), failure.details() or "", Status())


def _error(code: grpc.StatusCode, message: str, status: Status) -> KvRouteError:
    reason: str | None = None
    retry_after_s: float | None = None
    metadata: dict[str, str] = {}
    for detail in status.details:
        try:
            if detail.Is(ErrorInfo.DESCRIPTOR):
                info = ErrorInfo.FromString(detail.value)
                if info.domain == DOMAIN and info.reason:
                    reason, metadata = info.reason, dict(info.metadata)
            elif detail.Is(RetryInfo.DESCRIPTOR):
                delay = RetryInfo.FromString(detail.value).retry_delay
                retry_after_s = max(0.0, delay.seconds + delay.nanos / 1e9)
        except DecodeError:
            continue  # no detail of a router; the code and the message still hold
    kind = _BY_REASON.get(reason or "") or _BY_CODE.get(code, KvRouteError)
    if reason is None and code in CUT:
        kind = RouterUnreachable
    return kind(code, reason, message or code.name, retry_after_s, metadata)
