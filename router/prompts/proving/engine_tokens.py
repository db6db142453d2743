"""The tokens of a body, as an engine of its model (or a render service) computes them.

vLLM: its render endpoints, which take the body as it is, else /tokenize, which knows fewer options.
SGLang: /tokenize, which takes the whole body of a chat.

Laws:
- at most QUESTIONS_MAX questions are open at once, each of them for ASK_S at most;
- an answer is tokens, an EngineRefused (the engine reads the body and refuses it), or an
  EngineAway; no other exception leaves `ask`.
"""

import asyncio
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import aiohttp
import msgspec

from events.engines.access import EngineAccess, refused_key
from router.prompts.settings import EngineKind, PromptKind

QUESTIONS_MAX = 16
ASK_S = 2.0
ANSWER_BYTES_MAX = 64 << 20
MISSING_MAX = 4096
"""Render endpoints that engines lack, at most so many of which are remembered."""


class EngineAway(Exception):
    """No answer that can be used: the message says why."""


class EngineRefused(Exception):
    """The engine refuses the body itself, with this message."""


class EngineUnsupported(EngineAway):
    """This kind of engine gives no tokens of such a body."""


class Item(msgspec.Struct, frozen=True):
    """An image, a sound or the like among the tokens."""

    id: str
    first_token: int
    token_count: int


@dataclass(frozen=True, slots=True)
class EngineTokens:
    """An engine's answer."""

    token_bytes: bytes
    items: tuple[Item, ...] = ()


class _Chat(msgspec.Struct):
    """The fields of a chat that vLLM's /tokenize knows, and those that it would ignore."""

    messages: msgspec.Raw = msgspec.Raw()
    model: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()
    add_generation_prompt: msgspec.Raw = msgspec.Raw()
    continue_final_message: msgspec.Raw = msgspec.Raw()
    add_special_tokens: msgspec.Raw = msgspec.Raw()
    mm_processor_kwargs: msgspec.Raw = msgspec.Raw()
    reasoning_effort: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    tool_choice: msgspec.Raw = msgspec.Raw()


class _Completion(msgspec.Struct):
    prompt: msgspec.Raw
    model: msgspec.Raw = msgspec.Raw()
    add_special_tokens: msgspec.Raw = msgspec.Raw()
    truncate_prompt_tokens: msgspec.Raw = msgspec.Raw()


_KNOWN = (
    "messages", "model", "tools", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "add_special_tokens", "mm_processor_kwargs",
)  # fmt: skip
_NOT_OF_CHATS = ("add_generation_prompt", "add_special_tokens")
"""Fields that SGLang's chats ignore, and that its /tokenize obeys."""
_IGNORED = ("reasoning_effort", "documents")
"""Fields of which vLLM's /tokenize takes no notice, though they change the prompt."""


class _Place(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str | None]] = {}
    mm_placeholders: dict[str, list[_Place]] = {}


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_RENDER = {
    PromptKind.CHAT: "/v1/chat/completions/render",
    PromptKind.COMPLETION: "/v1/completions/render",
    PromptKind.MESSAGES: "/v1/messages/render",
}


