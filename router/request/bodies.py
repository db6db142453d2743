"""Formats of HTTP request bodies. Each has a record (BodyFormat) with its paths, the fields that
routing reads, and how its prompt, its request to a worker and its answer are treated. Pure.

Gateway, picker, renderers, commands, metrics and pages iterate over FORMATS, and compare no
format's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Optional

from router.request.error_forms import ANTHROPIC, OPENAI, OPENAI_RESPONSES, ErrorForm


class Templated(Enum):
    """Kinds of bodies whose prompt the model's chat template writes. An engine's dialect
    (dialects/table.py) says how that engine turns such a body into the template's input."""

    CHAT = auto()
    MESSAGES = auto()
    RESPONSES = auto()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BodyFormat:
    """A format of HTTP request bodies. The defaults of the fields fit OpenAI's chats and
    completions."""

    name: str
    """The format's name in `kvroute render --kind`, in metrics, and at the beginning of a prompt's
    shape."""
    about: str
    """Phrase that describes a request of this format, for the documentation pages."""
    paths: tuple[str, ...] = ()
    """URL paths to which clients POST bodies of this format."""
    option: str = ""
    """Name of the body's field in RouteRequest and of the client's option for it. Empty: routers
    make no tokens of this format, and its requests are routed by load and estimated length."""
    text_of: Optional["BodyFormat"] = None
    """Format whose prompt the bytes are, as plain text; None: the bytes are a JSON object."""
    templated: Templated | None = None
    """How the chat template makes the prompt; None: the body has the prompt, as text or as tokens.
    """
    session_field: str = "prompt_cache_key"
    """Body field with the session id; `metadata`: an object whose user_id ends with the session id.
    """
    limit_fields: tuple[str, ...] = ("max_completion_tokens", "max_tokens")
    """Body fields that bound the answer's tokens; the first that is set counts."""
    is_continued: bool = False
    """Whether a request may continue an earlier answer, or be computed in the background. Both need
    the worker that stores the answer."""
    takes_priority: bool = True
    """Whether engines read a field `priority` of the body."""
    takes_tokens: bool = False
    """Whether engines accept the prompt's tokens in addition to the body."""
    may_pair: bool = True
    """Whether a prefill worker and a decode worker can share the request."""
    prefill_fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request to a prefill worker."""
    usage_is_option: bool = False
    """Whether a streamed answer reports usage only if stream_options.include_usage is set."""
    usage_begins: bool = False
    """Whether a streamed answer's first event has the count of prompt tokens, which the last event
    may lack."""
    usage_within: str = ""
    """First field of the answer's usage object, where long fields may follow that object; empty:
    the usage is at the answer's end."""
    first_token: tuple[bytes, ...] = ()
    """Byte strings of which a streamed event has one if it comes with or after the first token;
    empty: every event does."""
    finish_field: str = "finish_reason"
    """Answer's field that says why the answer ended; empty: no reason is read."""
    finish_words: tuple[str, ...] = ()
    """Words that are looked for in place of finish_field: reasons, statuses and item types of
    OpenAI's responses. The first of them that the answer has says why it ended."""
    errors: ErrorForm = OPENAI

    @property
    def render_path(self) -> str:
        """Path of vLLM's endpoint that gives the tokens of such a body."""
        return f"{self.paths[0]}/render"


CHAT = BodyFormat(
    name="chat",
    about="a chat, routed by its tokens",
    paths=("/v1/chat/completions",),
    option="chat_completion_body",
    templated=Templated.CHAT,
    takes_tokens=True,
    usage_is_option=True,
)
COMPLETION = BodyFormat(
    name="completion",
    about="a completion, routed by its tokens",
    paths=("/v1/completions",),
    option="completion_body",
    usage_is_option=True,
)
MESSAGES = BodyFormat(
    name="messages",
    about="Anthropic's messages, routed by their tokens",
    paths=("/v1/messages",),
    option="messages_body",
    templated=Templated.MESSAGES,
    session_field="metadata",
    takes_priority=False,
    usage_begins=True,
    # message_start may come before the prompt's end.
    first_token=(b"content_block", b"message_delta"),
    finish_field="stop_reason",
    errors=ANTHROPIC,
)
TEXT = BodyFormat(name="text", about="a completion's prompt", option="text", text_of=COMPLETION)
RESPONSES = BodyFormat(
    name="responses",
    about="OpenAI's responses, routed by their tokens, or to the worker of `previous_response_id`",
    paths=("/v1/responses",),
    option="responses_body",
    templated=Templated.RESPONSES,
    limit_fields=("max_output_tokens",),
    is_continued=True,
    prefill_fields={"max_output_tokens": 1, "store": False},
    usage_within="input_tokens",  # SGLang has tools and instructions after it
    # response.created and response.in_progress may come before the prompt's end.
    first_token=(b".delta\n", b"response.output_item", b"response.completed"),
    finish_field="",
    finish_words=(
        "failed",
        "cancelled",
        "max_output_tokens",
        "content_filter",
        "function_call",
        "custom_tool_call",
        "completed",
    ),
    errors=OPENAI_RESPONSES,
)
LOAD = BodyFormat(
    name="load",
    about="routed by load",
    paths=(
        "/v1/messages/count_tokens", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank",
        "/score", "/rerank", "/classify", "/pooling", "/tokenize", "/detokenize",
    ),
    takes_priority=False,
    may_pair=False,
    finish_field="",
)  # fmt: skip

FORMATS = (CHAT, COMPLETION, MESSAGES, RESPONSES, TEXT, LOAD)
PATHS = {path: body for body in FORMATS for path in body.paths}
"""Paths of requests that are forwarded to a worker, all of them POST."""
WITH_TOKENS = {body.option: body for body in FORMATS if body.option}
"""Formats of which routers make tokens, by the name of their field in RouteRequest."""
BY_NAME = {body.name: body for body in FORMATS}


def errors_on(path: str) -> ErrorForm:
    """Form of the errors that are answered on an HTTP path; OpenAI's for an unknown path."""
    body = PATHS.get(path)
    return OPENAI if body is None else body.errors
