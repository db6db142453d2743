"""Requests of a client: routed, followed to their last report, and tried on other workers.

The part of KvRouteClient that knows no connection: it takes picks from a Pick function and sends
reports through Reports. A router that has a gateway in its own process gives it the same calls.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar, Unpack

from kvroute.client.errors import KvRouteError, NoWorker
from kvroute.client.messages.bodies import Body, HttpBody
from kvroute.client.messages.options import (
    OnQueued,
    RequestKeywords,
    RouteOptions,
    settle_body,
)
from kvroute.client.messages.pick import Pick
from kvroute.client.messages.tokens import pack_tokens
from kvroute.client.requests.attempts import Attempts
from kvroute.client.requests.budget import RetryBudget
from kvroute.client.requests.life import RoutedRequest
from kvroute.client.requests.reports import Reports


class Made(Protocol):
    """A request in the form that its router takes, such as RouteBytes."""

    @property
    def body(self) -> HttpBody | None:
        """The prompt, if it is a body."""


M_contra = TypeVar("M_contra", bound=Made, contravariant=True)
M = TypeVar("M", bound=Made)


class PickFrom(Protocol[M_contra]):
    """Routes a request; raises KvRouteError."""

    async def __call__(
        self,
        request: M_contra,
        timeout_s: float | None,
        is_final: Callable[[KvRouteError], bool] | None = None,
        on_queued: OnQueued | None = None,
    ) -> Pick:
        """Routes the request. timeout_s: seconds for all attempts; None: the default. is_final:
        errors that get no further attempt. on_queued: see RequestCalls.route."""
        ...


class RequestCalls(Generic[M]):
    """The part of KvRouteClient that routes requests, reports on them, and tries them on other
    workers.
    """

    def __init__(
        self,
        make: Callable[..., M],
        pick: PickFrom[M],
        reports: Reports,
        *,
        budget: RetryBudget,
        counts: Counter[str],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """make: makes a request of RouteOptions; raises as route_bytes does. pick: routes a
        request. counts: the counters of Attempts."""
        self._make = make
        self._pick = pick
        self._reports = reports
        self._budget = budget
        self._counts = counts
        self._sleep = sleep
        self._clock = clock

    @property
    def reports_lost(self) -> int:
        """Number of reports of RoutedRequests that did not arrive, or that the router called
        invalid; the lease ends such reservations."""
        return self._reports.lost

    @property
    def counts(self) -> Mapping[str, int]:
        """The counters of this client since its start: those of RouteStream, ReportBatches, Lines,
        Watch, Attempts and Fallback, and `picks_moved` away from silent routers. Absent counters
        are 0."""
        return self._counts.copy()

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
        queue. Requests that go as a call of their own, in the place of the stream, have none: a
        client's first ones, and those over 1 MB.
        """
        if on_queued is not None:
            options["queue_progress"] = True
        request = self._make(**options)
        return await self._pick(request, timeout_s, on_queued=on_queued)

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
        if on_queued is not None:
            options["queue_progress"] = True
        request = self._make(**options)
        return self._routed(
            lambda: self._pick(request, timeout_s, on_queued=on_queued), request.body
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
        """request() with the body of POST /v1/completions as its prompt; see chat()."""
        return self.request(completion_body=body, **about)

    def messages(self, body: Body, **about: Unpack[RequestKeywords]) -> RoutedRequest:
        """request() with the body of POST /v1/messages, Anthropic's API, as its prompt;
        see chat()."""
        return self.request(messages_body=body, **about)

    def responses(self, body: Body, **about: Unpack[RequestKeywords]) -> RoutedRequest:
        """request() with the body of POST /v1/responses as its prompt; see chat(). A body with
        previous_response_id has no tokens: send it to the worker that gave that response
        (allowed_worker_ids)."""
        return self.request(responses_body=body, **about)

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
        if (token_ids := options.get("token_ids")) is not None:
            options["token_ids"] = pack_tokens(token_ids)
        body = settle_body(options)
        for name, value in options.items():
            if isinstance(value, Iterator):  # an iterator can be read once only
                options[name] = tuple(value)  # type: ignore[literal-required]
        first = self._make(**options)
        left_out = tuple(options.get("excluded_worker_ids") or ())

        async def route(number: int, tried: tuple[str, ...]) -> Pick:
            if number == 1:
                return await self._pick(first, timeout_s)
            again = options.copy()
            again["excluded_worker_ids"] = (*left_out, *tried)
            if request_id := options.get("request_id"):
                again["request_id"] = f"{request_id}-{number}"
            # A failed request doesn't wait for a worker that may come.
            return await self._pick(
                self._make(**again), timeout_s, lambda error: isinstance(error, NoWorker)
            )

        return Attempts(
            route,
            lambda route: self._routed(route, body),
            self._budget,
            attempts_max=attempts_max,
            clock=self._clock,
            counts=self._counts,
        )

    def _routed(self, route: Callable[[], Awaitable[Pick]], body: HttpBody | None) -> RoutedRequest:
        return RoutedRequest(route, self._reports, self._sleep, body)
