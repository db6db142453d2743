"""The gRPC face: reads requests, asks the core, writes answers. Decides nothing."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast
from urllib.parse import unquote

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha._async import ReflectionServicer
from grpc_reflection.v1alpha.reflection_pb2_grpc import (
    add_ServerReflectionServicer_to_server as add_reflection,
)
from typing_extensions import override

from events.engines.endpoints import masked
from events.plane.facts import Control
from events.plane.settings import EngineSettings
from kvroute.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    prompts_pb2,
    prompts_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)
from router.config.keys import ConfigError
from router.config.settings.fleet_settings import TOMBSTONE_MAX_S
from router.config.settings.serving_settings import GrpcSettings
from router.core.admission import Admission
from router.core.core import RouterCore
from router.desk import request_codec
from router.desk.desk import Desk
from router.desk.methods import ROUTE_STREAM
from router.desk.queue_list import listed
from router.desk.reports import Reports
from router.desk.stream_items import StreamLife, read_batch
from router.desk.tenant import caller_of
from router.keys.certificates import Certificates
from router.keys.door import CURRENT
from router.keys.exposure import UNIX
from router.replicas.fleet_commands import ControlDesk, audited
from router.request.refusal import Reason, Refusal
from router.service.calls import Guard, Handler, abort, time_left
from router.service.credentials import server_credentials
from router.service.inbound import SMALL_BYTES
from router.service.late_results import LateResults
from router.service.prompts_service import PromptsService
from router.service.texts import Texts
from router.service.turns import turned
from router.service.unsent import when_unsent
from router.service.worker_feed import WATCHES_MAX, WorkerFeed

KEEPALIVE_TIMEOUT_S = 20.0
"""What a client has to answer a ping."""
ANSWER_BYTES_MAX = 64 << 20
PING_STRIKES_MAX = 2
"""Pings that come too early, before their connection is closed."""

SERVICES = (
    router_pb2.DESCRIPTOR.services_by_name["Router"].full_name,
    fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name,
    prompts_pb2.DESCRIPTOR.services_by_name["Prompts"].full_name,
)
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class RouterService(router_pb2_grpc.RouterServicer):
    """kvroute.v1.Router."""

    def __init__(
        self,
        desk: Desk,
        reports: Reports,
        guard: Guard,
        stopping: asyncio.Event,
        *,
        texts: Texts,
        stream_age_s: float | None = None,
    ) -> None:
        """guard: stands before the handlers. stopping: set when the server drains, so that open
        streams end. texts: takes prompts without tokens. stream_age_s: a stream ends by itself
        after this time at most; None: never.
        """
        self.guard = guard
        self._desk = desk
        self.texts = texts
        self._reports = reports
        self._stopping = stopping
        self._stream_age_s = stream_age_s

    @override
    async def Route(  # type: ignore[override]  # messages are bytes here
        self, request: bytes, context: Context
    ) -> bytes:
        caller = caller_of(CURRENT.get())
        answer, reservation, repeated = await self.texts.answered(
            request, time_left(context), caller
        )
        if not repeated:
            if time_left(context) <= 0:
                self._desk.unsent(reservation)
                raise Refusal(
                    Reason.DEADLINE_EXCEEDED, "the call's deadline passed before its answer"
                )
            when_unsent(partial(self._desk.unsent, reservation))
        return answer

    @override
    async def RouteStream(  # type: ignore[override]  # the same, and read one by one
        self, request_iterator: object, context: Context
    ) -> None:
        await context.send_initial_metadata(())  # the client sees that streams get through
        limit = self.guard.limits.of(ROUTE_STREAM)
        usage = CURRENT.get()
        items = self.texts.items(caller_of(usage))
        async with (
            LateResults(items, context, read_s=self.guard.read_s) as late,
            StreamLife(self._stopping, jittered(self._stream_age_s)) as life,
        ):
            while (content := await life.read(context)) is not None:
                limit.check(len(content))
                if usage is not None:
                    usage.message(len(content))
                if len(content) <= SMALL_BYTES:
                    for results in items.decide(read_batch(content)):
                        await _write(late, results)
                    continue
                with self.guard.in_flight.hold(len(content)):
                    for results in items.decide(read_batch(content)):
                        await _write(late, results)
            await late.rest()

    @override
    async def Report(  # type: ignore[override]  # bytes, too
        self, request: bytes, context: Context
    ) -> bytes:
        return await self._reports.report(request, host_of(context.peer()))

    @override
    async def Explain(  # type: ignore[override]  # bytes, too
        self, request: bytes, context: Context
    ) -> bytes:
        return await self.texts.explain(request, caller_of(CURRENT.get()))


class FleetService(fleet_pb2_grpc.FleetServicer):
    """kvroute.v1.Fleet."""

    def __init__(
        self,
        core: RouterCore,
        clock: Callable[[], float],
        stopping: asyncio.Event,
        *,
        stream_age_s: float | None = None,
        admission: Admission,
        commands: ControlDesk,
        send_control: Callable[[Control], Awaitable[bool]],
        register: Callable[[EngineSettings], Awaitable[None]],
        runs_relay: Callable[[str], bool] = lambda _worker_id: False,
        keep: Callable[[], Awaitable[object]] | None = None,
        watches_max: int = WATCHES_MAX,
    ) -> None:
        """admission: the requests that wait. send_control: tells every replica. register: starts a
        relay; runs_relay: whether one runs here for a worker. keep: waits until what is in force is
        on the disk; None: it is not kept.
        """
        self._core = core
        self._admission = admission
        self.feed = WorkerFeed(core, clock, stopping, watches_max)
        self._clock = clock
        self._stopping = stopping
        self._stream_age_s = stream_age_s
        self._send_control = send_control
        self._commands = commands
        self._register = register
        self._runs_relay = runs_relay
        self._keep = keep

    @override
    async def ListWorkers(  # type: ignore[override]  # answers are bytes
        self, request: fleet_pb2.ListWorkersRequest, context: Context
    ) -> bytes:
        return await self.feed.list(request.model)

    @override
    async def WatchWorkers(  # type: ignore[override]  # answers are bytes
        self, request: fleet_pb2.WatchWorkersRequest, context: Context
    ) -> AsyncIterator[bytes]:
        age_s = jittered(self._stream_age_s)
        async with aclosing(self.feed.watch(request.model, age_s)) as messages:
            async for message in messages:
                yield message

    @override
    async def RegisterWorker(
        self, request: fleet_pb2.RegisterWorkerRequest, context: Context
    ) -> fleet_pb2.RegisterWorkerResponse:
        try:
            settings = request_codec.read_registration(request)
            _check_worker(settings.id)
            before = self._commands.state(settings.id)
            await self._register(settings)
        except Refusal as refusal:
            if refusal.reason is Reason.PERMISSION_DENIED:
                raise  # counted by the guard
            await abort(context, refusal)
        after = f"relay here, {settings.ranks} ranks, at {masked(settings.address)}"
        audited("register", settings.id, _author(context), before, after)
        if self._commands.removed(settings.id):  # or its beats would still be ignored
            await self._command(context, "undrain", settings.id)
        return fleet_pb2.RegisterWorkerResponse(ranks=settings.ranks)

    @override
    async def DrainWorker(
        self, request: fleet_pb2.DrainWorkerRequest, context: Context
    ) -> fleet_pb2.DrainWorkerResponse:
        action = "undrain" if request.undrain else "drain"
        ranks = await self._command(context, action, request.worker_id)
        return fleet_pb2.DrainWorkerResponse(ranks=ranks)

    @override
    async def RemoveWorker(
        self, request: fleet_pb2.RemoveWorkerRequest, context: Context
    ) -> fleet_pb2.RemoveWorkerResponse:
        if not 0 <= request.tombstone_s <= TOMBSTONE_MAX_S:
            refusal = Refusal(
                Reason.INVALID_FIELD,
                f"tombstone_s is {request.tombstone_s}; it must be from 0 (the configured time,"
                f" fleet.tombstone_s) to {TOMBSTONE_MAX_S:.0f} s",
                metadata={"field": "tombstone_s"},
            )
            await abort(context, refusal)
        ranks = await self._command(context, "remove", request.worker_id, request.tombstone_s)
        return fleet_pb2.RemoveWorkerResponse(ranks=ranks)

    @override
    async def ResyncWorker(
        self, request: fleet_pb2.ResyncWorkerRequest, context: Context
    ) -> fleet_pb2.ResyncWorkerResponse:
        ranks = await self._command(context, "resync", request.worker_id)
        return fleet_pb2.ResyncWorkerResponse(ranks=ranks)

    @override
    async def ListQueue(  # type: ignore[override]  # answers are bytes
        self, request: fleet_pb2.ListQueueRequest, context: Context
    ) -> bytes:
        return await turned(listed(self._admission, request, self._clock()))

    @override
    async def GetIndexStats(
        self, request: fleet_pb2.GetIndexStatsRequest, context: Context
    ) -> fleet_pb2.GetIndexStatsResponse:
        stats = self._core.fleet.view.index.stats()
        return fleet_pb2.GetIndexStatsResponse(
            blocks=stats.blocks,
            placements=stats.placements,
            bytes=stats.bytes,
            workers=len(self._core.fleet.view.sources),
            facts_applied=sum(self._core.fleet.view.facts.values()),
        )

    async def _command(
        self, context: Context, action: str, worker_id: str, tombstone_s: float = 0.0
    ) -> int:
        """Does it here at once, and tells every replica; returns the ranks it reached here."""
        _check_worker(worker_id)
        known = (
            worker_id in self._core.fleet.drained
            or self._commands.removed(worker_id)
            or self._runs_relay(worker_id)
            or self._core.fleet.view.ranks(worker_id)
        )
        if not known:
            await abort(
                context, Refusal(Reason.UNKNOWN_WORKER, f"no worker {worker_id!r} is known here")
            )
        control = self._commands.give(action, worker_id, tombstone_s, _author(context))
        ranks = self._commands.apply(control)
        sent = await self._send_control(control)
        if self._keep is not None:
            await self._keep()  # a disk that refuses is counted; the command has its effect
        if self._commands.overtaken(control):
            await abort(
                context,
                Refusal(
                    Reason.OVERTAKEN,
                    f"another command for worker {worker_id!r}, given at the same time, is newer"
                    f" than this {action}",
                ),
            )
        if not sent:
            await abort(
                context,
                Refusal(
                    Reason.NO_BROKER,
                    f"{action} took effect here, but NATS is away: other replicas don't know",
                ),
            )
        return ranks


def _check_worker(worker_id: str) -> None:
    """Raises Refusal for a worker that the caller's key is not for."""
    usage = CURRENT.get()
    if usage is not None:
        usage.identity.check_worker(worker_id)


