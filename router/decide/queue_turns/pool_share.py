"""How many of a pool's free places this router may fill, by what waits in all routers. Pure.

A flow is the requests that wait for the pool in one band of one router. With room for `free` more
requests, each flow f has these numbers:

    want(f)   = credit(f) + free * share(f)
    share(f)  = weight of its band / weights of all bands with a flow
                * part of the band that waits in its router
    part      = its waiting requests / those of the band in all routers; where tenants share:
                the mean of that over the tenants, by their weights
    credit(f) = sum of share(f) over all requests that went, less those of its own that went

A request of our flow f goes while the other replicas' requests in front of it leave room:

    free > sum of min(waiting(g), ceil(want(g) - want(f))) over their flows g that want more

Where bands are strict, all requests in another replica's higher bands are in front, and the room
that they leave is shared within the band. The parts by number make waits equal: by Little's law a
queue of n requests that gets n/N of the turns waits as long as one of N - n that gets the others.

Every router sends its own flows' credits, so that routers' views of them differ only by messages
under way. Another replica may want room that its requests can't use, or be dead. So a flow that was
in front, while there was room, and took none for HOLD_S, has no claims for REST_S, or until it
takes room.

Laws:
- of routers with equal views exactly one has the turn for one free place, while any wants it;
- a flow that always has waiting requests gets its share of turns, give or take a few requests;
- room that no replica takes is held for HOLD_S at most, once in REST_S for each flow;
- with nothing waiting elsewhere, all room is ours.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

HOLD_S = 0.1
"""Seconds for which room is left to a flow that takes none: several round trips of a message."""
REST_S = 2.0
"""Seconds for which the claims of a flow that took no room don't count: a flow that can take none
leaves room idle for HOLD_S / REST_S of the time, 5 %."""
CREDIT_MAX = 64.0
"""Most turns that a flow may be owed, or ahead: as many as go while messages are under way."""
_EQUAL = 1e-6
"""Wants that differ by less are equal: they are sums of the same shares in another order."""

REST = 0
"""Number under which all tenants without a number of their own are counted."""


@dataclass(slots=True)
class Band:
    """A flow: waiting requests of one router for a pool, in one band, and how it uses its turns."""

    waiting: int
    went: int = 0
    """Requests that waited and have a worker now, since the router began to count."""
    credit: float = 0.0
    tenants: Mapping[int, int] = field(default_factory=dict)
    """Waiting requests by number of the tenant; the others count as one tenant, REST."""
    owed_s: float | None = None
    """Time since which room is left for the flow; None: there is no room, or the flow took some."""
    rests_until_s: float = -inf
    """End of the time in which the flow's claims don't count; -inf: they count."""

    def by_tenant(self) -> dict[int, int]:
        """Number of waiting requests of each tenant."""
        others = self.waiting - sum(self.tenants.values())
        return {**self.tenants, REST: others} if others > 0 else dict(self.tenants)

    def added(self, other: "Band") -> "Band":
        """The sum of this band and another one of the same router."""
        tenants = Counter(self.tenants)
        tenants.update(other.tenants)
        return Band(
            self.waiting + other.waiting,
            self.went + other.went,
            self.credit + other.credit,
            tenants,
        )


Key = tuple[str, int]
"""Router and number of the band; our own router is OURS."""
OURS = ""


class PoolShare:
    """What this router knows of the requests that wait for a pool in all routers."""

    def __init__(
        self,
        replica: str,
        weights: Sequence[float],
        *,
        strict: bool,
        weight_of: Callable[[int], float] = lambda _: 1.0,
    ) -> None:
        """replica: this router's name, which orders equal claims. weights: of the bands, by number.
        weight_of: weight of a tenant, by its number.
        """
        self._replica = replica
        self._weights = weights
        self._strict = strict
        self._weight_of = weight_of
        self._flows: dict[Key, Band] = {}
        """Flows with waiting requests."""
        self._own: dict[int, Band] = {}
        """Flows of our router, by number of the band: their counts, and credits below 0, are kept
        while no request waits."""
        self._shares: dict[Key, float] | None = None
        """Shares of flows whose claims count; None: to be computed again."""
        self._went = False
        """Whether requests of ours went since the last `wait`. The next `wait` then has the shares
        computed again; they are nearly the same until then."""
        self._wakes_s = inf
        """When the claims of some flow count again; inf: all count."""
        self.went = 0
        """Requests of ours that went."""
        self.rests = 0
        """Flows whose claims ceased to count, since they used no room."""

    @property
    def is_contended(self) -> bool:
        """Whether requests wait in other replicas."""
        return any(replica for replica, _ in self._flows)

    def ours(self, level: int) -> Band | None:
        """Requests that wait in this router in a band, as last set by `wait`."""
        return self._flows.get((OURS, level))

    def wait(self, bands: Mapping[int, Band]) -> None:
        """Sets the requests that wait in this router, by band; counts and credit are kept."""
        for level in range(len(self._weights)):
            key, now = (OURS, level), bands.get(level)
            if now is None:
                if self._flows.pop(key, None) is not None:
                    self._shares = None
                continue
            band = self._own.setdefault(level, now)
            if self._went or (band.waiting, band.tenants) != (now.waiting, now.tenants):
                band.waiting, band.tenants = now.waiting, now.tenants
                self._shares = None
            if key not in self._flows:
                band.credit = min(0.0, band.credit)
                self._flows[key] = band
                self._shares = None
        self._went = False

    def hear(self, replica: str, bands: Mapping[int, Band]) -> None:
        """Sets the requests that wait in another replica, by band; empty: none wait, or that router
        is gone. The caller must not change `bands` afterwards.
        """
        for level, band in bands.items():
            before = self._flows.get((replica, level))
            if before is None:
                continue
            if (went := band.went - before.went) > 0:
                self._turned(level, went, theirs=False)
            else:
                band.owed_s, band.rests_until_s = before.owed_s, before.rests_until_s
        self._shares = None
        for key in [key for key in self._flows if key[0] == replica and key[1] not in bands]:
            del self._flows[key]
        for level, band in bands.items():
            self._flows[replica, level] = band

    def took(self, level: int) -> None:
        """Records that a request of a band of this router has its worker."""
        self.went += 1
        self._turned(level, 1, theirs=True)
        band = self._flows.get((OURS, level))
        if band is None:
            return
        band.went += 1
        band.credit = max(-CREDIT_MAX, band.credit - 1.0)
        band.waiting -= 1
        self._went = True
        if band.waiting <= 0:
            del self._flows[OURS, level]
            self._shares = None

    def filled(self) -> None:
        """Records that no worker has room, so that none is left to other replicas."""
        for flow in self._flows.values():
            flow.owed_s = None

    def may_go(self, level: int, free: int, now_s: float) -> bool:
        """Whether a request of a band of this router may take one of the free places now."""
        while (front := self._in_front(level, free, now_s)) is not None:
            for flow in front:
                if flow.owed_s is None:
                    flow.owed_s = now_s
            idle = [flow for flow in front if now_s - (flow.owed_s or 0.0) >= HOLD_S]
            if not idle:
                return False
            for flow in idle:
                flow.owed_s, flow.rests_until_s = None, now_s + REST_S
                self._wakes_s = min(self._wakes_s, flow.rests_until_s)
                self.rests += 1
            self._shares = None
        return True

    def holds(self, level: int, free: int, now_s: float) -> bool:
        """Whether other replicas' requests go before a band of this router; changes no count."""
        return self._in_front(level, free, now_s) is not None

    def _in_front(self, level: int, free: int, now_s: float) -> list[Band] | None:
        """The other replicas' flows that leave a band of ours no room; None: they leave some."""
        if now_s >= self._wakes_s:
            self._wake(now_s)
        ours = self._flows.get((OURS, level))
        if ours is None:
            return None
        shares, left, front = self._shares_now(), free, []
        if self._strict:
            for (replica, other), flow in self._flows.items():
                if replica and other > level and (replica, other) in shares:
                    left -= flow.waiting
                    front.append(flow)
            if left <= 0:
                return front
        want, ahead = ours.credit + left * shares[OURS, level], 0
        for key, share in shares.items():
            replica, other = key
            if not replica or (self._strict and other != level):
                continue
            flow = self._flows[key]
            lead = flow.credit + left * share - want
            if lead > _EQUAL or (lead >= -_EQUAL and replica < self._replica):
                ahead += min(flow.waiting, max(1, ceil(lead - _EQUAL)))
                front.append(flow)
        return None if left > ahead else front

    def _turned(self, level: int, went: int, *, theirs: bool) -> None:
        """Updates credits after `went` requests of a band went: each flow gains its share of them.

        theirs: whether other replicas' flows gain theirs, too, until those replicas send their
        credits again, which contain it by then.
        """
        for key, share in self._shares_now().items():
            if (theirs or key[0] == OURS) and (not self._strict or key[1] == level):
                band = self._flows[key]
                band.credit = min(CREDIT_MAX, band.credit + went * share)

    def _shares_now(self) -> dict[Key, float]:
        if self._shares is None:
            self._shares = self._worked_out()
        return self._shares

    def _worked_out(self) -> dict[Key, float]:
        """The share of turns of each flow whose claims count; if strict, of its band's turns."""
        by_level: dict[int, list[Key]] = defaultdict(list)
        for key, flow in self._flows.items():
            if flow.rests_until_s == -inf:
                by_level[key[1]].append(key)
        weights = sum(self._weights[level] for level in by_level)
        shares: dict[Key, float] = {}
        for level, keys in by_level.items():
            of_band = 1.0 if self._strict else self._weights[level] / weights
            for key, part in zip(keys, self._parts(keys), strict=True):
                shares[key] = of_band * part
        return shares

    def _parts(self, keys: Sequence[Key]) -> list[float]:
        """Shares of a band's flows, in the order of the keys; the sum is 1."""
        bands = [self._flows[key] for key in keys]
        if not any(band.tenants for band in bands):
            every = sum(band.waiting for band in bands)
            return [band.waiting / every for band in bands]
        counts = [band.by_tenant() for band in bands]
        totals: dict[int, int] = defaultdict(int)
        for count in counts:
            for tenant, waiting in count.items():
                totals[tenant] += waiting
        weights = {tenant: self._weight_of(tenant) for tenant in totals}
        all_weights = sum(weights.values())
        return [
            sum(
                weights[tenant] * waiting / totals[tenant]
                for tenant, waiting in count.items()
                if totals[tenant]
            )
            / all_weights
            for count in counts
        ]

    def _wake(self, now_s: float) -> None:
        """Counts the claims of those flows again whose time without claims (rests_until_s) is
        over."""
        self._wakes_s, self._shares = inf, None
        for flow in self._flows.values():
            if flow.rests_until_s <= now_s:
                flow.rests_until_s = -inf
            else:
                self._wakes_s = min(self._wakes_s, flow.rests_until_s)
