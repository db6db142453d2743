"""A client's HTTP request: path, headers, and the few fields of its body that routing needs.

Pure. The body is decoded once, without its messages. The client's own bytes go on to the engine;
fields that the gateway sets are inserted at the body's beginning.

Laws:
- a body without inserted fields stays as it is, byte for byte, but for a byte order mark;
- no request is refused for a field that only helps routing: an unreadable value counts as the
  default, and goes on to the engine. Only fields that a key's rights limit must be readable.
"""

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from router.gateway import engine_plane
from router.gateway.lenient import flag, text, whole
from router.gateway.refusals import GatewayRefusal
from router.gateway.top_level import decoded, span
from router.request.bodies import FORMATS, BodyFormat

TEXT_MAX = 1024
"""Most characters of a model, session, tenant or salt: the router's own bound."""
INT32_MAX = (1 << 31) - 1
EXPECTED_TOKENS_MAX = 1 << 20
"""Largest max_tokens that is used to expect an answer's length; a larger one counts as none."""
ANSWERS_MAX = 4096
"""Most answers of one request (`n`); a larger number counts as 1, and the engine may refuse it."""
ASIDE_BYTES_MAX = 1 << 16
"""Most bytes of a field beside the prompt that is parsed; a longer one counts as unreadable."""
PRIORITY_OF_TIER = {"priority": 1, "flex": -1}
"""OpenAI's service_tier as the router's priority; other tiers have none."""
BOM = b"\xef\xbb\xbf"
"""A byte order mark, with which some clients begin UTF-8; it is removed."""


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
TTFT_SLO_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
"""Headers with the client's objective for the time to the first token, in milliseconds."""
TPOT_SLO_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
"""Headers with the client's objective for the mean time between tokens, in milliseconds."""
_SLO_MAX = (1 << 32) - 1
_CLAUDE_SESSION = re.compile(r"_session_([0-9a-f-]{8,64})$")
"""The end of the metadata.user_id that Claude Code sends."""

_NULL = Raw(b"null")
_Known = Raw | UnsetType


class _Body(msgspec.Struct):
    """Fields of every format's body, as the bytes of JSON that the client wrote."""

    model: Raw = _NULL
    stream: Raw = _NULL
    stream_options: _Known = UNSET
    user: Raw = _NULL
    priority: _Known = UNSET
    service_tier: Raw = _NULL
    n: Raw = _NULL
    cache_salt: _Known = UNSET
    previous_response_id: Raw = _NULL
    background: Raw = _NULL
    input_ids: _Known = UNSET
    prompt: Raw = _NULL
    lora_path: Raw = _NULL
    vllm_xargs: Raw = _NULL


_of_formats = {name for each in FORMATS for name in (each.session_field, *each.limit_fields)}
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    msgspec.defstruct(
        "_Fields",
        [
            *((name, Raw, _NULL) for name in sorted(_of_formats)),
            *((name, _Known, UNSET) for name in engine_plane.FIELDS),
        ],
        bases=(_Body,),
    )
)


class _Metadata(msgspec.Struct):
    user_id: str | None = None


_metadata = msgspec.json.Decoder(_Metadata | None)
_object = msgspec.json.Decoder(dict[str, Raw])
_adapters = msgspec.json.Decoder(str | list[str | None] | None)


