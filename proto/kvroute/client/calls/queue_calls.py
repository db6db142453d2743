"""Steps of requests that wait in a router's queue, named by their request_id.

A request waits in one router, and the caller of a step may not know which: each step goes to every
router of the client.
"""

from collections.abc import Sequence

from kvroute.client.connections.line import Line
from kvroute.client.connections.transport import Transport
from kvroute.client.errors import KvRouteError
from kvroute.v1 import (
    FailureReason,
    Progress,
    ProgressOutcome,
    ProgressResult,
    ProgressState,
)

_BEST_FIRST = (
    ProgressResult.PROGRESS_RESULT_APPLIED,
    ProgressResult.PROGRESS_RESULT_UNCHANGED,
    ProgressResult.PROGRESS_RESULT_INVALID,
)
"""Outcomes in order of preference among routers' answers; each counts though another router does
not know the request, or does not answer."""


class QueueCalls:
    """The part of KvRouteClient that changes requests which wait."""

    _transport: Transport

    async def change_priority(
        self, request_id: str, priority: int, *, timeout_s: float | None = None
    ) -> ProgressOutcome:
        """Gives a request that waits in a router's queue another priority; higher is sooner.

        Every router of the client gets the step, once. The outcome is that of the router which
        knows the request: APPLIED; UNCHANGED if it has that priority, or has its worker, where a
        priority changes nothing (the outcome's message says so). UNKNOWN: no router knows it.
        Raises the error of a router that did not answer, unless another one knows the request, and
        ValueError for an empty id.
        """
        return await self._everywhere(Progress(request_id=request_id, priority=priority), timeout_s)

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> ProgressOutcome:
        """Ends the wait of a request, whose caller gets the error CANCELLED; if the request has its
        worker, its reservation ends as cancelled. Every router gets the step; outcomes (APPLIED or
        UNKNOWN) and errors are as for change_priority()."""
        step = Progress(
            request_id=request_id,
            state=ProgressState.PROGRESS_STATE_FAILED,
            failure_reason=FailureReason.FAILURE_REASON_CANCELLED,
        )
        return await self._everywhere(step, timeout_s)

    async def _everywhere(self, step: Progress, timeout_s: float | None) -> ProgressOutcome:
        if not step.request_id:
            raise ValueError("request_id is empty")

        async def attempt(line: Line, left_s: float) -> Sequence[ProgressOutcome]:
            return await line.report([step], left_s)

        answers = await self._transport.everywhere(attempt, timeout_s)
        errors = [answer for answer in answers if isinstance(answer, KvRouteError)]
        outcomes = [answer[0] for answer in answers if not isinstance(answer, KvRouteError)]
        for result in _BEST_FIRST:
            for outcome in outcomes:
                if outcome.result == result:
                    return outcome
        if errors:
            raise errors[0]
        return ProgressOutcome(result=ProgressResult.PROGRESS_RESULT_UNKNOWN)
