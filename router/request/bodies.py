"""Formats of HTTP bodies, a record each: paths, fields that routing reads, the prompt's tokens, the
request to a worker, its answer. Pure.

Gateway, picker, renderers, commands, metrics and pages walk FORMATS, and compare no format's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Optional

from router.request.error_forms import ANTHROPIC, OPENAI, OPENAI_RESPONSES, ErrorForm


class Templated(Enum):
    """A form of bodies whose prompt the model's chat template writes; each engine's dialect treats
    it in its own way (dialects/table.py)."""

    CHAT = auto()
    MESSAGES = auto()
    RESPONSES = auto()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BodyFormat:
    """A format of HTTP bodies. The defaults are those of OpenAI's API."""

    name: str
    """The format's name in `kvroute render --kind`, in metrics, and at the beginning of a prompt's
    shape."""
    about: str
    """A request of it, for the pages."""
    paths: tuple[str, ...] = ()
    """Paths of its POST requests."""
    option: str = ""
    """The prompt's field in RouteRequest, and the client's option; empty: routers make no tokens of
    it, and requests go by load and estimated length."""
    text_of: Optional["BodyFormat"] = None
    """The bytes are a text, the prompt of that format; None: they are a JSON object."""
    templated: Templated | None = None
    """None: the body has the prompt, as text or as tokens."""
    session_field: str = "prompt_cache_key"
    """The session's name, or metadata whose user_id ends in one."""
    limit_fields: tuple[str, ...] = ("max_completion_tokens", "max_tokens")
    """Bounds on the answer's tokens; the first that is set counts."""
    is_continued: bool = False
    """A request may go on from an earlier answer, or after its own: both need a certain worker."""
    takes_priority: bool = True
    """Engines have a field `priority` in it."""
    takes_tokens: bool = False
    """Engines take the prompt's tokens beside it."""
    may_pair: bool = True
    """A prefill worker and a decode worker can share the request."""
    prefill_fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request to a prefill worker."""
    usage_is_option: bool = False
    """A stream has its usage only if stream_options.include_usage asks for it."""
    usage_begins: bool = False
    """A stream's first event has the prompt's tokens, and its last one may lack them."""
    usage_within: str = ""
    """First field of the usage, where fields of any length may follow it in an answer; empty: it
    stands at the answer's end."""
    first_token: tuple[bytes, ...] = ()
    """Words of a stream's events that a first token brings; none: every event does."""
    finish_field: str = "finish_reason"
    """Field that says why the answer ended; empty: none is read."""
    finish_words: tuple[str, ...] = ()
    """Instead of that field: words of an answer in OpenAI's responses, where they stand as its
    reason, its status or an item's type; the first of them that it has says why it ended."""
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
"""Formats of which routers make tokens, by their option of a route."""
BY_NAME = {body.name: body for body in FORMATS}


def errors_on(path: str) -> ErrorForm:
    """Form of errors on a path; OpenAI's for a path of no format."""
    body = PATHS.get(path)
    return OPENAI if body is None else body.errors
