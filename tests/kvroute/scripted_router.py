"""A router that answers as it is told, and a clock that the test turns."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health, health_pb2_grpc
from grpc_status import rpc_status
from typing_extensions import override

from kvroute.client import KvRouteClient
from kvroute.v1 import (
    DrainWorkerRequest,
    DrainWorkerResponse,
    Explanation,
    FleetServicer,
    GetIndexStatsRequest,
    GetIndexStatsResponse,
    ListWorkersRequest,
    ListWorkersResponse,
    Progress,
    ProgressOutcome,
    ProgressResult,
    RegisterWorkerRequest,
    RegisterWorkerResponse,
    RemoveWorkerRequest,
    RemoveWorkerResponse,
    ReportRequest,
    ReportResponse,
    ResyncWorkerRequest,
    ResyncWorkerResponse,
    RouteBatch,
    RouteItem,
    RouteRequest,
    RouteResponse,
    RouteResult,
    RouteResults,
    RouterServicer,
    WatchWorkersRequest,
    WatchWorkersResponse,
    WorkerRef,
    WorkerStatus,
    add_FleetServicer_to_server,
    add_RouterServicer_to_server,
)

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
GUARD_S = 60.0
"""What hangs fails; nothing waits this long."""


async def until(condition: Callable[[], object]) -> None:
    """Waits for something that sockets bring about."""
    async with asyncio.timeout(GUARD_S):
        while not condition():  # noqa: ASYNC110  # what sockets bring sets no event here
            await asyncio.sleep(0.002)


def is_open(client: KvRouteClient) -> bool:
    """Whether the next request would go over a stream, to each router of the client."""
    assert client._transport.lines is not None
    return all(
        line.stream is not None and line.stream.takes(1) for line in client._transport.lines._lines
    )


async def opened(client: KvRouteClient) -> None:
    """Routes until the client has a stream open; these routes go one by one. That the server has
    taken the stream is not enough: the client may learn of it later."""
    for _ in range(2):
        await client.route(token_ids=[1, 2, 3], request_id="warm")
    await until(lambda: is_open(client))


def status(
    code: grpc.StatusCode,
    reason: str | None = None,
    *,
    message: str = "said the script",
    retry_after_s: float | None = None,
    domain: str = "kvroute",
    metadata: dict[str, str] | None = None,
) -> Status:
    """A refusal as the router writes it."""
    details: list[AnyMessage] = []
    if reason is not None:
        info = AnyMessage()
        info.Pack(ErrorInfo(reason=reason, domain=domain, metadata=metadata or {}))
        details.append(info)
    if retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(round(retry_after_s * 1000))
        retry = AnyMessage()
        retry.Pack(RetryInfo(retry_delay=delay))
        details.append(retry)
    return Status(code=code.value[0], message=message, details=details)


def pick_of(
    worker_id: str = "w0", lease_s: float = 30.0, name: str | None = None, **fields: Any
) -> RouteResponse:
    """A plain answer of Route."""
    return RouteResponse(
        reservation_id=f"r-{name or worker_id}",
        worker_id=worker_id,
        address=f"http://{worker_id}:8000",
        lease_s=lease_s,
        **fields,
    )


async def obey(script: deque[Status], context: Context) -> None:
    """Refuses once if the script says so; OK is in its turn, too."""
    if script:
        refusal = script.popleft()
        if refusal.code:
            said = rpc_status.to_status(refusal)
            await context.abort(said.code, said.details, said.trailing_metadata)


class PlayedStream:
    """One RouteStream call, with the test in the router's place."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._batches: asyncio.Queue[RouteBatch] = asyncio.Queue()
        self._ended: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self.metadata = dict(context.invocation_metadata() or ())
        self.resets = 0
        """1 once the client has reset the call."""

    async def read(self) -> list[RouteItem]:
        """The items of the next batch."""
        async with asyncio.timeout(GUARD_S):
            return list((await self._batches.get()).items)

    async def answer(self, *items: RouteItem, worker_id: str = "w0") -> None:
        """Picks the same worker for each; the reservation is named after the request."""
        results = [
            RouteResult(index=item.index, response=pick_of(worker_id, name=item.request.request_id))
            for item in items
        ]
        await self.write(*results)

    async def write(self, *results: RouteResult) -> None:
        await self._context.write(RouteResults(results=results))

    def end(self, status: Status | None = None) -> None:
        """Ends the call, with OK or another status."""
        self._ended.set_result(status or Status())

    async def play(self) -> None:
        reader = asyncio.create_task(self._read())
        try:
            await obey(deque([await self._ended]), self._context)
        except asyncio.CancelledError:
            self.resets += 1
            raise
        finally:
            reader.cancel()

    async def _read(self) -> None:
        while (batch := await self._context.read()) is not grpc.aio.EOF:
            self._batches.put_nowait(batch)
        if not self._ended.done():  # as a router does in which no request waits
            self.end()