def _author(context: Context) -> str:
    """The identity that gives a command."""
    usage = CURRENT.get()
    return f"anybody at {host_of(context.peer())}" if usage is None else usage.identity.name


class GrpcServer:
    """The server with its services, health and reflection."""

    def __init__(
        self,
        settings: GrpcSettings,
        router: RouterService,
        fleet: FleetService,
        *,
        certificates: Certificates | None = None,
    ) -> None:
        """certificates: of the TCP port; None: plain text, as on unix sockets."""
        self._certificates = certificates
        options = server_options(settings, router.guard.limits.largest)
        self._server = grpc.aio.server(options=options)
        self._settings = settings
        self._health = _Health()
        self._draining = False
        self.port = 0
        guard = self._guard = router.guard
        in_flight, feed = guard.in_flight, fleet.feed
        guard.metrics.follow(lambda: in_flight.bytes, in_flight.bytes_max, lambda: feed.watches)
        guard.add(self._server, SERVICES[0], byte_handlers(router))
        guard.add(self._server, SERVICES[1], fleet_handlers(fleet))
        guard.add(self._server, SERVICES[2], prompts_handlers(PromptsService(router.texts)))
        others = guard.registrar(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, others)
        if settings.reflection:
            names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
            add_reflection(ReflectionServicer(names), others)  # type: ignore[no-untyped-call]

    async def start(self) -> None:
        """Listens; raises ConfigError when an address can't be had."""
        self.port = self._listen(self._settings.listen)
        if self._settings.unix_socket:
            self._listen_on(
                Path(self._settings.unix_socket), int(self._settings.unix_socket_mode, 8)
            )
        await self.set_serving(ready=False)
        await self._server.start()

    async def set_serving(self, *, ready: bool) -> None:
        """Liveness is always SERVING while we run; all else follows readiness, never after a drain
        began."""
        ready = ready and not self._draining
        serving = health_pb2.HealthCheckResponse.SERVING
        state = serving if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("liveness", serving)
        for name in ("", "readiness", *SERVICES):
            await self._health.set(name, state)

    async def drain(self, grace_s: float) -> None:
        """Says NOT_SERVING, finishes what is in flight, then stops."""
        self._draining = True
        await self.set_serving(ready=False)
        self._health.end_watches()
        await self._guard.stop()
        await self._server.stop(grace_s)

    def _listen_on(self, unix_socket: Path, mode: int) -> None:
        """Listens on a unix socket, whose file has the permissions from the first moment; raises
        ConfigError."""
        before = os.umask(0o777 & ~mode)
        try:
            self._listen(f"unix:{unix_socket}")
        finally:
            os.umask(before)

    def _listen(self, address: str) -> int:
        try:
            if self._certificates is None or address.startswith(UNIX):
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, server_credentials(self._certificates))
        except RuntimeError as error:
            raise ConfigError(f"can't listen on {address}: is something else there?") from error


