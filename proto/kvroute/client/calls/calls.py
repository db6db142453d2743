"""KvRouteClient: every call of the contract, with deadlines, retries and errors of its own."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from typing_extensions import override

from kvroute.client.calls.fleet_calls import FleetCalls
from kvroute.client.calls.picking import Picker
from kvroute.client.calls.prompt_calls import PromptCalls
from kvroute.client.calls.queue_calls import QueueCalls
from kvroute.client.calls.reporting import Reporter
from kvroute.client.connections.channel import targets_of
from kvroute.client.connections.line import ConnectionOptions, Credentials
from kvroute.client.connections.retry import RetryPolicy
from kvroute.client.connections.silence import SILENT_S
from kvroute.client.connections.transport import Transport, duration
from kvroute.client.errors import DeadlineExceeded, Unavailable
from kvroute.client.fallback.fallback import Fallback, FallbackPolicy
from kvroute.client.fallback.takeover import Takeover
from kvroute.client.messages.options import (
    RouteBytes,
    RouteOptions,
    route_bytes,
    route_request,
)
from kvroute.client.requests.budget import RetryBudget, RetryBudgetPolicy
from kvroute.client.requests.reports import Reports
from kvroute.client.requests.requests import RequestCalls
from kvroute.v1 import Explanation, Progress, ProgressOutcome

POLL_S = 0.1
POLL_S_MAX = 1.0


class KvRouteClient(RequestCalls[RouteBytes], FleetCalls, QueueCalls, PromptCalls):
    """A client of one router, or of its replicas; of one event loop, and of any number of tasks.

    Connects at the first call. Every call raises KvRouteError, and has `timeout_s`: the longest
    that it takes with all its retries (absent: the client's). Routes, explanations, reports and
    lists may be sent several times without harm, so they are retried as RetryPolicy says; commands
    to the fleet are sent once, since their answer counts the workers that they reached.

    Arguments, times in seconds:

    targets: host:port or several, unix:path; a name stands for all replicas it resolves to.
    credentials: TLS (grpc.ssl_channel_credentials), or a function that returns the present ones:
    once it returns another object, later calls go over new connections. Absent: plain text.
    token: the bearer token of every call and stream, or a function that returns the present token.
    report_timeout_s: longest that a request waits for its own reports (see RoutedRequest).
    pending_reports_max: last reports under way; those past the bound are left to the lease.
    batching: routes of many tasks go in batches over a stream, reports of many as one call;
    False: each is a call of its own.
    routes_max, route_bytes_max: unanswered requests on a router's stream, and their bytes; past
    either bound calls raise ClientOverloaded.
    retry_budget: bound of what attempts() tries again, over all calls of the client.
    fallback: while no router can be reached, requests go to the workers listed last, see
    fallback.py; False: they raise RouterUnreachable.
    silent_s: a router that owes answers and sends nothing for so long, not even to a health check,
    is silent until it sends something: its open picks go to another router or to the fallback, and
    later calls avoid it. Without another router and without a list for the fallback, calls wait for
    it until their deadline. A call with a shorter timeout_s than this is not moved.
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        credentials: Credentials = None,
        token: str | Callable[[], str] | None = None,
        timeout_s: float = 5.0,
        report_timeout_s: float = 1.0,
        retry: RetryPolicy | None = None,
        pending_reports_max: int = 16_384,
        batching: bool = True,
        routes_max: int = 16_384,
        route_bytes_max: int = 256 * 1024 * 1024,
        retry_budget: RetryBudgetPolicy | None = None,
        fallback: FallbackPolicy | bool = True,
        silent_s: float = SILENT_S,
        channel_options: Sequence[tuple[str, str | int]] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        """Raises ValueError for a wrong argument; the class describes them."""
        options = ConnectionOptions(
            credentials=credentials,
            token=token,
            timeout_s=duration("timeout_s", timeout_s),
            retry=retry or RetryPolicy(),
            batching=batching,
            routes_max=routes_max,
            route_bytes_max=route_bytes_max,
            silent_s=duration("silent_s", silent_s),
            channel_options=channel_options,
            clock=clock,
            sleep=sleep,
            rng=rng or random.Random(),
        )
        counts: Counter[str] = Counter()
        policy = FallbackPolicy() if fallback is True else fallback
        picks = Fallback(policy, counts, options.rng) if policy else None
        self._takeover = takeover = Takeover(picks, silent_s=silent_s, clock=clock)
        transport = Transport(targets_of(targets), options, counts, takeover.replaces_silent)
        self._transport = transport
        self._picker = Picker(transport, takeover)
        self._reporter = Reporter(transport, takeover)
        reports = Reports(
            self._reporter.send_step,
            timeout_s=timeout_s,
            wait_s=duration("report_timeout_s", report_timeout_s),
            pending_max=pending_reports_max,
            began=takeover.began,
            ended=takeover.ended,
            silent=transport.is_silent,
        )
        super().__init__(
            route_bytes,
            self._picker.pick,
            reports,
            budget=RetryBudget(retry_budget or RetryBudgetPolicy()),
            counts=counts,
            sleep=sleep,
            clock=clock,
        )

    @override
    def __repr__(self) -> str:
        transport = self._transport
        lines = repr(transport.lines) if transport.lines else "not connected"
        state = "closed" if transport.closed else lines
        names = ",".join(target.text for target in transport.targets)
        return f"<KvRouteClient {names}, {state}, {self._reports!r}>"

    async def __aenter__(self) -> Self:
        self._transport.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Waits for last reports under way (each within timeout_s), then ends the connection.

        Calls still open raise ClientClosed, and so does every later call. Closing twice is fine.
        """
        try:
            await self._reports.flush()
        finally:
            self._transport.closed = True
            await self._picker.close()
            await self._transport.close()

    async def explain(
        self, *, timeout_s: float | None = None, **options: Unpack[RouteOptions]
    ) -> Explanation:
        """Every worker's cost for a request; reserves nothing.

        Without an eligible worker the answer has a refusal: error_from_status(explanation.refusal).
        """
        message = route_request(**options)
        return await self._transport.unary(lambda line: line.router.Explain, message, timeout_s)

    async def report(
        self, *progress: Progress, timeout_s: float | None = None
    ) -> list[ProgressOutcome]:
        """Reports steps of requests to routers; returns one outcome for each step, in order. Token
        counts in steps are cumulative.

        Each step goes to the router that made its reservation. A step with a request_id goes to one
        of the routers, and each knows only the requests that wait in it: see change_priority() and
        cancel(). More than 1,024 steps go in several calls, one after the other. Raises the error
        of the first call that fails, though other calls may have succeeded; a repeated step changes
        nothing.
        """
        return await self._reporter.report(progress, timeout_s)

    async def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Waits until the router answers and says that it is ready (health "readiness").

        Raises DeadlineExceeded with the last answer, and at once any error but Unavailable.
        """
        transport = self._transport
        left_s = duration("timeout_s", timeout_s)
        deadline_s = transport.clock() + left_s
        poll_s = POLL_S
        seen = "nothing"
        while left_s > 0:
            try:
                message = HealthCheckRequest(service="readiness")
                response = await transport.command(lambda line: line.health, message, left_s)
            except Unavailable as error:
                seen = str(error)
            else:
                if response.status == HealthCheckResponse.SERVING:
                    return
                seen = HealthCheckResponse.ServingStatus.Name(response.status)
            await transport.options.sleep(min(poll_s, max(0.0, deadline_s - transport.clock())))
            poll_s = min(POLL_S_MAX, poll_s * 2)
            left_s = deadline_s - transport.clock()
        seen_last = f"the router is not ready after {timeout_s:g} s; the last answer: {seen}"
        raise DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, None, seen_last)
