"""The tokens of a body, as an engine of its model (or a render service) computes them.

vLLM: its render endpoints, which take the body as it is, else /tokenize, which knows fewer options.
SGLang: /tokenize, which takes the whole body of a chat.

Laws:
- whatever an engine answers, and at whatever pace, `ask` ends within its limit: by tokens, an
  EngineRefused (the engine reads the body and refuses it), or an EngineAway, which says why the
  answer is unusable; no other exception leaves it;
- the number of tokens is plausible for the body, and items lie within the tokens;
- an engine with UNUSABLE_MAX unusable answers in a row rests: nothing is sent to it for REST_S to
  REST_MAX_S seconds; a body that can't be read is no answer of the engine, and one of more than
  LONG_BYTES is never late;
- at most QUESTIONS_MAX calls are open at one engine, and the answers of all engines hold at most
  ANSWERS_BYTES_MAX bytes while they are read.
"""

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from math import inf
from typing import Annotated, Any, TypeVar

import aiohttp
import msgspec

from events.engines.access import EngineAccess, refused_key
from events.engines.endpoints import masked
from events.engines.sessions import http_session
from router.request.bodies import BodyFormat
from router.request.dialects.table import DIALECTS
from router.request.dialects.tokenize import Unsupported

QUESTIONS_MAX = 16
"""Most calls that are open at one engine at once."""
ASK_S = 0.8
"""Longest wait of a request for an engine's tokens, in seconds; after it the length is estimated.
"""
PATIENT_S = 2.0
"""Longest wait for an engine's tokens where the caller requires them, and for comparisons, in
seconds."""
ANSWER_BYTES_MAX = 32 << 20
"""Bytes of one answer, at most: a render of images has their pixels."""
ANSWERS_BYTES_MAX = 256 << 20
TOKENS_BESIDE_MAX = 1 << 16
"""Tokens that a prompt may have in addition to one for each byte of its body: those of a template's
own text, and of images that the body has as URLs."""
TOKEN_BYTES_MAX = 16
"""Bytes of a token in JSON, at most: ten digits, a comma, white space."""
SHORT_BYTES = 1 << 16
"""Bytes of a body or an answer that is read on the event loop, at most: 10,000 tokens take 0.3 ms,
and waking a thread and waiting for it costs as much."""
LONG_BYTES = 1 << 20
"""Bytes of a body, at most, that has an engine rest if its tokens come too late: those of a longer
one (250,000 tokens) may take a sound engine more than ASK_S."""
ITEMS_MAX = 4096
REASON_CHARS = 300
REFUSAL_CHARS = 500
UNUSABLE_MAX = 2
REST_S = 1.0
REST_MAX_S = 60.0
ENGINES_MAX = 4096
"""Engines of which something is remembered, at most; the one that was unused for longest goes
first."""


Read = TypeVar("Read")


class EngineAway(Exception):
    """An engine gave no usable answer; the message says why, without passwords."""

    def __init__(self, reason: str) -> None:
        super().__init__(masked(reason))


class EngineRefused(Exception):
    """The engine refuses the body itself, with this message."""


class EngineLacks(EngineAway):
    """The engine has neither a render endpoint nor /tokenize."""


class _Unusable(EngineAway):
    """An answer of the engine is unusable, such as one over its size limit, and leads to a rest."""


class Item(msgspec.Struct, frozen=True):
    """An image, a sound or the like, and its place among the tokens."""

    id: str
    first_token: int
    token_count: int


@dataclass(frozen=True, slots=True)
class EngineTokens:
    """The tokens that an engine gave for a body."""

    token_bytes: bytes
    items: tuple[Item, ...] = ()


Place = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Identity = Annotated[str, msgspec.Meta(max_length=1024)]


class _Place(msgspec.Struct):
    offset: Place
    length: Place


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[Identity | None]] = {}
    mm_placeholders: dict[str, list[_Place]] = {}


class _Rendered(msgspec.Struct):
    token_ids: msgspec.Raw
    features: _Features | None = None


class _Tokenized(msgspec.Struct):
    tokens: msgspec.Raw


@dataclass(slots=True)
class _Engine:
    """What is known of the engine at one address."""

    turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(QUESTIONS_MAX))
    questions: int = 0
    """Calls that are open, or wait for a turn."""
    missing: set[str] = field(default_factory=set)
    """URLs of render endpoints that the engine lacks: it may have some of them only."""
    unusable: int = 0
    """Number of the engine's last answers in a row that were unusable."""
    rest_s: float = 0.0
    until_s: float = -inf
    """When the engine's rest ends, on the loop's clock."""

    def answered(self) -> None:
        """Ends the rest, as the last answer was usable, or another engine may have the address."""
        self.unusable, self.rest_s, self.until_s = 0, 0.0, -inf


