"""Forwards a gateway's requests: gets a pick from a router, and records each answer."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from aiohttp import web

from events.engines.table import engine_of
from kvroute.client import KvRouteError, Pick
from kvroute.v1 import Phase
from router.config.settings.gateway_settings import GatewaySettings
from router.gateway.exchange import Exchange, Upstream
from router.gateway.refusals import GatewayRefusal
from router.gateway.response_workers import ResponseWorkers
from router.gateway.server.asking import Asking
from router.gateway.server.attempt import WorkerAttempt
from router.gateway.server.counters import GatewayCounters
from router.gateway.server.upstreams import Seat, Sent, Upstreams
from router.net.keys.engine_accesses import EngineAccesses
from router.observe.tracing.gateway_trace import GatewayTrace

ATTEMPTS_MAX = 3
"""Most workers that a request is tried on before a byte of an answer, as in the client library."""

log = logging.getLogger("kvroute.gateway")


class Forwarder:
    """Forwards the requests of one gateway."""

    def __init__(
        self,
        asking: Asking,
        upstreams: Upstreams,
        counters: GatewayCounters,
        settings: GatewaySettings,
        accesses: EngineAccesses,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """spawn: starts a task that sends a report while its request goes on."""
        self.asking = asking
        self.counters = counters
        self.settings = settings
        self.accesses = accesses
        self.spawn = spawn
        self._upstreams = upstreams
        self._roster = asking.roster
        self._responses = ResponseWorkers()

    async def serve(
        self,
        request: web.Request,
        exchange: Exchange,
        began_s: float,
        trace: GatewayTrace | None = None,
    ) -> web.StreamResponse:
        """Serves a request, and returns the answer, which the client has by then. Raises
        KvRouteError or GatewayRefusal for a request without a worker, one of WORKER_ERRORS when no
        worker answered, and ClientLeft. began_s: when the request came, by the loop's clock. trace:
        its spans; None: it is not sampled.
        """
        tries = partial(self._tries, request, exchange, began_s, trace)
        try:
            return await self.asking.or_by_load(exchange, tries, trace)
        except KvRouteError as error:
            self._check_possible(exchange, error)
            raise

    async def observe(self, exchange: Exchange) -> None:
        """Has a router decide about a request that another router serves, and forwards nothing.
        Raises KvRouteError or GatewayRefusal for a request without a worker."""
        try:
            await self.asking.observe(exchange, partial(self._question, exchange))
        except KvRouteError as error:
            self._check_possible(exchange, error)
            raise

    async def _tries(
        self,
        request: web.Request,
        exchange: Exchange,
        began_s: float,
        trace: GatewayTrace | None,
        by_load: bool,
    ) -> web.StreamResponse:
        options = self._question(exchange, by_load)
        if self.settings.forward == "tokens" and exchange.may_have_tokens and not by_load:
            options["return_tokens"] = True
        if holder := self._holder(exchange):
            options["allowed_worker_ids"] = (holder,)
        if trace is not None:
            options["traceparent"] = trace.pick_header()
        asking = self.asking
        async for attempt in asking.client.attempts(
            attempts_max=ATTEMPTS_MAX, timeout_s=asking.timeout_s, **options
        ):
            async with attempt as routed:
                if attempt.number == 1:
                    now_s = asyncio.get_running_loop().time()
                    self.counters.picked(now_s - began_s, trace)
                if trace is not None:
                    trace.picked(routed.pick.worker_id)
                work = WorkerAttempt(self, request, exchange, routed, trace, movable=not holder)
                return await work.run()
        raise RuntimeError(
            "all attempts of the request ended without an answer and without an error"
        )

    def _question(self, exchange: Exchange, by_load: bool) -> dict[str, Any]:
        """Options for a request's Route call, for a pair if the model has prefill workers.
        by_load: the prompt's estimated length replaces the prompt."""
        options = self.asking.question(exchange, by_load=by_load)
        if self._pairs(exchange):
            options["phase"] = Phase.PHASE_PREFILL_DECODE
        return options

    def _pairs(self, exchange: Exchange) -> bool:
        engines = self._roster.pair_engines(exchange.facts.model)
        return bool(engines) and all(map(exchange.pairs_on, engines))

    def _holder(self, exchange: Exchange) -> str | None:
        """Id of the worker that holds the earlier response which the request continues; None: it
        continues none, or the model has a single worker. Raises GatewayRefusal if the worker is not
        known."""
        previous = exchange.facts.previous_response_id
        if not previous:
            return None
        now_s = asyncio.get_running_loop().time()
        worker_id = self._responses.worker(previous, now_s, exchange.owner)
        is_fenced = exchange.identity is not None or self._responses.is_anothers(
            previous, now_s, exchange.owner
        )
        if worker_id is None and (is_fenced or self._roster.count(exchange.facts.model) > 1):
            raise _gone(
                previous,
                "this gateway knows no such response: it is too old, or was given elsewhere",
            )
        return worker_id

    def _check_possible(self, exchange: Exchange, error: KvRouteError) -> None:
        """Raises GatewayRefusal if `error` means that no worker can serve the request since the
        worker of an earlier response can't, or since its engine takes no pairs on this path."""
        if error.reason not in ("NO_ELIGIBLE_WORKER", "UNKNOWN_WORKER"):
            return
        if self._holder(exchange) is not None:
            previous = exchange.facts.previous_response_id
            raise _gone(
                previous, f"the worker that holds the response can't serve: {error.message}"
            ) from error
        if self._roster.pair_engines(exchange.facts.model) and not self._pairs(exchange):
            message = (
                f"the model's workers serve in pairs, between which a request to {exchange.path}"
                f" can't be split: {error.message}"
            )
            raise GatewayRefusal("PAIR_UNSUPPORTED", message) from error

    def finished(self, exchange: Exchange, worker_id: str) -> None:
        """Records which worker holds a response that was passed on whole, for later requests."""
        if response_id := exchange.answer.response_id():
            now_s = asyncio.get_running_loop().time()
            self._responses.add(response_id, worker_id, now_s, exchange.owner)
            self.counters.responses.set(len(self._responses))

    def token_fields(self, pick: Pick) -> dict[str, Any]:
        """Fields with the prompt's tokens, to add to the body; empty: the tokens are not verified,
        or the worker's engine takes none.
        """
        prompt = pick.prompt
        if prompt is None or not prompt.verified or not prompt.token_bytes:
            return {}
        engine = self._roster.engine(pick.worker_id)
        chat_tokens = engine_of(engine).chat_tokens
        if chat_tokens is None:
            return {}
        self.counters.sent.labels(engine, "with_tokens").inc()
        return chat_tokens(prompt.token_ids.tolist())

    def post(self, upstream: Upstream, seat: Seat) -> Sent:
        """A request to a worker, with the worker's API key if it has one; sent when entered."""
        access = self.accesses.of_worker(seat.worker_id, upstream.url)
        headers = access.headers(upstream.headers)
        return self._upstreams.post(upstream._replace(headers=headers), seat, access.tls)

    def unusable_hand_over(self, worker_id: str, error: Exception) -> None:
        """Counts and logs a prefill worker's hand-over that can't be used, so that the decode
        worker computes the prompt.
        """
        self.counters.unusable_hand_overs.inc()
        log.warning("unusable hand-over of %s: %s: %s", worker_id, type(error).__name__, error)


def _gone(response_id: str, why: str) -> GatewayRefusal:
    return GatewayRefusal(
        "RESPONSE_GONE",
        f"no worker is known to hold the response {response_id[:200]!r}: {why}",
        param="previous_response_id",
    )
