"""Requests of one pool that wait: those that the same workers could serve. Pure.

A round of dispatch walks the line from the front. Requests without room are looked past, within
bounds, so that a large request doesn't idle a fleet that could serve those behind it, and requests
that few workers may serve don't hold the others.

Law: a round has at most 4 * (look_past + 1) attempts that fail, look_past + 1 of one restriction,
and LOOKS_MAX requests that are skipped without an attempt.
"""

from collections import Counter
from collections.abc import Hashable, Iterator

from typing_extensions import override

from router.queue.drain_rate import DrainRate
from router.queue.line import Line
from router.queue.ranking import Ranking
from router.queue.waiter import Waiter

LOOKS_MAX = 1024
"""Requests that a round skips without an attempt: about 0.1 ms."""
FAILURES_FACTOR = 4
"""Failed attempts of a round, as a multiple of those of one restriction."""


class PoolQueue:
    """One pool's line."""

    def __init__(self, ranking: Ranking, look_past: int) -> None:
        self.rate = DrainRate()
        self._ranking = ranking
        self._look_past = look_past
        self._line = Line()

    def __len__(self) -> int:
        return len(self._line)

    @override
    def __repr__(self) -> str:
        return f"<PoolQueue {len(self)} waiting, {self._ranking.order.name}>"

    def configure(self, ranking: Ranking, look_past: int) -> None:
        """Ranks all that wait by another order."""
        waiting = list(self)
        self._ranking, self._look_past = ranking, look_past
        self._line = Line()
        for waiter in waiting:
            self.add(waiter)

    def add(self, waiter: Waiter) -> None:
        """Puts a request into the line."""
        waiter.key = self._ranking.key(waiter)
        self._line.add(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Takes a request out of the line."""
        self._line.remove(waiter)

    def __iter__(self) -> Iterator[Waiter]:
        """All that wait, the next one first."""
        return (entry[3] for entry in self._line.entries)

    def candidates(self, version: int, now_s: float) -> Iterator[Waiter]:
        """Whose turn it is, one after the other; each may leave the line before the next is taken.

        Leaves out requests that no worker had room for at this version of the room, and those whose
        wait is over.
        """
        line, place, skipped = self._line, 0, 0
        failed: Counter[Hashable] = Counter()
        while place < len(line.entries) and skipped < LOOKS_MAX:
            entry = line.entries[place]
            waiter = entry[3]
            if (
                waiter.passed_at == version
                or waiter.expires_s <= now_s
                or failed[waiter.restriction] > self._look_past
            ):
                skipped += 1
            else:
                yield waiter
            if waiter.waits and waiter.passed_at == version:
                failed[waiter.restriction] += 1
                if failed.total() >= FAILURES_FACTOR * (self._look_past + 1):
                    return
            place = line.after(place, entry)
