"""Report: each step goes to the router that made its reservation.

Law: steps of the fallback's own picks go to no router.
"""

import asyncio
from collections.abc import Sequence

import grpc

from kvroute.client.connections.line import Line
from kvroute.client.connections.report_batches import report_pieces
from kvroute.client.connections.retry import RetryPolicy
from kvroute.client.connections.transport import Transport
from kvroute.client.errors import DeadlineExceeded
from kvroute.client.fallback.fallback import RESERVATION
from kvroute.client.fallback.takeover import Takeover
from kvroute.v1 import Progress, ProgressOutcome


class Reporter:
    """Sends the reports of one client to the routers of their reservations."""

    def __init__(self, transport: Transport, takeover: Takeover) -> None:
        self._transport = transport
        self._takeover = takeover

    async def report(
        self, progress: Sequence[Progress], timeout_s: float | None
    ) -> list[ProgressOutcome]:
        """Sends steps; returns one outcome for each, in order. Routers are called at the
        same time."""
        deadline_s = self._transport.deadline_s(timeout_s)
        lines = self._transport.open()
        by_owner: dict[Line | str | None, list[int]] = {}
        for i, step in enumerate(progress):
            ours = step.reservation_id.startswith(RESERVATION)
            owner = RESERVATION if ours else lines.owner(step.reservation_id)
            by_owner.setdefault(owner, []).append(i)
        if len(by_owner) <= 1:
            return await self._send_pieces(progress, deadline_s)
        outcomes: dict[int, ProgressOutcome] = {}

        async def send(places: list[int]) -> None:
            answers = await self._send_pieces([progress[i] for i in places], deadline_s)
            outcomes.update(zip(places, answers, strict=True))

        calls = [send(places) for places in by_owner.values()]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # a cycle: its traceback refers to this frame
        return [outcomes[i] for i in range(len(progress))]

    async def send_step(
        self, progress: Progress, *, timeout_s: float, attempts: int | None
    ) -> ProgressOutcome:
        """Sends one step. attempts: 1, or None for the client's retry policy."""
        policy = self._transport.once if attempts == 1 else self._transport.retry
        return (await self._send([progress], timeout_s, policy))[0]

    async def _send_pieces(
        self, progress: Sequence[Progress], deadline_s: float
    ) -> list[ProgressOutcome]:
        """Sends steps for one router, in calls of a size that it takes, one after the other."""
        outcomes: list[ProgressOutcome] = []
        for piece in report_pieces(progress):
            left_s = deadline_s - self._transport.clock()
            if left_s <= 0:
                message = f"the deadline passed after {len(outcomes)} of {len(progress)} steps"
                raise DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, None, message)
            outcomes += await self._send(piece, left_s, self._transport.retry)
        return outcomes

    async def _send(
        self, progress: Sequence[Progress], timeout_s: float, policy: RetryPolicy
    ) -> list[ProgressOutcome]:
        """Sends steps of reservations that one router made; steps of the fallback's picks go
        to it."""
        reservation_id = progress[0].reservation_id if progress else ""
        if reservation_id.startswith(RESERVATION):
            return [self._takeover.reported(step) for step in progress]

        async def attempt(line: Line, left_s: float) -> list[ProgressOutcome]:
            return list(await line.report(progress, left_s))

        return await self._transport.call(attempt, timeout_s, policy, reservation_id)
