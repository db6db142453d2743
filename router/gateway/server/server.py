"""The gateway's HTTP server: paths, answers, errors, shutdown.

POST     the paths of router.request.bodies.PATHS, each forwarded to a worker
GET      /v1/models, /v1/models/NAME, /health (the process), /ready (some worker may be picked),
         /metrics
OPTIONS  every path, without a key: a browser's CORS preflight

Laws:
- every request is counted once, by its path and its outcome, and its body is freed at its end;
- every request passes through the entrance, and every answer through `_prepared`;
- after SIGTERM a connection ends after an answer with `Connection: close`, or while it is idle.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property, partial
from itertools import count
from logging import INFO, WARNING

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from typing_extensions import override

from kvroute.client import KvRouteError
from kvroute.client.requests.failures import Kind, judgement
from router.config.settings.gateway_settings import GatewaySettings
from router.config.settings.request_settings import RequestSettings
from router.gateway.exchange import Blame, Exchange, client_id
from router.gateway.refusals import Answer, GatewayRefusal, answer_of, reason_of
from router.gateway.server.attempt import WORKER_ERRORS, ClientLeft
from router.gateway.server.cors import Cors
from router.gateway.server.counters import (
    FULL,
    MODEL_PATH,
    OTHER_PATH,
    OWN_PATHS,
    GatewayCounters,
)
from router.gateway.server.entrance import (
    KEY_HEADERS,
    Entrance,
    gateway_refusal,
    query_of,
    without_keys,
)
from router.gateway.server.forwarding import Forwarder
from router.gateway.server.long_bodies import made
from router.gateway.server.roster import Roster
from router.gateway.server.unpacking import ENCODINGS
from router.gateway.server.upstreams import HEADER_KIB_MAX, WorkerAnswered
from router.net.http.port import HttpPort
from router.net.keys.certificates import Contexts
from router.net.keys.door import Door
from router.net.keys.exposure import check_exposure, split_address
from router.net.keys.rights import Right
from router.net.keys.usage import Usage
from router.net.listener.connections import Connections
from router.net.listener.http_bounds import HttpBounds
from router.net.listener.seldom import Seldom
from router.observe.metrics.families import export
from router.observe.metrics.of_http import http_metrics
from router.observe.metrics.scrape import Scrapes
from router.observe.tracing.gateway_trace import GatewayTrace
from router.observe.tracing.spans import Value
from router.observe.tracing.traceparent import HEADER
from router.request.bodies import PATHS, errors_on
from router.request.error_forms import OPENAI
from router.request.refusal import Refusal

SERVED = ("finished", "worker_refused", "observed")
"""Outcomes that are no failure of the fleet."""
_FAILED = {
    "WORKER_FAILED": "no worker answered",
    "WORKER_SILENT": "no worker answered in time",
    "ANSWER_HEAD_TOO_LARGE": "the worker's answer can't be passed on",
    "HOST_FAILED": "the gateway's own host can't reach a worker",
    "GATEWAY_FAULT": "the gateway failed",
}
"""Reason in the answer to a request that failed at its workers -> what it means to the client."""

_calls = count()

log = logging.getLogger("kvroute.gateway")


class _Call:
    """A client's request, with what is counted and logged at its end."""

    def __init__(self, request: web.Request, began_s: float) -> None:
        self.request = request
        self.began_s = began_s
        self.outcome = "cancelled"
        self.usage: Usage | None = None
        """Use of the client's identity; None: clients need no keys."""
        self.trace: GatewayTrace | None = None
        self.about: dict[str, Value] = {}
        """Attributes of the request's span."""
        self.id = f"gateway {next(_calls):x}"  # beside ids of gRPC's reservations
        self.ended: bool | None = None
        self.path = request.rel_url.raw_path

    @cached_property
    def request_id(self) -> str:
        """The client's X-Request-Id if it can be passed on, else a random id."""
        return client_id(self.request.headers.get("X-Request-Id", "")) or uuid.uuid4().hex

    def end_trace(self) -> None:
        """Ends the request's span, if it has one."""
        if self.trace is not None:
            path, error = self.path, "" if self.outcome in SERVED else self.outcome
            about = {"http.route": path, "kvroute.outcome": self.outcome, **self.about}
            about["kvroute.request.id"] = self.request_id
            self.trace.end(f"POST {path}", about, error)


