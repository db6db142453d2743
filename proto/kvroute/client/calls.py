"""KvRouteClient: every call of the contract, with deadlines, retries and errors of its own."""

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from typing_extensions import override

from kvroute.client.channel import open_channel, target_of
from kvroute.client.errors import (
    ClientClosed,
    DeadlineExceeded,
    Unavailable,
    error_from_call,
)
from kvroute.client.life import RoutedRequest
from kvroute.client.options import RouteOptions, route_request
from kvroute.client.pick import Pick
from kvroute.client.reports import Reports
from kvroute.client.retry import RetryPolicy
from kvroute.v1 import (
    DrainWorkerRequest,
    Explanation,
    FleetAsyncStub,
    FleetStub,
    GetIndexStatsRequest,
    GetIndexStatsResponse,
    ListWorkersRequest,
    Progress,
    ProgressOutcome,
    RegisterWorkerRequest,
    RemoveWorkerRequest,
    ReportRequest,
    ResyncWorkerRequest,
    RouterAsyncStub,
    RouteRequest,
    RouteResponse,
    RouterStub,
    WatchWorkersRequest,
    WatchWorkersResponse,
    WorkerStatus,
)

READY_POLL_S = 0.1
READY_POLL_S_MAX = 1.0

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """An open channel and what is called over it."""

    channel: grpc.aio.Channel
    router: RouterAsyncStub
    fleet: FleetAsyncStub
    health: grpc.aio.UnaryUnaryMultiCallable[Message, HealthCheckResponse]


