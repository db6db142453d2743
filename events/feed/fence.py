"""Which publishers a router listens to: one that floods is shut out, for longer each time.

    open      a plane (facts, load) has one subscription, to all publishers
    fenced    it has one for each known publisher that is not shut out, and none to all

A connection is read in order, so that a flood delays whatever the server has queued behind it: the
flood has to end at the server. A fenced plane has no strangers; they are known by the other plane,
or as the fence falls. A PING through that queue, which no publisher can forge, shows how far the
router is behind. Pure: no clock, no sockets.

Laws:
- a publisher over its budget is shut out of the plane of that message, for PAUSE_S, doubled with
  each further time up to PAUSE_MAX_S; after CALM_S within its budget it begins at PAUSE_S again;
- a router that is behind gives each publisher a part of its budget, so that no few of them, each
  within its own, can keep it behind;
- a publisher that is let in again has the FIRST_PART-th part of its budget for FIRST_S;
- a plane opens for all at once, at the end of the longest pause in it, when the router is not
  behind: flooding publishers fence a plane for PAUSE_MAX_S each, at most, before strangers have
  their turn;
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
"""Longer than the longest pause, so that a flood that goes on never begins at the first again."""
FIRST_S = 1.0
FIRST_PART = 4
"""So that a flood that goes on is seen after some thousand messages."""
REMEMBERED_MAX = 4096
"""Publishers of a plane whose floods are remembered; of more, the first is forgotten."""
BEHIND_S = ((2.0, 16), (0.5, 4))
"""Seconds behind from which a publisher has the n-th part of its budget. A router reads some 60,000
small messages a second, and a budget is 30,000 of them."""
ALL = b""
"""All publishers, in the place of one."""


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
    """What is subscribed to in one plane."""

    publishers: set[bytes] = field(default_factory=lambda: {ALL})
    out: set[bytes] = field(default_factory=set)
    until_s: float = 0.0
    """End of the longest pause of those that are out."""
    let_in: set[bytes] = field(default_factory=set)
    """Those that were out until the plane opened last."""
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
        """Whether a plane is fenced, so that workers that come or go change what is subscribed."""
        return any(here.out for here in self._planes.values())

    def out(self, plane: Plane) -> Container[bytes]:
        """The publishers that are shut out of a plane, now and later."""
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
        """Opens each plane whose last pause is over; returns whether `changes` is due for that."""
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
        """What to subscribe to and what to end, in this order; counts as performed. known: the
        publishers of known workers."""
        for plane, here in self._planes.items():
            wanted = {*known} - here.out if here.out else {ALL}
            for publisher in sorted(wanted - here.publishers):
                yield Change(plane, publisher, begins=True)
            for publisher in sorted(here.publishers - wanted):
                yield Change(plane, publisher, begins=False)
            here.publishers = wanted
