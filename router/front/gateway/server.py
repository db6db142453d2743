"""The gateway's HTTP server: paths, limits, errors.

POST  the paths of openai_body.PATHS, each forwarded to a worker
GET   /v1/models, /v1/models/NAME, /health (the process), /ready (some worker may be picked),
      /metrics

Law: every request is counted once, by its path and its outcome, and leaves no body behind.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping

from aiohttp import web

from kvroute.client import KvRouteError, RouterUnreachable
from kvroute.client.requests.life import failure_reason
from kvroute.v1 import FailureReason
from router.config.settings.gateway_settings import GatewaySettings
from router.config.settings.serving_settings import HttpSettings
from router.front.exchange import Blame, Exchange
from router.front.gateway.attempt import WORKER_ERRORS, ClientLeft
from router.front.gateway.counters import FULL, GatewayCounters
from router.front.gateway.entrance import entered, without_keys
from router.front.gateway.forwarding import Forwarder
from router.front.gateway.roster import Roster
from router.front.gateway.upstreams import WorkerAnswered
from router.front.openai_body import PATHS, shape_of
from router.front.refusals import Answer, FrontRefusal, Shape, answer_of
from router.http.port import HttpPort
from router.keys.certificates import Contexts
from router.keys.door import Door
from router.keys.exposure import check_exposure, split_address
from router.keys.usage import Usage
from router.metrics.of_http import HttpCollector
from router.metrics.scrape import Scrapes
from router.request.refusal import Refusal
from router.tracing.front_trace import FrontTrace
from router.tracing.spans import Value
from router.tracing.traceparent import HEADER

REQUEST_ID_MAX = 256
"""Characters of a client's X-Request-Id; a longer one, or one that isn't printable, is replaced."""
SERVED = ("finished", "worker_refused")
"""Outcomes that are no failure of the fleet."""
BODY_S = 120.0
"""For the bytes of a request's body, during which it holds one of gateway.open_max places."""
_MIB = 1 << 20

log = logging.getLogger("kvroute.gateway")


class _Call:
    """A client's request, and what is said of it at its end."""

    def __init__(self, request: web.Request, began_s: float) -> None:
        self.request = request
        self.began_s = began_s
        self.outcome = "cancelled"
        self.usage: Usage | None = None
        """Of the client's identity; None: clients need no keys."""
        self.trace: FrontTrace | None = None
        self.about: dict[str, Value] = {}
        """Of its span."""
        self.id = uuid.uuid4().hex
        self.ended: bool | None = None
        self.held = 0
        """Bytes that the request's body is reckoned with."""
        known = request.headers.get("X-Request-Id", "")
        usable = known and len(known) <= REQUEST_ID_MAX and known.isprintable()
        self.request_id = known if usable else uuid.uuid4().hex

    def end_trace(self) -> None:
        """The request is over."""
        if self.trace is not None:
            path, error = self.request.path, "" if self.outcome in SERVED else self.outcome
            about = {"http.route": path, "kvroute.outcome": self.outcome, **self.about}
            self.trace.end(f"POST {path}", about, error)