class Engines:
    """Gets tokens from engines over HTTP. Made in a running event loop; must be closed."""

    def __init__(self, *, ask_s: float = PATIENT_S) -> None:
        """ask_s: longest wait for an answer in seconds, where its caller has more time."""
        self._ask_s = ask_s
        self._session: aiohttp.ClientSession | None = None
        self._engines: OrderedDict[str, _Engine] = OrderedDict()
        self._answer_bytes = 0
        """Bytes of all answers that are being read."""
        self.unusable = 0
        """Unusable answers, of all engines."""

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def forget(self, base: str) -> None:
        """Forgets what is known of the engine at an address, where another one may have started."""
        if (engine := self._engines.get(base)) is not None:
            engine.missing.clear()
            engine.answered()

    def rests(self, base: str) -> bool:
        """Whether the engine at an address rests after unusable answers, so that nothing is sent to
        it."""
        engine = self._engines.get(base)
        return engine is not None and asyncio.get_running_loop().time() < engine.until_s

    async def ask(
        self,
        access: EngineAccess,
        engine: str,
        kind: BodyFormat,
        content: bytes,
        model: str,
        *,
        left_s: float = inf,
        is_renderer: bool = False,
    ) -> EngineTokens:
        """The tokens of a body from an engine. access: credentials. engine: the engine's kind, such
        as vllm. model: the name that the engine serves. left_s: seconds until the caller's
        deadline. is_renderer: whether it is a render service, which has render endpoints alone.
        Raises EngineAway, EngineRefused."""
        base = access.base
        if self.rests(base):
            raise EngineAway(
                f"{base} gave no usable tokens lately, so it rests for {REST_MAX_S:g} s at most"
            )
        limit_s = min(self._ask_s, left_s)
        known = self._known(base)
        known.questions += 1
        is_asked = False
        try:
            async with asyncio.timeout(limit_s), known.turn:
                is_asked = True
                made = await self._ask(access, known, engine, kind, content, model, is_renderer)
        except TimeoutError:
            if is_asked and limit_s >= min(self._ask_s, ASK_S):  # else its caller had no time
                self._note_unusable(known, is_long=len(content) > LONG_BYTES)
            raise EngineAway(f"{base} gave no tokens within {max(limit_s, 0):.3g} s") from None
        except _Unusable as error:
            self._note_unusable(known)
            raise EngineAway(str(error)) from None
        except (EngineAway, EngineRefused):
            raise
        except Exception as error:  # of aiohttp, of readers, of what an engine makes of them
            self._note_unusable(known)
            what = str(error)[:REASON_CHARS]
            raise EngineAway(f"{base} gave no tokens: {type(error).__name__}: {what}") from None
        finally:
            known.questions -= 1
        known.answered()
        return made

    def _known(self, base: str) -> _Engine:
        engine = self._engines.pop(base, None) or _Engine()
        self._engines[base] = engine
        if len(self._engines) > ENGINES_MAX:
            # One with open questions has turns that these hold.
            idle = (base for base, known in self._engines.items() if not known.questions)
            self._engines.pop(next(idle, base))
        return engine

    def _note_unusable(self, engine: _Engine, *, is_long: bool = False) -> None:
        """Counts an unusable answer. is_long: it was late for a long body, which is no fault."""
        self.unusable += 1
        if is_long:
            return
        engine.unusable += 1
        if engine.unusable >= UNUSABLE_MAX:
            engine.rest_s = min(max(2 * engine.rest_s, REST_S), REST_MAX_S)
            engine.until_s = asyncio.get_running_loop().time() + engine.rest_s

    async def _ask(
        self,
        access: EngineAccess,
        known: _Engine,
        engine: str,
        kind: BodyFormat,
        content: bytes,
        model: str,
        is_renderer: bool,
    ) -> EngineTokens:
        base = access.base
        if kind.text_of is not None:
            content, kind = _completion(model, content), kind.text_of
        tokens_max = len(content) + TOKENS_BESIDE_MAX
        renders = DIALECTS[engine].has_render or is_renderer
        render_url = access.url(kind.render_path)
        if renders and (is_renderer or render_url not in known.missing):
            status, answer = await self._post(access, render_url, content, ANSWER_BYTES_MAX)
            if status == 200:
                return await _aside(len(answer), partial(_read_rendered, answer, tokens_max))
            _check_refused(status, answer)
            if status not in (404, 405, 501) or is_renderer:
                raise EngineAway(f"{base} answers a render with HTTP status {status}")
            known.missing.add(render_url)
        question = await _aside(len(content), partial(_question, engine, kind, content))
        bytes_max = min(TOKEN_BYTES_MAX * tokens_max, ANSWER_BYTES_MAX)
        status, answer = await self._post(access, access.url("/tokenize"), question, bytes_max)
        _check_refused(status, answer)
        if status in (404, 405, 501):
            raise EngineLacks(f"{base} has no /tokenize (HTTP status {status})")
        if status != 200:
            raise EngineAway(f"{base} answers /tokenize with HTTP status {status}")
        return await _aside(len(answer), partial(_read_tokenized, answer, tokens_max))

    async def _post(
        self, access: EngineAccess, url: str, content: bytes, bytes_max: int
    ) -> tuple[int, bytes]:
        """Sends a POST; returns status and body. The body is cut at about REFUSAL_CHARS bytes where
        the status is not 200."""
        if self._session is None:
            self._session = http_session()
        headers = access.headers({"Content-Type": "application/json"})
        limits = aiohttp.ClientTimeout(total=None)  # `ask` has one
        answer = bytearray()
        try:
            async with self._session.post(
                url,
                data=BytesIO(content),
                headers=headers,
                timeout=limits,
                allow_redirects=False,
                ssl=access.tls,
            ) as response:
                async for piece in response.content.iter_any():
                    answer += piece
                    self._answer_bytes += len(piece)
                    if response.status != 200 and len(answer) > REFUSAL_CHARS:
                        break
                    if len(answer) > bytes_max:
                        raise _Unusable(f"{url} answers with more than {bytes_max} bytes")
                    if self._answer_bytes > ANSWERS_BYTES_MAX:
                        raise EngineAway(
                            f"unread answers of engines take {ANSWERS_BYTES_MAX} bytes, the limit"
                        )
                return response.status, bytes(answer)
        finally:
            self._answer_bytes -= len(answer)


