"""A client's HTTP request: path, headers, and the few fields of its body that routing needs.

Pure. The body is decoded once, without its messages. The client's own bytes go on to the engine,
with fields patched in front where the gateway needs them.

Law: a body without patched fields stays as it is, byte for byte.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from router.front.refusals import FrontRefusal, Shape

TEXT_MAX = 1024
"""Characters of a model, session, tenant or salt: the router's own bound."""
INT32_MAX = (1 << 31) - 1
EXPECTED_TOKENS_MAX = 1 << 20
"""A limit on the answer above this says nothing about its length."""
PRIORITY_OF_TIER = {"priority": 1, "flex": -1}
"""OpenAI's service_tier as the router's priority; other tiers have none."""


class Kind(StrEnum):
    """Which prompt a path's body has."""

    CHAT = "chat"
    COMPLETION = "completion"
    MESSAGES = "messages"
    RESPONSES = "responses"
    LOAD = "load"
    """No prompt that a router could tokenise: routed by load and length."""


PATHS: Mapping[str, Kind] = {
    "/v1/chat/completions": Kind.CHAT,
    "/v1/completions": Kind.COMPLETION,
    "/v1/messages": Kind.MESSAGES,
    "/v1/responses": Kind.RESPONSES,
    "/v1/messages/count_tokens": Kind.LOAD,
    "/v1/embeddings": Kind.LOAD,
    "/v1/score": Kind.LOAD,
    "/v1/rerank": Kind.LOAD,
    "/v2/rerank": Kind.LOAD,
    "/score": Kind.LOAD,
    "/rerank": Kind.LOAD,
    "/classify": Kind.LOAD,
    "/pooling": Kind.LOAD,
    "/tokenize": Kind.LOAD,
    "/detokenize": Kind.LOAD,
}
"""Paths that are forwarded to a worker, all of them POST."""

SESSION_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",  # Claude Code
    "session_id",  # Codex
    "session-id",  # Codex, later releases
    "x-session-affinity",  # OpenCode
    "x-opencode-session",  # OpenCode
    "x-session-token",
)
"""Headers that name a conversation; the first of them that is set counts."""
TENANT_HEADERS = (
    "x-tenant-id",
    "x-llm-d-inference-fairness-id",
    "x-gateway-inference-fairness-id",
)
PRIORITY_HEADERS = ("x-priority",)
_CLAUDE_SESSION = re.compile(r"_session_([0-9a-f-]{8,64})$")
"""The end of the metadata.user_id that Claude Code sends."""

Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Int32 = Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Metadata(msgspec.Struct):
    user_id: str | None = None


class _Body(msgspec.Struct):
    model: Text | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | UnsetType | None = UNSET
    user: str | None = None
    prompt_cache_key: str | None = None
    priority: Int32 | UnsetType | None = UNSET
    service_tier: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    max_output_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=4096)] | None = None
    cache_salt: Text | None = None
    previous_response_id: Text | None = None
    background: bool | None = None
    kv_transfer_params: Raw | UnsetType = UNSET
    input_ids: Raw | UnsetType = UNSET
    metadata: Raw = Raw(b"null")
    prompt: Raw = Raw(b"null")


_decoder = msgspec.json.Decoder(_Body)
_metadata = msgspec.json.Decoder(_Metadata | None)
_AT = re.compile(r" - at `\$\.?(.*)`$")


@dataclass(frozen=True, slots=True)
class Facts:
    """What routing needs to know of a request."""

    model: str
    is_stream: bool
    wants_usage: bool
    """The client requested the usage of a stream."""
    names_stream_options: bool
    names_priority: bool
    session_id: str
    tenant: str
    priority: int | None
    """The router's: higher is sooner."""
    output_tokens_max: int | None
    """Of all answers together; None: the client sets no bound."""
    cache_salt: str
    has_one_prompt: bool
    """False: a completion with a list of prompts, whose usage is that of all."""
    previous_response_id: str
    is_background: bool
    """A response that its engine goes on with after the answer."""
    names_tokens: bool
    """The body has fields of its own in which engines take tokens."""


