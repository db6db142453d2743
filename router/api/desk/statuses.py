"""Writes a refusal as a google.rpc.Status, the message in which gRPC carries an error."""

import grpc
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from router.request.refusal import Reason, Refusal

DOMAIN = "kvroute"
MESSAGE_BYTES_MAX = 1024
"""Bytes of a status message, at most. It travels twice in the trailers, once percent-encoded, and
gRPC drops trailers over 8 KiB together with the status in them."""

STATUS = {reason: grpc.StatusCode[reason.grpc_status] for reason in Reason}


def write_status(refusal: Refusal) -> Status:
    """A refusal as a google.rpc.Status with details: ErrorInfo always, RetryInfo if a retry may
    help."""
    code, _ = STATUS[refusal.reason].value
    status = Status(code=code, message=_shortened(refusal.message))
    info = ErrorInfo(reason=refusal.reason, domain=DOMAIN, metadata=refusal.metadata)
    status.details.add().Pack(info)
    if refusal.retry_after_s is not None:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(round(refusal.retry_after_s * 1000))
        status.details.add().Pack(retry)
    return status


def _shortened(message: str) -> str:
    encoded = message.encode()
    if len(encoded) <= MESSAGE_BYTES_MAX:
        return message
    return encoded[: MESSAGE_BYTES_MAX - 3].decode(errors="ignore") + "…"
