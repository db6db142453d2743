"""Which publishers a router listens to: one that floods is shut out, for longer each time.

    open      a plane (facts, load) has one subscription, to all publishers
    fenced    it has one for each known publisher that is not shut out, and none to all

A connection is read in order, so that a flood delays all messages that the server has queued behind
it: the flood has to end at the server. Unknown publishers reach no fenced plane; they become known
by the other plane, or once the plane is open again. A PING, whose PONG comes through that queue and
which no publisher can forge, shows how far the router is behind. Pure: no clock, no sockets.

Laws:
- a publisher over its budget is shut out of the plane of that message, for PAUSE_S, doubled with
  each further time up to PAUSE_MAX_S; after CALM_S within its budget it begins at PAUSE_S again;
- a router that is behind gives each publisher a part of its budget, so that a few publishers within
  their budgets can't keep the router behind;
- a publisher that is let in again has the FIRST_PART-th part of its budget for FIRST_S;
- a plane opens for all at once, at the end of the longest pause in it, when the router is not
  behind: each flooding publisher fences a plane for PAUSE_MAX_S at most, before the plane is open
  to unknown publishers again;
- a new subscription begins before the old one ends: no message of a publisher that is not shut out
  is missed.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from typing_extensions import override

Plane = Literal["facts", "load"]
PLANES: tuple[Plane, ...] = ("facts", "load")
PAUSE_S = 1.0
"""First pause, seconds: a burst, such as a relay's whole ring, is over by then."""
PAUSE_MAX_S = 64.0
CALM_S = 120.0
"""Seconds within its budget after which a publisher's next pause is PAUSE_S again. Longer than
PAUSE_MAX_S: a flood that goes on never gets there."""
FIRST_S = 1.0
FIRST_PART = 4
"""Divisor of a publisher's budget in its first FIRST_S: a flood that goes on is seen after some
thousand messages."""
REMEMBERED_MAX = 4096
"""Publishers of a plane whose floods are remembered; beyond it the oldest flood is forgotten."""
BEHIND_S = ((2.0, 16), (0.5, 4))
"""(s, n): a router that is s seconds behind divides each publisher's budget by n. A router reads
some 60,000 small messages a second, and a budget is 30,000 of them."""
ALL = b""
"""Stands for all publishers in the place of a publisher's token."""


def budget_part(behind_s: float) -> int:
    """Divisor of a publisher's budget, for a router that is behind_s seconds behind."""
    return next((part for from_s, part in BEHIND_S if behind_s >= from_s), 1)


class Change(NamedTuple):
    """A subscription to begin or to end."""

    plane: Plane
    publisher: bytes
    """Token of a worker id, or ALL."""
    begins: bool


@dataclass(slots=True)
class _Listening:
    """The subscriptions of one plane, and the publishers that are shut out of it."""

    publishers: set[bytes] = field(default_factory=lambda: {ALL})
    out: set[bytes] = field(default_factory=set)
    until_s: float = 0.0
    """End of the longest pause of the publishers in `out`."""
    let_in: set[bytes] = field(default_factory=set)
    """Publishers that were shut out until the plane opened last."""
    opened_s: float = -inf
    floods: dict[bytes, tuple[int, float]] = field(default_factory=dict)
    """Publisher -> times that it was shut out, and the end of its last pause"""


class Fence:
    """The publishers that one router has shut out, by plane, and until when."""

    def __init__(self) -> None:
        self._planes: dict[Plane, _Listening] = {plane: _Listening() for plane in PLANES}
        self.times: Counter[Plane] = Counter(dict.fromkeys(PLANES, 0))
        """Plane -> times that a publisher was shut out"""

    @override
    def __repr__(self) -> str:
        out = ", ".join(f"{len(here.out)} out of {plane}" for plane, here in self._planes.items())
        return f"<Fence {out}>"

    @property
    def fenced(self) -> bool:
        """Whether a plane is fenced, so that the subscriptions change with the known workers."""
        return any(here.out for here in self._planes.values())

    def out(self, plane: Plane) -> Container[bytes]:
        """The publishers that are shut out of a plane: a view, which changes with the fence."""
        return self._planes[plane].out

    def shut_out(self, plane: Plane, publisher: bytes, now_s: float) -> float | None:
        """Shuts out a publisher whose message was over its budget; `changes` is due then. Returns
        the pause in seconds; None: it was shut out already.
        """
        here = self._planes[plane]
        if publisher in here.out:
            return None
        times, ended_s = here.floods.pop(publisher, (0, now_s))
        times = 1 if now_s - ended_s >= CALM_S else times + 1
        pause_s = min(PAUSE_MAX_S, PAUSE_S * 2.0 ** min(times - 1, 16))
        if len(here.floods) >= REMEMBERED_MAX:
            del here.floods[next(iter(here.floods))]
        here.floods[publisher] = times, now_s + pause_s
        here.out.add(publisher)
        here.until_s = max(here.until_s, now_s + pause_s)
        self.times[plane] += 1
        return pause_s

    def tick(self, now_s: float, behind_s: float = 0.0) -> bool:
        """Opens each plane whose longest pause is over, unless the router is behind; returns
        whether any was opened, so that `changes` is due."""
        if budget_part(behind_s) > 1:
            return False
        due = [here for here in self._planes.values() if here.out and now_s >= here.until_s]
        for here in due:
            here.let_in = set(here.out)
            here.opened_s = now_s
            here.out.clear()
        return bool(due)

    def let_in(self, now_s: float) -> set[bytes]:
        """The publishers that were let in again less than FIRST_S ago."""
        planes = (here for here in self._planes.values() if now_s - here.opened_s < FIRST_S)
        return set().union(*(here.let_in for here in planes))

    def changes(self, known: Collection[bytes]) -> Iterator[Change]:
        """The subscriptions to begin, then those to end, for each plane; they count as performed.
        known: the publishers of known workers."""
        for plane, here in self._planes.items():
            wanted = {*known} - here.out if here.out else {ALL}
            for publisher in sorted(wanted - here.publishers):
                yield Change(plane, publisher, begins=True)
            for publisher in sorted(here.publishers - wanted):
                yield Change(plane, publisher, begins=False)
            here.publishers = wanted
