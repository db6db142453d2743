"""The keywords of route(), request() and explain(), and the RouteRequest they make."""

import os
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack

from kvroute.client.messages.bodies import PATHS, Body, HttpBody, encoded, read_fields
from kvroute.client.messages.tokens import block_hashes_of, invalid_prompt, pack_tokens
from kvroute.client.messages.wire import head
from kvroute.v1 import MultimodalItem, Phase, QueueProgress, RenderRequest, RouteRequest

OnQueued: TypeAlias = Callable[[QueueProgress], object]
"""Called with a QueueProgress (place, expected wait) while a request waits in the
router's queue."""
_REQUEST_ID = RouteRequest.REQUEST_ID_FIELD_NUMBER
_TOKEN_BYTES = RouteRequest.TOKEN_BYTES_FIELD_NUMBER
_BLOCK_HASHES = RouteRequest.BLOCK_HASHES_FIELD_NUMBER
_WITHOUT_TOKENS = {
    name: RouteRequest.DESCRIPTOR.fields_by_name[name].number for name in ("text", *PATHS)
}


class RequestAbout(TypedDict, total=False):
    """The options of a request to be served, without its prompt. None means absent."""

    model: str | None
    """Model, alias or LoRA name; absent: that of the body, if the prompt is a body. May be absent
    when the fleet serves one model."""
    return_tokens: bool | None
    """True: the answer to a text or body has its tokens."""
    require_tokens: bool | None
    """True: a text or body whose tokens the router can't make is refused (NoTokens). Else its
    length is estimated, and it is routed by load."""
    request_id: str | None
    """The same id and prompt get the same answer; absent: a random id, so that a retry is no new
    request. A request that is sent again after its worker failed needs a new id."""
    lora_name: str | None
    cache_salt: str | None
    """Salt of the block hashes; absent: that of the body, if the prompt is a body."""
    multimodal_items: Iterable[MultimodalItem] | None
    expected_output_tokens: int | None
    priority: int | None
    """Higher is served sooner; absent: 0."""
    tenant: str | None
    session_id: str | None
    ttft_slo_ms: int | None
    tpot_slo_ms: int | None
    """Objective for the mean time between output tokens, milliseconds; 1 at least."""
    queue_timeout_ms: int | None
    """Longest that the request waits in the router's queue, milliseconds; the call's deadline ends
    the wait, too."""
    phase: Phase.ValueType | None
    required_labels: Mapping[str, str] | None
    excluded_labels: Mapping[str, str] | None
    allowed_worker_ids: Iterable[str] | None
    """Workers that may be picked; absent or empty: all."""
    excluded_worker_ids: Iterable[str] | None
    policy: str | None
    """Name of a policy; absent: the router's configured policy."""
    omit_receipt: bool | None
    """True: the pick has no receipt, which takes less time to make and to read."""
    queue_progress: bool | None
    """Set by route() and request() if they have `on_queued`: the router reports the place in the
    queue."""
    observed: bool | None
    """True, for route() alone: another router serves the request. This one decides, counts and logs
    it at once, and reserves nothing."""
    traceparent: str | None
    """W3C traceparent of the caller's span: the router's spans are its children."""
    charged_tokens: int | None
    """Tokens that the tenant's quota is charged with, for a prompt whose length is a lowered
    estimate; the engine's count takes their place once it is reported."""


class RequestKeywords(RequestAbout, total=False):
    """The keywords of request(), without its prompt."""

    timeout_s: float | None
    """Time limit of the routing alone, seconds; absent: the client's."""
    on_queued: OnQueued | None
    """Called while the request waits in the queue, as for route()."""


class RouteOptions(RequestAbout, total=False):
    """One request to be served. None means absent.

    The prompt is `token_ids`, or `block_hashes` with `block_size` and `prompt_tokens`, or one of
    `text`, `chat_completion_body`, `completion_body`, `messages_body` and `responses_body`, of
    which the router makes the tokens, or `estimated_tokens`; only a DECODE for a known session
    needs none of them.
    """

    token_ids: Iterable[int] | None
    """list, tuple, array, numpy array, or bytes of little-endian u32. See pack_tokens."""
    block_hashes: Iterable[int] | None
    """XXH3-64 of each full block, with LoRA name and cache salt, see router.proto. numpy's uint64
    arrays cost least."""
    block_size: int | None
    """Tokens in each block of `block_hashes`."""
    prompt_tokens: int | None
    """Tokens of the prompt behind `block_hashes`, with the tail that fills no block."""
    text: str | None
    """Prompt of a completion."""
    chat_completion_body: Body | None
    """Body of POST /v1/chat/completions, as the engine will get it: JSON as bytes, or a dict."""
    completion_body: Body | None
    """Body of POST /v1/completions."""
    messages_body: Body | None
    """Body of POST /v1/messages."""
    responses_body: Body | None
    """Body of POST /v1/responses."""
    estimated_tokens: int | None
    """Tokens of a prompt of which only the length is known, so that it is routed by load."""


_WAITED_MS_MAX = (1 << 32) - 1