class Router(RouterServicer):
    """Route and Report refuse in the order of their scripts, then agree for ever. RouteStream does
    the same item by item, unless the test plays it."""

    def __init__(self) -> None:
        self.refusals: deque[Status] = deque()
        self.answer = pick_of()
        self.workers: list[str] | None = None
        """If given, the first that a request doesn't exclude is picked, in the answer's place."""
        self.asked: list[RouteRequest] = []
        self.left_s: list[float] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.routes = asyncio.Event()
        self.routes.set()
        self.arrived = asyncio.Event()
        self.batches: list[RouteBatch] = []
        self.streams_played: asyncio.Queue[PlayedStream] | None = None
        """Streams go here, to be played by the test, if there is a queue."""
        self.stream_refusals: deque[Status] = deque()
        self.streams_silent = False
        """Never a word to whoever opens a stream, like a proxy that gathers the whole call."""
        self.streams_end = False
        """They end with OK, and nothing else."""
        self.report_refusals: deque[Status] = deque()
        self.report_results: deque[ProgressResult.ValueType] = deque()
        self.outcomes_max: int | None = None
        """Outcomes in an answer of Report, at most."""
        self.reports = asyncio.Event()
        self.reports.set()
        self.told: asyncio.Queue[Progress] = asyncio.Queue()

    @override
    async def Route(self, request: RouteRequest, context: Context) -> RouteResponse:
        self.asked.append(request)
        self.left_s.append(context.time_remaining())
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.arrived.set()
        await self.routes.wait()
        await obey(self.refusals, context)
        chosen = self._choose(request)
        if isinstance(chosen, Status):
            await obey(deque([chosen]), context)
        assert isinstance(chosen, RouteResponse)
        return chosen

    def _choose(self, request: RouteRequest) -> RouteResponse | Status:
        if self.workers is None:
            return self.answer
        for worker_id in self.workers:
            if worker_id not in request.excluded_worker_ids:
                return pick_of(worker_id, name=f"{worker_id}-{len(self.asked)}")
        return status(grpc.StatusCode.UNAVAILABLE, "NO_ELIGIBLE_WORKER")

    @override
    async def RouteStream(  # type: ignore[override]
        self, request_iterator: Any, context: Context
    ) -> None:
        await obey(self.stream_refusals, context)
        if self.streams_silent:
            await asyncio.Event().wait()
        if self.streams_end:
            return
        await context.send_initial_metadata(())
        if self.streams_played is not None:
            played = PlayedStream(context)
            self.streams_played.put_nowait(played)
            await played.play()
            return
        async for batch in request_iterator:
            self.batches.append(batch)
            results = RouteResults()
            for item in batch.items:
                if item.HasField("request"):
                    self.asked.append(item.request)
                    self.left_s.append(item.timeout_ms / 1000)
                    self.arrived.set()
                    await self.routes.wait()
                    result = results.results.add(index=item.index)
                    refusal = self.refusals.popleft() if self.refusals else Status()
                    chosen = refusal if refusal.code else self._choose(item.request)
                    if isinstance(chosen, Status):
                        result.status.CopyFrom(chosen)
                    else:
                        result.response.CopyFrom(chosen)
            await context.write(results)

    @override
    async def Report(self, request: ReportRequest, context: Context) -> ReportResponse:
        for progress in request.progress:
            self.told.put_nowait(progress)
        await self.reports.wait()
        await obey(self.report_refusals, context)
        applied = ProgressResult.PROGRESS_RESULT_APPLIED
        return ReportResponse(
            outcomes=[
                ProgressOutcome(
                    reservation_id=progress.reservation_id,
                    result=self.report_results.popleft() if self.report_results else applied,
                    message="as scripted",
                )
                for progress in request.progress
            ][: self.outcomes_max]
        )

    @override
    async def Explain(self, request: RouteRequest, context: Context) -> Explanation:
        self.asked.append(request)
        await obey(self.refusals, context)
        return Explanation(refusal=status(grpc.StatusCode.UNAVAILABLE, "NO_WORKER"))


