"""Reports of many tasks as few calls to one router.

A report is sent at once, unless a call is under way: then the next call carries it, with all other
reports that come meanwhile. A lone report is a call of its own without a wait.

A busy router accepts a new call in a few turns of its event loop, however little it carries. Calls
at a higher rate queue up there, and reports of failed workers come seconds late. So a call holds
the next call back until it is answered, and each unanswered call doubles that time.

Laws:
- every report gets its outcomes, the error of its call, or its own deadline;
- with n calls unanswered, the next call starts HOLD_S * 2^(n-1) after the last at the earliest, so
  that a deadline of 5 s has 5 calls open at most.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import grpc
from typing_extensions import override

from kvroute.client.errors import (
    ClientClosed,
    ClientOverloaded,
    DeadlineExceeded,
    KvRouteError,
    broken_by,
    unreachable,
)
from kvroute.v1 import Progress, ProgressOutcome, ReportRequest, ReportResponse

STEPS_A_CALL_MAX = 1024
"""Steps in a call, at most: about 10 ms of a router's time."""
BYTES_A_CALL_MAX = 512 * 1024
"""Bytes in a call, at most: half of the smallest default message limit of a router."""
STEPS_MAX = 65_536
"""Steps that wait for a call, at most."""
HOLD_S = 0.25
"""Longest that a single unanswered call holds the next call back, seconds; more than the round trip
to any place on Earth."""
_DOUBLINGS_MAX = 16


@dataclass(slots=True, eq=False)
class _Report:
    progress: Sequence[Progress]
    size: int
    deadline_s: float
    outcomes: asyncio.Future[list[ProgressOutcome]]


def report_pieces(progress: Sequence[Progress]) -> Iterator[Sequence[Progress]]:
    """Steps in order, in as many pieces as the bounds of a call require; a step over the bound is
    a piece of its own, which the router refuses."""
    begin = size = 0
    for i, step in enumerate(progress):
        size += _size(step)
        if i > begin and (i - begin >= STEPS_A_CALL_MAX or size > BYTES_A_CALL_MAX):
            yield progress[begin:i]
            begin, size = i, _size(step)
    yield progress[begin:]


def hold_s(unanswered: int) -> float:
    """Seconds for which the last of `unanswered` calls holds the next call back."""
    return HOLD_S * 2.0 ** min(unanswered - 1, _DOUBLINGS_MAX)


class ReportBatches:
    """The reports to one router."""

    def __init__(
        self,
        send: Callable[[ReportRequest, float], Awaitable[ReportResponse]],
        counts: Counter[str],
    ) -> None:
        """send: sends a request, within a number of seconds; its answer has an outcome for each
        step. counts: `report_calls`, `reports`, `report_overflows`."""
        self._send = send
        self._counts = counts
        self._waiting: deque[_Report] = deque()
        self._steps = 0
        self._closed = False
        self._runner: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    @override
    def __repr__(self) -> str:
        return f"<ReportBatches {self._steps} steps waiting, {len(self._calls)} calls>"

    async def report(self, progress: Sequence[Progress], timeout_s: float) -> list[ProgressOutcome]:
        """One outcome for each step, within timeout_s seconds; raises KvRouteError. The report of a
        cancelled caller is still sent, since it stays true."""
        if self._closed:
            raise ClientClosed
        if self._steps and self._steps + len(progress) > STEPS_MAX:
            self._counts["report_overflows"] += 1
            message = f"{self._steps} steps wait to be reported; {STEPS_MAX} is the most"
            raise ClientOverloaded(grpc.StatusCode.RESOURCE_EXHAUSTED, None, message)
        loop = asyncio.get_running_loop()
        size = sum(_size(step) for step in progress)
        report = _Report(progress, size, loop.time() + timeout_s, loop.create_future())
        self._waiting.append(report)
        self._steps += len(progress)
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        timer = loop.call_later(timeout_s, _expire, report, timeout_s)
        try:
            return await report.outcomes
        finally:
            timer.cancel()
            del report  # a cycle: the error's traceback refers to this frame

    async def close(self) -> None:
        """Ends all calls; waiting reports raise ClientClosed."""
        self._closed = True
        tasks = {*self._calls} | ({self._runner} if self._runner is not None else set())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        _fail(self._waiting, ClientClosed())
        self._waiting.clear()

    async def _run(self) -> None:
        try:
            while self._waiting:
                call = asyncio.create_task(self._call(self._take()))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
                await asyncio.wait({call}, timeout=hold_s(len(self._calls)))
        finally:
            self._runner = None

    def _take(self) -> list[_Report]:
        """The reports of the next call, at least one: report_pieces keeps them small."""
        taken: list[_Report] = []
        steps = size = 0
        while self._waiting:
            steps += len(self._waiting[0].progress)
            size += self._waiting[0].size
            if taken and (steps > STEPS_A_CALL_MAX or size > BYTES_A_CALL_MAX):
                break
            report = self._waiting.popleft()
            self._steps -= len(report.progress)
            taken.append(report)
        return taken

    async def _call(self, reports: list[_Report]) -> None:
        loop = asyncio.get_running_loop()
        left_s = max(report.deadline_s for report in reports) - loop.time()
        steps = [step for report in reports for step in report.progress]
        self._counts["report_calls"] += 1
        self._counts["reports"] += len(reports)
        error: KvRouteError
        try:
            request = ReportRequest(progress=steps)
            outcomes = (await self._send(request, max(0.001, left_s))).outcomes
        except asyncio.CancelledError:
            error = unreachable("the connection was closed")
            _fail(reports, ClientClosed() if self._closed else error)
            raise
        except Exception as failure:  # whatever the cause, the reports must not wait in vain
            error = broken_by(failure)
        else:
            answers = iter(outcomes)
            for report in reports:
                own = [next(answers) for _ in report.progress]
                if not report.outcomes.done():
                    report.outcomes.set_result(own)
            return
        _fail(reports, error)


def _size(step: Progress) -> int:
    """Bytes of a step in a ReportRequest, with its tag and length."""
    return step.ByteSize() + 4


def _fail(reports: Sequence[_Report] | deque[_Report], error: KvRouteError) -> None:
    for report in reports:
        if not report.outcomes.done():
            report.outcomes.set_exception(copy(error))


def _expire(report: _Report, timeout_s: float) -> None:
    if not report.outcomes.done():
        message = f"the report had no outcome in {timeout_s:g} s"
        report.outcomes.set_exception(
            DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, None, message)
        )
