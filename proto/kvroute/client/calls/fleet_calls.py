"""The Fleet calls of a client: list, watch, register, drain and remove workers; list the queue.

Lists are retried; commands are sent once, since their answer counts the ranks that they reached.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from kvroute.client.connections.transport import Method, Transport
from kvroute.client.errors import KvRouteError, unreachable, unreadable
from kvroute.v1 import (
    DrainWorkerRequest,
    DrainWorkerResponse,
    FindDecisionsRequest,
    GetIndexStatsRequest,
    GetIndexStatsResponse,
    ListQueueRequest,
    ListQueueResponse,
    ListWorkersRequest,
    PastDecision,
    RegisterWorkerRequest,
    RegisterWorkerResponse,
    RemoveWorkerRequest,
    RemoveWorkerResponse,
    ResyncWorkerRequest,
    ResyncWorkerResponse,
    WatchDecisionsRequest,
    WatchDecisionsResponse,
    WatchWorkersRequest,
    WatchWorkersResponse,
    WorkerRef,
    WorkerStatus,
)

_Command = TypeVar(
    "_Command",
    DrainWorkerRequest,
    RegisterWorkerRequest,
    RemoveWorkerRequest,
    ResyncWorkerRequest,
)
_Reached = TypeVar(
    "_Reached",
    DrainWorkerResponse,
    RegisterWorkerResponse,
    RemoveWorkerResponse,
    ResyncWorkerResponse,
)


class FleetCalls:
    """The part of KvRouteClient that calls the Fleet service."""

    _transport: Transport

    async def list_workers(
        self, model: str | None = None, *, away: bool = False, timeout_s: float | None = None
    ) -> list[WorkerStatus]:
        """Every worker that the router knows, by id and rank; absent model: workers of all models.
        away: only workers whose relay is silent or whose engine does not answer its relay."""
        message = ListWorkersRequest(model=model or "", away=away)
        response = await self._transport.unary(
            lambda line: line.fleet.ListWorkers, message, timeout_s
        )
        return list(response.workers)

    async def watch_workers(self, model: str | None = None) -> AsyncIterator[WatchWorkersResponse]:
        """Every worker once, then the changes, until the iteration ends.

        Survives the end of a connection: the next message then has every worker again, and lists
        those that left meanwhile as removed. Raises KvRouteError when no router can be reached, by
        the same retry policy as other calls.
        """
        known: set[tuple[str, int]] = set()
        watched = self._watch(
            "WatchWorkers",
            lambda line: line.fleet.WatchWorkers,
            WatchWorkersRequest(model=model or ""),
            lambda response: _add_removed(response, known),
        )
        async for response in watched:
            _follow(response, known)
            yield response

    async def watch_decisions(
        self,
        *,
        model: str = "",
        worker_id: str = "",
        tenant: str = "",
        reasons: Iterable[str] = (),
        slower_than_s: float = 0.0,
        share: float = 0.0,
    ) -> AsyncIterator[WatchDecisionsResponse]:
        """Decisions as a router makes them, until the iteration ends; the arguments are the fields
        of WatchDecisionsRequest.

        Survives the end of a connection, but misses the decisions made meanwhile. Raises
        KvRouteError as watch_workers does.
        """
        message = WatchDecisionsRequest(
            model=model,
            worker_id=worker_id,
            tenant=tenant,
            reasons=reasons,
            slower_than_s=slower_than_s,
            share=share,
        )
        watched = self._watch(
            "WatchDecisions", lambda line: line.fleet.WatchDecisions, message, lambda _: None
        )
        async for response in watched:
            yield response

    async def find_decisions(
        self, wanted: str, *, timeout_s: float | None = None
    ) -> list[PastDecision]:
        """Picks of all routers that are remembered for an id (of a request, reservation or client),
        the newest first: see FindDecisionsRequest. Empty: no router that answered remembers a pick.
        Raises the error of a router that did not answer, unless another router remembers a pick."""
        attempt = self._transport.attempt(
            lambda line: line.fleet.FindDecisions, FindDecisionsRequest(id=wanted)
        )
        answers = await self._transport.everywhere(attempt, timeout_s)
        past = [
            decision
            for answer in answers
            if not isinstance(answer, KvRouteError)
            for decision in answer.decisions
        ]
        errors = [answer for answer in answers if isinstance(answer, KvRouteError)]
        if errors and not past:
            raise errors[0]
        return sorted(past, key=lambda decision: decision.age_s)

    async def _watch(
        self,
        name: str,
        method: Callable[[Any], Any],
        message: object,
        on_first: Callable[[Any], None],
    ) -> AsyncIterator[Any]:
        """Yields the messages of a stream that is opened again after each end; raises KvRouteError
        when the retry policy gives up. on_first: gets the first message of each stream."""
        transport = self._transport
        attempt = 0
        error: KvRouteError
        while True:
            attempt += 1
            first = True
            try:
                line = transport.free_line() or await transport.line(transport.options.timeout_s)
                call = method(line)(message, metadata=transport.options.metadata())
                line.calls += 1
                try:
                    async for response in call:
                        if response is None:  # gRPC's result for bytes that are no message
                            raise unreadable(name)
                        if first:
                            attempt, first = 0, False
                            on_first(response)
                        yield response
                    error = unreachable("the router ended the watch")
                finally:
                    line.calls -= 1
                    call.cancel()
            except (grpc.aio.AioRpcError, KvRouteError, asyncio.CancelledError) as failure:
                error = transport.error_of(failure)
            delay_s = transport.retry.delay_s(
                error, max(1, attempt), math.inf, transport.options.rng
            )
            if delay_s is None:
                try:
                    raise error
                finally:
                    del error  # a cycle: its traceback refers to this frame
            await transport.options.sleep(delay_s)

    async def register_worker(
        self,
        worker_id: str,
        *,
        engine: str,
        address: str,
        events: str | None = None,
        events_bind: bool = False,
        replay: str | None = None,
        topic: str | None = None,
        metrics: str | None = None,
        load: str | None = None,
        ranks: int | None = None,
        first_rank: int = 0,
        model: str | None = None,
        model_aliases: Sequence[str] = (),
        block_size: int | None = None,
        role: str | None = None,
        kv_connector: str | None = None,
        kv_engine_id: str | None = None,
        bootstrap_host: str | None = None,
        bootstrap_port: int | None = None,
        labels: Mapping[str, str] | None = None,
        priority_scheduling: bool = False,
        warm: bool = False,
        slots: int | None = None,
        total_blocks: int | None = None,
        loads_loras: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """Makes the router run a relay for an engine; returns the number of ranks that it follows.

        engine: its kind, such as vllm. address: where clients send their requests. Every other
        argument is a field of RegisterWorkerRequest, with its default there. Raises InvalidRequest
        with the field's name. 0 ranks: the router's release is older and reads engine, address,
        events, replay, metrics, labels, role and warm only.
        """
        message = RegisterWorkerRequest(
            worker_id=worker_id,
            engine=engine,
            address=address,
            events=events or "",
            events_bind=events_bind,
            replay=replay or "",
            topic=topic or "",
            metrics=metrics or "",
            load=load or "",
            ranks=ranks,
            first_rank=first_rank,
            model=model or "",
            model_aliases=model_aliases,
            block_size=block_size,
            role=role or "",
            kv_connector=kv_connector or "",
            kv_engine_id=kv_engine_id or "",
            bootstrap_host=bootstrap_host or "",
            bootstrap_port=bootstrap_port,
            labels=labels or {},
            priority_scheduling=priority_scheduling,
            warm=warm,
            slots=slots,
            total_blocks=total_blocks,
            loads_loras=loads_loras,
        )
        return await self._ranks(lambda line: line.fleet.RegisterWorker, message, timeout_s)

    async def drain_worker(self, worker_id: str, *, timeout_s: float | None = None) -> int:
        """Stops new picks of a worker; its running requests go on. Returns the number of ranks
        reached."""
        message = DrainWorkerRequest(worker_id=worker_id)
        return await self._ranks(lambda line: line.fleet.DrainWorker, message, timeout_s)

    async def undrain_worker(self, worker_id: str, *, timeout_s: float | None = None) -> int:
        """Allows new picks of a drained worker again. Returns the number of ranks reached."""
        message = DrainWorkerRequest(worker_id=worker_id, undrain=True)
        return await self._ranks(lambda line: line.fleet.DrainWorker, message, timeout_s)

    async def remove_worker(
        self, worker_id: str, *, tombstone_s: float | None = None, timeout_s: float | None = None
    ) -> int:
        """Forgets a worker and ignores its heartbeats for tombstone_s seconds (absent: 60 s).

        Returns the number of ranks reached.
        """
        message = RemoveWorkerRequest(worker_id=worker_id, tombstone_s=tombstone_s or 0.0)
        return await self._ranks(lambda line: line.fleet.RemoveWorker, message, timeout_s)

    async def resync_worker(self, worker_id: str, *, timeout_s: float | None = None) -> int:
        """Forgets the blocks of a worker and requests them from its relay again. Returns the number
        of ranks reached."""
        message = ResyncWorkerRequest(worker_id=worker_id)
        return await self._ranks(lambda line: line.fleet.ResyncWorker, message, timeout_s)

    async def list_queue(
        self, model: str | None = None, *, limit: int = 0, timeout_s: float | None = None
    ) -> ListQueueResponse:
        """The requests that wait in one router for a worker with room, and how many there are.

        model: by any of its names; absent: all models. limit: length of the list, 4,096 at most; 0:
        100. Each router has a queue of its own: a client of several routers gets the queue of any
        of them.
        """
        message = ListQueueRequest(model=model or "", limit=limit)
        return await self._transport.unary(lambda line: line.fleet.ListQueue, message, timeout_s)

    async def index_stats(self, *, timeout_s: float | None = None) -> GetIndexStatsResponse:
        """The size of the router's index: its blocks, placements, bytes, workers and
        applied facts."""
        message = GetIndexStatsRequest()
        return await self._transport.unary(
            lambda line: line.fleet.GetIndexStats, message, timeout_s
        )

    async def _ranks(
        self, method: Method[_Command, _Reached], message: _Command, timeout_s: float | None
    ) -> int:
        """Sends a command once; returns the number of ranks that it reached."""
        return (await self._transport.command(method, message, timeout_s)).ranks


def _add_removed(first: WatchWorkersResponse, known: set[tuple[str, int]]) -> None:
    """Adds the workers that left to a watch's first message, which lists every other worker."""
    gone = known - {(worker.worker_id, worker.dp_rank) for worker in first.changed}
    first.removed.extend(
        WorkerRef(worker_id=worker_id, dp_rank=rank) for worker_id, rank in sorted(gone)
    )


def _follow(response: WatchWorkersResponse, known: set[tuple[str, int]]) -> None:
    """Updates the (worker, rank) pairs that the watch has listed."""
    known.update((worker.worker_id, worker.dp_rank) for worker in response.changed)
    known.difference_update((worker.worker_id, worker.dp_rank) for worker in response.removed)
