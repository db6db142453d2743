"""Takes requests without a byte of an answer away from workers that are silent to the router.

A worker that is cut off closes no connection: its open requests would wait for gateway.silence_s.
The router knows in seconds, by the worker's relay.

Law: a request is taken away only while no byte of its answer has come, and only where another
worker of its model and role may be picked.
"""

import asyncio

from kvroute.client import KvRouteError
from router.gateway.routers import Router
from router.gateway.server.counters import GatewayCounters
from router.gateway.server.roster import Roster
from router.gateway.server.upstreams import Upstreams

LOOK_S = 1.0
"""Seconds between two looks for silent workers, and from a request's sending to its first look."""


class SilentWorkers:
    """Moves one gateway's requests away from silent workers."""

    def __init__(
        self, client: Router, upstreams: Upstreams, roster: Roster, counters: GatewayCounters
    ) -> None:
        self._client = client
        self._upstreams = upstreams
        self._roster = roster
        self._counters = counters

    async def keep(self) -> None:
        """Looks for silent workers repeatedly, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look(asyncio.get_running_loop().time() - LOOK_S)

    async def look(self, since_s: float) -> None:
        """Takes requests that were sent before since_s, by the loop's clock, and have no byte of an
        answer, away from workers that the router lists as silent."""
        if next(self._upstreams.waiting(since_s), None) is None:
            return
        try:
            workers = await self._client.list_workers(away=True)
        except KvRouteError:
            return  # no worker is known to be silent; the roster's own list says so in the log
        gone = {(each.worker_id, each.dp_rank): each.role for each in workers}
        for sent in self._upstreams.waiting(since_s):
            seat = sent.seat
            role = gone.get((seat.worker_id, seat.dp_rank))
            if role is not None and self._roster.has_other(seat.model, role, gone.keys()):
                self._counters.moved.inc()
                sent.leave()