class Facts:
    """The fields of a request that routing needs."""

    def __init__(
        self, body: bytes, headers: Mapping[str, str], kind: BodyFormat, *, low_first: bool = False
    ) -> None:
        """headers: names in lower case. kind: the body's format. low_first: a lower `priority` in
        the body goes first. Raises GatewayRefusal for a body that is no JSON object, or a model
        that is no text.
        """
        fields, within = decoded(_decoder, body)
        self.spans = _spans(fields, within)
        """Field that a gateway may replace -> start and end of its value in the body's bytes."""
        self.is_readable = within is body
        """False: routers can't read the body, though engines can: it has NaN or Infinity."""
        if not self.is_readable:
            _read_again(fields, within, body)
        self.model = _model(fields.model)
        self.is_stream = flag(fields.stream) or False
        self.stream_options, self.wants_usage = _stream_options(fields.stream_options)
        """stream_options: the client's; None: they can't be read, and stay as they are.
        wants_usage: whether they request a stream's usage."""
        self.names_stream_options = fields.stream_options is not UNSET
        self.names_priority = fields.priority is not UNSET
        self.names_salt = fields.cache_salt is not UNSET
        self.session_id = _session(getattr(fields, kind.session_field), headers)
        tenant = first_header(headers, TENANT_HEADERS) or _aside_text(fields.user)
        self.tenant = tenant[:TEXT_MAX]
        self.priority = _priority(fields, headers, low_first)
        """Priority for routers, a higher one goes first; None: the client sets none."""
        self.ttft_slo_ms = _slo_ms(headers, TTFT_SLO_HEADERS)
        self.tpot_slo_ms = _slo_ms(headers, TPOT_SLO_HEADERS) or None
        self.output_tokens_max = _output_tokens_max(fields, kind.limit_fields)
        """Tokens of all answers together, at most; None: the client sets no bound."""
        self.cache_salt = _salt(fields.cache_salt)
        self.has_one_prompt = not _is_list_of_prompts(fields.prompt)
        """False: a completion with a list of prompts, whose usage is the sum over all of them."""
        self.previous_response_id = ""
        self.is_background = False
        """Whether the engine computes the response after its HTTP answer (`background`)."""
        if kind.is_continued:
            self.previous_response_id = _text_of(fields.previous_response_id)
            self.is_background = flag(fields.background) or False
        unnamed = fields.kv_transfer_params is UNSET and fields.input_ids is UNSET
        self.names_tokens = not unnamed
        """Whether the body itself sets a field in which engines take tokens."""
        self.adapters = _adapters_of(fields.lora_path)
        """LoRA adapters named in engine_plane.ADAPTER; "" among them: the field can't be read."""
        self.of_plane = _of_plane(fields)
        """Names of the body's fields that belong to the engine plane, see engine_plane.py."""


def _spans(fields: _Body, within: bytes) -> dict[str, tuple[int, int]]:
    return {
        name: span(value, within)
        for name in ("priority", "stream_options", "cache_salt")
        if (value := getattr(fields, name)) is not UNSET
    }


def _read_again(fields: _Body, within: bytes, body: bytes) -> None:
    """Replaces values decoded from `within`, a copy of the body without NaN and Infinity, by the
    body's own bytes at the same places."""
    for name in fields.__struct_fields__:
        value = getattr(fields, name)
        if value is not UNSET and value is not _NULL:
            start, end = span(value, within)
            setattr(fields, name, Raw(body[start:end]))


def _is_null(value: Raw) -> bool:
    return bytes(memoryview(value)[:1]) == b"n"


def _is_there(fields: _Body, name: str) -> bool:
    """Whether a body has a field, and it is not null."""
    value = getattr(fields, name)
    return value is not UNSET and not _is_null(value)


def _model(value: Raw) -> str:
    if _is_null(value):
        return ""
    name = text(value)
    if name is None or len(name) > TEXT_MAX:
        sentence = f"model: expected a text of at most {TEXT_MAX} characters"
        raise GatewayRefusal("INVALID_BODY", sentence, param="model")
    return name


def _text_of(value: Raw) -> str:
    """A JSON value as a name that is only compared: a text, else the value's bytes as Latin-1; at
    most TEXT_MAX characters."""
    if _is_null(value):
        return ""
    written = text(value)
    if written is None:
        written = bytes(memoryview(value)[:TEXT_MAX]).decode("latin1")
    return written[:TEXT_MAX]


