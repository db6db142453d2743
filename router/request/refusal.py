"""The table of reasons why a request gets no worker. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """A reason for a refusal, with its gRPC and HTTP status and its meaning. Its value is the text
    of google.rpc.ErrorInfo.reason, and of a metric's label."""

    grpc_status: str
    """Name of a grpc.StatusCode."""
    http_status: int
    meaning: str
    """Sentences for docs/reference-statuses.md: what it means, and what a caller can do."""

    def __new__(cls, value: str, grpc_status: str, http_status: int, meaning: str) -> "Reason":
        reason = str.__new__(cls, value)
        reason._value_ = value
        reason.grpc_status = grpc_status
        reason.http_status = http_status
        reason.meaning = meaning
        return reason

    # fmt: off
    EMPTY_PROMPT = (
        "EMPTY_PROMPT", "INVALID_ARGUMENT", 400,
        "The request has no prompt, or hashes without the prompt's length.",
    )
    MALFORMED_PROMPT = (
        "MALFORMED_PROMPT", "INVALID_ARGUMENT", 400,
        "The prompt's bytes can't be tokens or hashes.",
    )
    PROMPT_TOO_LONG = (
        "PROMPT_TOO_LONG", "INVALID_ARGUMENT", 400,
        "The prompt is over `routing.prompt_tokens_max`, or over the context of every worker that "
        "may take it.",
    )
    MALFORMED_BODY = (
        "MALFORMED_BODY", "INVALID_ARGUMENT", 400,
        "The request's prompt is a body that is no JSON, or none that an engine would take.",
    )
    TEMPLATE_REFUSED = (
        "TEMPLATE_REFUSED", "INVALID_ARGUMENT", 400,
        "The model's chat template refuses the messages; the message has the template's own "
        "sentence.",
    )
    NO_TOKENIZER = (
        "NO_TOKENIZER", "FAILED_PRECONDITION", 503,
        "The router can't make tokens for the model, and `require_tokens` is set. Configure "
        "`models: prompts`, or send tokens.",
    )
    UNSUPPORTED_CONTENT = (
        "UNSUPPORTED_CONTENT", "UNIMPLEMENTED", 400,
        "The body has content whose tokens only an engine knows, such as an image, and "
        "`require_tokens` is set.",
    )
    RENDERER_UNAVAILABLE = (
        "RENDERER_UNAVAILABLE", "UNAVAILABLE", 503,
        "The prompt's tokens can't be made now, in the router or at an engine, and "
        "`require_tokens` is set. Try again.",
    )
    RENDER_QUEUE_FULL = (
        "RENDER_QUEUE_FULL", "RESOURCE_EXHAUSTED", 429,
        "Too many prompts wait for their tokens. Raise `prompts.processes`, or send tokens.",
    )
    INVALID_FIELD = (
        "INVALID_FIELD", "INVALID_ARGUMENT", 400,
        "A field of the request is out of its bounds; the message names the field and the bound.",
    )
    UNKNOWN_POLICY = (
        "UNKNOWN_POLICY", "INVALID_ARGUMENT", 400,
        "The request names a policy that the router doesn't have; the message lists those that it "
        "has.",
    )
    MODEL_REQUIRED = (
        "MODEL_REQUIRED", "INVALID_ARGUMENT", 400,
        "The fleet serves several models, and the request names none.",
    )
    POLICY_NOT_ALLOWED = (
        "POLICY_NOT_ALLOWED", "PERMISSION_DENIED", 403,
        "The request names a policy, and `routing.policy_per_request` is false.",
    )
    UNKNOWN_MODEL = (
        "UNKNOWN_MODEL", "NOT_FOUND", 404,
        "No worker serves the model, it is in no configuration, and none has served it for 300 s.",
    )
    UNKNOWN_WORKER = (
        "UNKNOWN_WORKER", "NOT_FOUND", 404,
        "A command names a worker that the router doesn't know.",
    )
    UNKNOWN_SESSION = (
        "UNKNOWN_SESSION", "NOT_FOUND", 404,
        "A request without a prompt names a session that no worker holds any more. Send the "
        "prompt.",
    )
    NO_WORKER = (
        "NO_WORKER", "UNAVAILABLE", 503,
        "No worker of the model is live; before the router is ready, of any model.",
    )
    NO_ELIGIBLE_WORKER = (
        "NO_ELIGIBLE_WORKER", "UNAVAILABLE", 503,
        "Workers are live, but each is excluded: drained, of another label or role, or not "
        "allowed. The message counts the reasons.",
    )
    DRAINING = (
        "DRAINING", "UNAVAILABLE", 503,
        "This router is stopping. Send the request to another router.",
    )
    ALL_WORKERS_FULL = (
        "ALL_WORKERS_FULL", "RESOURCE_EXHAUSTED", 429,
        "Every worker that may take the request is full, and the request doesn't wait.",
    )
    QUEUE_FULL = (
        "QUEUE_FULL", "RESOURCE_EXHAUSTED", 429,
        "The queue has reached a bound (`queue.*`, named in the metadata), or a request of a "
        "higher priority took the place.",
    )
    TENANT_QUOTA = (
        "TENANT_QUOTA", "RESOURCE_EXHAUSTED", 429,
        "The request's tenant is at its quota (`queue.tenants`).",
    )
    QUEUE_TIMEOUT = (
        "QUEUE_TIMEOUT", "RESOURCE_EXHAUSTED", 429,
        "The request waited in the queue for as long as it may.",
    )
    WAIT_TOO_LONG = (
        "WAIT_TOO_LONG", "RESOURCE_EXHAUSTED", 429,
        "The request would wait longer than it may, so it is refused at once "
        "(`queue.early_refusal`).",
    )
    TOO_MANY_RESERVATIONS = (
        "TOO_MANY_RESERVATIONS", "RESOURCE_EXHAUSTED", 429,
        "The router is at `routing.reservations_max`. Report the ends of requests.",
    )
    REQUEST_ID_REUSED = (
        "REQUEST_ID_REUSED", "ALREADY_EXISTS", 409,
        "The request id was used with another prompt, model or phase.",
    )
    WORKER_EXISTS = (
        "WORKER_EXISTS", "ALREADY_EXISTS", 409,
        "RegisterWorker names a worker whose relay runs already.",
    )
    MESSAGE_TOO_LARGE = (
        "MESSAGE_TOO_LARGE", "RESOURCE_EXHAUSTED", 413,
        "The message is over its bound (`limit_bytes` in the metadata).",
    )
    TOO_MANY_BYTES = (
        "TOO_MANY_BYTES", "RESOURCE_EXHAUSTED", 429,
        "Messages that are being handled hold 128 MiB, the bound; at the gateway, bodies hold "
        "`requests.bodies_mib_max`.",
    )
    TOO_MANY_WATCHES = (
        "TOO_MANY_WATCHES", "RESOURCE_EXHAUSTED", 429,
        "As many WatchWorkers calls are open as the router takes (1,000).",
    )
    DEADLINE_EXCEEDED = (
        "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", 504,
        "The request's time was over before its answer.",
    )
    CANCELLED = (
        "CANCELLED", "CANCELLED", 503,
        "The caller left before the answer, or another call ended the request's wait by its id.",
    )
    NO_BROKER = (
        "NO_BROKER", "UNAVAILABLE", 503,
        "NATS is away. A command took effect on this router alone, or can't take effect: the "
        "message says which.",
    )
    OVERTAKEN = (
        "OVERTAKEN", "ABORTED", 409,
        "Another replica gave a newer command for the worker at the same moment.",
    )
    UNAUTHENTICATED = (
        "UNAUTHENTICATED", "UNAUTHENTICATED", 401,
        "The call has no valid key or certificate.",
    )
    PERMISSION_DENIED = (
        "PERMISSION_DENIED", "PERMISSION_DENIED", 403,
        "The key lacks the right to the method, the model, the tenant or the worker.",
    )
    KEY_LIMIT = (
        "KEY_LIMIT", "RESOURCE_EXHAUSTED", 429,
        "The key is at one of its limits (requests, reservations, streams or bytes; named in the "
        "metadata).",
    )
    INTERNAL = (
        "INTERNAL", "INTERNAL", 500,
        "A fault of the router, in its log. It ends one request and reserves nothing.",
    )
    # fmt: on


@dataclass(eq=False)
class Refusal(Exception):
    """A request gets no worker: an answer to its caller, not a fault of the router."""

    reason: Reason
    message: str
    """A sentence for a person."""
    retry_after_s: float | None = None
    metadata: dict[str, str] = field(default_factory=dict)

    def copy(self) -> "Refusal":
        """The same refusal without its traceback, for an owner that stores it: frames refer to the
        request, and a request that stores its refusal would be in a cycle, which the garbage
        collector frees hours later (router/app/cli/run.py).
        """
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
    """Number of entries of each list and map of the request that is not empty, by field name."""
    waited_s: float = 0.0
    """Seconds in the router's queue; 0: it did not wait."""
