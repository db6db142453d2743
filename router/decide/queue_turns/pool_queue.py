"""The waiting requests of one pool, whose workers can serve each of them. Pure.

A band has the turn, then a tenant of that band, then the first request of its line.

Laws: bands and tenants get shares by their weights (router/decide/queue_turns/shares.py); a request
is in a higher band once its priority, raised by queue.bands_aging points a second of waiting,
reaches that band's from_priority.
"""

from collections.abc import Callable, Iterator
from math import inf

from typing_extensions import override

from router.decide.queue_limits.drain_rate import DrainRate
from router.decide.queue_limits.standing import Standing
from router.decide.queue_turns.line import Level, Line
from router.decide.queue_turns.round import Round, Rules
from router.decide.queue_turns.shares import Shares
from router.decide.waiter import Waiter

RANK_EACH_S = 1e-4
"""Seconds between two rankings of a pool, for each waiting request in it: a score that changes with
the fleet may take 10 us, so that ranking takes a tenth of the time at most."""
RISES_MAX = 256
"""Requests that come into a higher band in one round: about 1 ms."""


class PoolQueue:
    """The bands of a pool, with their waiting requests."""

    def __init__(self, rules: Rules, rate: DrainRate | None = None) -> None:
        self.rate = rate or DrainRate()
        self._rules = rules
        self._ranking = rules.rankings.of(0)
        """The ranking that made the requests' keys."""
        self._is_stale = False
        """Whether requests came since the keys were made, and so are behind all others."""
        self._ranked_at: int | None = None
        """Version of the room (Fleet.room) at which the keys were made."""
        self._rank_again_s = -inf
        self.levels = [Level(number) for number in range(len(rules.bands.settings))]
        """The bands, the lowest first; read only."""
        self._shares: Shares[int] = Shares()
        """Shares of bands, by number, in requests."""
        self._weights = 0.0
        """Sum of the weights of the bands that requests wait in."""
        self._shares_by_tenant = rules.tenants.share
        self._rises = Standing()
        """Times at which requests come into the next higher band."""
        self.count = 0
        """Number of waiting requests."""

    @override
    def __repr__(self) -> str:
        return f"<PoolQueue {self.count} waiting, {self._ranking.name}>"

    def under(self, rules: Rules, now_s: float) -> "PoolQueue":
        """Returns a queue of the same requests under other rules; shares begin from nothing."""
        queue = PoolQueue(rules, self.rate)
        queue._ranking = rules.rankings.of(self.count)
        for waiter in sorted(self, key=lambda waiter: waiter.seq):
            queue.add(waiter, now_s)
        return queue

    def __iter__(self) -> Iterator[Waiter]:
        """Yields all waiting requests by band, tenant and line, as they stand at this moment."""
        for line in self._lines():
            for entry in line.entries:
                yield entry[3]

    def of_band(self, number: int) -> list[Waiter]:
        """Waiting requests of a band, in the order of `__iter__`."""
        return [entry[3] for line in self.levels[number].lines() for entry in line.entries]

    def wait_s(self, number: int, now_s: float) -> float | None:
        """Expected wait of a request that comes last in a band, in seconds; None: no request went
        yet.
        """
        of_band = self.levels[number].count + 1.0
        return self.rate.wait_s(self._of_all_bands(number, of_band, self.count + 1.0), now_s)

    def places(self, waiter: Waiter, now_s: float) -> float:
        """Number of the pool's requests that go until a request has gone, itself included, by the
        present order and shares. Sets the key and the band of a request that is not queued yet.
        """
        comes = not waiter.waits
        if comes:
            waiter.key = self._ranking.key(waiter)
            waiter.level = self._rules.bands.level(waiter, now_s)
        of_band = self.levels[waiter.level].places(*self._flow(waiter), waiter)
        return self._of_all_bands(waiter.level, of_band, float(self.count + comes))

    def _of_all_bands(self, number: int, of_band: float, most: float) -> float:
        """Number of requests of all bands that go until `of_band` of one band have gone, these
        included. number: of that band.

        strict: of_band + requests of higher bands
        else:   of_band / (share of the band by weight among those that wait), `most` at most
        """
        levels = self.levels
        if len(levels) == 1:
            return of_band
        if self._rules.strict:
            return of_band + sum(level.count for level in levels[number + 1 :])
        weight = self._rules.bands.settings[number].weight
        weights = self._weights if levels[number].count else self._weights + weight
        return min(of_band * weights / weight, most)

    def add(self, waiter: Waiter, now_s: float) -> None:
        """Adds a request to its line."""
        waiter.key = self._ranking.key(waiter)
        self._is_stale = True
        self._put(waiter, self._rules.bands.level(waiter, now_s))

    def remove(self, waiter: Waiter) -> None:
        """Removes a request from its line."""
        level = self.levels[waiter.level]
        level.remove(waiter.tenant if self._shares_by_tenant else "", waiter)
        if len(self.levels) > 1:
            self._rises.discard(waiter)
        self.count -= 1
        if not level.count:
            self._shares.leave(waiter.level)
            self._weigh()

    def charge(self, waiter: Waiter, cost: float) -> None:
        """Charges tenant and band for a request that goes, and that is still in its line."""
        if len(self.levels) > 1:
            weight = self._rules.bands.settings[waiter.level].weight
            self._shares.charge(waiter.level, 1.0, weight)
        if self._shares_by_tenant:
            tenant, weight = self._flow(waiter)
            self.levels[waiter.level].charge(tenant, cost, weight)

    def candidates(
        self, version: int, now_s: float, held: Callable[[int], bool] | None = None
    ) -> Iterator[Waiter]:
        """Yields requests by their turns; each may leave its line before the next is taken.

        Leaves out requests that no worker had room for at this version of the room, those whose
        wait is over, and bands that are held as their turn comes. Changes nothing but the bands of
        requests that waited long enough, and the order of those whose scores changed.
        """
        self._rise(now_s)
        self._rank(version, now_s)
        walk = Round(self._rules, version, now_s, self._line_count)
        lines = self._lines()
        while (line := next(lines, None)) is not None:
            if walk.may_go(line) and (held is None or not held(line.level)):
                yield from walk.of_line(line)
                if walk.went:  # a dispatched request has changed the turns
                    lines = self._lines()
                elif walk.over():
                    return

    def _lines(self) -> Iterator[Line]:
        """Lines with waiting requests, in the order of their turns."""
        levels = self.levels
        if len(levels) == 1:
            return levels[0].lines()
        numbers = reversed(range(len(levels))) if self._rules.strict else iter(self._shares)
        return (line for number in numbers for line in levels[number].lines())

    def _line_count(self) -> int:
        return sum(level.line_count for level in self.levels)

    def _put(self, waiter: Waiter, number: int) -> None:
        level = self.levels[number]
        if not level.count:
            self._shares.enter(number)
        waiter.level = number
        level.add(*self._flow(waiter), waiter)
        self.count += 1
        if level.count == 1:
            self._weigh()
        if number + 1 < len(self.levels):
            rises_at_s = self._rules.bands.rises_at_s(waiter, number)
            if rises_at_s < inf:
                self._rises.put(waiter, rises_at_s)

    def _flow(self, waiter: Waiter) -> tuple[str, float]:
        """The name under which a request has its share of a band, and the weight of that share:
        those of its tenant; where tenants don't share, the same for all requests."""
        if not self._shares_by_tenant:
            return "", 1.0
        return waiter.tenant, self._rules.tenants.of(waiter.tenant).weight

    def _weigh(self) -> None:
        """Sums the bands' weights again: a band has its first request, or lost its last one."""
        bands = self._rules.bands.settings
        self._weights = sum(bands[i].weight for i, level in enumerate(self.levels) if level.count)

    def _rank(self, version: int, now_s: float) -> None:
        """Computes the waiting requests' sort keys again: once there are so many that another order
        counts; and, under an order whose scores change, once requests have come or workers' free
        room has changed (version)."""
        ranking = self._rules.rankings.of(self.count)
        is_current = ranking is self._ranking and not (
            ranking.is_dynamic and (self._is_stale or version != self._ranked_at)
        )
        if is_current or now_s < self._rank_again_s:
            return
        for level in self.levels:
            level.rank(ranking, now_s)
        self._ranking, self._is_stale, self._ranked_at = ranking, False, version
        self._rank_again_s = now_s + RANK_EACH_S * self.count

    def _rise(self, now_s: float) -> None:
        """Moves requests that waited long enough into the next higher band."""
        if len(self.levels) == 1:
            return
        for _ in range(RISES_MAX):
            waiter = self._rises.due(now_s)
            if waiter is None:
                return
            self.remove(waiter)
            self._put(waiter, waiter.level + 1)
