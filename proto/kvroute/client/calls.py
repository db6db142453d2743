"""KvRouteClient: every call of the contract, with deadlines, retries and errors of its own."""

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from typing_extensions import override

from kvroute.client.attempts import Attempts
from kvroute.client.budget import RetryBudget, RetryBudgetPolicy
from kvroute.client.channel import targets_of
from kvroute.client.errors import (
    ClientClosed,
    DeadlineExceeded,
    KvRouteError,
    NoWorker,
    RouterUnreachable,
    Unavailable,
    error_from_call,
    unreachable,
    unreadable,
)
from kvroute.client.fallback import RESERVATION, Fallback, FallbackPolicy, Key
from kvroute.client.lane import Lane
from kvroute.client.lane_items import LaneItems
from kvroute.client.life import RoutedRequest
from kvroute.client.lines import SILENT_S, Line, Lines, Metadata
from kvroute.client.options import RouteBytes, RouteOptions, route_bytes, route_request
from kvroute.client.pick import Pick
from kvroute.client.prompt_hashing import PromptHashing
from kvroute.client.report_lane import ReportLane, report_pieces
from kvroute.client.reports import Reports
from kvroute.client.retry import RetryPolicy
from kvroute.client.silence import is_word
from kvroute.client.tokens import pack_tokens
from kvroute.v1 import (
    DrainWorkerRequest,
    Explanation,
    FailureReason,
    GetIndexStatsRequest,
    GetIndexStatsResponse,
    ListWorkersRequest,
    Progress,
    ProgressOutcome,
    ProgressResult,
    RegisterWorkerRequest,
    RemoveWorkerRequest,
    ReportRequest,
    ReportResponse,
    ResyncWorkerRequest,
    RouterAsyncStub,
    RouteResponse,
    RouteResults,
    WatchWorkersRequest,
    WatchWorkersResponse,
    WorkerRef,
    WorkerStatus,
)

ROUTE_STREAM = "/kvroute.v1.Router/RouteStream"
READY_POLL_S = 0.1
READY_POLL_S_MAX = 1.0

