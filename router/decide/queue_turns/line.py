"""Waiting requests of one band of a pool: a sorted line for each tenant, and their shares. Pure.

A line is a sorted list with binary search: moving the pointers of 10,000 requests takes less time
than walking the levels of a balanced tree in Python does.

Laws:
- entries of a line ascend by (key, arrival, number), and no request's number is there twice;
- no line is kept for a tenant without a waiting request, only turns taken beyond its share.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from heapq import nlargest
from math import inf
from operator import itemgetter

from typing_extensions import override

from router.decide.queue_order.ranking import Ranking
from router.decide.queue_turns.shares import Shares
from router.decide.waiter import Key, Waiter
from router.request.narrowing import Narrowing

Entry = tuple[Key, float, int, Waiter]


class Line:
    """Waiting requests, sorted by one order."""

    __slots__ = ("entries", "level", "narrowings", "tenant", "weight")

    def __init__(self, level: int = 0, tenant: str = "", weight: float = 1.0) -> None:
        self.level = level
        """Number of the line's band."""
        self.tenant = tenant
        """The requests' tenant; empty: all tenants."""
        self.weight = weight
        """Weight of the tenant."""
        self.entries: list[Entry] = []
        """The requests with their sort keys, the next request in front."""
        self.narrowings: Counter[Narrowing] = Counter()
        """Number of requests with each narrowing; requests without one are not counted."""

    def __len__(self) -> int:
        return len(self.entries)

    @override
    def __repr__(self) -> str:
        return f"<Line {len(self.entries)} waiting>"

    def add(self, waiter: Waiter) -> None:
        """Adds a request at the place of its key."""
        insort(self.entries, (waiter.key, waiter.arrived_s, waiter.seq, waiter))
        if waiter.narrowing is not None:
            self.narrowings[waiter.narrowing] += 1

    def remove(self, waiter: Waiter) -> None:
        """Removes a request; its key must be the one with which it was added."""
        place = 0 if self.entries and self.entries[0][3] is waiter else self.place(waiter)
        if place == len(self.entries) or self.entries[place][3] is not waiter:
            raise LookupError(f"{waiter} is not in {self}")
        del self.entries[place]
        if waiter.narrowing is not None:
            self.narrowings[waiter.narrowing] -= 1
            if not self.narrowings[waiter.narrowing]:
                del self.narrowings[waiter.narrowing]

    def rank(self, ranking: Ranking, now_s: float) -> None:
        """Sorts the line by new keys for all its requests."""
        waiters = [entry[3] for entry in self.entries]
        waiters.sort(key=lambda waiter: (waiter.arrived_s, waiter.seq))
        ranking.rank(waiters, now_s)
        self.entries = sorted(
            (waiter.key, waiter.arrived_s, waiter.seq, waiter) for waiter in waiters
        )

    def place(self, waiter: Waiter) -> int:
        """Number of requests in front of a request, whether or not it is in this line."""
        return bisect_left(self.entries, (waiter.key, waiter.arrived_s, waiter.seq))

    def after(self, place: int, entry: Entry) -> int:
        """The place behind an entry that was at `place`, whether or not it is still there."""
        if place < len(self.entries) and self.entries[place] is entry:
            return place + 1
        return bisect_right(self.entries, entry)


class Level:
    """Waiting requests of one band; the tenant's name is empty where tenants don't share."""

    __slots__ = ("_lines", "_number", "_shares", "_weights", "count")

    def __init__(self, number: int) -> None:
        self.count = 0
        self._number = number
        self._lines: dict[str, Line] = {}
        self._shares: Shares[str] = Shares()
        self._weights = 0.0
        """Sum of the weights of all lines' tenants."""

    @override
    def __repr__(self) -> str:
        return f"<Level {self.count} waiting, {len(self._lines)} lines>"

    @property
    def line_count(self) -> int:
        """Number of tenants' lines with waiting requests."""
        return len(self._lines)

    def largest(self, most: int) -> list[tuple[str, int]]:
        """Tenants with the most waiting requests, at most `most`, with their numbers."""
        counts = ((tenant, len(line)) for tenant, line in self._lines.items() if tenant)
        return nlargest(most, counts, key=itemgetter(1))

    def oldest_s(self) -> float:
        """Arrival time of the request that waits longest; inf: none waits. Reads all requests."""
        lines = self._lines.values()
        return min((entry[1] for line in lines for entry in line.entries), default=inf)

    def lines(self) -> Iterator[Line]:
        """Yields the lines in the order of their turns; none may be added or removed meanwhile."""
        return (self._lines[tenant] for tenant in self._shares)

    def places(self, tenant: str, weight: float, waiter: Waiter) -> float:
        """Number of the band's requests that go until a request has gone, itself included, by its
        place in its tenant's line and that tenant's share. weight: of the tenant.
        """
        line = self._lines.get(tenant)
        of_line = 1 if line is None else line.place(waiter) + 1
        others = self._weights - (0.0 if line is None else line.weight)
        return min(of_line * (others + weight) / weight, self.count + (not waiter.waits))

    def add(self, tenant: str, weight: float, waiter: Waiter) -> None:
        """Adds a waiting request to its tenant's line. weight: of the tenant."""
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = Line(self._number, tenant, weight)
            self._weights += weight
            self._shares.enter(tenant)
        line.add(waiter)
        self.count += 1

    def remove(self, tenant: str, waiter: Waiter) -> None:
        """Removes a request from its tenant's line."""
        line = self._lines[tenant]
        line.remove(waiter)
        self.count -= 1
        if not len(line):
            del self._lines[tenant]
            self._weights = self._weights - line.weight if self._lines else 0.0
            self._shares.leave(tenant)

    def rank(self, ranking: Ranking, now_s: float) -> None:
        """Sorts each line by new keys for all its requests."""
        for line in self._lines.values():
            line.rank(ranking, now_s)

    def charge(self, tenant: str, cost: float, weight: float) -> None:
        """Charges a tenant for a request that goes, and that is still in its line."""
        self._shares.charge(tenant, cost, weight)