class _Health(health.aio.HealthServicer):
    """Health whose Watch ends with a drain; the base's would hold it up for all its grace."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = asyncio.Event()

    def end_watches(self) -> None:
        self._ended.set()

    async def List(self, request: Any, context: Context) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "serving or not, and nothing else")
        raise AssertionError("abort() ends the call")

    @override
    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        watch = asyncio.ensure_future(super().Watch(request, context))
        if await _first(watch, self._ended):
            await watch


def byte_handlers(router: RouterService) -> dict[str, Handler]:
    """Router's methods as bytes, which are bounded and read before protobuf sees them."""
    return {
        "Route": grpc.unary_unary_rpc_method_handler(router.Route),
        "RouteStream": grpc.stream_stream_rpc_method_handler(router.RouteStream),
        "Report": grpc.unary_unary_rpc_method_handler(router.Report),
        "Explain": grpc.unary_unary_rpc_method_handler(router.Explain),
    }


class _Collected:
    """Takes the handlers that generated code would give to a server."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same ones."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Handler]) -> None:
        self.handlers |= handlers


def fleet_handlers(fleet: FleetService) -> dict[str, Handler]:
    """Fleet's methods; those that tell of all workers answer with bytes."""
    collected = _Collected()
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, cast("grpc.aio.Server", collected))
    return collected.handlers | {
        "ListWorkers": grpc.unary_unary_rpc_method_handler(
            fleet.ListWorkers, fleet_pb2.ListWorkersRequest.FromString
        ),
        "ListQueue": grpc.unary_unary_rpc_method_handler(
            fleet.ListQueue, fleet_pb2.ListQueueRequest.FromString
        ),
        "WatchWorkers": grpc.unary_stream_rpc_method_handler(
            fleet.WatchWorkers, fleet_pb2.WatchWorkersRequest.FromString
        ),
    }


