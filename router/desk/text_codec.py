"""Between the wire and prompts without tokens: a request's text out, its tokens or estimate in."""

from dataclasses import dataclass

from google.protobuf.message import DecodeError
from xxhash import xxh3_64_intdigest

from kvroute.v1 import router_pb2
from router.desk.answer_codec import framed
from router.desk.request_codec import ASIDE_BYTES_MAX, FIELDS_MAX, TEXT_MAX
from router.prompts.prompts import BYTES_A_TOKEN, MadeBy, PromptTokens, Source
from router.prompts.settings import PromptKind
from router.request.refusal import Reason, Refusal
from router.wire.received import TooMuch, take_apart

TEXT_BYTES_MAX = 32 << 20
"""Of a prompt without tokens."""
_BLOCKS = 1 << 30
"""Block sizes among which those of estimates lie, above every length of a prompt."""

_KINDS = {
    router_pb2.RouteRequest.TEXT_FIELD_NUMBER: PromptKind.TEXT,
    router_pb2.RouteRequest.CHAT_COMPLETION_BODY_FIELD_NUMBER: PromptKind.CHAT,
    router_pb2.RouteRequest.COMPLETION_BODY_FIELD_NUMBER: PromptKind.COMPLETION,
    router_pb2.RouteRequest.MESSAGES_BODY_FIELD_NUMBER: PromptKind.MESSAGES,
}
_MADE_BY = {
    MadeBy.LOCAL: router_pb2.PROMPT_SOURCE_LOCAL,
    MadeBy.ENGINE: router_pb2.PROMPT_SOURCE_ENGINE,
    MadeBy.ESTIMATE: router_pb2.PROMPT_SOURCE_ESTIMATE,
}
_TOKENS = router_pb2.RouteRequest.TOKEN_BYTES_FIELD_NUMBER


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A request whose prompt has no tokens."""

    message: router_pb2.RouteRequest
    """What is beside the prompt, and is no matter of tokens."""
    kind: PromptKind
    content: bytes
    returns_tokens: bool = False
    require: bool = False
    source: Source | None = None
    """In the place of the configured one."""


def read_text(content: bytes) -> TextPrompt:
    """A RouteRequest whose prompt is a text or a body; raises Refusal."""
    try:
        rest, form, text, _, _ = take_apart(content, FIELDS_MAX, ASIDE_BYTES_MAX, 0)
        message = router_pb2.RouteRequest.FromString(rest)
    except TooMuch as error:
        raise Refusal(
            Reason.INVALID_FIELD, f"the request has too many {error.what} beside its prompt"
        ) from None
    except (ValueError, DecodeError) as error:
        raise Refusal(Reason.INVALID_FIELD, f"no RouteRequest: {error}") from None
    if len(message.model) > TEXT_MAX:
        raise Refusal(Reason.INVALID_FIELD, f"model is longer than {TEXT_MAX} characters")
    check_text(text)
    returns_tokens, require = message.return_tokens, message.require_tokens
    message.ClearField("return_tokens")
    message.ClearField("require_tokens")
    return TextPrompt(message, _KINDS[form], text, returns_tokens, require)


def text_prompt(
    message: router_pb2.RouteRequest, field: str, content: str | bytes, source: Source | None
) -> TextPrompt:
    """A prompt whose tokens are wanted, and nothing else; raises Refusal. field: the one of
    RouteRequest that would hold it; source: in the place of the configured one."""
    if len(message.model) > TEXT_MAX:
        raise Refusal(Reason.INVALID_FIELD, f"model is longer than {TEXT_MAX} characters")
    text = content.encode() if isinstance(content, str) else content
    check_text(text)
    kind = _KINDS[router_pb2.RouteRequest.DESCRIPTOR.fields_by_name[field].number]
    return TextPrompt(message, kind, text, returns_tokens=True, require=True, source=source)


def check_text(text: bytes) -> None:
    """Raises Refusal for a text that is empty or too long."""
    if not text:
        raise Refusal(Reason.EMPTY_PROMPT, "the prompt's text or body is empty")
    if len(text) > TEXT_BYTES_MAX:
        raise Refusal(
            Reason.MESSAGE_TOO_LARGE,
            f"the prompt's text or body has {len(text)} bytes, the limit is {TEXT_BYTES_MAX}",
            metadata={"limit_bytes": str(TEXT_BYTES_MAX)},
        )


def with_tokens(text: TextPrompt, made: PromptTokens) -> bytes:
    """The request with tokens in the place of the text.

    An estimate is a prompt of which no block is known: block hashes of a block that is longer than
    the prompt, so that there are none, and so large that no worker has such blocks. Its size tells
    one text from another, as tokens do, for the answer to a repeated request id.
    """
    message = text.message
    if made.made_by is MadeBy.ESTIMATE:
        size = _BLOCKS + xxh3_64_intdigest(text.content) % (_BLOCKS - 1)
        hashes = router_pb2.BlockHashes(block_size=size, prompt_tokens=made.count)
        charged = max(made.count, len(text.content) // BYTES_A_TOKEN)
        about = router_pb2.RouteRequest(
            block_hashes=hashes, charged_tokens=charged
        ).SerializeToString()
        return message.SerializeToString() + about
    if made.items and not message.multimodal_items:
        message.multimodal_items.extend(
            router_pb2.MultimodalItem(
                id=item.id, first_token=item.first_token, token_count=item.token_count
            )
            for item in made.items
        )
    return message.SerializeToString() + framed(_TOKENS, made.token_bytes)


def answered(made: PromptTokens, text: TextPrompt) -> bytes:
    """What is added to a RouteResponse: a field at the end of a message is read like one in its
    place."""
    written = write_prompt(made, returns_tokens=text.returns_tokens)
    return router_pb2.RouteResponse(prompt=written).SerializeToString()


def explained(made: PromptTokens, text: TextPrompt) -> bytes:
    """What is added to an Explanation."""
    written = write_prompt(made, returns_tokens=text.returns_tokens)
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