class Fleet(FleetServicer):
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.refusals: deque[Status] = deque()
        self.asked: list[Any] = []
        self.watch_ends: deque[Status] = deque()
        """How watches end, one after the other; the last one lasts."""
        self.workers = ["w0"]
        self.statuses: list[WorkerStatus] | None = None
        """What ListWorkers answers, if given."""

    async def _note(self, request: Any, context: Context) -> None:
        self.asked.append(request)
        await obey(self.refusals, context)

    @override
    async def ListWorkers(
        self, request: ListWorkersRequest, context: Context
    ) -> ListWorkersResponse:
        await self._note(request, context)
        if self.statuses is not None:
            return ListWorkersResponse(workers=self.statuses)
        return ListWorkersResponse(workers=[WorkerStatus(worker_id="w0", model=request.model)])

    @override
    async def WatchWorkers(self, request: WatchWorkersRequest, context: Context) -> Any:
        await self._note(request, context)
        yield WatchWorkersResponse(changed=[WorkerStatus(worker_id=name) for name in self.workers])
        if self.watch_ends:
            await obey(self.watch_ends, context)
            return
        yield WatchWorkersResponse(removed=[WorkerRef(worker_id="w0")])
        await asyncio.Event().wait()

    @override
    async def RegisterWorker(
        self, request: RegisterWorkerRequest, context: Context
    ) -> RegisterWorkerResponse:
        await self._note(request, context)
        return RegisterWorkerResponse(ranks=2)

    @override
    async def DrainWorker(
        self, request: DrainWorkerRequest, context: Context
    ) -> DrainWorkerResponse:
        await self._note(request, context)
        return DrainWorkerResponse(ranks=2)

    @override
    async def RemoveWorker(
        self, request: RemoveWorkerRequest, context: Context
    ) -> RemoveWorkerResponse:
        await self._note(request, context)
        return RemoveWorkerResponse(ranks=2)

    @override
    async def ResyncWorker(
        self, request: ResyncWorkerRequest, context: Context
    ) -> ResyncWorkerResponse:
        await self._note(request, context)
        return ResyncWorkerResponse(ranks=2)

    @override
    async def GetIndexStats(
        self, request: GetIndexStatsRequest, context: Context
    ) -> GetIndexStatsResponse:
        await self._note(request, context)
        return GetIndexStatsResponse(blocks=7)


class Server:
    """A real gRPC server on a loopback port of its own, which can go away and come back."""

    def __init__(self) -> None:
        self.router = Router()
        self.fleet = Fleet()
        self.health = health.aio.HealthServicer()
        self.port = 0
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, address: str | None = None) -> None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_RouterServicer_to_server(self.router, server)
        add_FleetServicer_to_server(self.fleet, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        self.port = server.add_insecure_port(address or self.address)
        await server.start()
        self._server = server

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def next_stream(self) -> PlayedStream:
        """The next stream, to be played."""
        assert self.router.streams_played is not None
        async with asyncio.timeout(GUARD_S):
            return await self.router.streams_played.get()

    async def next_report(self) -> Progress:
        async with asyncio.timeout(GUARD_S):
            return await self.router.told.get()


class Clock:
    """Time that passes when somebody sleeps: at once, or when the test says so."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.now_s = 1000.0
        self.slept_s: list[float] = []
        self.before_waking: Callable[[], Awaitable[None]] | None = None
        self._at_once = at_once
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []
        self.asleep = asyncio.Event()

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        if self._at_once:
            self.now_s += seconds
            if self.before_waking is not None:
                await self.before_waking()
            return
        waking: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now_s + seconds, waking))
        self.asleep.set()
        await waking

    async def advance(self, seconds: float) -> None:
        """Waits until somebody sleeps, then wakes whoever's time has come."""
        async with asyncio.timeout(GUARD_S):
            await self.asleep.wait()
        self.now_s += seconds
        due = [one for one in self._sleepers if one[0] <= self.now_s]
        self._sleepers = [one for one in self._sleepers if one[0] > self.now_s]
        if not self._sleepers:
            self.asleep.clear()
        for _, waking in due:
            if not waking.done():
                waking.set_result(None)
