"""One request, from its reservation to its last report.

Law: no report raises an error here. The body of the `async with` serves a person, and the router's
bookkeeping must neither break it nor hide its errors: a report that does not arrive, or that the
router finds invalid, is counted (`KvRouteClient.reports_lost`), kept in `report_error`, repeated by
the next renewal, and at last replaced by the end of the lease.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import grpc
from typing_extensions import override

from kvroute.client.errors import InvalidRequest, KvRouteError, broken_by
from kvroute.client.messages.bodies import HttpBody
from kvroute.client.messages.pick import Pick, PromptTokens
from kvroute.client.messages.usage import count, read_usage
from kvroute.client.requests.failures import judgement
from kvroute.client.requests.reports import Reports
from kvroute.v1 import FailureReason, Progress, ProgressResult, ProgressState

RENEWALS_PER_LEASE = 3
"""Renewals in the time of a lease, which thus outlives two lost renewals."""
RENEW_S_MIN = 0.1
"""Least seconds between renewals, however short the lease is."""
RENEW_S_MAX = 3600.0
"""Most seconds between renewals."""

log = logging.getLogger("kvroute.client")


class RoutedRequest:
    """The life of one request; made by `KvRouteClient.request`, entered once.

    Entering routes and reserves, with the errors of route(). Inside, a task renews the lease every
    third of it. Leaving reports the end: FINISHED with the counts, or FAILED with the reason that
    failures.py has for the exception, which is raised unchanged.

    Leaving waits until the last report is delivered, at most the client's report_timeout_s; after
    that the report goes on in the background, and the client's close() waits for it. A cancelled
    body, and a body whose router is silent, leaves at once. A time limit around the block cancels
    it; a limit inside the block is a TimeoutError and is reported as TIMEOUT.
    """

    def __init__(
        self,
        route: Callable[[], Awaitable[Pick]],
        reports: Reports,
        sleep: Callable[[float], Awaitable[None]],
        http_body: HttpBody | None = None,
    ) -> None:
        """route: routes the request. reports: sends its reports. http_body: its prompt, if it is a
        body."""
        self.output_tokens = 0
        """Output tokens so far; renewals and the last report carry it."""
        self.finish_reason = ""
        """The engine's word for why the answer ended, as stop or length; empty: not known."""
        self.cached_tokens: int | None = None
        """Prompt tokens that the engine reused: usage.prompt_tokens_details.cached_tokens."""
        self.prompt_tokens: int | None = None
        """Prompt tokens as the engine counted them: usage.prompt_tokens. The router compares them
        with the tokens that it made of a text or a body."""
        self.failed_worker_id = ""
        """Id of the worker of a pair that a reported failure blames, unless failed() names another;
        empty: see failed()."""
        self.report_error: KvRouteError | None = None
        """The error of the last report that failed, or that lacks a count; None: there was none."""
        self.lease_lost = False
        """Whether the router no longer knows the reservation: it ended, or the router restarted."""
        self._route = route
        self._reports = reports
        self._sleep = sleep
        self._http_body = http_body
        self._entered = False
        self._ended = False
        self._pick: Pick | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._last: asyncio.Task[None] | None = None
        self._prefill_reported = False
        self._answering = False
        self._unobserved = False
        # State in the next renewal: RUNNING, or PREFILL_DONE until it has arrived.
        self._step: ProgressState.ValueType = ProgressState.PROGRESS_STATE_RUNNING

    @override
    def __repr__(self) -> str:
        where = "not routed" if self._pick is None else f"on {self._pick.worker_id}"
        state = "ended" if self._ended else "open"
        return f"<RoutedRequest {where}, {state}, {self.output_tokens} tokens out>"

    @property
    def answering(self) -> bool:
        """Whether prefill_done() was called: a token may have been passed on."""
        return self._answering

    @property
    def ended(self) -> bool:
        """Whether the request was ended, as finished or failed."""
        return self._ended

    @property
    def pick(self) -> Pick:
        """Where the request goes; raises RuntimeError before the `async with` is entered."""
        if self._pick is None:
            raise RuntimeError("the request is not routed yet: enter it with `async with`")
        return self._pick

    @property
    def prompt(self) -> PromptTokens | None:
        """The tokens that the router made of a text or a body; None: see Pick.prompt."""
        return self.pick.prompt

    @property
    def body(self) -> bytes:
        """The body to send: the caller's own bytes, or its mapping as JSON. Of a pair, the fields
        of `pick.prefill_worker` have yet to be put in. Raises RuntimeError for a request whose
        prompt is no body, and so do `path`, `url` and `headers`."""
        return self._sent.content

    @property
    def path(self) -> str:
        """Path of the engine's API that takes the body, such as /v1/chat/completions."""
        return self._sent.path

    @property
    def url(self) -> str:
        """Where the body goes: the path at the picked worker."""
        return self.pick.address.rstrip("/") + self.path

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers to send with the body, with those of the pick."""
        _ = self._sent
        return {"Content-Type": "application/json"} | self.pick.headers

    @property
    def _sent(self) -> HttpBody:
        if self._http_body is None:
            raise RuntimeError("the request's prompt is no body: write the HTTP request yourself")
        return self._http_body

    def read_usage(self, usage: Any, *, details_enabled: bool) -> None:
        """Takes output, cached and prompt tokens from the `usage` of the engine's answer, as far as
        it has them.

        usage: the object of the JSON, or of the openai or anthropic package. details_enabled:
        whether the engine runs with the flag that has it count cached tokens, so that null means 0;
        see cached_tokens.
        """
        read = read_usage(usage, details_enabled=details_enabled)
        if read.output_tokens is not None:
            self.output_tokens = read.output_tokens
        if read.cached_tokens is not None:
            self.cached_tokens = read.cached_tokens
        if read.prompt_tokens is not None:
            self.prompt_tokens = read.prompt_tokens

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a routed request is entered once; make another one")
        self._entered = True
        self._pick = await self._route()
        self._reports.began(self._pick)
        if (lease_s := self._pick.lease_s) > 0:
            period_s = min(max(lease_s / RENEWALS_PER_LEASE, RENEW_S_MIN), RENEW_S_MAX)
            self._keeper = asyncio.create_task(self._keep(period_s))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            await self.finished()
        else:
            judged = judgement(error)
            await self.failed(judged.reported, refused=judged.refused)

    async def prefill_done(self, *, answering: bool = True, measured: bool = True) -> None:
        """Reports that the first token is out; later calls do nothing.

        One attempt of at most the client's report_timeout_s, so that an unreachable router hardly
        delays a stream, and no attempt if it is silent; the next renewal repeats the report.
        answering: False: the prefill worker of a pair is done, and no token was passed on yet, so
        that attempts() may still try other workers. measured: False: the token came before this
        reservation was made, so that the router learns no speed from it.
        """
        self._answering = self._answering or answering
        if self._prefill_reported or self._ended:
            return
        self._prefill_reported = True
        if measured:
            self._step = ProgressState.PROGRESS_STATE_PREFILL_DONE
        else:
            self.output_tokens = max(1, self.output_tokens)
        if not self._reports.silent(self.pick.reservation_id):
            await self._renew(self._reports.wait_s, attempts=1)

    async def unobserved(self) -> None:
        """Reports that this program will not see the answer: the router takes its first token and
        its end from the worker's events and load, as far as they show them.

        One attempt of at most the client's report_timeout_s, and none if the router is silent; each
        renewal repeats it. End the request by `finished` once it is surely over.
        """
        self._unobserved = True
        if not self._ended and not self._reports.silent(self.pick.reservation_id):
            await self._renew(self._reports.wait_s, attempts=1)

    async def finished(
        self,
        *,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
        wait: bool = True,
    ) -> None:
        """Ends the request before the block does; of several endings the first counts.

        wait: until the report is delivered, at most the client's report_timeout_s. False: neither
        this call nor the end of the block waits.
        """
        if self._ended:
            return
        if output_tokens is not None:
            self.output_tokens = output_tokens
        if cached_tokens is not None:
            self.cached_tokens = cached_tokens
        self._end(self._progress(ProgressState.PROGRESS_STATE_FINISHED))
        if wait:
            await self._leave()

    async def failed(
        self,
        reason: FailureReason.ValueType = FailureReason.FAILURE_REASON_WORKER,
        *,
        refused: bool = False,
        failed_worker_id: str = "",
        wait: bool = True,
    ) -> None:
        """Ends the request as failed, with a reason that the exception's type does not show.

        refused: the worker refused the connection, so that nothing of the request arrived; counts
        for reason WORKER alone. failed_worker_id: of a pair, the worker that failed; empty: the
        prefill worker before prefill_done(), else the picked worker. wait: until the report is
        delivered, at most the client's report_timeout_s.
        """
        if self._ended:
            return
        progress = self._progress(ProgressState.PROGRESS_STATE_FAILED)
        progress.failure_reason = reason
        progress.refused = refused and reason == FailureReason.FAILURE_REASON_WORKER
        progress.failed_worker_id = failed_worker_id or self.failed_worker_id
        self._end(progress)
        if wait and reason != FailureReason.FAILURE_REASON_CANCELLED:
            await self._leave()

    def _end(self, progress: Progress) -> None:
        self._ended = True
        failed = progress.state == ProgressState.PROGRESS_STATE_FAILED
        reason = progress.failure_reason if failed else None
        self._reports.ended(self.pick, reason, progress.refused)
        if self._keeper is not None:
            self._keeper.cancel()
        self._last = self._reports.start(lambda: self._report_last(progress))

    async def _leave(self) -> None:
        # wait() leaves the task alone when it is itself cancelled or out of time.
        if self._last is not None and not self._reports.silent(self.pick.reservation_id):
            await asyncio.wait({self._last}, timeout=self._reports.wait_s)

    async def _report_last(self, progress: Progress) -> None:
        if self._keeper is not None:
            await asyncio.wait({self._keeper})  # no renewal may come after the end
            # Its CancelledError refers to its frame, and that to this request with its body: a
            # cycle, which a process with few looks of the collector would keep for hours.
            self._keeper = None
        await self._report(progress, self._reports.timeout_s, attempts=None)

    async def _keep(self, period_s: float) -> None:
        while not self.lease_lost:
            await self._sleep(period_s)
            await self._renew(period_s, attempts=None)

    async def _renew(self, timeout_s: float, attempts: int | None) -> None:
        step = self._step
        if await self._report(self._progress(step), timeout_s, attempts) and step == self._step:
            self._step = ProgressState.PROGRESS_STATE_RUNNING

    def _progress(self, state: ProgressState.ValueType) -> Progress:
        output_tokens, cached_tokens = count(self.output_tokens), count(self.cached_tokens)
        if output_tokens is None:
            self.report_error = _no_count("output_tokens", self.output_tokens)
        if cached_tokens is None and self.cached_tokens is not None:
            self.report_error = _no_count("cached_tokens", self.cached_tokens)
        return Progress(
            reservation_id=self.pick.reservation_id,
            state=state,
            output_tokens=output_tokens or 0,
            cached_tokens=cached_tokens,
            prompt_tokens=count(self.prompt_tokens),
            unobserved=self._unobserved,
            finish_reason=self.finish_reason,
        )

    async def _report(self, progress: Progress, timeout_s: float, attempts: int | None) -> bool:
        """Sends a report; returns whether it reached the router. Never raises."""
        try:
            outcome = await self._reports.send(progress, timeout_s=timeout_s, attempts=attempts)
        except Exception as error:
            self._lose(broken_by(error))
            return False
        if outcome.result == ProgressResult.PROGRESS_RESULT_UNKNOWN:
            self.lease_lost = True
        elif outcome.result == ProgressResult.PROGRESS_RESULT_INVALID:
            code = grpc.StatusCode.INVALID_ARGUMENT
            self._lose(InvalidRequest(code, None, outcome.message))
        return True

    def _lose(self, error: KvRouteError) -> None:
        self.report_error = error.with_traceback(None)  # its frames have this request: a cycle
        self._reports.lost += 1
        log.debug("a report about %s was lost: %s", self.pick.reservation_id, error)


def _no_count(name: str, value: object) -> InvalidRequest:
    """The error for an engine's number that is no count of tokens: the step is reported
    without it."""
    message = f"{name} is {value!r:.80}; a whole number below 2^32 is wanted: it was not reported"
    return InvalidRequest(grpc.StatusCode.INVALID_ARGUMENT, None, message)
