"""KvRouteClient: every call of the contract, with deadlines, retries and errors of its own."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc
from typing_extensions import override

from kvroute.client.attempts import Attempts
from kvroute.client.bodies import Body, HttpBody
from kvroute.client.budget import RetryBudget, RetryBudgetPolicy
from kvroute.client.channel import targets_of
from kvroute.client.errors import NoWorker
from kvroute.client.fallback import Fallback, FallbackPolicy
from kvroute.client.fleet_calls import FleetCalls
from kvroute.client.life import RoutedRequest
from kvroute.client.lines import SILENT_S
from kvroute.client.options import (
    OnQueued,
    RequestKeywords,
    RouteOptions,
    route_bytes,
    route_request,
    settle_body,
)
from kvroute.client.pick import Pick
from kvroute.client.picking import Picker
from kvroute.client.prompt_calls import PromptCalls
from kvroute.client.prompt_hashing import PromptHashing
from kvroute.client.queue_calls import QueueCalls
from kvroute.client.readiness import wait_ready
from kvroute.client.reporting import Reporter
from kvroute.client.reports import Reports
from kvroute.client.retry import RetryPolicy
from kvroute.client.takeover import Takeover
from kvroute.client.tokens import pack_tokens
from kvroute.client.transport import Transport, TransportOptions, duration
from kvroute.v1 import Explanation, Progress, ProgressOutcome


class KvRouteClient(FleetCalls, QueueCalls, PromptCalls):
    """A client of one router, or of its replicas; of one event loop, and of any number of tasks.

    Connects at the first call. Every call raises KvRouteError, and has `timeout_s`: the longest
    that it takes with all its retries (absent: the client's). Routes, explanations, reports and
    lists may be sent several times without harm, so they are retried as RetryPolicy says; commands
    to the fleet are sent once, since their answer counts the workers that they reached.

    Arguments, times in seconds:

    targets: host:port or several, unix:path; a name stands for all replicas it resolves to.
    credentials: TLS (grpc.ssl_channel_credentials); absent: plain text.
    token: the bearer token of every call and stream, or a function that returns the present token.
    report_timeout_s: longest that a request waits for its own reports (see RoutedRequest).
    pending_reports_max: last reports under way; those past the bound are left to the lease.
    fast_lane: routes of many tasks go in batches over a stream, reports of many as one call;
    False: each is a call of its own.
    hash_prompts: the client hashes token ids, once a router has answered with a block size; hashes
    take an eighth of the bytes or less. Needs the extra kvroute-client[hash-prompts], or the router
    in the same environment, whose kernel hashes faster; else raises ImportError.
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
        credentials: grpc.ChannelCredentials | None = None,
        token: str | Callable[[], str] | None = None,
        timeout_s: float = 5.0,
        report_timeout_s: float = 1.0,
        retry: RetryPolicy | None = None,
        pending_reports_max: int = 16_384,
        fast_lane: bool = True,
        hash_prompts: bool = False,
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
        options = TransportOptions(
            credentials=credentials,
            token=token,
            timeout_s=duration("timeout_s", timeout_s),
            retry=retry or RetryPolicy(),
            fast_lane=fast_lane,
            routes_max=routes_max,
            route_bytes_max=route_bytes_max,
            silent_s=duration("silent_s", silent_s),
            channel_options=channel_options,
            clock=clock,
            sleep=sleep,
            rng=rng or random.Random(),
        )
        self._counts: Counter[str] = Counter()
        self._budget = RetryBudget(retry_budget or RetryBudgetPolicy())
        self._takeover = Takeover(
            _fallback(fallback, self._counts, options.rng), silent_s=silent_s, clock=clock
        )
        can_replace_silent = self._takeover.replaces_silent
        super().__init__(Transport(targets_of(targets), options, self._counts, can_replace_silent))
        hashing = PromptHashing() if hash_prompts else None
        self._picker = Picker(self._transport, self._takeover, hashing)
        self._reporter = Reporter(self._transport, self._takeover)
        self._reports = Reports(
            self._reporter.send_step,
            timeout_s=timeout_s,
            wait_s=duration("report_timeout_s", report_timeout_s),
            pending_max=pending_reports_max,
            began=self._takeover.began,
            ended=self._takeover.ended,
            silent=self._transport.is_silent,
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

    @property
    def reports_lost(self) -> int:
        """Reports of RoutedRequests that did not arrive; the lease makes good for them."""
        return self._reports.lost

    @property
    def counts(self) -> Mapping[str, int]:
        """The counters of this client since its start: those of Lane, ReportLane, Lines, Watch,
        Attempts and Fallback, and `picks_moved` away from silent routers. Absent counters are 0."""
        return self._counts.copy()

    # Requests

    async def route(
        self,
        *,
        timeout_s: float | None = None,
        on_queued: OnQueued | None = None,
        **options: Unpack[RouteOptions],
    ) -> Pick:
        """Picks a worker and reserves the request's load there; options: see RouteOptions.

        The caller reports the request's progress with report(); request() reports by itself.
        on_queued: called with a QueueProgress once a second while the request waits in the router's
        queue. Requests that go as a call of their own, in the place of the fast lane, have none: a
        client's first ones, and those over 1 MB.
        """
        model = self._picker.hashed(options)
        if on_queued is not None:
            options["queue_progress"] = True
        request = route_bytes(**options)
        return await self._picker.pick(request, timeout_s, model, on_queued=on_queued)

    def request(
        self,
        *,
        timeout_s: float | None = None,
        on_queued: OnQueued | None = None,
        **options: Unpack[RouteOptions],
    ) -> RoutedRequest:
        """The life of one request, for `async with`; timeout_s is for its routing alone, on_queued
        as for route().

        Raises InvalidRequest, TypeError or ValueError at once for options that can't be sent.
        """
        model = self._picker.hashed(options)
        if on_queued is not None:
            options["queue_progress"] = True
        request = route_bytes(**options)
        return self._routed(
            lambda: self._picker.pick(request, timeout_s, model, on_queued=on_queued), request.body
        )

    def chat(self, body: Body, **about: Unpack[RequestKeywords]) -> RoutedRequest:
        """request() with the body of POST /v1/chat/completions as its prompt.

            async with client.chat(body) as request:
                ...  # POST request.body to request.url, with request.headers
                request.read_usage(answer["usage"], details_enabled=True)

        body: a dict, or JSON as bytes, which are sent untouched. The request has the body's model
        and cache_salt, unless `about` has others; bytes are parsed only if it leaves the model out,
        or if there is a salt. To try other workers: attempts(chat_completion_body=body). Raises as
        request() does.
        """
        return self.request(chat_completion_body=body, **about)

    def completion(self, body: Body, **about: Unpack[RequestKeywords]) -> RoutedRequest:
        """The same for POST /v1/completions."""
        return self.request(completion_body=body, **about)

    def messages(self, body: Body, **about: Unpack[RequestKeywords]) -> RoutedRequest:
        """The same for POST /v1/messages, Anthropic's API."""
        return self.request(messages_body=body, **about)

    def text(self, prompt: str, **about: Unpack[RequestKeywords]) -> RoutedRequest:
        """request() with the text of a completion's prompt; the caller writes the HTTP request."""
        return self.request(text=prompt, **about)

    def attempts(
        self,
        *,
        attempts_max: int = 3,
        timeout_s: float | None = None,
        **options: Unpack[RouteOptions],
    ) -> Attempts:
        """One request, tried on other workers before its first token: see attempts.py.

            async for attempt in client.attempts(token_ids=ids):
                async with attempt as request:
                    ...

        attempts_max: most attempts, the first one counted; 1: no further attempt. Up to 8 attempts
        that met a refused connection don't count. timeout_s: for the routing of each attempt.
        options: as for request(); a request_id names the first attempt, and later attempts get
        their number added to it, since each is another request to the router.
        """
        if attempts_max < 1:
            raise ValueError(f"attempts_max is {attempts_max}; 1 is the least")
        model = self._picker.hashed(options)
        if (token_ids := options.get("token_ids")) is not None:
            options["token_ids"] = pack_tokens(token_ids)
        body = settle_body(options)
        for name, value in options.items():
            if isinstance(value, Iterator):  # an iterator can be read once only
                options[name] = tuple(value)  # type: ignore[literal-required]
        first = route_bytes(**options)
        left_out = tuple(options.get("excluded_worker_ids") or ())

        async def route(number: int, tried: tuple[str, ...]) -> Pick:
            if number == 1:
                return await self._picker.pick(first, timeout_s, model)
            again = options.copy()
            again["excluded_worker_ids"] = (*left_out, *tried)
            if request_id := options.get("request_id"):
                again["request_id"] = f"{request_id}-{number}"
            # A failed request doesn't wait for a worker that may come.
            return await self._picker.pick(
                route_bytes(**again), timeout_s, model, lambda error: isinstance(error, NoWorker)
            )

        return Attempts(
            route,
            lambda route: self._routed(route, body),
            self._budget,
            attempts_max=attempts_max,
            clock=self._transport.clock,
            counts=self._counts,
        )

    def _routed(self, route: Callable[[], Awaitable[Pick]], body: HttpBody | None) -> RoutedRequest:
        return RoutedRequest(route, self._reports, self._transport.options.sleep, body)

    async def explain(
        self, *, timeout_s: float | None = None, **options: Unpack[RouteOptions]
    ) -> Explanation:
        """Every worker's score for a request; reserves nothing.

        Without an eligible worker it answers too: error_from_status(explanation.refusal).
        """
        message = route_request(**options)
        return await self._transport.unary(lambda line: line.router.Explain, message, timeout_s)

    async def report(
        self, *progress: Progress, timeout_s: float | None = None
    ) -> list[ProgressOutcome]:
        """Moves reservations on; one outcome for each step, in order. Counts are cumulative.

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
        await wait_ready(self._transport, timeout_s)


def _fallback(
    fallback: FallbackPolicy | bool, counts: Counter[str], rng: random.Random
) -> Fallback | None:
    if not fallback:
        return None
    return Fallback(FallbackPolicy() if fallback is True else fallback, counts, rng)