def _salt(value: _Known) -> str:
    """The client's cache salt for routers; a salt over TEXT_MAX characters is replaced by its
    SHA-256."""
    salt = "" if value is UNSET else text(value) or ""
    return salt if len(salt) <= TEXT_MAX else sha256(salt.encode()).hexdigest()


def _stream_options(value: _Known) -> tuple[Mapping[str, Raw] | None, bool]:
    """Facts.stream_options and Facts.wants_usage, read from the field stream_options."""
    if value is UNSET or _is_null(value):
        return {}, False
    options = _aside(value)
    if options is None:
        return None, False
    include = options.get("include_usage", _NULL)
    wants = flag(include)
    return (None, False) if wants is None and not _is_null(include) else (options, bool(wants))


def _is_long(value: Raw) -> bool:
    """Whether a JSON value has too many bytes to be parsed for what routing needs."""
    return len(memoryview(value)) > ASIDE_BYTES_MAX


def _aside_text(value: Raw) -> str:
    return "" if _is_long(value) else text(value) or ""


def _aside(value: Raw) -> dict[str, Raw] | None:
    """Fields of a JSON object; None: the value is no object, or over ASIDE_BYTES_MAX long."""
    if _is_long(value):
        return None
    try:
        return _object.decode(value)
    except (msgspec.DecodeError, UnicodeError):
        return None


def _adapters_of(value: Raw) -> tuple[str, ...]:
    if _is_null(value):
        return ()
    if _is_long(value):
        return ("",)
    try:
        named = _adapters.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ("",)
    each = {named} if isinstance(named, str) else set(named or ())
    return tuple(name for name in each if name is not None)


def _of_plane(fields: _Body) -> tuple[str, ...]:
    named = [name for name in engine_plane.FIELDS if _is_there(fields, name)]
    if not _is_null(fields.vllm_xargs):
        inner = _aside(fields.vllm_xargs)
        named += (
            [engine_plane.NESTED] if inner is None else engine_plane.NESTED_FIELDS & inner.keys()
        )
    return tuple(named)


def _session(value: Raw, headers: Mapping[str, str]) -> str:
    name = first_header(headers, SESSION_HEADERS) or _aside_text(value)
    if not name and not _is_null(value) and not _is_long(value):
        try:
            metadata = _metadata.decode(value)
        except (msgspec.DecodeError, UnicodeError):  # metadata in another client's form
            return ""
        ended = _CLAUDE_SESSION.search((metadata and metadata.user_id) or "")
        name = ended[1] if ended else ""
    return (name or "")[:TEXT_MAX]


def _priority(fields: _Body, headers: Mapping[str, str], low_first: bool) -> int | None:
    number = whole(msgspec.json.encode(first_header(headers, PRIORITY_HEADERS)[:TEXT_MAX]))
    if number is None and fields.priority is not UNSET:
        number = whole(fields.priority)
        number = -number if low_first and number is not None else number
    if number is None:
        return PRIORITY_OF_TIER.get(_aside_text(fields.service_tier))
    return max(-INT32_MAX, min(number, INT32_MAX))


def _slo_ms(headers: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    slo = first_header(headers, names)
    if not (slo.isascii() and slo.isdigit()):
        return None
    number = int(slo[:12])
    return number if number <= _SLO_MAX else None


def _output_tokens_max(fields: _Body, names: Iterable[str]) -> int | None:
    for name in names:
        most = whole(getattr(fields, name))
        if most is not None and most >= 0:
            answers = whole(fields.n) or 1
            tokens = most * (answers if 1 <= answers <= ANSWERS_MAX else 1)
            return tokens if tokens <= EXPECTED_TOKENS_MAX else None
    return None


def _is_list_of_prompts(prompt: Raw) -> bool:
    start = bytes(memoryview(prompt)[:64]).translate(None, b" \t\r\n")
    return start[:2] in (b'["', b"[[")


def first_header(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    """The first of these headers that has a value; empty: none has."""
    for name in names:
        if value := headers.get(name):
            return value
    return ""