class KvRouteClient:
    """A client of one router, or of its replicas; of one event loop, and of any number of tasks.

    Connects with the first call. Every call raises KvRouteError, and has `timeout_s`: how long it
    may take with all its retries (absent: the client's). Routes, explanations, reports and lists
    are the same however often they are sent, so they are retried as RetryPolicy says; commands to
    the fleet are sent once, since their answer tells whom they reached.
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
        channel_options: Sequence[tuple[str, str | int]] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        """targets: host:port, a DNS name of all replicas, unix:path, or several IP addresses.

        credentials: TLS (grpc.ssl_channel_credentials); absent: plain text. token: sent as bearer
        token with every attempt, or a function that gives the present one. report_timeout_s: how
        long a request's own reports may hold it up (see RoutedRequest). pending_reports_max: last
        reports under way; past it they are left to the lease. clock and sleep are in seconds.
        Raises ValueError.
        """
        self._target = target_of(targets)
        self._credentials = credentials
        self._token = token
        self._timeout_s = _duration("timeout_s", timeout_s)
        self._retry = retry or RetryPolicy()
        self._once = RetryPolicy(attempts=1)
        self._channel_options = channel_options
        self._clock = clock
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._line: _Line | None = None
        self._closed = False
        self._reports = Reports(
            self._send_report,
            timeout_s=self._timeout_s,
            wait_s=_duration("report_timeout_s", report_timeout_s),
            pending_max=pending_reports_max,
        )

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._line else "not connected"
        return f"<KvRouteClient {self._target}, {state}, {self._reports!r}>"

    async def __aenter__(self) -> Self:
        self._open()
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

        Calls still open raise ClientClosed, and so does every later one. Closing twice is fine.
        """
        try:
            await self._reports.flush()
        finally:
            self._closed = True
            if self._line is not None:
                await self._line.channel.close()

    @property
    def reports_lost(self) -> int:
        """Reports of RoutedRequests that did not arrive; the lease makes good for them."""
        return self._reports.lost

    # Requests

    async def route(
        self, *, timeout_s: float | None = None, **options: Unpack[RouteOptions]
    ) -> Pick:
        """Picks a worker and reserves the request's load there; options: see RouteOptions.

        The caller reports what becomes of it, with report(); request() does so by itself.
        """
        return await self._pick(route_request(**options), timeout_s)

    def request(
        self, *, timeout_s: float | None = None, **options: Unpack[RouteOptions]
    ) -> RoutedRequest:
        """The life of one request, for `async with`; timeout_s is for its routing alone.

        Raises at once what can be told from the options.
        """
        message = route_request(**options)
        return RoutedRequest(lambda: self._pick(message, timeout_s), self._reports, self._sleep)

    async def explain(
        self, *, timeout_s: float | None = None, **options: Unpack[RouteOptions]
    ) -> Explanation:
        """Every worker's score for a request; reserves nothing.

        With nobody to pick it answers all the same: error_from_status(explanation.refusal).
        """
        return await self._call(self._open().router.Explain, route_request(**options), timeout_s)

    async def report(
        self, *progress: Progress, timeout_s: float | None = None
    ) -> list[ProgressOutcome]:
        """Moves reservations on; one outcome for each step, in order. Counts are cumulative."""
        message = ReportRequest(progress=progress)
        response = await self._call(self._open().router.Report, message, timeout_s)
        return list(response.outcomes)

    # The fleet

    async def list_workers(
        self, model: str | None = None, *, timeout_s: float | None = None
    ) -> list[WorkerStatus]:
        """Every worker the router knows, by id and rank; absent model: of all."""
        message = ListWorkersRequest(model=model or "")
        return list((await self._call(self._open().fleet.ListWorkers, message, timeout_s)).workers)

    async def watch_workers(self, model: str | None = None) -> AsyncIterator[WatchWorkersResponse]:
        """Every worker once, then the changes, for as long as one iterates.

        Retries until the first message is there, by the same rule as other calls; later it raises,
        since a reader must know that removals may have passed unseen.
        """
        attempt, started = 0, False
        while True:
            attempt += 1
            call = self._open().fleet.WatchWorkers(
                WatchWorkersRequest(model=model or ""), metadata=self._metadata()
            )
            try:
                async for response in call:
                    started = True
                    yield response
                return
            except grpc.aio.AioRpcError as failure:
                error = error_from_call(failure)
                delay_s = self._retry.delay_s(error, attempt, math.inf, self._rng)
                if started or delay_s is None:
                    raise error from failure
            except asyncio.CancelledError:
                self._raise_if_closed()
                raise
            finally:
                call.cancel()
            await self._sleep(delay_s)

    async def register_worker(
        self,
        worker_id: str,
        *,
        engine: str,
        address: str,
        events: str | None = None,
        replay: str | None = None,
        metrics: str | None = None,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Makes this router run a relay for an engine that has none.

        engine: vllm or sglang. address: where clients send their requests. events, replay: the
        engine's ZMQ sockets, tcp://...; absent: it publishes no events. metrics: its HTTP base;
        absent: the address.
        """
        message = RegisterWorkerRequest(
            worker_id=worker_id,
            engine=engine,
            address=address,
            events=events or "",
            replay=replay or "",
            metrics=metrics or "",
            labels=labels or {},
        )
        await self._call(self._open().fleet.RegisterWorker, message, timeout_s, self._once)

    async def drain_worker(self, worker_id: str, *, timeout_s: float | None = None) -> int:
        """Stops new picks of a worker; what runs there goes on. Returns the ranks reached."""
        message = DrainWorkerRequest(worker_id=worker_id)
        call = self._open().fleet.DrainWorker
        return (await self._call(call, message, timeout_s, self._once)).ranks

    async def undrain_worker(self, worker_id: str, *, timeout_s: float | None = None) -> int:
        """Takes a drained worker back in. Returns the ranks reached."""
        message = DrainWorkerRequest(worker_id=worker_id, undrain=True)
        call = self._open().fleet.DrainWorker
        return (await self._call(call, message, timeout_s, self._once)).ranks

    async def remove_worker(
        self, worker_id: str, *, tombstone_s: float | None = None, timeout_s: float | None = None
    ) -> int:
        """Forgets a worker and ignores it for tombstone_s (absent: the router's own setting).

        Returns the ranks reached.
        """
        message = RemoveWorkerRequest(worker_id=worker_id, tombstone_s=tombstone_s or 0.0)
        call = self._open().fleet.RemoveWorker
        return (await self._call(call, message, timeout_s, self._once)).ranks

    async def resync_worker(self, worker_id: str, *, timeout_s: float | None = None) -> int:
        """Forgets what a worker holds and asks its relay again. Returns the ranks reached."""
        message = ResyncWorkerRequest(worker_id=worker_id)
        call = self._open().fleet.ResyncWorker
        return (await self._call(call, message, timeout_s, self._once)).ranks

    async def index_stats(self, *, timeout_s: float | None = None) -> GetIndexStatsResponse:
        """The size of the overlap index."""
        return await self._call(self._open().fleet.GetIndexStats, GetIndexStatsRequest(), timeout_s)

    async def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Waits until the router answers and says that it is ready (health "readiness").

        Raises DeadlineExceeded with what it saw last, and at once any error but Unavailable.
        """
        left_s = _duration("timeout_s", timeout_s)
        deadline_s = self._clock() + left_s
        poll_s = READY_POLL_S
        seen = "nothing"
        while left_s > 0:
            try:
                message = HealthCheckRequest(service="readiness")
                response = await self._call(self._open().health, message, left_s, self._once)
            except Unavailable as error:
                seen = str(error)
            else:
                if response.status == HealthCheckResponse.SERVING:
                    return
                seen = HealthCheckResponse.ServingStatus.Name(response.status)
            await self._sleep(min(poll_s, max(0.0, deadline_s - self._clock())))
            poll_s = min(READY_POLL_S_MAX, poll_s * 2)
            left_s = deadline_s - self._clock()
        said = f"not ready after {timeout_s:g} s; seen last: {seen}"
        raise DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, None, said)

    # How a call is made

    async def _pick(self, message: RouteRequest, timeout_s: float | None) -> Pick:
        response = await self._call_route(message, timeout_s)
        return Pick.from_response(message.request_id, response)

    async def _call_route(self, message: RouteRequest, timeout_s: float | None) -> RouteResponse:
        """Every Route goes through here, whatever carries it."""
        return await self._call(self._open().router.Route, message, timeout_s)

    async def _send_report(
        self, progress: Progress, *, timeout_s: float, attempts: int | None
    ) -> ProgressOutcome:
        policy = self._once if attempts == 1 else self._retry
        message = ReportRequest(progress=[progress])
        response = await self._call(self._open().router.Report, message, timeout_s, policy)
        return response.outcomes[0] if response.outcomes else ProgressOutcome()

    async def _call(
        self,
        call: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        message: _Request,
        timeout_s: float | None,
        policy: RetryPolicy | None = None,
    ) -> _Response:
        """One answer, within timeout_s and as many attempts as the policy allows.

        What is left of the time is each attempt's deadline.
        """
        policy = policy or self._retry
        left_s = self._timeout_s if timeout_s is None else _duration("timeout_s", timeout_s)
        deadline_s = self._clock() + left_s
        attempt = 0
        while True:
            attempt += 1
            try:
                return await call(message, timeout=left_s, metadata=self._metadata())
            except grpc.aio.AioRpcError as failure:
                error = error_from_call(failure)
                left_s = deadline_s - self._clock()
                delay_s = policy.delay_s(error, attempt, left_s, self._rng)
                if delay_s is None:
                    raise error from failure
            except asyncio.CancelledError:
                self._raise_if_closed()
                raise
            await self._sleep(delay_s)
            if self._closed:
                raise ClientClosed
            left_s = deadline_s - self._clock()
            if left_s <= 0:  # the sleep took longer than asked
                raise error

    def _raise_if_closed(self) -> None:
        """Tells a channel closed under a call from a task that was cancelled: gRPC makes no
        difference."""
        task = asyncio.current_task()
        if self._closed and not (task is not None and task.cancelling()):
            raise ClientClosed from None

    def _metadata(self) -> _Metadata:
        if self._token is None:
            return ()
        token = self._token if isinstance(self._token, str) else self._token()
        return (("authorization", f"Bearer {token}"),)

    def _open(self) -> _Line:
        """The line, opened with its first use: gRPC binds a channel to the running loop."""
        if self._closed:
            raise ClientClosed
        if self._line is None:
            channel = open_channel(self._target, self._credentials, self._channel_options)
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=HealthCheckRequest.SerializeToString,
                response_deserializer=HealthCheckResponse.FromString,
            )
            self._line = _Line(channel, RouterStub(channel), FleetStub(channel), check)
        return self._line


def _duration(name: str, seconds: float) -> float:
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} is {seconds}; a positive number of seconds is wanted")
    return seconds