_NAMES = frozenset(RouteOptions.__annotations__)
_ids = random.Random()
"""Makes request ids. They needn't be secret: random bytes from the system would be a seventh of the
time that route() takes in the caller."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ids.seed)


class RouteBytes(NamedTuple):
    """A RouteRequest in serialized pieces; no message holds a copy of its prompt."""

    request_id: str
    pieces: tuple[bytes, ...]
    """The message's bytes."""
    size: int
    """Bytes of all pieces."""
    body: HttpBody | None = None
    """The prompt, if it is a body."""

    def waited(self, waited_s: float) -> "RouteBytes":
        """The same request with the field waited_ms: it has waited for waited_s seconds in routers
        that are gone."""
        field = RouteRequest(waited_ms=min(round(waited_s * 1000), _WAITED_MS_MAX))
        piece = field.SerializeToString()
        return self._replace(pieces=(*self.pieces, piece), size=self.size + len(piece))

    def message(self) -> RouteRequest:
        return RouteRequest.FromString(b"".join(self.pieces))


def route_bytes(**options: Unpack[RouteOptions]) -> RouteBytes:
    """The RouteRequest for these options, with the prompt as bytes or as hashes.

    Raises InvalidRequest for a prompt that is ambiguous or incomplete and for a body that can't be
    read, TypeError and ValueError for values that don't fit their fields. Lengths and names are
    checked by the router.
    """
    if not _NAMES.issuperset(options):
        raise TypeError(f"unknown options of a route: {', '.join(sorted(options.keys() - _NAMES))}")
    body = settle_body(options)
    token_ids, block_hashes = options.pop("token_ids", None), options.pop("block_hashes", None)
    block_size, prompt_tokens = options.pop("block_size", None), options.pop("prompt_tokens", None)
    request_id = options.pop("request_id", None) or random_id()
    if not isinstance(request_id, str):
        raise TypeError(f"request_id is a {type(request_id).__name__}; a str is wanted")
    identity = request_id.encode()
    about = head(_REQUEST_ID, len(identity)) + identity
    without_tokens = _take_text(options)
    if options:
        fields: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
        about += RouteRequest(**fields).SerializeToString()
    prompt: tuple[bytes, ...] = ()
    prompts = block_hashes, token_ids, without_tokens, options.get("estimated_tokens")
    if sum(each is not None for each in prompts) > 1:
        raise invalid_prompt(
            "token_ids, block_hashes, text, bodies and estimated_tokens are prompts; give one of"
            " them"
        )
    if block_hashes is not None:
        if block_size is None or prompt_tokens is None:
            raise invalid_prompt("block_hashes need both block_size and prompt_tokens")
        hashes = block_hashes_of(block_hashes, block_size, prompt_tokens)
        prompt = (head(_BLOCK_HASHES, sum(map(len, hashes))), *hashes)
    elif block_size is not None or prompt_tokens is not None:
        raise invalid_prompt("block_size and prompt_tokens need block_hashes, which are absent")
    elif token_ids is not None:
        tokens = pack_tokens(token_ids)
        prompt = (head(_TOKEN_BYTES, len(tokens)), tokens)
    elif without_tokens is not None:
        prompt = without_tokens
    pieces = (about, *prompt)
    return RouteBytes(request_id, pieces, sum(map(len, pieces)), body)


def random_id() -> str:
    """The id of a request whose caller gives it none."""
    return f"{_ids.getrandbits(128):032x}"


def route_request(**options: Unpack[RouteOptions]) -> RouteRequest:
    """The RouteRequest message for these options; raises as route_bytes does."""
    return route_bytes(**options).message()


def render_request(options: RouteOptions) -> RenderRequest:
    """The RenderRequest for a text or a body: its fields have the numbers that they have in
    RouteRequest. Raises as route_bytes does, and InvalidRequest without such a prompt."""
    settle_body(options)
    without_tokens = _take_text(options)
    if without_tokens is None:
        raise invalid_prompt("the options have no prompt to render: give a text or a body")
    about = RenderRequest(model=options.get("model") or "").SerializeToString()
    return RenderRequest.FromString(b"".join((about, *without_tokens)))


def settle_body(options: RouteOptions) -> HttpBody | None:
    """Encodes and returns the HTTP body among the options (None: there is none), and adds to them
    the model and cache_salt that it names, unless they have others. A second call changes nothing.
    Raises as route_bytes does."""
    settled = None
    for name, path in PATHS.items():
        body: Any = options.get(name)
        if body is None:
            continue
        content = encoded(name, body)
        absent = [field for field in ("model", "cache_salt") if options.get(field) is None]
        fields: dict[str, Any] = {name: content, **read_fields(name, body, absent)}
        options.update(fields)  # type: ignore[typeddict-item]
        settled = HttpBody(path, content)
    return settled


def _take_text(options: RouteOptions) -> tuple[bytes, bytes] | None:
    """Takes a text or a body out of the options, as head and content of its field in RouteRequest;
    None: there is none.

    Raises InvalidRequest for several prompts.
    """
    taken: tuple[bytes, bytes] | None = None
    for name, number in _WITHOUT_TOKENS.items():
        content: Any = options.pop(name, None)  # type: ignore[misc]
        if content is None:
            continue
        if taken is not None:
            raise invalid_prompt(f"a request has one prompt, and {name} is a second one")
        wanted = str if name == "text" else bytes
        if not isinstance(content, wanted):
            raise TypeError(f"{name} is a {type(content).__name__}; {wanted.__name__} is wanted")
        content = content.encode() if isinstance(content, str) else content
        taken = head(number, len(content)), content
    return taken
