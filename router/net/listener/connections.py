"""The open connections of a port, and which of them is closed for a new one. Owns no sockets.

Laws:
- a connection counts from its acceptance to its end, by port and by client;
- at most connections_max are open, and of one client at most FREE_TIMES as many as there are free
  places: one client never takes all of a port, and a proxy that stands before all clients gets
  seven eighths of it;
- past a bound, a new connection replaces an open one that has not begun, or is idle: past its
  client's part, one of that client; on a full port, one of the client with most connections, if
  that client is the same or has more. With none to replace, the new connection is closed at once;
- where the host has no descriptor left for a new connection, the one that a full port would replace
  is closed;
- a connection that has not begun begin_s after its acceptance is late. It begins when its TLS
  handshake and its first request's head, or HTTP/2's preface, are whole.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from router.net.listener.held import PortHeld

FREE_TIMES = 7
LOOKED_AT = 64
"""Most connections, not begun and begun each, that are checked to find one to replace."""
REASONS = ("full", "address", "slow_head", "idle", "malformed", "tls", "keepalive", "age", "held",
           "unread")  # fmt: skip
"""Why a port closed a connection by itself. full: past connections_max, or to make room then.
address: past its client's part, or to make room then. slow_head: TLS, or a request's head, took too
long. idle: it had no request for too long. malformed: what came is not the port's protocol, or is
past a bound of it. tls: a handshake that failed, or bytes without TLS where the port wants TLS, or
the reverse. keepalive: no answer to a ping. age: calls went on after the grace of its age. held: it
held most of a port that held too much, see held.PortHeld. unread: its client took nothing of an
answer."""


@dataclass(frozen=True, slots=True)
class PortBounds:
    """Bounds of one port: open connections, and seconds until a connection must begin."""

    connections_max: int
    begin_s: float = 20.0


class Begins(Protocol):
    """Interface: the protocol object that serves a connection."""

    @property
    def begun(self) -> bool:
        """Whether the first request's head, or HTTP/2's preface, has come whole."""

    @property
    def idle(self) -> bool:
        """Whether the connection has begun, and has no request or part of one, but calls of
        health.
        """


class Place:
    """One open connection, as its port counts it."""

    __slots__ = ("client", "close", "open", "served_by", "until_s")

    def __init__(self, client: str, until_s: float) -> None:
        self.client = client
        self.close: Callable[[], object] = lambda: None
        """Closes the connection at once; set by the part that has its socket."""
        self.until_s = until_s
        """Loop time from which the connection is late, unless it has begun."""
        self.open = True
        self.served_by: Begins | None = None
        """Protocol object that serves the connection; None: its TLS handshake is not over."""

    @property
    def begun(self) -> bool:
        return self.served_by is not None and self.served_by.begun


class _Client:
    """One client's connections."""

    __slots__ = ("begun", "open", "waiting")

    def __init__(self) -> None:
        self.open = 0
        self.waiting: dict[Place, None] = {}
        """Connections that had not begun when they were last checked; the oldest first."""
        self.begun: dict[Place, None] = {}
        """Connections that have begun; those checked last are last."""


class Connections:
    """The connections of one port."""

    def __init__(self, port: str, bounds: PortBounds) -> None:
        """port: name of the port in metrics."""
        self.port = port
        self.bounds = bounds
        self.open = 0
        self.closed: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        """Connections that the port itself closed, by reason."""
        self.held: PortHeld | None = None
        """Counter of the bytes that the port's connections hold; None: the port counts none."""
        self._clients: dict[str, _Client] = {}
        self._waiting: dict[Place, None] = {}
        self._begun: dict[Place, None] = {}
        """Connections of all clients that have begun; those checked last are last."""
        self._left = asyncio.Event()

    @property
    def incomplete(self) -> int:
        """Number of open connections that have not begun."""
        return sum(not place.begun for place in self._waiting)

    @property
    def most_of_one(self) -> int:
        """Number of open connections of the client with the most."""
        return max((client.open for client in self._clients.values()), default=0)

    @property
    def late_s(self) -> float | None:
        """Loop time at which the next connection may be late; None: no connection can be."""
        return next(iter(self._waiting)).until_s if self._waiting else None

    def unserved(self) -> list[Place]:
        """Connections whose TLS handshake is not over."""
        return [place for place in self._waiting if place.served_by is None]

    def admit(self, client: str, now_s: float) -> tuple[Place | None, Place | None]:
        """Returns a place for a new connection, or None if it is to be closed; and the connection
        to close for it, if any.
        """
        reason, left = self._room(client)
        if reason:
            self.closed[reason] += 1
            if left is None:
                return None, None
            self.leave(left)
        place = Place(client, now_s + self.bounds.begin_s)
        known = self._clients.setdefault(client, _Client())
        self._waiting[place] = known.waiting[place] = None
        known.open += 1
        self.open += 1
        return place, left

    def leave(self, place: Place) -> None:
        """Removes a connection that is over; a second call changes nothing."""
        if not place.open:
            return
        place.open = False
        self._left.set()
        self._looked_at(place)
        known = self._clients[place.client]
        self._begun.pop(place, None)
        known.begun.pop(place, None)
        known.open -= 1
        self.open -= 1
        if not known.open:
            del self._clients[place.client]

    def give_up_one(self) -> Place | None:
        """Removes and returns the connection to close because the host has no descriptor left for
        another; None: there is none."""
        place = self._heaviest()
        if place is not None:
            self.closed["full"] += 1
            self.leave(place)
        return place

    async def none_left(self, wait_s: float) -> None:
        """Returns when no connection is open, or after wait_s."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self.open:
                    self._left.clear()
                    await self._left.wait()

    def late(self, now_s: float, most: int) -> list[Place]:
        """Connections to close because they are late, among the `most` oldest."""
        due = [place for place in islice(self._waiting, most) if place.until_s <= now_s]
        for place in due:
            self._looked_at(place)
        late = [place for place in due if not place.begun]
        for place in late:
            self.closed["slow_head"] += 1
            self.leave(place)
        return late

    def _room(self, client: str) -> tuple[str, Place | None]:
        """The bound that a new connection of a client exceeds, "full" or "address", or ""; and the
        open connection that it may replace, or None."""
        known = self._clients.get(client)
        held = known.open if known is not None else 0
        free = self.bounds.connections_max - self.open
        if known is not None and free and held >= FREE_TIMES * free:
            waiting = next(self._not_begun(known.waiting), None)
            return "address", waiting or next(_idle(known.begun), None)
        if free:
            return "", None
        other = self._heaviest()
        if other is None or other.client == client:
            return "full", other
        return "full", other if self._clients[other.client].open > held else None

    def _heaviest(self) -> Place | None:
        """The connection to replace, not begun or idle, of the client with most connections; None:
        there is none."""
        return max(
            (*self._not_begun(self._waiting), *_idle(self._begun)),
            key=lambda place: self._clients[place.client].open,
            default=None,
        )

    def _not_begun(self, waiting: dict[Place, None]) -> Iterator[Place]:
        for place in list(islice(waiting, LOOKED_AT)):
            if place.begun:
                self._looked_at(place)
            else:
                yield place

    def _looked_at(self, place: Place) -> None:
        """Takes a connection that has begun, or is over, off those that have not begun."""
        known = self._clients[place.client]
        self._waiting.pop(place, None)
        known.waiting.pop(place, None)
        if place.open:
            self._begun[place] = known.begun[place] = None


def _idle(places: dict[Place, None]) -> Iterator[Place]:
    for place in list(islice(places, LOOKED_AT)):
        del places[place]
        places[place] = None
        if place.served_by is not None and place.served_by.idle:
            yield place
