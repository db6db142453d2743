"""kvroute.v1.Fleet over gRPC: the fleet, its queue, and operators' commands. Decides nothing."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from events.engines.endpoints import masked
from events.plane.facts import Control
from events.plane.settings import EngineSettings
from kvroute.v1 import fleet_pb2
from router.api.desk import request_codec
from router.api.desk.request_lists import listed, past_decisions
from router.api.service.calls import Context
from router.api.service.decision_feed import DecisionFeed
from router.api.service.router_service import jittered
from router.api.service.worker_feed import WATCHES_MAX, WorkerFeed
from router.cluster.replicas.fleet_commands import FleetCommands, audited
from router.config.settings.fleet_settings import TOMBSTONE_MAX_S, TOMBSTONE_S
from router.decide.core.admission import Admission
from router.decide.core.core import RouterCore
from router.net.keys.door import CURRENT
from router.net.keys.identity import ANYBODY, Identity
from router.net.listener.turns import turned
from router.observe.audit.observers import Watchers
from router.request.refusal import Reason, Refusal


class FleetService:
    """Handlers of the service kvroute.v1.Fleet; those with long lists answer with bytes."""

    def __init__(
        self,
        core: RouterCore,
        clock: Callable[[], float],
        stopping: asyncio.Event,
        *,
        stream_age_s: float | None = None,
        admission: Admission,
        commands: FleetCommands,
        send_control: Callable[[Control], Awaitable[bool]],
        register: Callable[[EngineSettings], Awaitable[None]],
        runs_relay: Callable[[str], bool] = lambda _worker_id: False,
        keep: Callable[[], Awaitable[object]] | None = None,
        watches_max: int = WATCHES_MAX,
        watchers: Watchers,
    ) -> None:
        """admission: the queue of requests that wait. send_control: sends a fleet command to every
        replica. register: starts a relay; runs_relay: whether this router runs one for a worker.
        keep: waits until the commands in force are on the disk; None: they are not saved. watchers:
        where WatchDecisions calls are entered for decisions.
        """
        self._core = core
        self._admission = admission
        self.feed = WorkerFeed(core, clock, stopping, watches_max)
        self.decisions = DecisionFeed(core, watchers, stopping, watches_max)
        self._clock = clock
        self._stopping = stopping
        self._stream_age_s = stream_age_s
        self._send_control = send_control
        self._commands = commands
        self._register = register
        self._runs_relay = runs_relay
        self._keep = keep

    async def ListWorkers(self, request: fleet_pb2.ListWorkersRequest, context: Context) -> bytes:
        return await self.feed.list(request.model, _identity(), only_away=request.away)

    def WatchWorkers(
        self, request: fleet_pb2.WatchWorkersRequest, context: Context
    ) -> AsyncGenerator[bytes, None]:
        return self.feed.watch(request.model, jittered(self._stream_age_s), _identity())

    def WatchDecisions(
        self, request: fleet_pb2.WatchDecisionsRequest, context: Context
    ) -> AsyncGenerator[bytes, None]:
        _check_sight()
        return self.decisions.watch(request, jittered(self._stream_age_s))

    async def FindDecisions(
        self, request: fleet_pb2.FindDecisionsRequest, context: Context
    ) -> bytes:
        _check_sight()
        return await turned(past_decisions(self._core.reservations, request.id, self._clock()))

    async def RegisterWorker(
        self, request: fleet_pb2.RegisterWorkerRequest, context: Context
    ) -> fleet_pb2.RegisterWorkerResponse:
        settings = request_codec.read_registration(request)
        _check_worker(settings.id)
        before = self._commands.state(settings.id)
        await self._register(settings)
        after = f"relay here, {settings.ranks} ranks, at {masked(settings.address)}"
        audited("register", settings.id, _author(context), before, after)
        if self._commands.removed(settings.id):  # or its beats would still be ignored
            await self._command(context, "undrain", settings.id)
        return fleet_pb2.RegisterWorkerResponse(ranks=settings.ranks)

    async def DrainWorker(
        self, request: fleet_pb2.DrainWorkerRequest, context: Context
    ) -> fleet_pb2.DrainWorkerResponse:
        action = "undrain" if request.undrain else "drain"
        ranks = await self._command(context, action, request.worker_id)
        return fleet_pb2.DrainWorkerResponse(ranks=ranks)

    async def RemoveWorker(
        self, request: fleet_pb2.RemoveWorkerRequest, context: Context
    ) -> fleet_pb2.RemoveWorkerResponse:
        if not 0 <= request.tombstone_s <= TOMBSTONE_MAX_S:
            raise Refusal(
                Reason.INVALID_FIELD,
                f"tombstone_s is {request.tombstone_s}; it must be from 0 (the default,"
                f" {TOMBSTONE_S:.0f} s) to {TOMBSTONE_MAX_S:.0f} s",
                metadata={"field": "tombstone_s"},
            )
        ranks = await self._command(context, "remove", request.worker_id, request.tombstone_s)
        return fleet_pb2.RemoveWorkerResponse(ranks=ranks)

    async def ResyncWorker(
        self, request: fleet_pb2.ResyncWorkerRequest, context: Context
    ) -> fleet_pb2.ResyncWorkerResponse:
        ranks = await self._command(context, "resync", request.worker_id)
        return fleet_pb2.ResyncWorkerResponse(ranks=ranks)

    async def ListQueue(self, request: fleet_pb2.ListQueueRequest, context: Context) -> bytes:
        return await turned(listed(self._admission, request, self._clock(), _identity()))

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
        """Applies a command to a worker here at once, and sends it to every replica; returns the
        number of ranks reached here. Raises Refusal, also when NATS is away."""
        _check_worker(worker_id)
        known = (
            worker_id in self._core.fleet.drained
            or self._commands.removed(worker_id)
            or self._runs_relay(worker_id)
            or self._core.fleet.view.ranks(worker_id)
        )
        if not known:
            raise Refusal(Reason.UNKNOWN_WORKER, f"no worker {worker_id!r} is known here")
        control = self._commands.give(action, worker_id, tombstone_s, _author(context))
        ranks = self._commands.apply(control)
        sent = await self._send_control(control)
        if self._keep is not None:
            await self._keep()  # a failed write is counted; the command has its effect
        if self._commands.overtaken(control):
            raise Refusal(
                Reason.OVERTAKEN,
                f"another command for worker {worker_id!r}, given at the same time, is newer"
                f" than this {action}",
            )
        if not sent:
            raise Refusal(
                Reason.NO_BROKER,
                f"{action} took effect here, but NATS is away: other replicas did not get it",
            )
        return ranks


def _check_worker(worker_id: str) -> None:
    """Raises Refusal for a worker that the caller's key may not command."""
    usage = CURRENT.get()
    if usage is not None:
        usage.identity.check_worker(worker_id)


def _check_sight() -> None:
    """Raises Refusal for a caller that may not see decisions."""
    if _identity().sight is not None:
        raise Refusal(
            Reason.PERMISSION_DENIED,
            "decisions show all workers, and this key sees some workers or models only",
        )


def _identity() -> Identity:
    """The identity of the current call's caller."""
    usage = CURRENT.get()
    return ANYBODY if usage is None else usage.identity


def _author(context: Context) -> str:
    """Name of the identity that gives a command, or the caller's address, for the audit log."""
    usage = CURRENT.get()
    return f"anybody at {context.host}" if usage is None else usage.identity.name
