"""The one table from reasons of refusals to gRPC statuses, and a refusal as a Status message."""

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from router.request.refusal import Reason, Refusal

DOMAIN = "kvroute"
MESSAGE_BYTES_MAX = 1024
"""Bytes of a status message, at most. It travels twice in the trailers, once percent-encoded, and
gRPC drops trailers over 8 KiB together with the status in them."""

STATUS: dict[Reason, grpc.StatusCode] = {
    Reason.EMPTY_PROMPT: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.MALFORMED_PROMPT: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.PROMPT_TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.MALFORMED_BODY: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.TEMPLATE_REFUSED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.UNKNOWN_POLICY: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.MODEL_REQUIRED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.NO_TOKENIZER: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.UNSUPPORTED_CONTENT: grpc.StatusCode.UNIMPLEMENTED,
    Reason.POLICY_NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    Reason.UNKNOWN_WORKER: grpc.StatusCode.NOT_FOUND,
    Reason.UNKNOWN_SESSION: grpc.StatusCode.NOT_FOUND,
    Reason.NO_WORKER: grpc.StatusCode.UNAVAILABLE,
    Reason.NO_ELIGIBLE_WORKER: grpc.StatusCode.UNAVAILABLE,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.RENDERER_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.NO_BROKER: grpc.StatusCode.UNAVAILABLE,
    Reason.ALL_WORKERS_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TENANT_QUOTA: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUEUE_TIMEOUT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.WAIT_TOO_LONG: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.RENDER_QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_MANY_RESERVATIONS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.MESSAGE_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_MANY_BYTES: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_MANY_WATCHES: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.REQUEST_ID_REUSED: grpc.StatusCode.ALREADY_EXISTS,
    Reason.WORKER_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Reason.OVERTAKEN: grpc.StatusCode.ABORTED,
    Reason.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.KEY_LIMIT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}


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


def _shortened(message: str) -> str:
    encoded = message.encode()
    if len(encoded) <= MESSAGE_BYTES_MAX:
        return message
    return encoded[: MESSAGE_BYTES_MAX - 3].decode(errors="ignore") + "…"
