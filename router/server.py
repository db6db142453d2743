"""The gRPC face: reads requests, asks the core, writes answers. Decides nothing."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from math import inf
from time import thread_time
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status
from typing_extensions import override

from events.facts import Control
from events.settings import EngineSettings
from indexer.identity import WorkerKey
from kvroute.v1 import fleet_pb2, fleet_pb2_grpc, router_pb2, router_pb2_grpc
from router import codec
from router.config import TOMBSTONE_MAX_S, ConfigError, GrpcSettings
from router.control_desk import ControlDesk
from router.core import RouterCore
from router.decision import Progress, ProgressState, Repeated
from router.hot_prefixes import HotPrefixes
from router.lane import Batch, Results
from router.metrics import Metrics
from router.peer_link import PeerLink
from router.refusals import Reason, Refusal
from router.reservations import Ending, Reservation
from router.route_stream import SLICE_S, Answered, RouteItems, StreamLife, read_batch
from router.watch import Due, Watch

BATCH_ITEMS_MAX = 4096
PROGRESS_MAX = 65_536
KEEPALIVE_TIMEOUT_S = 20.0
"""What a client has to answer a ping."""
WATCH_S = 0.5
RUN_ITEMS = 16
"""Plain items that the lane answers at once, at most."""
PEER_PROGRESS_MAX = 1024
"""Steps in one question to another replica."""
CALLER_MAX = 64
"""Characters of a caller's address, as another replica names it."""
OWNERS_MAX = 64
"""Replicas asked for one Report."""

log = logging.getLogger("kvroute.grpc")

