"""Has routers pick the endpoints of Envoy's requests, among those that Envoy allows."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from kvroute.client import Pick, RoutedRequest
from kvroute.v1 import Phase
from router.config.settings.picker_settings import PickerSettings
from router.config.settings.request_settings import RequestSettings
from router.gateway.exchange import Exchange
from router.gateway.openai_body import first_header
from router.gateway.picker.endpoints import Endpoints
from router.gateway.picker.request_stream import RequestStream
from router.gateway.routers import Router
from router.gateway.server.asking import Asking
from router.gateway.server.counters import ProgramCounters
from router.gateway.server.roster import Roster
from router.observe.tracing.gateway_trace import GatewayTrace

_OBJECTIVES = ("x-llm-d-inference-objective", "x-gateway-inference-objective")


class PickerAsking(Asking):
    """A picker's calls to its routers."""

    def __init__(
        self,
        client: Router,
        roster: Roster,
        endpoints: Endpoints,
        counters: ProgramCounters,
        settings: PickerSettings,
        requests: RequestSettings,
    ) -> None:
        super().__init__(client, roster, counters, requests)
        self._endpoints = endpoints
        self._settings = settings

    async def routed(
        self,
        request: RequestStream,
        exchange: Exchange,
        trace: GatewayTrace | None = None,
        only: tuple[str, ...] = (),
    ) -> RoutedRequest:
        """Has a router pick a worker for a request, and returns the request with its reservation.
        only: ids of the workers that may be picked; empty: any. Raises KvRouteError.
        """

        async def tries(by_load: bool) -> RoutedRequest:
            options = self._options(request, exchange, by_load)
            if only:
                options["allowed_worker_ids"] = only
            if trace is not None:
                options["traceparent"] = trace.pick_header()
            routed = self.client.request(timeout_s=self.timeout_s, **options)
            entered = await routed.__aenter__()
            if trace is not None:
                trace.picked(entered.pick.worker_id)
            return entered

        return await self.or_by_load(exchange, tries, trace)

    async def decided(self, request: RequestStream, exchange: Exchange) -> None:
        """Has a router decide, without a reservation, about a request that another router serves.
        Raises KvRouteError."""
        await self.observe(exchange, partial(self._options, request, exchange))

    async def endpoints_of(self, pick: Pick) -> tuple[list[str], Mapping[str, str]]:
        """The endpoints to name to Envoy, the picked one first, and headers for the worker; no
        endpoints: the picked worker's address can't be resolved.
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

    def _options(self, request: RequestStream, exchange: Exchange, by_load: bool) -> dict[str, Any]:
        """Options for a request's Route call. by_load: an estimated length replaces the prompt."""
        settings = self._settings
        options = self.question(exchange, by_load=by_load)
        priority = settings.objectives.get(first_header(request.headers, _OBJECTIVES))
        if priority is not None:
            options["priority"] = priority
        if request.subset is not None:
            options["allowed_worker_ids"] = self._endpoints.among(request.subset)
        if settings.pairs == "llm-d" and self.roster.pair_engines(exchange.model):
            options["phase"] = Phase.PHASE_PREFILL_DECODE
        return options