def shape_of(kind: Kind) -> Shape:
    """The shape of a kind's errors."""
    return Shape.ANTHROPIC if kind is Kind.MESSAGES else Shape.OPENAI


def read(body: bytes, headers: Mapping[str, str], *, low_first: bool = False) -> Facts:
    """Reads a request; raises FrontRefusal for a body that is no JSON object, or a field of another
    type. headers: names in lower case. low_first: the body's priority is lower for sooner.
    """
    try:
        fields = _decoder.decode(body)
    except msgspec.ValidationError as error:
        where = _AT.search(str(error))
        sentence = _AT.sub("", str(error))
        param = where[1] if where and where[1] else None
        at = f"{param}: " if param else "the body: "
        raise FrontRefusal("INVALID_BODY", f"{at}{sentence}", param=param) from None
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise FrontRefusal("INVALID_BODY", f"the body is no JSON: {error}") from None
    options = fields.stream_options
    usage = isinstance(options, _StreamOptions) and bool(options.include_usage)
    return Facts(
        model=fields.model or "",
        is_stream=bool(fields.stream),
        wants_usage=usage,
        names_stream_options=options is not UNSET,
        names_priority=fields.priority is not UNSET,
        session_id=_session(fields, headers),
        tenant=(_header(headers, TENANT_HEADERS) or fields.user or "")[:TEXT_MAX],
        priority=_priority(fields, headers, low_first),
        output_tokens_max=_output_tokens_max(fields),
        cache_salt=fields.cache_salt or "",
        has_one_prompt=not _is_list_of_prompts(fields.prompt),
        previous_response_id=fields.previous_response_id or "",
        is_background=bool(fields.background),
        names_tokens=fields.kv_transfer_params is not UNSET or fields.input_ids is not UNSET,
    )


def patched(body: bytes, fields: Mapping[str, Any], *, absent: bool) -> bytes:
    """The body with these fields in the place of its own of the same names; UNSET takes one out.

    absent: the body has none of them, so that they are inserted behind its first brace and all else
    stays as it is; otherwise its top level is written again, with the values' own bytes.
    """
    if not fields:
        return body
    if absent:
        start = body.index(b"{") + 1
        rest = body[start:]
        separator = b"" if rest.lstrip()[:1] == b"}" else b","
        inserted = msgspec.json.encode(fields)[1:-1]
        return b"".join((body[:start], inserted, separator, rest))
    top: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Raw])
    top.update(fields)
    return msgspec.json.encode({name: value for name, value in top.items() if value is not UNSET})


def _session(fields: _Body, headers: Mapping[str, str]) -> str:
    name = _header(headers, SESSION_HEADERS) or fields.prompt_cache_key
    if not name and bytes(fields.metadata) != b"null":
        try:
            metadata = _metadata.decode(fields.metadata)
        except msgspec.DecodeError:  # metadata of other clients, which is theirs
            return ""
        ended = _CLAUDE_SESSION.search((metadata and metadata.user_id) or "")
        name = ended[1] if ended else ""
    return (name or "")[:TEXT_MAX]


def _priority(fields: _Body, headers: Mapping[str, str], low_first: bool) -> int | None:
    text = _header(headers, PRIORITY_HEADERS)
    if text:
        try:
            number = int(text[:32])
        except ValueError:
            number = INT32_MAX + 1
        if abs(number) > INT32_MAX:
            raise FrontRefusal("INVALID_BODY", "x-priority is no whole number of 32 bits")
        return number
    if isinstance(fields.priority, int):
        return -fields.priority if low_first else fields.priority
    return PRIORITY_OF_TIER.get(fields.service_tier or "")


def _output_tokens_max(fields: _Body) -> int | None:
    for most in (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens):
        if most is not None:
            tokens = most * (fields.n or 1)
            return tokens if tokens <= EXPECTED_TOKENS_MAX else None
    return None


def _is_list_of_prompts(prompt: Raw) -> bool:
    text = bytes(memoryview(prompt)[:64]).translate(None, b" \t\r\n")
    return text[:2] in (b'["', b"[[")


def _header(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    for name in names:
        if value := headers.get(name):
            return value
    return ""
