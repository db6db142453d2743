"""What the calls raise: one class for each kind of answer a caller would treat differently."""

from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from typing_extensions import override

DOMAIN = "kvroute"
"""google.rpc.ErrorInfo.domain of the router's own answers; other domains are not its words."""

_TOLD_MAX = 500
"""Characters kept of an error that is not the router's."""
_DETAILS_KEY = "grpc-status-details-bin"
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class KvRouteError(Exception):
    """A call got no answer that it could use.

    code: the gRPC status. reason: the router's word for it, None when something else answered (a
    proxy, gRPC itself). message: one sentence for a person. retry_after_s: seconds after which the
    router would hear the same request again, None when it said nothing of the kind. metadata: what
    ErrorInfo tells besides.
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


class NotFound(KvRouteError):
    """The request names something the router doesn't know."""


class UnknownModel(NotFound):
    """No such model, alias or LoRA in the fleet."""


class UnknownSession(NotFound):
    """A decode for a session that nobody holds."""


class UnknownWorker(NotFound):
    """A command for a worker that isn't there."""


class AlreadyExists(KvRouteError):
    """The request's name is taken."""


class DuplicateRequest(AlreadyExists):
    """The request id was used with another prompt."""


class WorkerExists(AlreadyExists):
    """A worker of that id is registered already."""


class Unavailable(KvRouteError):
    """Not now; the retries within the deadline are used up."""


class NoWorker(Unavailable):
    """The router answers, but no worker can take the request at the moment."""


class RouterUnreachable(Unavailable):
    """No router answered: refused, reset, unresolved, a proxy's word for it, or bytes that are no
    answer."""


class Overloaded(KvRouteError):
    """All workers are full, or a limit is reached; worth another try only with `retry_after_s`."""


class ClientOverloaded(Overloaded):
    """This client holds as much unanswered as it may; the router was not asked."""


class DeadlineExceeded(KvRouteError, TimeoutError):
    """The time given to the call is over."""


class PermissionDenied(KvRouteError):
    """The caller may not do this."""


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
"""What gRPC and proxies say of a connection that broke or carried nonsense. The router's own words
come with a reason."""


def error_from_status(status: Status) -> KvRouteError:
    """The error that a google.rpc.Status means, such as `Explanation.refusal`. Never raises."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    if code is grpc.StatusCode.OK:  # no error's code
        code = grpc.StatusCode.UNKNOWN
    return _error(code, status.message, status)


def unreachable(told: str) -> RouterUnreachable:
    """For what the client itself sees."""
    return RouterUnreachable(grpc.StatusCode.UNAVAILABLE, None, told)


def unreadable(call: str) -> RouterUnreachable:
    """For an answer that is no message: gRPC gives None for it. Another router may do better."""
    return unreachable(f"the answer to {call} can't be read")


def broken_by(failure: Exception) -> KvRouteError:
    """What a failure of the client's own work means to the calls that wait for that work."""
    if isinstance(failure, KvRouteError):
        return failure
    if isinstance(failure, grpc.aio.AioRpcError):
        return error_from_call(failure)
    told = f"the call broke in the client: {type(failure).__name__}: {failure}"
    return KvRouteError(grpc.StatusCode.UNKNOWN, None, told[:_TOLD_MAX])


def error_from_call(failure: grpc.aio.AioRpcError) -> KvRouteError:
    """The error that a failed call means. Details that can't be read are left out. Never raises."""
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
            continue  # a detail of another making; the code and the message still hold
    kind = _BY_REASON.get(reason or "") or _BY_CODE.get(code, KvRouteError)
    if reason is None and code in CUT:
        kind = RouterUnreachable
    return kind(code, reason, message or code.name, retry_after_s, metadata)
