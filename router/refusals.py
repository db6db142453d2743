"""Why a request gets no worker, and the one table from reasons to gRPC statuses."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:  # whose parts raise refusals
    from router.decision import Decision


class Reason(StrEnum):
    """What google.rpc.ErrorInfo.reason says, and the metric label."""

    EMPTY_PROMPT = "EMPTY_PROMPT"
    MALFORMED_PROMPT = "MALFORMED_PROMPT"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    INVALID_FIELD = "INVALID_FIELD"
    UNKNOWN_POLICY = "UNKNOWN_POLICY"
    MODEL_REQUIRED = "MODEL_REQUIRED"
    POLICY_NOT_ALLOWED = "POLICY_NOT_ALLOWED"
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    UNKNOWN_WORKER = "UNKNOWN_WORKER"
    UNKNOWN_SESSION = "UNKNOWN_SESSION"
    NO_WORKER = "NO_WORKER"
    NO_ELIGIBLE_WORKER = "NO_ELIGIBLE_WORKER"
    DRAINING = "DRAINING"
    ALL_WORKERS_FULL = "ALL_WORKERS_FULL"
    TOO_MANY_RESERVATIONS = "TOO_MANY_RESERVATIONS"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    WORKER_EXISTS = "WORKER_EXISTS"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    TOO_MANY_BYTES = "TOO_MANY_BYTES"
    TOO_MANY_WATCHES = "TOO_MANY_WATCHES"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    NO_BROKER = "NO_BROKER"
    OVERTAKEN = "OVERTAKEN"
    INTERNAL = "INTERNAL"


STATUS: dict[Reason, grpc.StatusCode] = {
    Reason.EMPTY_PROMPT: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.MALFORMED_PROMPT: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.PROMPT_TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.UNKNOWN_POLICY: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.MODEL_REQUIRED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.POLICY_NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    Reason.UNKNOWN_WORKER: grpc.StatusCode.NOT_FOUND,
    Reason.UNKNOWN_SESSION: grpc.StatusCode.NOT_FOUND,
    Reason.NO_WORKER: grpc.StatusCode.UNAVAILABLE,
    Reason.NO_ELIGIBLE_WORKER: grpc.StatusCode.UNAVAILABLE,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.NO_BROKER: grpc.StatusCode.UNAVAILABLE,
    Reason.ALL_WORKERS_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_MANY_RESERVATIONS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.MESSAGE_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_MANY_BYTES: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_MANY_WATCHES: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.REQUEST_ID_REUSED: grpc.StatusCode.ALREADY_EXISTS,
    Reason.WORKER_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Reason.OVERTAKEN: grpc.StatusCode.ABORTED,
    Reason.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}


@dataclass(eq=False)
class Refusal(Exception):
    """A request that gets no worker: an answer, not a fault of ours."""

    reason: Reason
    message: str
    """One sentence for a person."""
    retry_after_s: float | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    decision: "Decision | None" = None
    """What was weighed, where it came so far."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that got no worker, without its prompt."""

    refusal: Refusal
    at_s: float
    """Unix time."""
    request_id: str = ""
    model: str = ""
    role: str = ""
    policy: str = ""
    """The one that it named."""
    prompt_tokens: int = 0
    """0: it had no prompt, or one that can't be read."""
    output_tokens: int | None = None
    """That it expected."""
    required_labels: int = 0
    """How many it named, as with the next two."""
    allowed_workers: int = 0
    excluded_workers: int = 0
