"""A router's gRPC services on loopback, with a real core and a fleet that the test plays."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry

from events.plane.facts import Control
from events.plane.settings import EngineSettings
from indexer.hashing import pack_tokens
from kvroute.v1 import fleet_pb2, fleet_pb2_grpc, router_pb2, router_pb2_grpc
from router.api.desk.counters import Metrics
from router.api.desk.desk import Desk
from router.api.desk.reports import Reports
from router.api.service.calls import Guard
from router.api.service.fleet_service import FleetService
from router.api.service.grpc_bounds import GRPC_BOUNDS, GrpcBounds
from router.api.service.local_router import LocalRouter
from router.api.service.router_service import RouterService
from router.api.service.server import GrpcServer
from router.api.service.texts import Texts
from router.api.service.worker_feed import WATCHES_MAX, WorkerFeed
from router.api.service.workers_to_ask import proof_trouble, tokens_trouble
from router.cluster.replicas.fleet_commands import FleetCommands
from router.config.settings.queue_settings import QueueSettings
from router.config.settings.serving_settings import GrpcSettings
from router.decide.core.admission import Admission
from router.fleet.health.warnings import WarningCode
from router.net.keys.certificates import Certificates
from router.net.keys.door import Door
from router.net.listener.http_bounds import HttpBounds
from router.observe.audit.observers import Watchers
from router.observe.audit.sampling import Watch
from router.observe.tracing.spans import Tracing
from router.request.refusal import Refusal
from router.request.tokens import ModelPrompts, Prompts
from tests.stage.fleet import Fleet
from tests.stage.waiting import until

NO_QUEUE = QueueSettings(max_waiting=0)
"""Requests without a worker that has room are refused at once."""


@dataclass
class Served:
    """What a test talks to."""

    fleet: Fleet
    server: GrpcServer
    commands: FleetCommands
    metrics: Metrics
    stopping: asyncio.Event
    channel: grpc.aio.Channel
    desk: Desk
    reports: Reports
    guard: Guard
    watched: WorkerFeed
    texts: Texts
    watchers: Watchers
    sent: list[Control] = field(default_factory=list)
    """Commands that went to the other replicas."""
    registered: list[EngineSettings] = field(default_factory=list)
    broker_is_there: bool = True
    on_register: Callable[[], object] = lambda: None
    """Called before an engine is taken."""
    on_sent: Callable[[], object] = lambda: None
    """Called while a command is on its way to the others."""

    @property
    def router(self) -> Any:
        return router_pb2_grpc.RouterStub(self.channel)

    @property
    def workers(self) -> Any:
        return fleet_pb2_grpc.FleetStub(self.channel)

    def route(self, tokens: int = 100, first: int = 0, **about: Any) -> Any:
        """A call of Route; the request is that of `asked`."""
        return self.router.Route(asked(tokens, first, **about))

    async def waits(self, count: int) -> None:
        """Returns once so many requests wait in the queue."""
        await until(lambda: len(self.desk.admission) == count, f"{count} requests wait", pause_s=0)

    async def queued(
        self, tokens: int = 100, first: int = 0, **about: Any
    ) -> "asyncio.Future[Any]":
        """A call of Route whose request waits."""
        count = len(self.desk.admission)
        call = asyncio.ensure_future(self.route(tokens, first, **about))
        await self.waits(count + 1)
        return call

    def call(
        self, method: str, *, metadata: Any = None, timeout: float | None = None, **fields: Any
    ) -> Any:
        """A call of a method of the fleet service; fields: of its request."""
        request = getattr(fleet_pb2, f"{method}Request")(**fields)
        return getattr(self.workers, method)(request, metadata=metadata, timeout=timeout)

    async def stream(self, *requests: router_pb2.RouteRequest, metadata: Any = None) -> Any:
        """A call of RouteStream to which a batch of these requests was written."""
        call = self.router.RouteStream(metadata=metadata)
        await call.write(batch_of(*requests))
        return call

    async def report(self, reservation_id: str, state: str = "finished", **told: Any) -> Any:
        """A call of Report with one step, which is told its result."""
        number = router_pb2.ProgressState.Value(f"PROGRESS_STATE_{state.upper()}")
        step = router_pb2.Progress(reservation_id=reservation_id, state=number, **told)
        return await self.router.Report(router_pb2.ReportRequest(progress=[step]))

    def local(self) -> LocalRouter:
        """The router for a port in the same process."""
        rng = random.Random(1)
        return LocalRouter(self.texts, self.reports, self.guard, self.watched.list, rng=rng)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"kvroute_{name}", labels) or 0.0

    def requests(self, outcome: str, reason: str = "") -> float:
        return self.metric("requests_total", outcome=outcome, reason=reason)

    def state(self) -> object:
        """All that a refused request must leave as it was."""
        core = self.fleet.core
        return self.fleet.loads(), repr(core.reservations), core.endings.total()


@asynccontextmanager
async def served(
    *workers: str,
    grpc_settings: GrpcSettings | None = None,
    watch: Watch | None = None,
    queue: QueueSettings = NO_QUEUE,
    models_prompts: Mapping[str, ModelPrompts] | None = None,
    certificates: Certificates | None = None,
    replicas: Any = None,
    on_resync: Callable[[str], None] = lambda _worker_id: None,
    door: Door | None = None,
    tracing: Tracing | None = None,
    bounds: GrpcBounds = GRPC_BOUNDS,
    http: HttpBounds | None = None,
    watches_max: int = WATCHES_MAX,
    **about: Any,
) -> AsyncIterator[Served]:
    """Serves a fleet, and takes the server down without grace. The channel is plain text.

    workers: ids of those that are there already. replicas: the link to other replicas."""
    prompts = Prompts(models_prompts or {})
    troubles = {
        WarningCode.TOKENS_DIFFER: tokens_trouble(prompts),
        WarningCode.TOKENS_UNPROVEN: proof_trouble(prompts),
    }
    fleet = Fleet(*workers, troubles=troubles, **about)
    metrics = Metrics(CollectorRegistry())
    stopping = asyncio.Event()
    commands = FleetCommands(fleet.core, fleet.clock, on_resync=on_resync)

    async def send_control(control: Control) -> bool:
        stage.sent.append(control)
        stage.on_sent()
        return stage.broker_is_there

    async def register(settings: EngineSettings) -> None:
        stage.on_register()
        stage.registered.append(settings)

    settings = grpc_settings or GrpcSettings(listen="127.0.0.1:0")
    stream_age_s = bounds.stream_age_s
    guard = Guard.of(fleet.core.routing.prompt_tokens_max, metrics, door, bounds)
    soon = asyncio.get_running_loop().call_soon
    watchers = Watchers("a", random.Random(7), print)
    desk = desk_of(
        fleet,
        metrics,
        guard.fault,
        watch=watch or watchers.watch,
        queue=queue,
        soon=soon,
        tracing=tracing,
    )
    reports = Reports(
        fleet.core,
        metrics,
        fleet.clock,
        desk.admission,
        desk.changed,
        prompts.on_answer,
        replicas=lambda: replicas,
    )
    texts = Texts(desk, fleet.core, prompts)
    service = RouterService(desk, reports, guard, stopping, texts=texts, stream_age_s=stream_age_s)
    fleet_service = FleetService(
        fleet.core,
        fleet.clock,
        stopping,
        stream_age_s=stream_age_s,
        admission=desk.admission,
        commands=commands,
        send_control=send_control,
        register=register,
        watches_max=watches_max,
        watchers=watchers,
    )
    server = GrpcServer(
        settings, service, fleet_service, certificates=certificates, http=http, bounds=bounds
    )
    await server.start()
    try:
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{server.port}",
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        ) as channel:
            stage = Served(
                fleet,
                server,
                commands,
                metrics,
                stopping,
                channel,
                desk,
                reports,
                guard,
                fleet_service.feed,
                texts,
                watchers,
            )
            yield stage
    finally:
        stopping.set()
        await server.drain(0)
        await prompts.close()


def desk_of(
    fleet: Fleet,
    metrics: Metrics,
    fault: Callable[[str, Exception], Refusal],
    *,
    watch: Watch | None = None,
    queue: QueueSettings = NO_QUEUE,
    soon: Callable[[Callable[[], None]], object] = lambda call: call(),
    tracing: Tracing | None = None,
) -> Desk:
    """The desk of a fleet, with its admission queue. soon: by default, at once."""
    admission = Admission(fleet.core, queue, random.Random(7))
    return Desk(
        fleet.core,
        metrics,
        fleet.clock,
        fault=fault,
        admission=admission,
        soon=soon,
        watch=watch,
        tracing=tracing,
    )


def raised(_method: str, error: Exception, _effect: str = "") -> Refusal:
    """The `fault` of a desk whose test wants to see faults."""
    raise error


@dataclass(frozen=True)
class Refused:
    """A status with its details, taken apart."""

    code: grpc.StatusCode
    reason: str
    domain: str
    message: str
    retry_s: float | None
    metadata: dict[str, str] = field(default_factory=dict)
    """Of ErrorInfo."""


def taken_apart(status: Status) -> Refused:
    info, retry = ErrorInfo(), RetryInfo()
    retry_s = None
    for detail in status.details:
        if detail.Is(RetryInfo.DESCRIPTOR):
            detail.Unpack(retry)
            retry_s = retry.retry_delay.ToTimedelta().total_seconds()
        else:
            assert detail.Unpack(info)
    (code,) = (one for one in grpc.StatusCode if one.value[0] == status.code)
    return Refused(code, info.reason, info.domain, status.message, retry_s, dict(info.metadata))


async def refusal(call: Awaitable[object]) -> Refused:
    """The status that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error: Any = caught.value
    status = rpc_status.from_call(error)
    if status is None:
        return Refused(error.code(), "", "", error.details(), None)
    assert status.message == error.details()
    return taken_apart(status)


PROMPTS = frozenset(
    field.name for field in router_pb2.RouteRequest.DESCRIPTOR.oneofs_by_name["prompt"].fields
)


def asked(tokens: int = 100, first: int = 0, **about: Any) -> router_pb2.RouteRequest:
    """A request for tokens that follow one another; a prompt of another form takes their place."""
    prompt = {"token_bytes": pack_tokens(range(first, first + tokens))}
    if PROMPTS & about.keys():
        prompt = {}
    return router_pb2.RouteRequest(**prompt | about)


def batch_of(*requests: router_pb2.RouteRequest) -> router_pb2.RouteBatch:
    """Items with the indices 1, 2 and so on."""
    items = [router_pb2.RouteItem(index=i, request=one) for i, one in enumerate(requests, 1)]
    return router_pb2.RouteBatch(items=items)