SERVICES = (
    router_pb2.DESCRIPTOR.services_by_name["Router"].full_name,
    fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name,
)
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class RouterService(router_pb2_grpc.RouterServicer):
    """kvroute.v1.Router."""

    def __init__(
        self,
        core: RouterCore,
        metrics: Metrics,
        clock: Callable[[], float],
        stopping: asyncio.Event,
        *,
        stream_age_s: float | None = None,
        watch: Watch | None = None,
    ) -> None:
        """stopping: set when the server drains, so that open streams end.

        stream_age_s: a stream ends by itself after this time at most; None: never. watch: sees a
        share of the decisions, and may be another one later.
        """
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._stopping = stopping
        self._stream_age_s = stream_age_s
        self.watch = watch
        if core.lane is not None:
            core.lane.tally = metrics.tally
        self.peers: PeerLink | None = None
        """The way to other replicas, once there is one."""

    @override
    async def Route(  # type: ignore[override]  # messages are bytes here
        self, request: bytes, context: Context
    ) -> bytes:
        try:
            answer, _, _ = self._route(request)
        except Refusal as refusal:
            await abort(context, refusal)
        return answer

    @override
    async def RouteStream(  # type: ignore[override]  # the same, and read one by one
        self, request_iterator: object, context: Context
    ) -> None:
        await context.send_initial_metadata(())  # the client sees that streams get through
        items = self.route_items()
        async with StreamLife(self._stopping, jittered(self._stream_age_s)) as life:
            while (content := await life.read(context)) is not None:
                try:
                    batch = read_batch(content)
                    if len(batch) > BATCH_ITEMS_MAX:
                        raise Refusal(
                            Reason.INVALID_FIELD,
                            f"a batch of {len(batch)} items; {BATCH_ITEMS_MAX} is the most",
                        )
                except Refusal as refusal:
                    await abort(context, refusal)
                for results in items.decide(batch):
                    await context.write(results)

    def route_items(self) -> RouteItems:
        """For one stream."""
        return RouteItems(self._route, self._cancel, self._run)

    @override
    async def Report(
        self, request: router_pb2.ReportRequest, context: Context
    ) -> router_pb2.ReportResponse:
        if len(request.progress) > PROGRESS_MAX:
            await abort(
                context,
                Refusal(
                    Reason.INVALID_FIELD,
                    f"{len(request.progress)} steps in one call; {PROGRESS_MAX} is the most",
                ),
            )
        outcomes = []
        caller = caller_of(context.peer())
        began_s = thread_time()
        for one in request.progress:
            outcomes.append(self._report(one, caller))
            if thread_time() - began_s >= SLICE_S:
                await asyncio.sleep(0)  # other calls have a turn
                began_s = thread_time()
        if self.peers is not None:
            await self._ask_owners(self.peers, request.progress, outcomes, caller)
        return router_pb2.ReportResponse(outcomes=outcomes)

    def report_of_peer(self, payload: bytes) -> bytes:
        """Another replica hands on what it was told of our reservations: the answer's bytes."""
        request = router_pb2.ReportRequest()
        try:
            request.ParseFromString(payload)
        except DecodeError:
            self._core.view.dropped["malformed"] += 1
            return b""
        caller = request.caller[:CALLER_MAX]
        outcomes = [self._report(one, caller) for one in request.progress]
        return router_pb2.ReportResponse(outcomes=outcomes).SerializeToString()

    async def _ask_owners(
        self,
        peers: PeerLink,
        progress: Sequence[router_pb2.Progress],
        outcomes: list[router_pb2.ProgressOutcome],
        caller: str,
    ) -> None:
        """Hands steps of others' reservations to the replicas that own them; an owner that does not
        answer leaves them unknown."""
        places: dict[str, list[int]] = {}
        for i, outcome in enumerate(outcomes):
            if outcome.result == router_pb2.PROGRESS_RESULT_UNKNOWN and (
                owner := peers.owner(outcome.reservation_id)
            ):
                places.setdefault(owner, []).append(i)

        async def ask(owner: str, mine: list[int]) -> None:
            for first in range(0, len(mine), PEER_PROGRESS_MAX):
                some = mine[first : first + PEER_PROGRESS_MAX]
                asked = router_pb2.ReportRequest(
                    progress=[progress[i] for i in some], caller=caller
                )
                answer = await peers.forward(owner, asked.SerializeToString())
                for i, outcome in zip(some, _outcomes(answer, len(some)), strict=True):
                    outcomes[i] = outcome or router_pb2.ProgressOutcome(
                        reservation_id=progress[i].reservation_id,
                        result=router_pb2.PROGRESS_RESULT_UNKNOWN,
                        message=f"its replica, {owner}, does not answer",
                    )

        if len(places) > OWNERS_MAX:  # nobody's clients know as many replicas
            places = dict(islice(places.items(), OWNERS_MAX))
        await asyncio.gather(*(ask(owner, mine) for owner, mine in places.items()))

    @override
    async def Explain(
        self, request: router_pb2.RouteRequest, context: Context
    ) -> router_pb2.Explanation:
        try:
            asked = codec.read_request(request, self._core)
            decision = self._core.decide(asked, self._clock())
        except Refusal as refusal:
            await abort(context, refusal)
        self._metrics.requests.labels("explained", "").inc()
        refusal_instead = None if decision.order else self._core.decider.refuse(decision)
        return codec.write_explanation(decision, refusal_instead, self._core)

    def _route(self, request: bytes) -> Answered:
        """One request, answered; raises Refusal, counted."""
        now_s = self._clock()
        due = self.watch.take() if self.watch is not None else None
        try:
            if due is not None or (answered := self._plain(request, now_s)) is None:
                answered = self._any(read_message(request), now_s, due)
            self._tell_peers()
            return answered
        except Refusal as refusal:
            self._refused(refusal, request, now_s, due)
            raise
        except Exception as error:  # a fault of ours, which ends one request and no other
            log.exception("routing a request failed")
            fault = Refusal(Reason.INTERNAL, "the router failed on this request; its log says how")
            self._refused(fault, request, now_s, due)
            raise fault from error

    def _refused(self, refusal: Refusal, request: bytes, now_s: float, due: Due | None) -> None:
        self._metrics.requests.labels("refused", refusal.reason).inc()
        if due is not None:
            due.refused(codec.read_refused(request, refusal, now_s))

    def _plain(self, request: bytes, now_s: float) -> Answered | None:
        """A request answered by the lane; None when it takes the general way."""
        lane = self._core.lane
        if lane is None or (reservation := lane.answer(request, now_s)) is None:
            return None
        if (hot := self._core.hot) is not None:
            self._count(hot, reservation, lambda: request, now_s)
        return reservation.answer, reservation, False

    def _count(
        self,
        hot: HotPrefixes,
        reservation: Reservation,
        request: Callable[[], bytes],
        now_s: float,
    ) -> None:
        """The lane answered a plain request, which every worker may see."""
        hot.on_pick(
            reservation,
            True,
            lambda: codec.read_request(read_message(request()), self._core).prompt,
            now_s,
        )

    def _any(self, request: router_pb2.RouteRequest, now_s: float, due: Due | None) -> Answered:
        """A request answered the general way."""
        mark = self._metrics.stage_clock()
        asked = codec.read_request(request, self._core)
        outcome = self._core.route(asked, now_s, mark, due)
        reservation = outcome.reservation
        if isinstance(outcome, Repeated):
            self._metrics.requests.labels("repeated", "").inc()
            return reservation.answer, reservation, True
        answer = router_pb2.RouteResponse()
        try:
            codec.write_pick(answer, outcome, self._core, request.priority)
            if request.omit_receipt:
                answer.ClearField("receipt")
                answer.ClearField("prefill_receipt")
            reservation.answer = answer.SerializeToString()
        except BaseException:
            self._core.withdraw(reservation, now_s)
            raise
        self._metrics.picked(outcome)
        mark.total()
        return reservation.answer, reservation, False

    def _run(self, batch: Batch, results: Results, waited_s: float) -> dict[int, Reservation]:
        """Plain items at the front of what is left of a batch, answered by the lane."""
        answered: dict[int, Reservation] = {}
        watch = self.watch
        if watch is not None and watch.left < RUN_ITEMS:
            return answered  # one by one, so that the item that is due is seen
        if (lane := self._core.lane) is not None:
            now_s = self._clock()
            hot = self._core.hot
            places: list[tuple[Reservation, int]] | None = None if hot is None else []
            try:
                lane.answers(batch, results, int(waited_s * 1000), now_s, answered, places)
            except Refusal:
                pass  # of the item that is next: the general way comes to it again
            except Exception:  # a fault of ours; the next item is tried once more by itself
                log.exception("routing a batch failed")
            if hot is not None and places is not None:
                for reservation, place in places:
                    self._count(hot, reservation, partial(batch.request_of, place), now_s)
            if watch is not None:
                watch.passed(len(answered))
            self._tell_peers()
        return answered

    def _cancel(self, reservation: Reservation) -> None:
        """Ends a reservation whose caller left before it had the answer."""
        failed = Progress(reservation.id, ProgressState.FAILED, failure=Ending.FAILED_CANCELLED)
        self._core.report(failed, self._clock())
        self._tell_peers()

    def _tell_peers(self) -> None:
        """What is reserved here may have changed."""
        if self.peers is not None:
            self.peers.on_change()

    def _report(self, message: router_pb2.Progress, caller: str) -> router_pb2.ProgressOutcome:
        """A step that a caller reports, here or to another replica."""
        progress = codec.read_progress(message)
        if isinstance(progress, str):
            return router_pb2.ProgressOutcome(
                reservation_id=message.reservation_id,
                result=router_pb2.PROGRESS_RESULT_INVALID,
                message=progress,
            )
        reservation = self._core.reservations.get(progress.reservation_id)
        unknown_before = reservation is None or reservation.cached_tokens is None
        result = self._core.report(progress, self._clock(), caller)
        self._tell_peers()
        if reservation is not None and unknown_before and reservation.cached_tokens is not None:
            self._metrics.cache_reported(reservation.predicted_tokens, reservation.cached_tokens)
        return router_pb2.ProgressOutcome(
            reservation_id=message.reservation_id, result=codec.progress_result(result)
        )


