"""Has routers pick workers for the requests of a gateway or a picker, and reports how they end.

Law: a request whose body a router can't make tokens of is routed by load alone, and counted; every
other refusal is raised.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kvroute.client import KvRouteError, RoutedRequest
from router.config.settings.request_settings import RequestSettings
from router.gateway.exchange import Exchange, Outcome, goes_by_load
from router.gateway.output_lengths import OutputLengths
from router.gateway.routers import Router
from router.gateway.server.counters import ProgramCounters
from router.gateway.server.roster import Roster
from router.observe.tracing.gateway_trace import GatewayTrace

T = TypeVar("T")


class Asking:
    """A gateway's or a picker's calls to its routers."""

    def __init__(
        self,
        client: Router,
        roster: Roster,
        counters: ProgramCounters,
        requests: RequestSettings,
    ) -> None:
        self.client = client
        self.roster = roster
        self.timeout_s = requests.route_timeout_s
        self._counters = counters
        self._lengths = OutputLengths()

    def question(self, exchange: Exchange, *, by_load: bool) -> dict[str, Any]:
        """Options for a request's Route call. by_load: the prompt's estimated length replaces the
        prompt."""
        model = exchange.model
        return exchange.question(
            by_load=by_load,
            tokens_max=self.roster.estimate_max(model),
            output_tokens=self._lengths.mean(model),
        )

    async def or_by_load(
        self,
        exchange: Exchange,
        tries: Callable[[bool], Awaitable[T]],
        trace: GatewayTrace | None = None,
    ) -> T:
        """Calls `tries(by_load)`, and again with True if a router can't read the prompt; returns
        its result. Raises KvRouteError."""
        by_load = not exchange.has_body
        while True:
            try:
                return await tries(by_load)
            except KvRouteError as error:
                reason = error.reason or error.code.name
                if trace is not None:
                    trace.picked(error=reason)
                if by_load or not goes_by_load(error.reason, error.code.name):
                    raise
                self._counters.went_by_load(reason)
                by_load = True

    async def observe(self, exchange: Exchange, options: Callable[[bool], dict[str, Any]]) -> None:
        """Has a router decide, without a reservation, about a request that another router serves.
        options: makes the Route call's options from by_load. Raises KvRouteError."""

        def decided(by_load: bool) -> Awaitable[object]:
            observed = options(by_load) | {"observed": True, "omit_receipt": True}
            return self.client.route(timeout_s=self.timeout_s, **observed)

        await self.or_by_load(exchange, decided)

    async def report(
        self,
        exchange: Exchange,
        outcome: Outcome,
        routed: RoutedRequest,
        cached_tokens: int | None = None,
    ) -> None:
        """Sends a request's last report to the router. cached_tokens: replaces the answer's own
        number; None: that number."""
        usage = outcome.usage
        routed.prompt_tokens = usage.prompt_tokens
        routed.finish_reason = outcome.finish_reason
        if outcome.blame is not None:
            routed.output_tokens = outcome.output_tokens
            await routed.failed(outcome.blame.value, wait=False)
            return
        if exchange.has_body:
            self._lengths.add(exchange.model, outcome.output_tokens)
        await routed.finished(
            output_tokens=outcome.output_tokens,
            cached_tokens=usage.cached_tokens if cached_tokens is None else cached_tokens,
            wait=False,
        )
