"""Reasons for which a request gets no worker. Pure.

Their gRPC statuses: router/api/desk/statuses.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """The value of google.rpc.ErrorInfo.reason, and the metric label."""

    EMPTY_PROMPT = "EMPTY_PROMPT"
    MALFORMED_PROMPT = "MALFORMED_PROMPT"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    MALFORMED_BODY = "MALFORMED_BODY"
    TEMPLATE_REFUSED = "TEMPLATE_REFUSED"
    NO_TOKENIZER = "NO_TOKENIZER"
    UNSUPPORTED_CONTENT = "UNSUPPORTED_CONTENT"
    RENDERER_UNAVAILABLE = "RENDERER_UNAVAILABLE"
    RENDER_QUEUE_FULL = "RENDER_QUEUE_FULL"
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
    QUEUE_FULL = "QUEUE_FULL"
    TENANT_QUOTA = "TENANT_QUOTA"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    WAIT_TOO_LONG = "WAIT_TOO_LONG"
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
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    KEY_LIMIT = "KEY_LIMIT"
    INTERNAL = "INTERNAL"


@dataclass(eq=False)
class Refusal(Exception):
    """A request that gets no worker: an answer, not a fault of ours."""

    reason: Reason
    message: str
    """A sentence for a person."""
    retry_after_s: float | None = None
    metadata: dict[str, str] = field(default_factory=dict)

    def copy(self) -> "Refusal":
        """The same answer, without the frames that this one was raised through. What keeps a
        refusal keeps such a one: frames refer to the request, and a request that keeps its refusal
        would be a cycle, which the collector comes to hours later (router/app/cli/run.py)."""
        return Refusal(self.reason, self.message, self.retry_after_s, self.metadata)


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
    """The policy that the request named."""
    prompt_tokens: int = 0
    """0: it had no prompt, or one that can't be read."""
    output_tokens: int | None = None
    """Output tokens that the request expected."""
    entries: Mapping[str, int] = field(default_factory=dict)
    """How many entries its lists and maps had, by the contract's names; empty ones left out."""
    waited_s: float = 0.0
    """Seconds in the router's queue; 0: it did not wait."""
