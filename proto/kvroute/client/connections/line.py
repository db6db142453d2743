"""One line: the connection to a router, its batching, and what is open on it."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kvroute.client.connections.channel import Address, open_channel
from kvroute.client.connections.report_batches import ReportBatches
from kvroute.client.connections.retry import RetryPolicy
from kvroute.client.connections.route_stream import RouteStream
from kvroute.client.connections.route_stream_items import RouteStreamItems
from kvroute.client.connections.silence import SILENT_S, Watch
from kvroute.client.errors import (
    KvRouteError,
    RouterUnreachable,
    error_from_call,
    unreachable,
    unreadable,
)
from kvroute.client.messages.options import OnQueued, RouteBytes
from kvroute.v1 import (
    FleetAsyncStub,
    FleetStub,
    Progress,
    ProgressOutcome,
    PromptsAsyncStub,
    PromptsStub,
    ReportRequest,
    ReportResponse,
    RouterAsyncStub,
    RouteResponse,
    RouteResults,
    RouterStub,
)

ROUTE = "/kvroute.v1.Router/Route"
ROUTE_STREAM = "/kvroute.v1.Router/RouteStream"
HEALTH = "/grpc.health.v1.Health/Check"

Metadata: TypeAlias = tuple[tuple[str, str], ...]
Credentials: TypeAlias = grpc.ChannelCredentials | Callable[[], grpc.ChannelCredentials] | None
"""TLS credentials, or a function that returns the present ones: another object once they changed;
None: plain text."""


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """The keywords of KvRouteClient that concern connections and attempts."""

    credentials: Credentials = None
    token: str | Callable[[], str] | None = None
    timeout_s: float = 5.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    batching: bool = True
    routes_max: int = 16_384
    route_bytes_max: int = 256 * 1024 * 1024
    silent_s: float = SILENT_S
    channel_options: Sequence[tuple[str, str | int]] = ()
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    rng: random.Random = field(default_factory=random.Random)

    def metadata(self) -> Metadata:
        """The metadata of every call: the bearer token, if the client has one."""
        token = self.token
        if token is None:
            return ()
        return (("authorization", f"Bearer {token if isinstance(token, str) else token()}"),)


class Line:
    """The connection to one router. Needs a running loop."""

    def __init__(
        self,
        address: Address,
        credentials: grpc.ChannelCredentials | None,
        options: ConnectionOptions,
        counts: Counter[str],
        on_silent: Callable[["Line"], None],
    ) -> None:
        """counts: counters that RouteStream, ReportBatches and Watch add to. on_silent: called with
        this line when its router goes silent, and after each further health check without an
        answer."""
        self.address = address
        self.channel = channel = open_channel(address, credentials, options.channel_options)
        self.router: RouterAsyncStub = RouterStub(channel)
        self.fleet: FleetAsyncStub = FleetStub(channel)
        self.prompts: PromptsAsyncStub = PromptsStub(channel)
        self.health: grpc.aio.UnaryUnaryMultiCallable[HealthCheckRequest, HealthCheckResponse]
        self.health = channel.unary_unary(
            HEALTH,
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        self.watch = Watch(
            address.target, options.silent_s, self._probe, partial(on_silent, self), counts
        )
        self.calls = 0
        """Number of open calls on the line."""
        self.rests_until_s = 0.0
        """Time of the client's clock until which the line is passed over, if there is
        another line."""
        self._metadata = options.metadata
        # Requests go as bytes: their prompts are not copied into messages.
        self._route: grpc.aio.UnaryUnaryMultiCallable[bytes, RouteResponse]
        self._route = channel.unary_unary(ROUTE, response_deserializer=RouteResponse.FromString)
        self._picks: set[grpc.aio.UnaryUnaryCall[bytes, RouteResponse]] = set()
        """Open Route calls; routes over the stream are not among them."""
        self.stream: RouteStream | None = None
        """The stream of Route calls; None without batching, and so are report_batches."""
        self.report_batches: ReportBatches | None = None
        if options.batching:
            call: grpc.aio.StreamStreamMultiCallable[bytes, RouteResults]
            call = channel.stream_stream(
                ROUTE_STREAM, response_deserializer=RouteResults.FromString
            )
            items = RouteStreamItems(options.routes_max, options.route_bytes_max)
            self.stream = RouteStream(lambda: call(metadata=options.metadata()), items, counts)
            self.report_batches = ReportBatches(self._report, counts)

    def connected(self, *, connect: bool) -> bool:
        """Whether there is a connection; connect: begins to connect if there is none."""
        return self.channel.get_state(connect) is grpc.ChannelConnectivity.READY

    async def settled(self) -> bool:
        """Waits until the line is connected or has failed to connect; returns whether it is
        connected.

        False for a line that is closed meanwhile.
        """
        trying = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
        try:
            while (state := self.channel.get_state(try_to_connect=True)) in trying:
                await self.channel.wait_for_state_change(state)
        except grpc.aio.UsageError:  # which gRPC raises for a closed channel
            return False
        return state is grpc.ChannelConnectivity.READY

    async def route(
        self, request: RouteBytes, left_s: float, on_queued: OnQueued | None
    ) -> RouteResponse:
        """Routes a request over the stream or by a call; raises KvRouteError or AioRpcError."""
        stream = self.stream
        if stream is not None and stream.takes(request.size):
            return await stream.route(request, left_s, on_queued)
        content = b"".join(request.pieces)
        call = self._route(content, timeout=left_s, metadata=self._metadata())
        self._picks.add(call)
        try:
            response = await call
        finally:
            self._picks.discard(call)
        if response is None:
            raise unreadable("Route")
        if stream is not None:
            stream.called()
        return response

    async def report(
        self, progress: Sequence[Progress], left_s: float
    ) -> Sequence[ProgressOutcome]:
        """One outcome for each step, by a call with other reports or its own; raises KvRouteError
        or AioRpcError."""
        if self.report_batches is not None:
            return await self.report_batches.report(progress, left_s)
        return (await self._report(ReportRequest(progress=progress), left_s)).outcomes

    def silence(self) -> RouterUnreachable:
        """The error of a call to this line's router, which is silent."""
        return unreachable(f"the router at {self.address.target} accepts calls and sends nothing")

    def give_up_picks(self) -> int:
        """Fails all open picks with silence(), so that they go elsewhere; returns how many.

        The router's reservations for them must end, also those that it makes when it wakes. Items
        of a stream are followed by cancels (the router remembers its last 4,096 answers for them);
        calls are reset, so that their answers can't be sent. The lease ends the other reservations:
        those whose answer had left the router, or whose cancel was lost with a connection.
        """
        calls = [call for call in self._picks if call.cancel()]
        return len(calls) + (0 if self.stream is None else self.stream.give_up(self.silence()))

    async def close(self) -> None:
        """Ends the connection and everything on it."""
        await self.watch.close()
        if self.stream is not None:
            await self.stream.close()
        if self.report_batches is not None:
            await self.report_batches.close()
        await self.channel.close()

    async def _report(self, request: ReportRequest, left_s: float) -> ReportResponse:
        """One call; raises KvRouteError, also for another number of outcomes than of steps, or
        AioRpcError."""
        response = await self.router.Report(request, timeout=left_s, metadata=self._metadata())
        if response is None:
            raise unreadable("Report")
        count, steps = len(response.outcomes), len(request.progress)
        if count != steps:
            message = f"the router gave {count} outcomes for {steps} steps"
            raise KvRouteError(grpc.StatusCode.INTERNAL, None, message)
        return response

    async def _probe(self, timeout_s: float) -> None:
        message = HealthCheckRequest(service="liveness")
        try:
            await self.health(message, timeout=timeout_s, metadata=self._metadata())
        except grpc.aio.AioRpcError as failure:
            raise error_from_call(failure) from failure