class GatewayServer:
    """The HTTP server of a gateway; connections to workers are not its part."""

    def __init__(
        self,
        settings: GatewaySettings,
        requests: RequestSettings,
        forwarder: Forwarder,
        roster: Roster,
        counters: GatewayCounters,
        *,
        bounds: HttpBounds,
        tls: Contexts | None = None,
        door: Door | None = None,
        begin_trace: Callable[[str], GatewayTrace | None] | None = None,
    ) -> None:
        """tls: for HTTPS; None: HTTP. door: checks clients' keys; None: they need none.
        begin_trace: makes a request's spans from its traceparent or ""; None: no spans. Raises
        ConfigError for an invalid address, or one that the settings don't allow.
        """
        self._begin_trace = begin_trace
        self._settings = settings
        self._of_requests = requests
        self._forwarder = forwarder
        self._roster = roster
        self._counters = counters
        self._scrapes = Scrapes(counters.registry)
        self._entrance = Entrance(settings, requests, door)
        self._cors = Cors(settings.cors_origins)
        self._said: dict[str, Seldom] = {}
        """Reason of a refusal -> its log line, which is written seldom."""
        self._requests = 0
        """Number of requests, on all paths, whose answer has not ended."""
        self._leaving = False
        """Whether each answer closes its connection."""
        self._stopping = False
        """Whether requests for workers are refused, but on the connections of `_staying`."""
        self._staying: frozenset[object] = frozenset()
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
            head_bytes_max=HEADER_KIB_MAX * 1024,
            shutdown_timeout_s=1.0,
            malformed=self._malformed,
        )
        export(counters.registry, http_metrics, self._http.connections)
        counters.watch(self._entrance.room)

    @property
    def port(self) -> int:
        return self._http.port

    @property
    def connections(self) -> Connections:
        """The server's connections: the open ones, and counts of closed ones."""
        return self._http.connections

    def _app(self) -> web.Application:
        app = web.Application()
        app._router = _OneRoute(self._handle)
        app.on_response_prepare.append(self._prepared)
        return app

    async def start(self) -> None:
        """Starts to listen; raises ConfigError if the address can't be used."""
        await self._http.start()

    async def stop(self, drain_s: float) -> None:
        """Shuts down within drain_s seconds: serves new requests for requests.accept_after_stop_s,
        then only those on connections that are open; waits for open requests, and closes every
        connection."""
        ends_s = asyncio.get_running_loop().time() + drain_s
        self._leaving = True
        accept_s = min(self._of_requests.accept_after_stop_s, drain_s)
        await self._http.connections.none_left(accept_s)
        self._stopping = True
        self._staying = self._http.close_idle()
        try:
            async with asyncio.timeout_at(ends_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d open requests are cut, %g s after the stop", self._requests, drain_s)
        await self._http.stop()

    # Every request, and every answer

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        call = _Call(request, asyncio.get_running_loop().time())
        path = call.path
        self._requests += 1
        self._idle.clear()
        forwarded, route = path in PATHS, path
        if not forwarded:
            route = MODEL_PATH if path.startswith("/v1/models/") else path
            route = route if route in OWN_PATHS else OTHER_PATH
        try:
            self._entrance.check_head(request)
            if request.method == "OPTIONS":
                return self._options(call, route)
            if forwarded and request.method == "POST":
                return await self._forward(call)
            return await self._own(call, route)
        except GatewayRefusal as refusal:
            return self._refused(call, refusal)
        except Refusal as refusal:  # of a key
            return self._refused(call, gateway_refusal(refusal))
        except Exception:
            return self._fault(call)
        finally:
            call.ended = True
            self._counters.requests.labels(route, call.outcome).inc()
            call.end_trace()
            self._requests -= 1
            if not self._requests:
                self._idle.set()

    async def _prepared(self, request: web.Request, answer: web.StreamResponse) -> None:
        """Adds the CORS headers, and after SIGTERM `Connection: close`, to an answer whose head is
        about to be written."""
        headers = answer.headers
        methods = headers.get("Allow", "") if request.method == "OPTIONS" else ""
        self._cors.apply(request.headers, headers, methods=methods)
        if self._leaving:
            answer.force_close()
            headers["Connection"] = "close"

    def _malformed(self, error: HttpProcessingError) -> web.Response:
        """The answer to bytes that are no HTTP head, or to a head past its bounds; counts it."""
        reason, message = "MALFORMED_REQUEST", "the request is not valid HTTP"
        if isinstance(error, LineTooLong):
            reason = "HEAD_TOO_LARGE"
            message = f"the request's line or a header is over {HEADER_KIB_MAX} KiB"
        self._counters.requests.labels(OTHER_PATH, "refused").inc()
        self._counters.refused(reason)
        return _response(answer_of(reason, message, OPENAI), uuid.uuid4().hex)

    def _options(self, call: _Call, route: str) -> web.Response:
        call.outcome = "finished"
        return web.Response(status=204, headers={"Allow": _methods(route)})

    # Requests to workers

    async def _forward(self, call: _Call) -> web.StreamResponse:
        request, entrance = call.request, self._entrance
        if self._begin_trace is not None:
            call.trace = self._begin_trace(request.headers.get(HEADER, ""))
        if self._stopping and request.protocol not in self._staying:
            raise GatewayRefusal("STOPPING", "the gateway is stopping")
        usage = call.usage = await entrance.usage(request, Right.ROUTE)
        with entrance.place(request, usage, call) as place:
            return await self._served(call, await entrance.body(request, usage, place))

    def _headers(self, call: _Call) -> Mapping[str, str]:
        """A request's headers for a worker: where keys are checked, without credentials, unless
        gateway.pass_keys is set."""
        headers = call.request.headers
        if call.usage is None:
            return headers
        return without_keys(headers, but=KEY_HEADERS if self._settings.pass_keys else ())

    async def _served(self, call: _Call, body: bytes) -> web.StreamResponse:
        request, usage = call.request, call.usage
        make = partial(
            Exchange,
            call.path,
            body,
            self._headers(call),
            query=query_of(request),
            request_id=call.request_id,
            low_first=self._of_requests.priority == "lower",
            identity=None if usage is None else usage.identity,
            salts_tenants=self._settings.salt == "tenant",
        )
        exchange = await made(len(body), make)
        exchange.check_rights()
        try:
            if self._settings.observe:
                await self._forwarder.observe(exchange)
                call.outcome = "observed"
                return web.Response(status=204)
            response = await self._forwarder.serve(request, exchange, call.began_s, call.trace)
        except GatewayRefusal:
            raise
        except ClientLeft:
            return web.Response(status=499)  # nobody reads it
        except KvRouteError as error:
            return self._unrouted(call, error)
        except WorkerAnswered as error:
            refused = error.failure in (Kind.REJECTED, Kind.NO_MODEL)
            call.outcome = "worker_refused" if refused else "failed"
            answer = web.Response(status=error.status, body=error.body, headers=error.headers)
            answer.headers["X-Request-Id"] = exchange.request_id
            return answer
        except WORKER_ERRORS as error:
            return self._failed(call, error)
        except Exception:
            if exchange.answer.passed and request.transport is not None:
                request.transport.close()  # the client may not take what it has for whole
            return self._fault(call)
        call.outcome = _outcome(exchange)
        if call.trace is not None:
            call.about = _about(exchange, response.status)
        return response

    def _unrouted(self, call: _Call, error: KvRouteError) -> web.Response:
        reason = reason_of(error)
        if reason in ("UNAUTHENTICATED", "PERMISSION_DENIED"):  # a fault of the gateway
            log.error("the router refuses this gateway's key (to_router): %s", error.message)
            message = "the router refuses the gateway's key"
            return self._answer(call, "failed", "GATEWAY_FAULT", message)
        retry_after_s = error.retry_after_s
        return self._answer(call, "refused", reason, error.message, retry_after_s=retry_after_s)

    def _failed(self, call: _Call, error: Exception) -> web.Response:
        reason = judgement(error).reason or "WORKER_FAILED"
        notes = "; ".join(getattr(error, "__notes__", ()))
        log.warning("%s: %s: %s %s", call.path, type(error).__name__, error, notes)
        outcome = "refused" if reason == "HOST_FAILED" else "failed"
        message = f"{_FAILED[reason]}: {type(error).__name__}: {error}"
        return self._answer(call, outcome, reason, message)

    def _refused(self, call: _Call, refusal: GatewayRefusal) -> web.Response:
        reason, message = refusal.reason, refusal.message
        said = self._said.setdefault(reason, Seldom(log, WARNING if reason in FULL else INFO))
        whose = call.request.remote if call.usage is None else call.usage.identity.name
        now_s = asyncio.get_running_loop().time()
        said.log(now_s, "a request of %s is refused: %s: %a", whose, reason, message)
        retry_after_s = refusal.retry_after_s or (1.0 if reason in FULL else None)
        answer = self._answer(
            call, "refused", reason, message, retry_after_s=retry_after_s, param=refusal.param
        )
        if reason == "UNSUPPORTED_ENCODING":
            answer.headers["Accept-Encoding"] = ", ".join(ENCODINGS)  # RFC 9110, 15.5.16
        if refusal.closes:
            answer.force_close()
        return answer

    def _fault(self, call: _Call) -> web.Response:
        """The answer to a request that the gateway's own fault ends; logs the present exception."""
        log.exception("a request failed in the gateway itself")
        return self._answer(call, "failed", "GATEWAY_FAULT", "the gateway failed")

    def _answer(
        self,
        call: _Call,
        outcome: str,
        reason: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        param: str | None = None,
    ) -> web.Response:
        """The answer to a request that ends with this outcome."""
        call.outcome = outcome
        if outcome == "refused":
            self._counters.refused(reason)
        form = errors_on(call.path)
        answer = answer_of(reason, message, form, retry_after_s=retry_after_s, param=param)
        return _response(answer, call.request_id)

    # Its own paths

    async def _own(self, call: _Call, route: str) -> web.Response:
        """The answer to a path of the gateway itself; raises GatewayRefusal."""
        if route == OTHER_PATH:
            raise GatewayRefusal("UNKNOWN_PATH", f"{call.path[:200]} is no path of the gateway")
        methods = _methods(route)
        if call.request.method not in methods.split(", "):
            message = f"{call.path[:200]} takes {methods} alone"
            answer = self._refused(call, GatewayRefusal("METHOD_NOT_ALLOWED", message))
            answer.headers["Allow"] = methods
            return answer
        match route:
            case "/health":
                answer = web.Response(text="ok\n")
            case "/ready":
                answer = self._ready()
            case "/metrics":
                answer = await self._metrics(call.request)
            case "/v1/models":
                cards = await self._cards(call.request)
                answer = web.json_response({"object": "list", "data": cards})
            case _:
                answer = await self._model(call.request)
        call.outcome = "finished"
        return answer

    def _ready(self) -> web.Response:
        ready = self._roster.ready and not self._leaving
        return web.Response(
            text="ready\n" if ready else "not ready\n", status=200 if ready else 503
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        await self._entrance.usage(request, Right.OBSERVE)
        body, content_type = await self._scrapes.text(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.path.removeprefix("/v1/models/")
        for card in await self._cards(request):
            if card["id"] == name:
                return web.json_response(card)
        raise GatewayRefusal("UNKNOWN_MODEL", f"no model is called {name[:200]!r}")

    async def _cards(self, request: web.Request) -> list[dict[str, object]]:
        """The models that the request's client may use, as OpenAI lists them; raises Refusal."""
        usage = await self._entrance.usage(request, Right.ROUTE)
        if not self._roster.ready:
            await self._roster.refresh()
        cards = self._roster.models()
        if usage is None:
            return cards
        return [card for card in cards if usage.identity.may_use(str(card["id"]))]


class _OneRoute(web.UrlDispatcher):
    """Gives every request to one handler. aiohttp's own search costs more the longer a path is, and
    by itself answers unknown paths and `Expect`."""

    def __init__(self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        super().__init__()
        resource = self.add_resource("/")
        self._route = resource.add_route("*", handler, expect_handler=_expects_nothing)

    @override
    async def resolve(self, request: web.Request) -> web.UrlMappingMatchInfo:
        return web.UrlMappingMatchInfo({}, self._route)


async def _expects_nothing(_request: web.Request) -> None:
    """Does nothing with `Expect`, which Entrance.check_head checks."""


def _methods(route: str) -> str:
    if route in PATHS:
        return "POST, OPTIONS"
    return "GET, HEAD, OPTIONS" if route in OWN_PATHS else "GET, HEAD, POST, OPTIONS"


def _outcome(exchange: Exchange) -> str:
    outcome = exchange.outcome
    if outcome is None or outcome.blame is Blame.CANCELLED:
        return "cancelled"
    if outcome.blame is Blame.CLIENT:
        return "worker_refused"
    return "finished" if outcome.blame is None else "cut"


def _about(exchange: Exchange, status: int) -> dict[str, Value]:
    """Attributes of the span of a request that was served, by OpenTelemetry's names where it has
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


def _response(answer: Answer, request_id: str) -> web.Response:
    headers = dict(answer.headers) | {"X-Request-Id": request_id}
    return web.Response(status=answer.status, body=answer.body, headers=headers)


def check_address(settings: GatewaySettings, keyed: bool) -> None:
    """Raises ConfigError for an invalid gateway.listen, or one that is not loopback, unless clients
    need keys (keyed) or gateway.any_address is set."""
    split_address(settings.listen, "gateway.listen")
    check_exposure(
        settings.listen,
        key="gateway.listen",
        guarded=keyed,
        switch="gateway.any_address",
        allowed=settings.any_address,
    )
