"""The engine's HTTP side, as far as a router and its clients use it, in vLLM's form.

GET /health /version /v1/models /metrics /kv_event_sources; POST /tokenize /v1/completions
/reset_prefix_cache. The tokenizer is a toy: one token a UTF-8 byte. A client that disconnects
aborts its request. Loopback only.
"""

import time
from contextlib import aclosing
from typing import Annotated, Any
from uuid import uuid4

import msgspec
from aiohttp import web
from msgspec import Meta

from simulator.engine import Completion, Engine, EngineStopped, RequestRefused
from simulator.publisher import Publisher

SPEAKS_VLLM = "0.32.0"
"""The release whose wire and endpoints this reproduces."""

_BODY_BYTES_MAX = 64 << 20
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DEFAULT_MAX_TOKENS = 16
_SHUTDOWN_S = 0.1
"""For handlers to end: the engine has already answered all of them by then."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _CompletionRequest(msgspec.Struct):
    """What is read of POST /v1/completions; other fields, such as temperature, are ignored."""

    prompt: str | list[Annotated[int, Meta(ge=0, lt=1 << 32)]]
    model: str | None = None
    max_tokens: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    return_token_ids: bool = False


class _TokenizeRequest(msgspec.Struct):
    prompt: str
    model: str | None = None


class HttpFace:
    """Serves one engine on a loopback port."""

    def __init__(self, engine: Engine, publisher: Publisher | None = None) -> None:
        self._engine = engine
        self._publisher = publisher
        self._runner: web.AppRunner | None = None
        self._address: str | None = None

    @property
    def address(self) -> str:
        """http://127.0.0.1:port. Raises RuntimeError before `start`."""
        if self._address is None:
            raise RuntimeError("the HTTP face has not been started")
        return self._address

    async def start(self, port: int = 0) -> None:
        """Listens; port 0 picks a free one. Raises OSError when the port is taken."""
        app = web.Application(client_max_size=_BODY_BYTES_MAX)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.get("/kv_event_sources", self._event_sources),
                web.post("/tokenize", self._tokenize),
                web.post("/v1/completions", self._completions),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
            ]
        )
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        host, bound_port = self._runner.addresses[0][:2]
        self._address = f"http://{host}:{bound_port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._engine.stopped else 200)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": SPEAKS_VLLM})

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
                "owned_by": "vllm",
                "root": name,
                "parent": parent,
                "max_model_len": length,
            }
            for name, parent, length in names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _metrics(self, request: web.Request) -> web.Response:
        text = metrics_text(self._engine)
        return web.Response(body=text.encode(), headers={"Content-Type": _METRICS_TYPE})

    async def _event_sources(self, request: web.Request) -> web.Response:
        if self._publisher is None:
            return web.json_response({})
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._publisher.endpoint,
            "replay_endpoint": self._publisher.replay_endpoint,
            "buffer_steps": self._publisher.ring_batches,
            "topic": self._publisher.topic,
        }
        return web.json_response({"0": source})

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read(), type=_TokenizeRequest)
        except msgspec.DecodeError as error:
            return _refusal(400, "BadRequestError", str(error))
        tokens = tokenize(asked.prompt)
        return web.json_response(
            {
                "count": len(tokens),
                "max_model_len": self._engine.config.scheduler.model_len,
                "tokens": tokens,
                "token_strs": None,
            }
        )

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        self._engine.reset_prefix_cache()
        return web.Response()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        config = self._engine.config
        try:
            asked = msgspec.json.decode(await request.read(), type=_CompletionRequest)
        except msgspec.DecodeError as error:
            return _refusal(400, "BadRequestError", str(error))
        model = asked.model or config.model
        is_lora = model in config.scheduler.lora_names
        if not is_lora and model != config.model:
            return _refusal(404, "NotFoundError", f"The model `{model}` does not exist.")
        prompt = tokenize(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
        arguments: dict[str, Any] = {
            "token_ids": prompt,
            "max_tokens": _DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens,
            "cache_salt": asked.cache_salt or "",
            "lora_name": model if is_lora else "",
            "session_id": asked.session_id or request.headers.get("X-Session-ID"),
        }
        reply = _Reply(request.headers.get("X-Request-Id"), model, prompt, asked)
        try:
            if asked.stream:
                return await self._stream(request, arguments, reply)
            completion = await self._engine.complete(**arguments)
        except RequestRefused as error:
            return _refusal(400, "BadRequestError", str(error))
        except EngineStopped as error:
            return _refusal(503, "ServiceUnavailableError", str(error))
        whole = reply.body(completion.token_ids, finished=True, first=True)
        return web.json_response(whole | {"usage": _usage(completion)})

    async def _stream(
        self, request: web.Request, arguments: dict[str, Any], reply: "_Reply"
    ) -> web.StreamResponse:
        """Server-sent events, a chunk a step; a refusal comes before the headers."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        async with aclosing(self._engine.stream(**arguments)) as chunks:
            async for chunk in chunks:
                first = not response.prepared
                if first:
                    await response.prepare(request)
                finished = chunk.completion is not None
                await response.write(_sse(reply.body(chunk.token_ids, finished, first)))
                if chunk.completion is not None and reply.include_usage:
                    usage = {"choices": [], "usage": _usage(chunk.completion)}
                    await response.write(_sse(reply.head() | usage))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


class _Reply:
    """What all parts of one answer have in common."""

    def __init__(
        self, request_id: str | None, model: str, prompt: list[int], asked: _CompletionRequest
    ) -> None:
        self._id = f"cmpl-{request_id or uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._prompt = prompt
        self._with_token_ids = asked.return_token_ids
        self.include_usage = asked.stream_options is not None and asked.stream_options.include_usage

    def head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
        }

    def body(self, token_ids: tuple[int, ...], finished: bool, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "text": detokenize(token_ids),
            "logprobs": None,
            "finish_reason": "length" if finished else None,
            "stop_reason": None,
        }
        if self._with_token_ids:
            choice["token_ids"] = list(token_ids)
            choice["prompt_token_ids"] = self._prompt if first else None
        return self.head() | {"choices": [choice]}


def tokenize(text: str) -> list[int]:
    """One token a UTF-8 byte."""
    return list(text.encode())


def detokenize(token_ids: tuple[int, ...]) -> str:
    """Bytes as the text they make, other tokens by number."""
    return "".join(chr(token) if 32 <= token < 127 else f"<{token}>" for token in token_ids)


def metrics_text(engine: Engine) -> str:
    """Prometheus text in vLLM's names; total_blocks and block_size are labels of an info gauge."""
    load = engine.load()
    config = engine.config
    scheduler = config.scheduler
    own = {"engine": "0", "model_name": config.model}
    cache = {
        "block_size": str(scheduler.block_size),
        "enable_prefix_caching": "True",
        "engine": "0",
        # vLLM counts its null block, which holds nothing, too.
        "num_gpu_blocks": str(scheduler.block_count + 1),
    }
    hit, queried = load.prefix_hit_tokens, load.prefix_queried_tokens
    return "".join(
        [
            _metric("process_start_time_seconds", "gauge", {}, engine.started_unix_s),
            _metric("vllm:num_requests_running", "gauge", own, load.running),
            _metric("vllm:num_requests_waiting", "gauge", own, load.waiting),
            _metric("vllm:kv_cache_usage_perc", "gauge", own, load.usage),
            _metric("vllm:cache_config_info", "gauge", cache, 1),
            _metric("vllm:prefix_cache_queries_total", "counter", own, queried),
            _metric("vllm:prefix_cache_hits_total", "counter", own, hit),
            _metric("vllm:num_preemptions_total", "counter", own, load.preemptions),
            _metric("vllm:prompt_tokens_total", "counter", own, load.prompt_tokens),
            _metric("vllm:generation_tokens_total", "counter", own, load.generated_tokens),
            _metric(
                "vllm:request_success_total",
                "counter",
                own | {"finished_reason": "length"},
                load.finished,
            ),
        ]
    )


def _metric(name: str, kind: str, labels: dict[str, str], value: float) -> str:
    inside = ",".join(f'{label}="{_escape(text)}"' for label, text in sorted(labels.items()))
    series = f"{name}{{{inside}}}" if inside else name
    return f"# TYPE {name} {kind}\n{series} {float(value)!r}\n"


def _escape(label_value: str) -> str:
    return label_value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _usage(completion: Completion) -> dict[str, Any]:
    answered = len(completion.token_ids)
    return {
        "prompt_tokens": completion.prompt_tokens,
        "total_tokens": completion.prompt_tokens + answered,
        "completion_tokens": answered,
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
    }


def _sse(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _refusal(status: int, kind: str, message: str) -> web.Response:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status)