class GatewayServer:
    """Serves HTTP; knows no sockets to workers.

    Over 300 lines: the paths of one port share what a request holds from its head to its end.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        forwarder: Forwarder,
        roster: Roster,
        counters: GatewayCounters,
        *,
        bounds: HttpSettings,
        tls: Contexts | None = None,
        door: Door | None = None,
        begin_trace: Callable[[str], FrontTrace | None] | None = None,
    ) -> None:
        """tls: serves HTTPS. door: keys of clients, on every address; None: they need none.
        begin_trace: the spans of a
        request, by its traceparent or ""; None: no request has spans. Raises ConfigError for an
        address that is none, or that the settings don't allow."""
        self._begin_trace = begin_trace
        self._door = door
        self._settings = settings
        self._forwarder = forwarder
        self._roster = roster
        self._counters = counters
        self._scrapes = Scrapes(counters.registry)
        self._open = 0
        self._body_bytes = 0
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        check_address(settings, door is not None)
        self._http = HttpPort(
            self._app(),
            settings.listen,
            name="gateway",
            bounds=bounds,
            tls=tls,
            reuse_port=settings.reuse_port,
            cancels=True,
            head_bytes_max=settings.header_kib_max * 1024,
            shutdown_timeout_s=1.0,
        )
        counters.registry.register(HttpCollector(self._http.connections))

    @property
    def port(self) -> int:
        return self._http.port

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=self._settings.body_mib_max * _MIB)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        for path in PATHS:
            app.router.add_post(path, self._forward)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        return app

    async def start(self) -> None:
        """Listens; raises ConfigError when the address can't be had."""
        await self._http.start()

    async def stop(self, drain_s: float) -> None:
        """Refuses new requests, waits for the open ones, then closes every connection."""
        self._stopping = True
        try:
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d requests were still open after %g s", self._open, drain_s)
        await self._http.stop()

    # Requests to workers

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        call = _Call(request, asyncio.get_running_loop().time())
        if self._begin_trace is not None:
            call.trace = self._begin_trace(request.headers.get(HEADER, ""))
        self._open += 1
        self._idle.clear()
        self._counters.open.set(self._open)
        try:
            if self._door is not None:
                call.usage = await self._enter(request)
            self._hold(call)
            return await self._served(call)
        except FrontRefusal as refusal:
            return self._refused(call, refusal)
        finally:
            call.ended = True
            self._open -= 1
            self._counters.open.set(self._open)
            self._hold_bytes(call, 0)
            self._counters.requests.labels(request.path, call.outcome).inc()
            call.end_trace()
            if not self._open:
                self._idle.set()

    async def _enter(self, request: web.Request) -> Usage:
        """Whose request it is; raises FrontRefusal."""
        if self._door is None:
            raise AssertionError("clients need no keys")
        try:
            return await entered(self._door, request)
        except Refusal as refusal:
            raise _front(refusal) from None

    def _admit(self, call: _Call, exchange: Exchange) -> None:
        """Checks a request against its client's rights and limits; raises FrontRefusal."""
        usage = call.usage
        if usage is None:
            return
        try:
            usage.check_model(exchange.facts.model)
            usage.message(len(exchange.body))
            usage.request()
        except Refusal as refusal:
            raise _front(refusal) from None
        usage.reserved(call)

    def _hold(self, call: _Call) -> None:
        """Reckons with the request and with its body; raises FrontRefusal past a limit."""
        settings, request = self._settings, call.request
        if self._stopping:
            raise FrontRefusal("STOPPING", "the gateway is stopping")
        if self._open > settings.open_max:
            raise FrontRefusal("TOO_MANY_REQUESTS", f"{settings.open_max} requests are open")
        most = settings.body_mib_max * _MIB
        length = request.content_length
        if length is not None and length > most:
            raise FrontRefusal("BODY_TOO_LARGE", f"the body is over {settings.body_mib_max} MiB")
        # Of unknown length, or compressed, it may be the largest until it is read.
        unknown = length is None or "Content-Encoding" in request.headers
        size = most if unknown else length or 0
        if self._body_bytes + size > max(settings.bodies_mib_max * _MIB, most):
            message = f"bodies of open requests hold {settings.bodies_mib_max} MiB"
            raise FrontRefusal("TOO_MANY_BYTES", message)
        self._hold_bytes(call, size)

    def _hold_bytes(self, call: _Call, size: int) -> None:
        """Reckons with so many bytes for the request's body from now on."""
        self._body_bytes += size - call.held
        call.held = size
        self._counters.body_bytes.set(self._body_bytes)

    async def _read(self, call: _Call) -> bytes:
        """The body; raises FrontRefusal."""
        try:
            async with asyncio.timeout(BODY_S):
                body = await call.request.read()
        except TimeoutError:
            raise FrontRefusal("BODY_TOO_SLOW", f"no body within {BODY_S:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            message = f"the body is over {self._settings.body_mib_max} MiB"
            raise FrontRefusal("BODY_TOO_LARGE", message) from None
        except (ConnectionError, web.RequestPayloadError) as error:
            raise FrontRefusal("INVALID_BODY", f"the body can't be read: {error}") from None
        self._hold_bytes(call, len(body))
        return body

    def _headers(self, call: _Call) -> Mapping[str, str]:
        """A request's headers, with the key that workers shall see."""
        headers = call.request.headers
        strips = call.usage is not None and not self._settings.pass_keys
        return without_keys(headers) if strips else headers

    async def _served(self, call: _Call) -> web.StreamResponse:
        request, usage = call.request, call.usage
        exchange = Exchange(
            request.path,
            await self._read(call),
            self._headers(call),
            query=request.rel_url.raw_query_string,
            request_id=call.request_id,
            low_first=self._settings.priority == "lower",
            tenant="" if usage is None else usage.identity.tenant,
        )
        self._admit(call, exchange)
        try:
            response = await self._forwarder.serve(request, exchange, call.began_s, call.trace)
        except FrontRefusal:
            raise
        except ClientLeft:
            return web.Response(status=499)  # nobody reads it
        except KvRouteError as error:
            return self._unrouted(call, error)
        except WorkerAnswered as error:
            refused = failure_reason(error) == FailureReason.FAILURE_REASON_CLIENT
            call.outcome = "worker_refused" if refused else "failed"
            answer = web.Response(status=error.status, body=error.body, headers=error.headers)
            answer.headers["X-Request-Id"] = exchange.request_id
            return answer
        except WORKER_ERRORS as error:
            call.outcome = "failed"
            return self._failed(call, error)
        except Exception:
            log.exception("a request failed in the gateway itself")
            call.outcome = "failed"
            if exchange.passed and request.transport is not None:
                request.transport.close()  # the client may not take what it has for whole
            return self._answer(call, "GATEWAY_FAULT", "the gateway failed")
        call.outcome = _outcome(exchange)
        if call.trace is not None:
            call.about = _about(exchange, response.status)
        return response

    def _unrouted(self, call: _Call, error: KvRouteError) -> web.Response:
        reason = error.reason or error.code.name
        if error.reason is None and isinstance(error, RouterUnreachable):
            reason = "ROUTER_UNREACHABLE"
        if reason in (
            "UNAUTHENTICATED",
            "PERMISSION_DENIED",
        ):  # a fault of the gateway
            log.error("the router refuses this gateway's key (to_router): %s", error.message)
            call.outcome = "failed"
            return self._answer(call, "GATEWAY_FAULT", "the router refuses the gateway's key")
        call.outcome = "refused"
        self._counters.refusals.labels(reason).inc()
        return self._answer(call, reason, error.message, retry_after_s=error.retry_after_s)

    def _failed(self, call: _Call, error: Exception) -> web.Response:
        silent = failure_reason(error) == FailureReason.FAILURE_REASON_TIMEOUT
        reason = "WORKER_SILENT" if silent else "WORKER_FAILED"
        notes = "; ".join(getattr(error, "__notes__", ()))
        log.warning("%s: %s: %s %s", call.request.path, type(error).__name__, error, notes)
        message = "no worker answered in time" if silent else "no worker answered"
        return self._answer(call, reason, f"{message}: {type(error).__name__}: {error}")

    def _refused(self, call: _Call, refusal: FrontRefusal) -> web.Response:
        reason, message = refusal.reason, refusal.message
        call.outcome = "refused"
        self._counters.refusals.labels(reason).inc()
        retry_after_s = refusal.retry_after_s or (1.0 if reason in FULL else None)
        return self._answer(call, reason, message, retry_after_s=retry_after_s, param=refusal.param)

    def _answer(
        self,
        call: _Call,
        reason: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        param: str | None = None,
    ) -> web.Response:
        kind = PATHS.get(call.request.path)
        shape = Shape.OPENAI if kind is None else shape_of(kind)
        answer = answer_of(reason, message, shape, retry_after_s=retry_after_s, param=param)
        return _response(answer, call.request_id)

    # Its own paths

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        ready = self._roster.ready and not self._stopping
        return web.Response(
            text="ready\n" if ready else "not ready\n", status=200 if ready else 503
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = await self._scrapes.text(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _models(self, request: web.Request) -> web.Response:
        if not self._roster.ready:
            await self._roster.refresh()
        try:
            cards = await self._cards(request)
        except FrontRefusal as refusal:
            return self._refused(_Call(request, 0.0), refusal)
        return web.json_response({"object": "list", "data": cards})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        try:
            cards = await self._cards(request)
        except FrontRefusal as refusal:
            return self._refused(_Call(request, 0.0), refusal)
        for card in cards:
            if card["id"] == name:
                return web.json_response(card)
        return self._answer(_Call(request, 0.0), "UNKNOWN_MODEL", f"no model is called {name!r}")

    async def _cards(self, request: web.Request) -> list[dict[str, object]]:
        """The models that a client may use; raises FrontRefusal."""
        cards = self._roster.models()
        if self._door is None:
            return cards
        identity = (await self._enter(request)).identity
        return [card for card in cards if identity.may_use(str(card["id"]))]

    async def _unknown(self, request: web.Request) -> web.Response:
        known = request.path in PATHS
        reason = "METHOD_NOT_ALLOWED" if known else "UNKNOWN_PATH"
        message = f"{request.method} {request.path[:200]} is no path of the gateway"
        return self._answer(_Call(request, 0.0), reason, message)


def _outcome(exchange: Exchange) -> str:
    outcome = exchange.outcome
    if outcome is None or outcome.blame is Blame.CANCELLED:
        return "cancelled"
    if outcome.blame is Blame.CLIENT:
        return "worker_refused"
    return "finished" if outcome.blame is None else "cut"


def _about(exchange: Exchange, status: int) -> dict[str, Value]:
    """Of a request that was served: attributes of its span, by OpenTelemetry's names where it has
    some."""
    about: dict[str, Value] = {
        "http.response.status_code": status,
        "gen_ai.request.model": exchange.facts.model,
    }
    if (outcome := exchange.outcome) is None:
        return about
    about["gen_ai.usage.output_tokens"] = outcome.output_tokens
    if outcome.usage.prompt_tokens is not None:
        about["gen_ai.usage.input_tokens"] = outcome.usage.prompt_tokens
    if outcome.usage.cached_tokens is not None:
        about["kvroute.cached_tokens"] = outcome.usage.cached_tokens
    return about


def _front(refusal: Refusal) -> FrontRefusal:
    front = FrontRefusal(refusal.reason.value, refusal.message)
    front.retry_after_s = refusal.retry_after_s
    return front


def _response(answer: Answer, request_id: str) -> web.Response:
    headers = dict(answer.headers) | {"X-Request-Id": request_id}
    return web.Response(status=answer.status, body=answer.body, headers=headers)


def check_address(settings: GatewaySettings, keyed: bool) -> None:
    """Raises ConfigError for an address that is none, or that the settings forbid."""
    split_address(settings.listen)
    check_exposure(
        settings.listen,
        key="gateway.listen",
        guarded=keyed,
        switch="gateway.any_address",
        allowed=settings.any_address,
    )
