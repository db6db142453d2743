"""Requests that were sent to a worker in trouble though their picker could know. Pure.

A router knows of a failure by the report of the client that met it, or by the other router's word;
a client's fallback by its own failures, for as long as it avoids a worker after them. Excused is
only what neither could bring:

- a failure that was reported over a line in trouble, or to a router that was stopped then: the
  next one counts that could be heard;
- a failure of the other router's pick while NATS was away: each router then learns by its own;
- a pick over a line in trouble: when it was made can't be known;
- a router that was stopped since: it has the reports before it when it goes on, and counts from
  then; and so when a core of the machine was away, since any process may have run there.
"""

from collections import defaultdict
from collections.abc import Iterator
from math import inf

from tests.chaos.records import Attempt, Cause, Observed, Trouble

LINE = frozenset({Cause.LINE_CUT, Cause.LINE_SLOW, Cause.LINE_CORRUPT})
AVOID_S = 10.0
"""For how long a client's fallback avoids a worker that failed (FallbackPolicy.avoid_s)."""

Sent = tuple[int, Attempt]
"""The client, and what it sent."""


def late_picks(
    run: Observed, causes: frozenset[Cause], late_s: float, failure: str = ""
) -> Iterator[tuple[Trouble, float, Attempt]]:
    """The trouble, when its picker could know of it, and the request that was sent late_s later.

    failure: of those that say so; empty: any does.
    """
    of: dict[str, list[Sent]] = defaultdict(list)
    for request in run.served:
        for attempt in request.attempts:
            of[attempt.worker].append((request.client, attempt))
    paths = Paths(run, late_s)
    for trouble in run.troubles:
        if trouble.cause not in causes:
            continue
        there = [
            one for one in of[trouble.worker] if trouble.overlaps(one[1].sent_s, one[1].sent_s)
        ]
        failed = sorted(
            (one for one in there if one[1].failure and failure in {"", one[1].failure}),
            key=lambda one: one[1].ended_s,
        )
        for client, attempt in sorted(there, key=lambda one: one[1].sent_s):
            known_s = paths.known_s(client, attempt, failed)
            if attempt.sent_s > known_s + late_s:
                yield trouble, known_s, attempt


class Paths:
    """How word of a failure gets to whatever picks."""

    def __init__(self, run: Observed, late_s: float) -> None:
        self._late_s = late_s
        self._routers = {one.replica: i for i, one in enumerate(run.routers) if one.replica}
        self._lines = [one for one in run.troubles if one.cause in LINE]
        self._stops = [one for one in run.troubles if one.cause is Cause.ROUTER_STOP]
        self._nats = [one for one in run.troubles if one.cause is Cause.NATS]
        self._stalls = [one for one in run.troubles if one.cause is Cause.MACHINE]

    def known_s(self, client: int, attempt: Attempt, failed: list[Sent]) -> float:
        """When the picker of an attempt could know of a failure before it; inf: it could not.

        failed: at the same worker in the same trouble, those that ended first before others.
        """
        before = [one for one in failed if one[1].ended_s < attempt.sent_s]
        if not attempt.replica:
            ends_s = (one.ended_s for by, one in before if by == client)
            since_s = attempt.sent_s - AVOID_S
            first_s = min((end_s for end_s in ends_s if end_s > since_s), default=inf)
            return self._ran_s(first_s, attempt.sent_s)
        first_s = next(
            (one.ended_s for by, one in before if self._heard(by, one, attempt.replica)), inf
        )
        if first_s == inf or self._line_in_trouble(
            client, attempt.replica, first_s, attempt.sent_s
        ):
            return inf
        stops = self._stopped(attempt.replica, first_s, attempt.sent_s)
        return max([self._ran_s(first_s, attempt.sent_s), *(stop.to_s for stop in stops)])

    def _ran_s(self, from_s: float, to_s: float) -> float:
        """Since when every core of the machine was there; from_s, if all that time."""
        return max([from_s, *(one.to_s for one in self._stalls if one.overlaps(from_s, to_s))])

    def _heard(self, client: int, failed: Attempt, replica: str) -> bool:
        """Whether word of a failure could be with a router in time."""
        from_s, to_s = failed.ended_s, failed.ended_s + self._late_s
        if not failed.replica or self._line_in_trouble(client, failed.replica, from_s, to_s):
            return False
        if self._stopped(failed.replica, from_s, to_s):
            return failed.replica == replica  # it hears of it when it goes on
        if failed.replica == replica:
            return True
        return not any(one.overlaps(from_s, to_s) for one in self._nats)

    def _line_in_trouble(self, client: int, replica: str, from_s: float, to_s: float) -> bool:
        router = self._routers.get(replica)
        return any(
            one.client == client and one.router == router and one.overlaps(from_s, to_s)
            for one in self._lines
        )

    def _stopped(self, replica: str, from_s: float, to_s: float) -> list[Trouble]:
        router = self._routers.get(replica)
        return [one for one in self._stops if one.router == router and one.overlaps(from_s, to_s)]