log = logging.getLogger("kvroute.client")

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Callable = Callable[[Line], grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]]


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
        """targets: host:port or several, unix:path; a name stands for all replicas it resolves to.

        credentials: TLS (grpc.ssl_channel_credentials); absent: plain text. token: sent as bearer
        token with every attempt (and every stream), or a function that gives the present one.
        report_timeout_s: how long a request's own reports may hold it up (see RoutedRequest).
        pending_reports_max: last reports under way; past it they are left to the lease.
        fast_lane: routes of many tasks go in batches over a stream, reports of many as one call;
        if not, each is a call of its own.
        hash_prompts: token ids are hashed here, once a router has said in blocks of which size, and
        go as an eighth of the bytes or less. Needs the extra kvroute-client[hash-prompts], or the
        router in the same environment, whose kernel hashes faster.
        routes_max, route_bytes_max: unanswered ones on a router's stream; past it ClientOverloaded.
        retry_budget: what attempts() may try again, over all of the client's calls.
        fallback: when no router can be reached, requests go to the workers listed last, see
        fallback.py; False: they raise RouterUnreachable.
        silent_s: a router that owes answers and sends nothing for so long, not even to a health
        check, is silent: open picks go to another router or to the fallback, later calls avoid it,
        until it sends something. Without another router and without a list for the fallback, calls
        wait for it as long as they may. A call with less time than this can't be moved.
        clock and sleep are in seconds. Raises ValueError, and ImportError where hash_prompts has
        nothing to hash with.
        """
        self._targets = targets_of(targets)
        self._credentials = credentials
        self._token = token
        self._timeout_s = _duration("timeout_s", timeout_s)
        self._retry = retry or RetryPolicy()
        self._once = RetryPolicy(attempts=1)
        self._channel_options = channel_options
        self._clock = clock
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._fast_lane = fast_lane
        self._hashing = PromptHashing() if hash_prompts else None
        self._routes_max = routes_max
        self._route_bytes_max = route_bytes_max
        self._counts: Counter[str] = Counter()
        self._silent_s = _duration("silent_s", silent_s)
        self._budget = RetryBudget(retry_budget or RetryBudgetPolicy())
        self._lines: Lines | None = None
        self._fallback: Fallback | None = None
        if fallback:
            policy = FallbackPolicy() if fallback is True else fallback
            self._fallback = Fallback(policy, self._counts, self._rng)
        self._listing: asyncio.Task[None] | None = None
        self._closed = False
        self._reports = Reports(
            self._send_report,
            timeout_s=self._timeout_s,
            wait_s=_duration("report_timeout_s", report_timeout_s),
            pending_max=pending_reports_max,
            began=self._began,
            ended=self._ended,
            silent=self._is_silent,
        )

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closed else repr(self._lines) if self._lines else "not connected"
        names = ",".join(target.text for target in self._targets)
        return f"<KvRouteClient {names}, {state}, {self._reports!r}>"

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
            if self._listing is not None:
                self._listing.cancel()
                await asyncio.wait({self._listing})
            if self._lines is not None:
                await self._lines.close()

    @property
    def reports_lost(self) -> int:
        """Reports of RoutedRequests that did not arrive; the lease makes good for them."""
        return self._reports.lost

    @property
    def counts(self) -> Mapping[str, int]:
        """What the client did since it was made: see Lane, ReportLane, Lines, Watch, Attempts and
        Fallback; `picks_moved` away from silent routers. 0 for what never happened."""
        return self._counts.copy()

    # Requests

    async def route(
        self, *, timeout_s: float | None = None, **options: Unpack[RouteOptions]
    ) -> Pick:
        """Picks a worker and reserves the request's load there; options: see RouteOptions.

        The caller reports what becomes of it, with report(); request() does so by itself.
        """
        model = self._hashed(options)
        return await self._pick(route_bytes(**options), timeout_s, model)

    def request(
        self, *, timeout_s: float | None = None, **options: Unpack[RouteOptions]
    ) -> RoutedRequest:
        """The life of one request, for `async with`; timeout_s is for its routing alone.

        Raises at once what can be told from the options.
        """
        model = self._hashed(options)
        request = route_bytes(**options)
        return RoutedRequest(
            lambda: self._pick(request, timeout_s, model), self._reports, self._sleep
        )

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

        attempts_max: workers that are tried, the first one counted, and those that refused the
        connection not, up to 8 of them; 1: none is tried again. timeout_s: for the routing of each.
        options: as for request(); a request_id is that of the first attempt, later ones have its
        number added, since they are other requests to the router.
        """
        if attempts_max < 1:
            raise ValueError(f"attempts_max is {attempts_max}; 1 is the least")
        model = self._hashed(options)
        if (token_ids := options.get("token_ids")) is not None:
            options["token_ids"] = pack_tokens(token_ids)
        for name, value in options.items():
            if isinstance(value, Iterator):  # which can be read once
                options[name] = tuple(value)  # type: ignore[literal-required]
        first = route_bytes(**options)
        left_out = tuple(options.get("excluded_worker_ids") or ())

        async def route(number: int, tried: tuple[str, ...]) -> Pick:
            if number == 1:
                return await self._pick(first, timeout_s, model)
            again = options.copy()
            again["excluded_worker_ids"] = (*left_out, *tried)
            if request_id := options.get("request_id"):
                again["request_id"] = f"{request_id}-{number}"
            # A failed request doesn't wait for a worker that may come.
            return await self._pick(
                route_bytes(**again), timeout_s, model, lambda error: isinstance(error, NoWorker)
            )

        return Attempts(
            route,
            lambda route: RoutedRequest(route, self._reports, self._sleep),
            self._budget,
            attempts_max=attempts_max,
            clock=self._clock,
            counts=self._counts,
        )

    async def explain(
        self, *, timeout_s: float | None = None, **options: Unpack[RouteOptions]
    ) -> Explanation:
        """Every worker's score for a request; reserves nothing.

        With nobody to pick it answers all the same: error_from_status(explanation.refusal).
        """
        message = route_request(**options)
        return await self._call(lambda line: line.router.Explain, message, timeout_s)

    async def report(
        self, *progress: Progress, timeout_s: float | None = None
    ) -> list[ProgressOutcome]:
        """Moves reservations on; one outcome for each step, in order. Counts are cumulative.

        Each step goes to the router that made its reservation; more than 1,024 of them go in
        several calls, one after the other. If a call fails that raises, though others were heard;
        to tell it again changes nothing there.
        """
        left_s = self._timeout_s if timeout_s is None else _duration("timeout_s", timeout_s)
        deadline_s = self._clock() + left_s
        lines = self._open()
        by_owner: dict[Line | str | None, list[int]] = {}
        for i, one in enumerate(progress):
            ours = one.reservation_id.startswith(RESERVATION)
            owner = RESERVATION if ours else lines.owner(one.reservation_id)
            by_owner.setdefault(owner, []).append(i)
        if len(by_owner) <= 1:
            return await self._send_pieces(progress, deadline_s)
        found: dict[int, ProgressOutcome] = {}

        async def tell(those: list[int]) -> None:
            outcomes = await self._send_pieces([progress[i] for i in those], deadline_s)
            found.update(zip(those, outcomes, strict=True))

        told = [tell(those) for those in by_owner.values()]
        for error in await asyncio.gather(*told, return_exceptions=True):
            if error is not None:
                raise error
        return [found[i] for i in range(len(progress))]

    # The fleet

    async def list_workers(
        self, model: str | None = None, *, timeout_s: float | None = None
    ) -> list[WorkerStatus]:
        """Every worker the router knows, by id and rank; absent model: of all."""
        message = ListWorkersRequest(model=model or "")
        response = await self._call(lambda line: line.fleet.ListWorkers, message, timeout_s)
        return list(response.workers)

    async def watch_workers(self, model: str | None = None) -> AsyncIterator[WatchWorkersResponse]:
        """Every worker once, then the changes, for as long as one iterates.

        Survives the end of a connection: the next message then has every worker again, and as
        removed those that went meanwhile. Raises when a router can't be had, by the same rule as
        other calls.
        """
        known: set[tuple[str, int]] = set()
        message = WatchWorkersRequest(model=model or "")
        attempt = 0
        error: KvRouteError
        while True:
            attempt += 1
            first = True
            try:
                line = self._free_line("") or await self._line(self._timeout_s)
                call = line.fleet.WatchWorkers(message, metadata=self._metadata())
                line.calls += 1
                try:
                    async for response in call:
                        if response is None:  # by which gRPC means bytes that are no message
                            raise unreadable("WatchWorkers")
                        if first:
                            attempt, first = 0, False
                            _add_removed(response, known)
                        _follow(response, known)
                        yield response
                    error = unreachable("the router ended the watch")
                finally:
                    line.calls -= 1
                    call.cancel()
            except grpc.aio.AioRpcError as failure:
                error = error_from_call(failure)
                error.__cause__ = failure
            except KvRouteError as failed:
                error = failed
            except asyncio.CancelledError as cancelled:
                error = self._cut_off(cancelled)
            delay_s = self._retry.delay_s(error, max(1, attempt), math.inf, self._rng)
            if delay_s is None:
                raise error
            await self._sleep(delay_s)

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
        loads_loras: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """Makes this router run a relay for an engine that has none; returns the ranks it follows.

        engine: vllm or sglang. address: where clients send their requests. Every other argument is
        a field of RegisterWorkerRequest, which says what its absence means. Raises InvalidRequest
        with the field's name. 0 ranks: a router of an older release, which ignored all but engine,
        address, events, replay, metrics, labels, role and warm.
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
            loads_loras=loads_loras,
        )
        call = await self._command(lambda line: line.fleet.RegisterWorker, message, timeout_s)
        return call.ranks

    async def drain_worker(self, worker_id: str, *, timeout_s: float | None = None) -> int:
        """Stops new picks of a worker; what runs there goes on. Returns the ranks reached."""
        message = DrainWorkerRequest(worker_id=worker_id)
        return (await self._command(lambda line: line.fleet.DrainWorker, message, timeout_s)).ranks

    async def undrain_worker(self, worker_id: str, *, timeout_s: float | None = None) -> int:
        """Takes a drained worker back in. Returns the ranks reached."""
        message = DrainWorkerRequest(worker_id=worker_id, undrain=True)
        return (await self._command(lambda line: line.fleet.DrainWorker, message, timeout_s)).ranks

    async def remove_worker(
        self, worker_id: str, *, tombstone_s: float | None = None, timeout_s: float | None = None
    ) -> int:
        """Forgets a worker and ignores it for tombstone_s (absent: the router's own setting).

        Returns the ranks reached.
        """
        message = RemoveWorkerRequest(worker_id=worker_id, tombstone_s=tombstone_s or 0.0)
        return (await self._command(lambda line: line.fleet.RemoveWorker, message, timeout_s)).ranks

    async def resync_worker(self, worker_id: str, *, timeout_s: float | None = None) -> int:
        """Forgets what a worker holds and asks its relay again. Returns the ranks reached."""
        message = ResyncWorkerRequest(worker_id=worker_id)
        return (await self._command(lambda line: line.fleet.ResyncWorker, message, timeout_s)).ranks

    async def index_stats(self, *, timeout_s: float | None = None) -> GetIndexStatsResponse:
        """The size of the overlap index."""
        message = GetIndexStatsRequest()
        return await self._call(lambda line: line.fleet.GetIndexStats, message, timeout_s)

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
                response = await self._command(lambda line: line.health, message, left_s)
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

    def _hashed(self, options: RouteOptions) -> str | None:
        """Hashes the tokens in `options` if that will do; the model whose answer tells if it will
        for the next, None: it is not looked at."""
        return None if self._hashing is None else self._hashing.hashed(options)

    async def _pick(
        self,
        request: RouteBytes,
        timeout_s: float | None,
        model: str | None,
        is_final: Callable[[KvRouteError], bool] | None = None,
    ) -> Pick:
        """model: see _hashed. is_final: see _attempts."""

        async def attempt(line: Line, left_s: float) -> RouteResponse:
            if line.watch.silent and self._do_without_routers():
                await asyncio.sleep(0)  # a caller in a loop leaves the health checks their turn
                raise line.silence()
            if line.lane is not None and line.lane.takes(request.size):
                response = await line.lane.route(request, left_s)
            else:
                content = b"".join(request.pieces)
                call = line.route(content, timeout=left_s, metadata=self._metadata())
                line.picks.add(call)
                try:
                    response = await call
                finally:
                    line.picks.discard(call)
                if response is None:
                    raise unreadable("Route")
                if line.lane is not None:
                    line.lane.called()
            self._open().heard(line, response.reservation_id)
            return response

        picked: list[Pick] = []

        def ends(error: KvRouteError) -> bool:
            if is_final is not None and is_final(error):
                return True
            if self._has_fallback(error) and (pick := self._fall_back(request, error)) is not None:
                picked.append(pick)
            return bool(picked)

        try:
            response = await self._attempts(
                attempt, timeout_s, self._retry, is_final=ends, line_wait_s=self._line_wait_s()
            )
        except (RouterUnreachable, NoWorker) as error:
            pick = picked[0] if picked else self._fall_back(request, error)
            if pick is None:
                raise
            return pick
        fallback = self._fallback
        if fallback is not None and fallback.routed(self._clock()) and self._listing is None:
            self._listing = asyncio.create_task(self._list(fallback))
        if model is not None and self._hashing is not None:
            self._hashing.heard(model, response.hash_block_size)
        return Pick(request.request_id, response)

    # Without routers

    def _line_wait_s(self) -> float:
        """How long a request waits for a router to be there."""
        fallback = self._fallback
        if fallback is None or not fallback.usable(self._clock()):
            return math.inf
        return max(fallback.policy.patience_s, 0.001)

    def _is_silent(self, reservation_id: str) -> bool:
        """Whether the router that made a reservation says nothing at present."""
        line = None if self._lines is None else self._lines.owner(reservation_id)
        return line is not None and line.watch.silent

    def _went_silent(self, line: Line) -> None:
        """A router says nothing: what waits for it goes elsewhere, if there is an elsewhere."""
        lines = self._lines
        if lines is None or self._closed:
            return
        if lines.another(line) or self._do_without_routers():
            self._counts["picks_moved"] += line.give_up_picks()

    def _do_without_routers(self) -> bool:
        """Whether the fallback takes the place of routers of which the best one is silent."""
        fallback = self._fallback
        now_s = self._clock()
        if fallback is None or not fallback.usable(now_s):
            return False
        fallback.unreachable(now_s - self._silent_s)  # since when that router has said nothing
        return fallback.unreachable(now_s)

    def _has_fallback(self, error: KvRouteError) -> bool:
        """Whether the client picks by itself in the place of more tries."""
        fallback = self._fallback
        if fallback is None:
            return False
        now_s = self._clock()
        if isinstance(error, RouterUnreachable):
            return fallback.unreachable(now_s) and fallback.usable(now_s)
        # A router that comes back knows of no workers for a moment.
        return isinstance(error, NoWorker) and fallback.outage and fallback.usable(now_s)

    def _fall_back(self, request: RouteBytes, error: KvRouteError) -> Pick | None:
        """A pick of our own in the place of an error; None when there is none."""
        fallback = self._fallback
        if fallback is None or not (isinstance(error, RouterUnreachable) or fallback.outage):
            return None
        answer = fallback.pick(request.message(), self._clock())
        if answer is None:
            return None
        log.debug("no router: the client picked %s: %s", answer.worker_id, error)
        return Pick(request.request_id, answer, fallback=True)

    async def _list(self, fallback: Fallback) -> None:
        """Has the workers listed, for when there is no router."""
        try:
            message = ListWorkersRequest()
            response = await self._command(lambda line: line.fleet.ListWorkers, message, None)
            fallback.listed(response.workers, self._clock())
        except Exception as error:  # of our own making or not, requests go on without a list
            fallback.not_listed(self._clock())
            log.info("the workers could not be listed, which a fallback needs: %s", error)
        finally:
            self._listing = None

    def _began(self, pick: Pick) -> None:
        if self._fallback is not None and not pick.fallback:
            self._fallback.began(_key_of(pick))

    def _ended(self, pick: Pick, failure: FailureReason.ValueType | None, refused: bool) -> None:
        if self._fallback is not None and not pick.fallback:
            self._fallback.ended(_key_of(pick), self._clock(), failure, refused=refused)

    async def _send_pieces(
        self, progress: Sequence[Progress], deadline_s: float
    ) -> list[ProgressOutcome]:
        """Steps for one router, in calls that it takes."""
        outcomes: list[ProgressOutcome] = []
        for piece in report_pieces(progress):
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                told = f"the time was over after {len(outcomes)} of {len(progress)} steps"
                raise DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, None, told)
            outcomes += await self._send_reports(piece, left_s)
        return outcomes

    async def _send_report(
        self, progress: Progress, *, timeout_s: float, attempts: int | None
    ) -> ProgressOutcome:
        policy = self._once if attempts == 1 else self._retry
        outcomes = await self._send_reports([progress], timeout_s, policy)
        return outcomes[0] if outcomes else ProgressOutcome()

    async def _send_reports(
        self,
        progress: Sequence[Progress],
        timeout_s: float | None,
        policy: RetryPolicy | None = None,
    ) -> list[ProgressOutcome]:
        """Steps of reservations that one router made, or that are picks of our own."""
        of = progress[0].reservation_id if progress else ""
        if of.startswith(RESERVATION):
            return [self._kept(one) for one in progress]

        async def attempt(line: Line, left_s: float) -> list[ProgressOutcome]:
            if line.report_lane is not None:
                return await line.report_lane.report(progress, left_s)
            request = ReportRequest(progress=progress)
            return list((await self._tell(line.router, request, left_s)).outcomes)

        return await self._attempts(attempt, timeout_s, policy or self._retry, of)

    def _kept(self, progress: Progress) -> ProgressOutcome:
        """A step that no router needs to hear of."""
        if self._fallback is not None:
            self._fallback.reported(progress, self._clock())
        return ProgressOutcome(
            reservation_id=progress.reservation_id, result=ProgressResult.PROGRESS_RESULT_APPLIED
        )

    async def _tell(
        self, router: RouterAsyncStub, request: ReportRequest, left_s: float
    ) -> ReportResponse:
        response = await router.Report(request, timeout=left_s, metadata=self._metadata())
        if response is None:
            raise unreadable("Report")
        return response

    async def _command(
        self, call: _Callable[_Request, _Response], message: _Request, timeout_s: float | None
    ) -> _Response:
        """One attempt."""
        return await self._call(call, message, timeout_s, self._once)

    async def _call(
        self,
        call: _Callable[_Request, _Response],
        message: _Request,
        timeout_s: float | None,
        policy: RetryPolicy | None = None,
    ) -> _Response:
        """One answer to a call over a line."""

        async def attempt(line: Line, left_s: float) -> _Response:
            response = await call(line)(message, timeout=left_s, metadata=self._metadata())
            if response is None:
                raise unreadable(type(message).__name__.removesuffix("Request"))
            return response

        return await self._attempts(attempt, timeout_s, policy or self._retry)

    async def _attempts(
        self,
        attempt: Callable[[Line, float], Awaitable[_Response]],
        timeout_s: float | None,
        policy: RetryPolicy,
        reservation_id: str = "",
        is_final: Callable[[KvRouteError], bool] | None = None,
        line_wait_s: float = math.inf,
    ) -> _Response:
        """One answer, within timeout_s and as many attempts as the policy allows. is_final: errors
        that are not tried again, whatever the policy says, unless another router can be asked.
        line_wait_s: how long to wait for a line.

        What is left of the time is each attempt's deadline. Another router is asked at once when
        one can't be reached and others can. What is about a reservation goes to the router that
        made it, if there is a line to it that works; else to another, which hands it on or knows
        that nobody has that reservation any longer.
        """
        left_s = self._timeout_s if timeout_s is None else _duration("timeout_s", timeout_s)
        deadline_s = self._clock() + left_s
        error: KvRouteError
        count = 0
        while True:
            count += 1
            line = None
            try:
                line = self._free_line(reservation_id) or await self._line(left_s, line_wait_s)
                return await self._watched(line, attempt, left_s)
            except grpc.aio.AioRpcError as failure:
                error = error_from_call(failure)
                error.__cause__ = failure
            except KvRouteError as failed:
                error = failed
            except asyncio.CancelledError as cancelled:
                error = self._cut_off(cancelled, line)
            elsewhere = False
            if line is not None and isinstance(error, RouterUnreachable):
                elsewhere = self._open().failed(line)
                if elsewhere:
                    reservation_id = ""  # its owner's line is passed over
            left_s = deadline_s - self._clock()
            delay_s = policy.delay_s(error, count, left_s, self._rng)
            if delay_s is None or (is_final is not None and not elsewhere and is_final(error)):
                raise error
            await self._sleep(0.0 if elsewhere else delay_s)
            if self._closed:
                raise ClientClosed
            left_s = deadline_s - self._clock()
            if left_s <= 0:  # the sleep took longer than asked
                raise error

    async def _watched(
        self, line: Line, attempt: Callable[[Line, float], Awaitable[_Response]], left_s: float
    ) -> _Response:
        """One attempt, of which the line's watch knows."""
        line.calls += 1
        line.watch.asked()
        heard = False
        try:
            response = await attempt(line, left_s)
            heard = True
            return response
        except grpc.aio.AioRpcError as failure:
            heard = is_word(error_from_call(failure))
            raise
        except KvRouteError as error:
            heard = is_word(error)
            raise
        finally:
            line.calls -= 1
            line.watch.ended(heard=heard)

    def _cut_off(self, cancelled: asyncio.CancelledError, line: Line | None = None) -> KvRouteError:
        """What `cancelled` means; goes on with it if the caller's task was cancelled. Otherwise
        the call was given up, or the channel closed under it: to gRPC that makes no difference."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise cancelled
        if self._closed:
            return ClientClosed()
        if line is not None and line.watch.silent:
            return line.silence()
        return unreachable("the connection was closed")

    def _metadata(self) -> Metadata:
        if self._token is None:
            return ()
        token = self._token if isinstance(self._token, str) else self._token()
        return (("authorization", f"Bearer {token}"),)

    def _free_line(self, reservation_id: str) -> Line | None:
        """The line for a call; None: it has to wait for one."""
        lines = self._open()
        return (lines.owner(reservation_id) if reservation_id else None) or lines.take()

    async def _line(self, left_s: float, wait_s: float = math.inf) -> Line:
        """The line for a call, after a wait; raises DeadlineExceeded when that takes longer than
        left_s, RouterUnreachable when it takes longer than wait_s."""
        try:
            async with asyncio.timeout(min(left_s, wait_s)):
                return await self._open().wait()
        except TimeoutError:
            if wait_s < left_s:
                raise unreachable(f"no router was found in {wait_s:g} s") from None
            told = f"no router was found in {left_s:g} s"
            raise DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, None, told) from None

    def _open(self) -> Lines:
        """The lines, made with their first use: gRPC binds a channel to the running loop."""
        if self._closed:
            raise ClientClosed
        if self._lines is None:
            self._lines = Lines(
                self._targets,
                credentials=self._credentials,
                options=self._channel_options,
                make_lanes=self._make_lanes,
                counts=self._counts,
                clock=self._clock,
                rng=self._rng,
                silent_s=self._silent_s,
                on_silent=self._went_silent,
                metadata=self._metadata,
            )
        return self._lines

    def _make_lanes(
        self, channel: grpc.aio.Channel, router: RouterAsyncStub
    ) -> tuple[Lane | None, ReportLane | None]:
        """The lanes of one router."""
        if not self._fast_lane:
            return None, None
        items = LaneItems(self._routes_max, self._route_bytes_max)
        stream: grpc.aio.StreamStreamMultiCallable[bytes, RouteResults] = channel.stream_stream(
            ROUTE_STREAM, response_deserializer=RouteResults.FromString
        )
        lane = Lane(lambda: stream(metadata=self._metadata()), items, self._counts)
        return lane, ReportLane(partial(self._tell, router), self._counts)


def _key_of(pick: Pick) -> Key:
    return pick.response.worker_id, pick.response.dp_rank


def _add_removed(first: WatchWorkersResponse, known: set[tuple[str, int]]) -> None:
    """Completes a watch's first message, which has every worker, by those that are gone."""
    gone = known - {(worker.worker_id, worker.dp_rank) for worker in first.changed}
    first.removed.extend(
        WorkerRef(worker_id=worker_id, dp_rank=rank) for worker_id, rank in sorted(gone)
    )


def _follow(response: WatchWorkersResponse, known: set[tuple[str, int]]) -> None:
    known.update((worker.worker_id, worker.dp_rank) for worker in response.changed)
    known.difference_update((worker.worker_id, worker.dp_rank) for worker in response.removed)


def _duration(name: str, seconds: float) -> float:
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} is {seconds}; a positive number of seconds is wanted")
    return seconds
