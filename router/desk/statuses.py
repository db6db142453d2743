"""The one table from reasons of refusals to gRPC statuses."""

import grpc

from router.request.refusal import Reason

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
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}