async def _aside(size: int, read: Callable[[], Read]) -> Read:
    """The result of `read`, which reads `size` bytes: in a thread if they are more than
    SHORT_BYTES."""
    return read() if size <= SHORT_BYTES else await asyncio.to_thread(read)


def _completion(model: str, text: bytes) -> bytes:
    """The body of a completion of a plain text; raises EngineRefused."""
    try:
        return msgspec.json.encode({"model": model, "prompt": text.decode()})
    except UnicodeDecodeError as error:
        raise EngineRefused(f"the prompt's text is no UTF-8: {error}") from None


def _question(engine: str, kind: BodyFormat, content: bytes) -> bytes:
    """The body to POST to /tokenize for a request's body; raises EngineRefused, EngineAway."""
    tokenize = DIALECTS[engine].tokenizes.get(kind.templated)
    if tokenize is None:
        raise EngineAway(f"{engine} has no endpoint that gives the tokens of {kind.name}")
    try:
        return tokenize(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineRefused(f"the body can't be read: {error}") from None
    except Unsupported as error:
        raise EngineAway(str(error)) from None


def _check_refused(status: int, answer: bytes) -> None:
    if why := refused_key(status):
        raise EngineAway(why)
    if status in (400, 413, 422):
        raise EngineRefused(answer[:REFUSAL_CHARS].decode(errors="replace"))


def _read_rendered(answer: bytes, tokens_max: int) -> EngineTokens:
    """Tokens from a render endpoint's answer; a completion's is a list, an entry for each prompt.
    Raises ValueError, RecursionError."""
    rendered: Any = msgspec.json.decode(answer, type=_Rendered | list[_Rendered])
    first: _Rendered = rendered[0] if isinstance(rendered, list) and rendered else rendered
    if not isinstance(first, _Rendered):
        raise ValueError("the engine's answer is an empty list: it has tokens of no prompt")
    token_bytes = _packed(first.token_ids, tokens_max)
    return EngineTokens(token_bytes, _items(first.features, len(token_bytes) // 4))


def _items(features: _Features | None, tokens: int) -> tuple[Item, ...]:
    """Images and other media, in order; raises ValueError if they overlap or leave the tokens."""
    if features is None:
        return ()
    items = [
        Item(identity, place.offset, place.length)
        for kind, places in features.mm_placeholders.items()
        for identity, place in zip(features.mm_hashes.get(kind, ()), places, strict=True)
        if identity
    ]
    items.sort(key=lambda item: item.first_token)
    if len(items) > ITEMS_MAX:
        raise ValueError(
            f"the engine's answer has {len(items)} images or other media in one prompt, over"
            f" {ITEMS_MAX}"
        )
    end = 0
    for item in items:
        if item.first_token < end or not item.token_count:
            raise ValueError("media items in the engine's answer overlap, or have no token")
        end = item.first_token + item.token_count
    if end > tokens:
        raise ValueError(f"a media item in the engine's answer ends at token {end} of {tokens}")
    return tuple(items)


def _read_tokenized(answer: bytes, tokens_max: int) -> EngineTokens:
    """Tokens from an answer of /tokenize; raises ValueError, RecursionError."""
    tokens = msgspec.json.decode(answer, type=_Tokenized).tokens
    return EngineTokens(_packed(tokens, tokens_max))


def _packed(ids: msgspec.Raw, tokens_max: int) -> bytes:
    """Token ids from JSON, as little-endian u32. Raises ValueError unless they are an array of 1 to
    tokens_max ids. The JSON's size is checked first, since decoding millions of ids can't be
    interrupted."""
    size = len(memoryview(ids))
    if size > TOKEN_BYTES_MAX * tokens_max:
        raise ValueError(
            f"the engine gave {size} bytes of token ids, for a body of at most {tokens_max} tokens"
        )
    tokens = msgspec.json.decode(ids, type=list[Place])
    if not 0 < len(tokens) <= tokens_max:
        raise ValueError(
            f"the engine gave {len(tokens)} tokens, for a body of 1 to {tokens_max} tokens"
        )
    return array("I", tokens).tobytes()
