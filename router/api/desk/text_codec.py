"""Requests whose prompt is a text or an HTTP body: reads them, adds the prompt's tokens or their
estimated number, and writes for answers how these were made."""

from kvroute.v1 import router_pb2
from router.api.desk import request_codec
from router.api.desk.request_codec import TEXT_MAX, RouteMessage
from router.api.desk.tenant import Caller
from router.request.bodies import WITH_TOKENS
from router.request.refusal import Reason, Refusal
from router.request.tokens import BYTES_A_TOKEN, MadeBy, PromptTokens
from router.request.wire.received import ReceivedRequest

TEXT_BYTES_MAX = 32 << 20
"""Bytes of a prompt that is a text or a body, at most."""

KINDS = {
    router_pb2.RouteRequest.DESCRIPTOR.fields_by_name[option].number: kind
    for option, kind in WITH_TOKENS.items()
}
"""Formats of prompts without tokens, by the number of the prompt's field in RouteRequest."""
_MADE_BY = {
    MadeBy.LOCAL: router_pb2.PROMPT_SOURCE_LOCAL,
    MadeBy.ENGINE: router_pb2.PROMPT_SOURCE_ENGINE,
    MadeBy.ESTIMATE: router_pb2.PROMPT_SOURCE_ESTIMATE,
}


def read_text(content: RouteMessage, caller: Caller) -> ReceivedRequest:
    """Reads a RouteRequest whose prompt is a text or a body; raises Refusal, also for an empty or
    too long prompt, and for a model that the caller may not use."""
    request = request_codec.receive(content, 0)
    if len(request.model) > TEXT_MAX:
        raise Refusal(Reason.INVALID_FIELD, f"model is longer than {TEXT_MAX} characters")
    if not request.data:
        raise Refusal(Reason.EMPTY_PROMPT, "the prompt's text or body is empty")
    if len(request.data) > TEXT_BYTES_MAX:
        raise Refusal(
            Reason.MESSAGE_TOO_LARGE,
            f"the prompt's text or body has {len(request.data)} bytes, the limit is"
            f" {TEXT_BYTES_MAX}",
            metadata={"limit_bytes": str(TEXT_BYTES_MAX)},
        )
    if caller.usage is not None:
        caller.usage.identity.check_model(request.model)
    return request


def put_tokens(request: ReceivedRequest, made: PromptTokens) -> None:
    """Puts the tokens of a request's text or body, or their estimated number, into the request."""
    earlier: PromptTokens | None = request.made
    request.size += len(made.token_bytes) - (0 if earlier is None else len(earlier.token_bytes))
    request.made, request.prompt_tokens = made, made.count
    if made.made_by is MadeBy.ESTIMATE:
        request.charged_tokens = max(made.count, len(request.data) // BYTES_A_TOKEN)


def answered(made: PromptTokens, request: ReceivedRequest) -> bytes:
    """The bytes that add the field `prompt` to a RouteResponse: protobuf reads fields in
    any order."""
    written = write_prompt(made, returns_tokens=request.return_tokens)
    return router_pb2.RouteResponse(prompt=written).SerializeToString()


def explained(made: PromptTokens, request: ReceivedRequest) -> bytes:
    """The bytes that add the field `prompt` to an Explanation."""
    written = write_prompt(made, returns_tokens=request.return_tokens)
    return router_pb2.Explanation(prompt=written).SerializeToString()


def write_prompt(made: PromptTokens, *, returns_tokens: bool) -> router_pb2.PromptTokens:
    return router_pb2.PromptTokens(
        count=made.count,
        token_bytes=made.token_bytes if returns_tokens else b"",
        source=_MADE_BY[made.made_by],
        verified=made.verified,
        tokenizer_digest=made.digest,
        shape=made.shape,
        estimate_reason=made.reason,
    )