class FleetService(fleet_pb2_grpc.FleetServicer):
    """kvroute.v1.Fleet."""

    def __init__(
        self,
        core: RouterCore,
        clock: Callable[[], float],
        stopping: asyncio.Event,
        *,
        stream_age_s: float | None = None,
        desk: ControlDesk,
        send_control: Callable[[Control], Awaitable[bool]],
        register: Callable[[EngineSettings], Awaitable[None]],
        runs_relay: Callable[[str], bool] = lambda _worker_id: False,
        keep: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """send_control: tells every replica. register: starts a relay; runs_relay: whether one runs
        here for a worker. keep: waits until what is in force is on the disk; None: it is not kept.
        """
        self._core = core
        self._clock = clock
        self._stopping = stopping
        self._stream_age_s = stream_age_s
        self._send_control = send_control
        self._desk = desk
        self._register = register
        self._runs_relay = runs_relay
        self._keep = keep

    @override
    async def ListWorkers(
        self, request: fleet_pb2.ListWorkersRequest, context: Context
    ) -> fleet_pb2.ListWorkersResponse:
        return fleet_pb2.ListWorkersResponse(workers=self._workers(request.model).values())

    @override
    async def WatchWorkers(
        self, request: fleet_pb2.WatchWorkersRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.WatchWorkersResponse]:
        known: dict[WorkerKey, bytes] = {}
        first = True
        age_s = jittered(self._stream_age_s)
        ends_s = inf if age_s is None else asyncio.get_running_loop().time() + age_s
        while not self._stopping.is_set() and asyncio.get_running_loop().time() < ends_s:
            workers = self._workers(request.model)
            current = {key: _settled(status) for key, status in workers.items()}
            changed = [status for key, status in workers.items() if known.get(key) != current[key]]
            removed = [key for key in known if key not in current]
            if first or changed or removed:
                yield fleet_pb2.WatchWorkersResponse(
                    changed=changed,
                    removed=[
                        fleet_pb2.WorkerRef(worker_id=key.worker_id, dp_rank=key.dp_rank)
                        for key in removed
                    ],
                )
            known, first = current, False
            await _wait(self._stopping, WATCH_S)

    @override
    async def RegisterWorker(
        self, request: fleet_pb2.RegisterWorkerRequest, context: Context
    ) -> fleet_pb2.RegisterWorkerResponse:
        try:
            settings = codec.read_engine(request)
            await self._register(settings)
        except Refusal as refusal:
            await abort(context, refusal)
        if self._desk.removed(settings.id):  # or its beats would still be ignored
            await self._command(context, "undrain", settings.id)
        return fleet_pb2.RegisterWorkerResponse()

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
    async def GetIndexStats(
        self, request: fleet_pb2.GetIndexStatsRequest, context: Context
    ) -> fleet_pb2.GetIndexStatsResponse:
        stats = self._core.view.index.stats()
        return fleet_pb2.GetIndexStatsResponse(
            blocks=stats.blocks,
            placements=stats.placements,
            bytes=stats.bytes,
            workers=len(self._core.view.sources),
            facts_applied=sum(self._core.view.facts.values()),
        )

    def _workers(self, model: str) -> dict[WorkerKey, fleet_pb2.WorkerStatus]:
        now_s = self._clock()
        return {
            key: codec.write_worker(source, self._core, now_s)
            for key, source in sorted(self._core.view.sources.items())
            if not model or self._core.serves(source, model)
        }

    async def _command(
        self, context: Context, action: str, worker_id: str, tombstone_s: float = 0.0
    ) -> int:
        """Does it here at once, and tells every replica; returns the ranks it reached here."""
        known = (
            worker_id in self._core.drained
            or self._desk.removed(worker_id)
            or self._runs_relay(worker_id)
            or self._core.view.ranks(worker_id)
        )
        if not known:
            await abort(
                context, Refusal(Reason.UNKNOWN_WORKER, f"no worker {worker_id!r} is known here")
            )
        control = self._desk.give(action, worker_id, tombstone_s)
        ranks = self._desk.apply(control)
        sent = await self._send_control(control)
        if self._keep is not None:
            await self._keep()  # a disk that refuses is counted; the command has its effect
        if self._desk.overtaken(control):
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


class GrpcServer:
    """The server with its services, health and reflection."""

    def __init__(self, settings: GrpcSettings, router: RouterService, fleet: FleetService) -> None:
        self._server = grpc.aio.server(options=server_options(settings))
        self._settings = settings
        self._health = _Health()
        self._draining = False
        self.port = 0
        router_pb2_grpc.add_RouterServicer_to_server(router, self._server)
        self._server.add_registered_method_handlers(SERVICES[0], byte_handlers(router))
        fleet_pb2_grpc.add_FleetServicer_to_server(fleet, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if settings.reflection:
            names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Listens; raises ConfigError when an address can't be had."""
        self.port = self._listen(self._settings.listen)
        if self._settings.unix_socket:
            self._listen(f"unix:{self._settings.unix_socket}")
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
        await self._server.stop(grace_s)

    def _listen(self, address: str) -> int:
        try:
            return self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"can't listen on {address}: is something else there?") from error


class _Health(health.aio.HealthServicer):
    """Health whose Watch ends with a drain; the base's would hold it up for all its grace."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = asyncio.Event()

    def end_watches(self) -> None:
        self._ended.set()

    @override
    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        watch = asyncio.ensure_future(super().Watch(request, context))
        if await _first(watch, self._ended):
            await watch


def byte_handlers(router: RouterService) -> dict[str, "grpc.RpcMethodHandler[Any, Any]"]:
    """Route and RouteStream as bytes, which the lane reads and writes by itself."""
    return {
        "Route": grpc.unary_unary_rpc_method_handler(router.Route),
        "RouteStream": grpc.stream_stream_rpc_method_handler(router.RouteStream),
    }


def server_options(settings: GrpcSettings) -> list[tuple[str, int]]:
    """gRPC's channel arguments."""
    size = settings.max_message_mib * 1024 * 1024
    options = [
        ("grpc.so_reuseport", 0),  # a second server on the port fails, and loudly
        ("grpc.max_receive_message_length", size),
        ("grpc.max_send_message_length", size),
        # A client that vanished without a word is noticed, though its stream says nothing.
        ("grpc.keepalive_time_ms", _milliseconds(settings.keepalive_s)),
        ("grpc.keepalive_timeout_ms", _milliseconds(KEEPALIVE_TIMEOUT_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
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


def caller_of(peer: str) -> str:
    """The host of a call, as gRPC names its peer; a caller may have any number of ports."""
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind


def _outcomes(answer: bytes | None, count: int) -> Sequence[router_pb2.ProgressOutcome | None]:
    """What another replica said of some steps; None of each when it said nothing of use."""
    response = router_pb2.ReportResponse()
    if answer:
        with suppress(DecodeError):
            response.ParseFromString(answer)
    if len(response.outcomes) != count:
        return [None] * count
    return response.outcomes


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


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Until the event comes, and no longer than that."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


async def abort(context: Context, refusal: Refusal) -> NoReturn:
    """Ends a call with a refusal's status and details."""
    status = rpc_status.to_status(codec.write_status(refusal))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort() ends the call")


def read_message(content: bytes) -> router_pb2.RouteRequest:
    """A RouteRequest; raises Refusal for bytes that are none."""
    try:
        return router_pb2.RouteRequest.FromString(content)
    except DecodeError as error:
        raise Refusal(Reason.INVALID_FIELD, f"no RouteRequest: {error}") from error


def _settled(status: fleet_pb2.WorkerStatus) -> bytes:
    """A worker's status without the ages, which change with every look."""
    copy = fleet_pb2.WorkerStatus()
    copy.CopyFrom(status)
    copy.ClearField("beat_age_s")
    copy.ClearField("sample_age_s")
    return copy.SerializeToString(deterministic=True)
