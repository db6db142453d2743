"""Waiting requests in the order of their keys. Pure.

A sorted list with binary search: moving the pointers of 10,000 requests takes less time than
walking the levels of a balanced tree in Python does.

Law: entries ascend by (key, arrival, number), and no number is there twice.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter

from typing_extensions import override

from router.decide.queue_order.ranking import Ranking
from router.decide.waiter import Key, Waiter
from router.request.narrowing import Narrowing

Entry = tuple[Key, float, int, Waiter]


class Line:
    """Waiting requests, sorted by one order."""

    __slots__ = ("entries", "level", "narrowings", "tenant", "weight")

    def __init__(self, level: int = 0, tenant: str = "", weight: float = 1.0) -> None:
        self.level = level
        """Number of its band."""
        self.tenant = tenant
        """The requests' tenant; empty: all tenants."""
        self.weight = weight
        """Weight of the tenant."""
        self.entries: list[Entry] = []
        """The next request in front."""
        self.narrowings: Counter[Narrowing] = Counter()
        """How many requests have each; those without one are not counted."""

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