class Engines:
    """Asks engines over HTTP. Made in a running event loop; must be closed."""

    def __init__(self, *, ask_s: float = ASK_S) -> None:
        self._ask_s = ask_s
        self._session: aiohttp.ClientSession | None = None
        self._open = asyncio.Semaphore(QUESTIONS_MAX)
        self._missing: OrderedDict[str, None] = OrderedDict()
        """URLs of render endpoints that engines lack, the one that was noticed first at the front:
        an engine may have some of them only."""

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def forget(self, base: str) -> None:
        """Another engine may be at this address: its render endpoints are tried again."""
        for path in _RENDER.values():
            self._missing.pop(base + path, None)

    async def ask(
        self,
        access: EngineAccess,
        engine: EngineKind,
        kind: PromptKind,
        content: bytes,
        model: str,
        *,
        left_s: float = ASK_S,
        is_renderer: bool = False,
    ) -> EngineTokens:
        """access: to the engine. model: the name that it serves. left_s:
        until the caller's deadline. is_renderer: it is a render service, which has render endpoints
        alone. Raises EngineAway, EngineRefused."""
        base = access.base
        limit_s = min(self._ask_s, left_s)
        try:
            async with asyncio.timeout(limit_s), self._open:
                return await self._ask(access, engine, kind, content, model, is_renderer)
        except TimeoutError:
            raise EngineAway(f"{base} gave no tokens within {max(limit_s, 0):.3g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineAway(f"{base} gave no tokens: {type(error).__name__}: {error}") from None

    async def _ask(
        self,
        access: EngineAccess,
        engine: EngineKind,
        kind: PromptKind,
        content: bytes,
        model: str,
        is_renderer: bool,
    ) -> EngineTokens:
        base = access.base
        if kind is PromptKind.TEXT:
            content = msgspec.json.encode({"model": model, "prompt": content.decode()})
            kind = PromptKind.COMPLETION
        renders = engine is EngineKind.VLLM or is_renderer
        render_url = access.url(_RENDER[kind])
        if renders and (is_renderer or render_url not in self._missing):
            status, answer = await self._post(access, render_url, content)
            if status == 200:
                return await asyncio.to_thread(_read_rendered, answer)
            _check_refused(status, answer)
            if status not in (404, 405, 501) or is_renderer:
                raise EngineAway(f"{base} answers a render with HTTP status {status}")
            self._missing[render_url] = None
            if len(self._missing) > MISSING_MAX:
                self._missing.popitem(last=False)
        question = await asyncio.to_thread(_question, engine, kind, content)
        status, answer = await self._post(access, access.url("/tokenize"), question)
        _check_refused(status, answer)
        if status != 200:
            raise EngineAway(f"{base} answers /tokenize with HTTP status {status}")
        return await asyncio.to_thread(_read_tokenized, answer)

    async def _post(self, access: EngineAccess, url: str, content: bytes) -> tuple[int, bytes]:
        if self._session is None:
            limits = aiohttp.ClientTimeout(total=None)  # `ask` has one
            self._session = aiohttp.ClientSession(timeout=limits, auto_decompress=False)
        headers = access.headers({"Content-Type": "application/json"})
        async with self._session.post(
            url, data=BytesIO(content), headers=headers, allow_redirects=False, ssl=access.tls
        ) as response:
            answer = bytearray()
            async for piece in response.content.iter_any():
                answer += piece
                if len(answer) > ANSWER_BYTES_MAX:
                    raise EngineAway(f"{url} answers with more than {ANSWER_BYTES_MAX} bytes")
            return response.status, bytes(answer)


def _check_refused(status: int, answer: bytes) -> None:
    if why := refused_key(status):
        raise EngineAway(why)
    if status in (400, 413, 422):
        raise EngineRefused(answer[:500].decode(errors="replace"))


def _question(engine: EngineKind, kind: PromptKind, content: bytes) -> bytes:
    """The body of /tokenize; raises EngineRefused, EngineUnsupported."""
    if kind is PromptKind.MESSAGES:
        raise EngineUnsupported(f"{engine} has no endpoint that gives the tokens of messages")
    try:
        if kind is PromptKind.COMPLETION:
            completion = msgspec.json.decode(content, type=_Completion)
            return _completion(completion)
        if engine is EngineKind.SGLANG:
            return _as_chats_read_it(content)
        chat = msgspec.json.decode(content, type=_Chat)
    except msgspec.DecodeError as error:
        raise EngineRefused(f"the body can't be read: {error}") from None
    if ignored := [name for name in _IGNORED if _is_set(getattr(chat, name))]:
        raise EngineUnsupported(f"vLLM's /tokenize ignores {', '.join(ignored)}")
    return _object({name: getattr(chat, name) for name in _KNOWN})


def _as_chats_read_it(content: bytes) -> bytes:
    """The same chat, without what only SGLang's /tokenize reads in it. Raises EngineUnsupported."""
    fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    if "tools" in fields and any(map(_is_reordered, _tools(fields["tools"]))):
        raise EngineUnsupported("SGLang's /tokenize reorders the fields of these tools")
    if not any(name in fields for name in _NOT_OF_CHATS):
        return content
    return _object({name: fields[name] for name in fields if name not in _NOT_OF_CHATS})


def _tools(tools: msgspec.Raw) -> list[Any]:
    read = msgspec.json.decode(tools)
    return read if isinstance(read, list) else []


def _is_reordered(tool: Any) -> bool:
    """Whether SGLang 0.5.23's /tokenize gives a template the fields of a tool's function in another
    order than its chats do (protocol.py): it drops nulls before it reads the tool once more, so
    that null fields come last, and after what the tool hands on to its function."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return False
    null = [name for name in ("description", "parameters") if function.get(name) is None]
    deferred = tool.get("defer_loading") is not None and function.get("defer_loading") is None
    return any(name in function for name in null) or (deferred and bool(null))


def _completion(body: _Completion) -> bytes:
    if not bytes(body.prompt).lstrip().startswith(b'"'):
        raise EngineUnsupported("/tokenize takes one text, and the body's prompt is none")
    if _is_set(body.truncate_prompt_tokens):
        raise EngineUnsupported("/tokenize ignores truncate_prompt_tokens")
    fields = ("prompt", "model", "add_special_tokens")
    return _object({name: getattr(body, name) for name in fields})


def _object(fields: dict[str, msgspec.Raw]) -> bytes:
    return msgspec.json.encode({name: value for name, value in fields.items() if _is_set(value)})


def _is_set(value: msgspec.Raw) -> bool:
    return bytes(value) not in (b"", b"null")


def _read_rendered(answer: bytes) -> EngineTokens:
    """Of a render endpoint; a completion's answer is a list, an entry for each prompt."""
    rendered: Any = msgspec.json.decode(answer, type=_Rendered | list[_Rendered])
    first: _Rendered = rendered[0] if isinstance(rendered, list) and rendered else rendered
    if not isinstance(first, _Rendered):
        raise ValueError("an answer without a prompt")
    return EngineTokens(_packed(first.token_ids), _items(first.features))


def _items(features: _Features | None) -> tuple[Item, ...]:
    if features is None:
        return ()
    items = [
        Item(identity, place.offset, place.length)
        for kind, places in features.mm_placeholders.items()
        for identity, place in zip(features.mm_hashes.get(kind, ()), places, strict=True)
        if identity
    ]
    return tuple(sorted(items, key=lambda item: item.first_token))


def _read_tokenized(answer: bytes) -> EngineTokens:
    tokens = msgspec.json.decode(answer, type=_Tokenized).tokens
    return EngineTokens(_packed(tokens))


def _packed(ids: list[int]) -> bytes:
    """Little-endian u32; raises ValueError for what is no id."""
    try:
        return array("I", ids).tobytes()
    except OverflowError as error:
        raise ValueError(str(error)) from None