def prompts_handlers(prompts: PromptsService) -> dict[str, Handler]:
    """Prompts' methods; a prompt that is rendered comes and goes as bytes."""
    collected = _Collected()
    prompts_pb2_grpc.add_PromptsServicer_to_server(prompts, cast("grpc.aio.Server", collected))
    return collected.handlers | {"Render": grpc.unary_unary_rpc_method_handler(prompts.Render)}


def server_options(settings: GrpcSettings, bytes_max: int) -> list[tuple[str, int]]:
    """gRPC's channel arguments. bytes_max: of the largest message that any method takes."""
    options = [
        ("grpc.so_reuseport", 0),  # a second server on the port fails, and loudly
        ("grpc.max_receive_message_length", bytes_max),
        ("grpc.max_send_message_length", ANSWER_BYTES_MAX),
        # A client that vanished without a word is noticed, though its stream says nothing.
        ("grpc.keepalive_time_ms", _milliseconds(settings.keepalive_s)),
        ("grpc.keepalive_timeout_ms", _milliseconds(KEEPALIVE_TIMEOUT_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", PING_STRIKES_MAX),
        ("grpc.max_concurrent_streams", settings.streams_max),
        ("grpc.max_allowed_incoming_connections", settings.connections_max),
        ("grpc.max_metadata_size", settings.metadata_kib_max * 1024),
        ("grpc.absolute_max_metadata_size", settings.metadata_kib_max * 1024),
        ("grpc.server_handshake_timeout_ms", _milliseconds(settings.handshake_timeout_s)),
    ]
    if settings.max_connection_age_s is not None:
        grace_s = settings.max_connection_age_grace_s
        options += [  # gRPC itself makes the age a tenth longer or shorter
            ("grpc.max_connection_age_ms", _milliseconds(settings.max_connection_age_s)),
            ("grpc.max_connection_age_grace_ms", _milliseconds(grace_s)),
        ]
    return options


def jittered(age_s: float | None) -> float | None:
    """An age between half of it and the whole, so that streams opened at once don't end at once."""
    return None if age_s is None else random.uniform(age_s / 2, age_s)


def host_of(peer: str) -> str:
    """The host of a call, as gRPC names its peer; a caller may have any number of ports."""
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


async def _first(future: asyncio.Future[Any], event: asyncio.Event) -> bool:
    """Whether the future was done before the event came; leaves nothing running behind."""
    came = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((future, came), return_when=asyncio.FIRST_COMPLETED)
        return future.done()
    finally:
        came.cancel()
        future.cancel()


async def _write(late: LateResults, results: bytes | None) -> None:
    """Sends results; None: only gives others a turn."""
    if results is None:
        await asyncio.sleep(0)
    else:
        await late.write(results)
