"""The engine's HTTP server: the endpoints that a router and its clients use, in vLLM's form.

GET  /health /v1/models, and what each kind of engine says of itself (vllm_pages, sglang_pages)
POST /v1/completions /v1/chat/completions /v1/messages /v1/responses, and these with /render after
     them, as vLLM --enable-scale-out has them; /v1/messages/count_tokens
POST /tokenize /detokenize /reset_prefix_cache; SGLang has /flush_cache, and no /render

A client that disconnects aborts its request. There are no keys. A prefill engine, or a decode
engine, answers when the other engine of the request is there (rooms.py).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from events.engines.sglang.engine import SGLANG
from events.engines.vllm.engine import VLLM
from router.request.bodies import CHAT, COMPLETION, MESSAGES, RESPONSES, BodyFormat
from simulator.live import sglang_pages, vllm_pages
from simulator.live.addresses import LOOPBACK, authority
from simulator.live.completion_wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    Reply,
    TokenizeRequest,
    refusal,
    untokenize,
)
from simulator.live.engine import Completion, Engine, EngineStopped, RequestRefused
from simulator.live.messages_wire import (
    CountTokensRequest,
    MessagesReply,
    MessagesRequest,
    messages_refusal,
)
from simulator.live.publisher import Publisher
from simulator.live.responses_wire import ResponsesReply, ResponsesRequest
from simulator.live.rooms import BootstrapServer, HandOverFailed, fetch, serve
from simulator.live.tool_calls import UnfitChoice

_BODY_BYTES_MAX = 64 << 20
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Body = TypeVar("Body")


class AnyReply(Protocol):
    """Interface: writes one answer in the form of an API, whole or in events of a stream."""

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def chunk(self, token_ids: Sequence[int], *, first: bool, last: bool) -> bytes:
        """The events with the next tokens of a stream."""

    def end(self, completion: Completion) -> bytes:
        """The events after the last tokens of a stream."""


class Form(NamedTuple):
    """An API of an engine: the format of its bodies, its requests and its answers."""

    kind: BodyFormat
    request: type[Any]
    """A GenerationRequest with token_ids() and limit()."""
    reply: Callable[[Any, str, str | None], AnyReply]
    """Makes the writer of an answer from the request, the model's name and the client's request
    id."""


_FORMS = (
    Form(COMPLETION, CompletionRequest, Reply),
    Form(CHAT, ChatRequest, Reply),
    Form(MESSAGES, MessagesRequest, MessagesReply),
    Form(RESPONSES, ResponsesRequest, ResponsesReply),
)
Page = Callable[[Engine, Publisher | None, int | None], Any]
"""Makes a page, a text or a JSON object, from the engine, its publisher of events, and the port of
its bootstrap server (None: it has none)."""


class OwnPaths(NamedTuple):
    """Paths that only one kind of engine has."""

    pages: Mapping[str, Page]
    reset_path: str
    """Path at which a POST resets the prefix cache."""
    renders: bool
    """Whether the engine has the paths with /render."""


_OWN = {
    VLLM.name: OwnPaths(vllm_pages.PAGES, "/reset_prefix_cache", renders=True),
    SGLANG.name: OwnPaths(sglang_pages.PAGES, "/flush_cache", renders=False),
}


class HttpApi:
    """The HTTP server of one engine."""

    def __init__(self, engine: Engine, publisher: Publisher | None = None) -> None:
        self._engine = engine
        self._publisher = publisher
        self._record = engine.config.what.engine
        self._own = _OWN[self._record.name]
        self._rooms = BootstrapServer() if engine.config.half == "prefill" else None
        self._others: aiohttp.ClientSession | None = None
        """HTTP client of a decode engine, for prefill engines."""
        self._open = 0
        self._idle = asyncio.Event()
        """Set while no request is open."""
        self._idle.set()
        self._draining = False
        self._runner: web.AppRunner | None = None
        self._address: str | None = None

    @property
    def address(self) -> str:
        """http://host:port, for this machine. Raises RuntimeError before `start`."""
        if self._address is None:
            raise RuntimeError("the HTTP API has not been started")
        return self._address

    async def start(self, port: int = 0, host: str = LOOPBACK, bootstrap_port: int = 0) -> None:
        """Listens on host, an IP address, and port; 0: any free port. bootstrap_port: port of a
        prefill engine's bootstrap server. Raises OSError when an address can't be bound."""
        if self._rooms is not None:
            await self._rooms.start(host, bootstrap_port)
        app = web.Application(client_max_size=_BODY_BYTES_MAX)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                *(web.get(path, self._page) for path in self._own.pages),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.post("/v1/messages/count_tokens", self._count_tokens),
                web.post(self._own.reset_path, self._reset_prefix_cache),
            ]
        )
        for form in _FORMS:
            app.router.add_post(form.kind.paths[0], partial(self._answer, form))
            if self._own.renders:
                app.router.add_post(form.kind.render_path, partial(self._render, form))
        self._runner = await serve(app, host, port)
        self._address = f"http://{authority(host, self._runner.addresses[0][1])}"

    async def drain(self, seconds: float) -> None:
        """Refuses new requests; returns once all requests that have begun are answered, or after
        `seconds`."""
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._rooms is not None:
            await self._rooms.stop()
        if self._others is not None:
            await self._others.close()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._engine.stopped or self._draining else 200)

    async def _page(self, request: web.Request) -> web.Response:
        bootstrap = None if self._rooms is None else self._rooms.port
        page = self._own.pages[request.path](self._engine, self._publisher, bootstrap)
        if isinstance(page, str):
            return web.Response(body=page.encode(), headers={"Content-Type": _METRICS_TYPE})
        return web.json_response(page)

    async def _models(self, request: web.Request) -> web.Response:
        config = self._engine.config
        created = int(self._engine.started_unix_s)
        names: list[tuple[str, str | None, int | None]]
        names = [(config.model, None, config.scheduler.model_len)]
        names += [(lora, config.model, None) for lora in config.scheduler.lora_names]
        cards = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": self._record.owned_by,
                "root": name,
                "parent": parent,
                "max_model_len": length,
            }
            for name, parent, length in names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _read(request, TokenizeRequest)
        if body.prompt is None and body.messages is None:
            raise _error(request, 400, "BadRequestError", "the body needs a prompt or messages")
        tokens = body.token_ids()
        return web.json_response(
            {
                "count": len(tokens),
                "max_model_len": self._engine.config.scheduler.model_len,
                "tokens": tokens,
                "token_strs": None,
            }
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await _read(request, DetokenizeRequest)
        return web.json_response({"prompt": untokenize(body.tokens)})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        self._engine.reset_prefix_cache()
        return web.Response()

    async def _render(self, form: Form, request: web.Request) -> web.Response:
        try:
            tokens = {"token_ids": (await _read(request, form.request)).token_ids()}
        except RequestRefused as error:
            raise _error(request, 400, "BadRequestError", str(error)) from error
        return web.json_response([tokens] if form.kind.templated is None else tokens)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body = await _read(request, CountTokensRequest)
        return web.json_response({"input_tokens": len(body.token_ids())})

    async def _answer(self, form: Form, request: web.Request) -> web.StreamResponse:
        body, config = await _read(request, form.request), self._engine.config
        model = body.model or config.model
        is_lora = model in config.scheduler.lora_names
        if not is_lora and model != config.model:
            raise _error(request, 404, "NotFoundError", f"The model `{model}` does not exist.")
        try:
            arguments: dict[str, Any] = {
                "token_ids": body.token_ids(),
                "max_tokens": body.limit()[0],
                "cache_salt": body.cache_salt or "",
                "lora_name": model if is_lora else "",
                "session_id": body.session_id or request.headers.get("X-Session-ID"),
            }
            reply = form.reply(body, model, request.headers.get("X-Request-Id"))
            with self._counted():
                async with self._other_half(body) as is_computed:
                    if is_computed:
                        arguments["remote_tokens"] = len(arguments["token_ids"])
                    if body.stream:
                        return await self._stream(request, arguments, reply)
                    completion = await self._engine.complete(**arguments)
                response = web.json_response(reply.whole(completion))
                await response.prepare(request)
                await response.write_eof()
                return response
        except (RequestRefused, UnfitChoice) as error:
            raise _error(request, 400, "BadRequestError", str(error)) from error
        except HandOverFailed as error:
            raise _error(request, 500, "InternalServerError", str(error)) from error
        except EngineStopped as error:
            raise _error(request, 503, "ServiceUnavailableError", str(error)) from error

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts a request as open within the block: `drain` waits for its end. Raises
        EngineStopped for a new request while the engine drains."""
        if self._draining:
            raise EngineStopped(
                f"engine {self._engine.config.engine_id} is stopping, and takes no more requests"
            )
        self._open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    @asynccontextmanager
    async def _other_half(self, body: GenerationRequest) -> AsyncIterator[bool]:
        """The block in which the engine serves its part of a request: a prefill engine waits for
        the decode engine before it, a decode engine until the prompt is computed. Yields whether
        another engine has computed the prompt. Raises RequestRefused, HandOverFailed."""
        half = self._engine.config.half
        if half is None:
            yield False
            return
        # SGLang drops the room from messages.
        room = None if isinstance(body, MessagesRequest) else body.bootstrap_room
        if room is None or (half == "decode" and not (body.bootstrap_host and body.bootstrap_port)):
            raise RequestRefused("Disaggregated request received without bootstrap room id.")
        if self._rooms is not None:
            async with self._rooms.prefilling(room):
                yield False
            return
        if self._others is None:
            # Without a limit: a request that waits for its prompt must not keep others from theirs.
            self._others = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        await fetch(self._others, body.bootstrap_host or "", body.bootstrap_port or 0, room)
        yield True

    async def _stream(
        self, request: web.Request, arguments: dict[str, Any], reply: AnyReply
    ) -> web.StreamResponse:
        """Answers with server-sent events, one for the tokens of each step; a refusal is raised
        before the headers are sent. An engine that stops breaks the connection, as a process that
        dies."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            async with aclosing(self._engine.stream(**arguments)) as chunks:
                async for chunk in chunks:
                    first = not response.prepared
                    if first:
                        await response.prepare(request)
                    last = chunk.completion is not None
                    await response.write(reply.chunk(chunk.token_ids, first=first, last=last))
                    if chunk.completion is not None:
                        await response.write(reply.end(chunk.completion))
        except EngineStopped:
            if response.prepared and request.transport is not None:
                request.transport.abort()
            raise
        await response.write_eof()
        return response


async def _read(request: web.Request, form: type[Body]) -> Body:
    """A request's body, decoded. Raises HTTPException, an answer with status 400, if it has another
    form."""
    try:
        return msgspec.json.decode(await request.read(), type=form)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise _error(request, 400, "BadRequestError", str(error)) from error


def _error(request: web.Request, status: int, kind: str, message: str) -> web.HTTPException:
    """An error in the shape of the API that was called."""
    classes = {
        400: web.HTTPBadRequest,
        404: web.HTTPNotFound,
        500: web.HTTPInternalServerError,
        503: web.HTTPServiceUnavailable,
    }
    of_messages = request.path.startswith("/v1/messages")
    body = messages_refusal(kind, message) if of_messages else refusal(status, kind, message)
    text = msgspec.json.encode(body).decode()
    return classes[status](text=text, content_type="application/json")
