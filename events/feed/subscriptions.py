"""The router's subscriptions to facts and load, as the fence (events/feed/fence.py) wants them.

Does the I/O for the fence, which is pure. A PING, whose PONG comes behind all messages queued in
the same connection, shows how many seconds the router is behind.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Container, Mapping
from typing import Any

from events.feed.fence import ALL, PLANES, Change, Fence, Plane, budget_part
from events.feed.intake import Intake
from events.plane import subjects
from events.plane.broker import Broker
from events.plane.nats_client import OnRaw, RawSubscription

PING_MAX_S = 10.0
"""Longest wait for a PONG, seconds; a router with divided budgets is never so far behind."""
_PAUSE_S = 0.25
"""Seconds between a PONG and the next PING."""

log = logging.getLogger("kvroute.feed")


class Subscriptions:
    """A feed's subscriptions: for a plane, one to all workers, or one to each not shut out."""

    def __init__(self, broker: Broker, fleet: str, opened: Callable[[], Awaitable[None]]) -> None:
        """opened: called when a plane is open to unknown publishers again."""
        self.fence = Fence()
        self._broker = broker
        self._fleet = fleet
        self._opened = opened
        self._listeners: Mapping[Plane, OnRaw] = {}
        self._due = asyncio.Event()
        """Set when the fence has changed, or workers may have come or gone in a fenced plane."""
        self._pinged_s: float | None = None
        """Loop time at which the unanswered PING was sent; None: no PING is unanswered."""
        self.running: dict[tuple[Plane, bytes], RawSubscription] = {}

    def out(self, plane: Plane) -> Container[bytes]:
        """The publishers that are shut out of a plane: a view, which changes with the fence."""
        return self.fence.out(plane)

    async def start(self, listeners: Mapping[Plane, OnRaw]) -> None:
        """Subscribes to all workers."""
        self._listeners = listeners
        for plane in PLANES:
            await self._change(plane, [Change(plane, ALL, begins=True)])

    def shut_out(self, plane: Plane, publisher: bytes, now_s: float) -> None:
        """Shuts out a publisher whose message was over its budget."""
        pause_s = self.fence.shut_out(plane, publisher, now_s)
        if pause_s is not None:
            self._due.set()
            log.warning(
                "worker %s floods its subject of %s: not subscribed to for %g s",
                subjects.worker_id_of(publisher) or "?",
                plane,
                pause_s,
            )

    @property
    def behind_s(self) -> float:
        """Seconds for which a PING is unanswered, its PONG being behind unread messages; else 0."""
        pinged_s = self._pinged_s
        return 0.0 if pinged_s is None else asyncio.get_running_loop().time() - pinged_s

    def tick(self, intake: Intake[Any]) -> None:
        """Lets in the publishers whose pause is over; sets the intake's divisors of budgets."""
        now_s, behind_s = asyncio.get_running_loop().time(), self.behind_s
        if self.fence.tick(now_s, behind_s) or self.fence.fenced:
            self._due.set()
        intake.budget_part = budget_part(behind_s)
        intake.let_in = self.fence.let_in(now_s)

    def connection_changed(self) -> None:
        """Forgets an unanswered PING, whose PONG will not come; call when the connection was lost
        or made."""
        self._pinged_s = None

    async def measure(self) -> None:
        """Sends one PING after the other, until cancelled."""
        while True:
            self._pinged_s = self._pinged_s or asyncio.get_running_loop().time()
            if await self._broker.round_trip(PING_MAX_S):
                self._pinged_s = None
            await asyncio.sleep(_PAUSE_S)

    async def keep(self, known: Callable[[], Collection[str]]) -> None:
        """Subscribes as the fence says, until cancelled. known: the ids of the workers."""
        while True:
            await self._due.wait()
            self._due.clear()
            publishers = {subjects.escape(worker_id).encode() for worker_id in known()}
            changes = list(self.fence.changes(publishers))
            for plane in PLANES:
                of_plane = [change for change in changes if change.plane == plane]
                if of_plane:
                    await self._change(plane, of_plane)
                if Change(plane, ALL, begins=True) in of_plane:
                    log.info("%s of all workers are subscribed to again", plane)
                    await self._opened()

    async def _change(self, plane: Plane, changes: list[Change]) -> None:
        begin = [change.publisher for change in changes if change.begins]
        names = [
            subjects.of_publisher(self._fleet, plane, publisher)
            if publisher
            else subjects.all_of(self._fleet, plane)
            for publisher in begin
        ]
        ended = [
            self.running.pop((plane, change.publisher))
            for change in changes
            if not change.begins and (plane, change.publisher) in self.running
        ]
        begun = await self._broker.change_raw(names, ended, self._listeners[plane])
        for publisher, subscription in zip(begin, begun, strict=False):
            self.running[plane, publisher] = subscription
