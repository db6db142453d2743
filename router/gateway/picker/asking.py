"""Calls routers for picks.

Law: what a router can't read goes by load, counted; every other refusal is raised.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from kvroute.client import KvRouteError, Pick, RoutedRequest
from kvroute.v1 import Phase
from router.config.settings.picker_settings import PickerSettings
from router.config.settings.request_settings import RequestSettings
from router.gateway.by_load import or_by_load
from router.gateway.exchange import Exchange
from router.gateway.output_lengths import OutputLengths
from router.gateway.picker.counters import PROGRAM, PickerCounters
from router.gateway.picker.endpoints import Endpoints
from router.gateway.picker.request_stream import Question
from router.gateway.routers import Router
from router.gateway.server.roster import Roster
from router.observe.tracing.gateway_trace import GatewayTrace

T = TypeVar("T")

_OBJECTIVES = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
_MODELS = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")


class Asking:
    """A picker's calls to its routers."""

    def __init__(
        self,
        client: Router,
        roster: Roster,
        endpoints: Endpoints,
        counters: PickerCounters,
        settings: PickerSettings,
        requests: RequestSettings,
    ) -> None:
        self._client = client
        self._roster = roster
        self._endpoints = endpoints
        self._counters = counters
        self._settings = settings
        self._route_timeout_s = requests.route_timeout_s
        self.lengths = OutputLengths()

    async def routed(
        self,
        question: Question,
        exchange: Exchange,
        trace: GatewayTrace | None = None,
        only: tuple[str, ...] = (),
    ) -> RoutedRequest:
        """The routed request, with its worker. only: ids of the workers that may be picked; empty:
        any. Raises KvRouteError.
        """

        async def tries(by_load: bool) -> RoutedRequest:
            options = self._options(question, exchange, only, by_load=by_load)
            if trace is not None:
                options["traceparent"] = trace.pick_header()
            routed = self._client.request(timeout_s=self._route_timeout_s, **options)
            entered = await routed.__aenter__()
            if trace is not None:
                trace.picked(entered.pick.worker_id)
            return entered

        return await self._or_by_load(exchange, tries, trace)

    async def observe(self, question: Question, exchange: Exchange) -> None:
        """Has a request decided that another router serves. Raises KvRouteError."""

        def decided(by_load: bool) -> Awaitable[Pick]:
            options = self._options(question, exchange, by_load=by_load)
            options |= {"observed": True, "omit_receipt": True}
            return self._client.route(timeout_s=self._route_timeout_s, **options)

        await self._or_by_load(exchange, decided)

    async def _or_by_load(
        self,
        exchange: Exchange,
        tries: Callable[[bool], Awaitable[T]],
        trace: GatewayTrace | None = None,
    ) -> T:
        """See by_load.py."""

        def failed(error: KvRouteError) -> None:
            if trace is not None:
                trace.picked(error=error.reason or error.code.name)

        return await or_by_load(exchange, tries, failed, self._count_by_load)

    def _count_by_load(self, reason: str) -> None:
        self._counters.by_load.labels(PROGRAM, reason).inc()

    async def endpoints_of(self, pick: Pick) -> tuple[list[str], Mapping[str, str]]:
        """The endpoints to name to Envoy, the picked one first, and headers for the worker; no
        endpoints: the pick has none.
        """
        endpoints = self._endpoints
        first = await endpoints.of(pick.address)
        named = [first] if first else []
        for other in pick.alternatives[: self._settings.fallbacks if named else 0]:
            endpoint = await endpoints.of(other.address)
            if endpoint and endpoint not in named and other.dp_rank is None:
                named.append(endpoint)
        headers = dict(pick.headers)
        if pick.prefill_worker is not None:
            headers["x-prefiller-host-port"] = await endpoints.of(pick.prefill_worker.address)
        return named, headers

    def _options(
        self,
        question: Question,
        exchange: Exchange,
        only: tuple[str, ...] = (),
        *,
        by_load: bool,
    ) -> dict[str, Any]:
        """The options of a request's route. by_load: without its prompt."""
        settings, roster = self._settings, self._roster
        model = _first(question.headers, _MODELS) or exchange.facts.model
        options = exchange.question(
            by_load=by_load,
            tokens_max=roster.estimate_max(model),
            output_tokens=self.lengths.mean(model),
        )
        options |= _more_options(question.headers, settings.objectives)
        if model:
            options["model"] = model
        if only:
            options["allowed_worker_ids"] = only
        elif question.subset is not None:
            options["allowed_worker_ids"] = self._endpoints.among(question.subset)
        if settings.pairs == "llm-d" and roster.pair_engines(model):
            options["phase"] = Phase.PHASE_PREFILL_DECODE
        return options


def _more_options(headers: Mapping[str, str], objectives: Mapping[str, int]) -> dict[str, Any]:
    """Options of a route that only a gateway's headers have."""
    options: dict[str, Any] = {}
    priority = objectives.get(_first(headers, _OBJECTIVES))
    if priority is not None:
        options["priority"] = priority
    return options


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := headers.get(name))), "")
