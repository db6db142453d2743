"""Turns of the queue among replicas: this router's demand, and its share of free room. Pure.

    queue ──what waits here──> `demand`, for the other replicas
    what waits in the other replicas ──> a PoolShare for each pool that requests wait for anywhere
                                `held`: bands of ours that let other replicas' requests go first

Laws:
- while nothing waits in the other replicas, no band is held, and no share is computed;
- POOLS_MAX pools of other replicas at most are known.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import inf

from xxhash import xxh3_64_intdigest

from events.feed.demand import TENANTS_MAX, Demand
from router.decide.core.core import RouterCore
from router.decide.core.pool import Pool
from router.decide.queue.admission_queue import AdmissionQueue
from router.decide.queue.views import Depth
from router.decide.queue_turns.line import Level
from router.decide.queue_turns.pool_share import Band, PoolShare
from router.decide.queue_turns.round import Rules
from router.decide.waiter import Waiter
from router.request.request import Role

POOLS_MAX = 256
"""Pools that requests wait for in other replicas."""
AGES_S = 1.0
"""Seconds between two looks at how long requests wait; each look reads all of them."""


_ROLES = frozenset(map(str, Role))


class FleetTurns:
    """Requests that wait in this router and in other replicas, by pool and band."""

    def __init__(self, core: RouterCore, queue: AdmissionQueue) -> None:
        self._core = core
        self._replicas = core.fleet.replicas
        self._queue = queue
        self._shares: dict[Pool, PoolShare] = {}
        """Shares of the pools that requests wait for in other replicas."""
        self._heard: dict[str, set[Pool]] = {}
        """Replica -> the pools that requests wait for there."""
        self._demands = 0
        """Number of the last change of the other replicas' demand that `_shares` contain."""
        self._rests = 0
        """Rests of bands, as `rests` counts them, in shares that were dropped."""
        self._oldest: dict[tuple[Pool, int], float] = {}
        """Arrival of the request that waits longest, by pool and number of the band."""
        self._oldest_at_s = -inf
        self.stopped: list[Demand] = []
        """The demand of this router when it stopped."""

    @property
    def rests(self) -> int:
        """Number of other replicas' bands whose claims do not count for a while, because they left
        free room unused.
        """
        return self._rests + sum(share.rests for share in self._shares.values())

    @property
    def is_contended(self) -> bool:
        """Whether any requests wait in other replicas."""
        if self._demands != self._replicas.demands:
            self._refresh()
        return bool(self._shares)

    def wanted(self, pool: Pool) -> bool:
        """Whether requests for a pool wait in other replicas."""
        return self.is_contended and pool in self._shares

    def elsewhere(self, model: str = "") -> list[Depth]:
        """Requests that wait in other replicas, by our bands, the lowest first; of one model, if
        one is named. The waits are those of the other replicas' last messages.
        """
        bands = self._queue.rules.bands
        depths = [Depth() for _ in bands.settings]
        for waiting in self._core.fleet.replicas.demand().values():
            for band in waiting:
                if not model or band.model == model:
                    depth = depths[bands.level_of(band.from_priority)]
                    depth.count += band.waiting
                    depth.oldest_s = max(depth.oldest_s, band.oldest_s)
        return depths

    def configure(self) -> None:
        """Starts the shares from nothing, since bands or tenants have changed."""
        self._rests = self.rests
        self._shares.clear()
        self._heard.clear()
        self._demands = -1

    def held(self, pool: Hashable, now_s: float) -> Callable[[int], bool] | None:
        """Returns a function for one round of turns: whether a band of ours has to let other
        replicas' requests go first. None: nothing waits in other replicas.
        """
        if not self.is_contended or not isinstance(pool, Pool):
            return None
        share = self._share(pool)
        if share is None:
            return None
        known: dict[int, tuple[int, bool]] = {}
        """Level -> (requests that went by then, whether it is held)."""

        def is_held(level: int) -> bool:
            if (last := known.get(level)) is None or last[0] != share.went:
                last = known[level] = share.went, self._is_held(share, pool, level, now_s)
            return last[1]

        return is_held

    def holds(self, pool: Hashable, level: int, now_s: float) -> bool:
        """Whether a band of ours has to let other replicas' requests go first, if any worker has
        room."""
        if not self.is_contended or not isinstance(pool, Pool):
            return False
        share, free = self._share(pool), self._core.fleet.free(*pool)
        return share is not None and free > 0 and share.holds(level, free, now_s)

    def took(self, waiter: Waiter) -> None:
        """Records that a waiting request has its worker."""
        if self._shares and isinstance(waiter.pool, Pool) and waiter.pool in self._shares:
            self._shares[waiter.pool].took(waiter.level)

    def stop(self, now_s: float) -> None:
        """Keeps the present demand in `stopped`: this router stops, and refuses what waits."""
        self.stopped = self.demand(now_s)

    def demand(self, now_s: float) -> list[Demand]:
        """How many requests wait in this router, by pool, level and tenant, for the message to
        other replicas."""
        queue = self._queue
        if not len(queue):
            return []
        self._look_at_ages(now_s)
        demands: list[Demand] = []
        for pool in queue.pools():
            if isinstance(pool, Pool):
                demands += self._of_pool(pool, now_s)
        return demands

    def _of_pool(self, pool: Pool, now_s: float) -> Iterator[Demand]:
        rules = self._queue.rules
        share = self._share(pool) if self.is_contended else None
        for number, level in enumerate(self._queue.levels(pool)):
            if level.count:
                ours = share.ours(number) if share is not None else None
                arrived_s = self._oldest.get((pool, number), now_s)
                yield Demand(
                    pool.model,
                    pool.role,
                    rules.bands.settings[number].from_priority,
                    level.count,
                    max(0.0, now_s - arrived_s),
                    ours.went if ours is not None else 0,
                    ours.credit if ours is not None else 0.0,
                    tuple(_tenants(level, rules).items()),
                )

    def _is_held(self, share: PoolShare, pool: Pool, level: int, now_s: float) -> bool:
        free = self._core.fleet.free(*pool)
        if free > 0:
            return not share.may_go(level, free, now_s)
        share.filled()
        return False  # no worker has room for it, which is for the decision to say

    def _share(self, pool: Pool) -> PoolShare | None:
        """The share of a pool, by what waits here now; None: nothing waits in other replicas."""
        if (share := self._shares.get(pool)) is None:
            return None
        rules = self._queue.rules
        waiting = {
            number: Band(level.count, tenants=_tenants(level, rules))
            for number, level in enumerate(self._queue.levels(pool))
            if level.count
        }
        share.wait(waiting)
        return share

    def _refresh(self) -> None:
        """Reads again what waits in other replicas."""
        self._demands = self._replicas.demands
        demand = self._replicas.demand()
        for replica in [replica for replica in self._heard if replica not in demand]:
            self._hear(replica, {})
        for replica, waiting in demand.items():
            self._hear(replica, self._by_pool(waiting))
        for key in [key for key, share in self._shares.items() if not share.is_contended]:
            self._rests += self._shares.pop(key).rests

    def _hear(self, replica: str, waiting: Mapping[Pool, Mapping[int, Band]]) -> None:
        for key in self._heard.pop(replica, set()) - waiting.keys():
            if (share := self._shares.get(key)) is not None:
                share.hear(replica, {})
        for key, bands in waiting.items():
            if key not in self._shares:
                if len(self._shares) >= POOLS_MAX:
                    continue
                self._shares[key] = self._made()
            self._shares[key].hear(replica, bands)
            self._heard.setdefault(replica, set()).add(key)

    def _made(self) -> PoolShare:
        rules = self._queue.rules
        tenants = rules.tenants
        named = {_number(name): settings.weight for name, settings in tenants.named.items()}
        other = tenants.of("").weight
        return PoolShare(
            self._core.replica,
            [band.weight for band in rules.bands.settings],
            strict=rules.strict,
            weight_of=lambda tenant: named.get(tenant, other),
        )

    def _by_pool(self, waiting: Sequence[Demand]) -> dict[Pool, dict[int, Band]]:
        """Another replica's demand by pool and our bands; its bands that fall into one of ours are
        added up."""
        bands = self._queue.rules.bands
        pools: dict[Pool, dict[int, Band]] = defaultdict(dict)
        for demand in waiting:
            if demand.role not in _ROLES:
                continue
            of_pool = pools[Pool(demand.model, Role(demand.role))]
            level = bands.level_of(demand.from_priority)
            band = Band(demand.waiting, demand.went, demand.credit, dict(demand.tenants))
            of_pool[level] = band.added(of_pool[level]) if level in of_pool else band
        return pools

    def _look_at_ages(self, now_s: float) -> None:
        if now_s - self._oldest_at_s < AGES_S:
            return
        self._oldest_at_s = now_s
        self._oldest = {
            (pool, number): level.oldest_s()
            for pool in self._queue.pools()
            if isinstance(pool, Pool)
            for number, level in enumerate(self._queue.levels(pool))
            if level.count
        }


def _tenants(level: Level, rules: Rules) -> dict[int, int]:
    """Numbers of waiting requests of the tenants with the most; empty if tenants don't share."""
    if not rules.tenants.share:
        return {}
    return {_number(tenant): count for tenant, count in level.largest(TENANTS_MAX)}


def _number(tenant: str) -> int:
    """Number of a tenant: the 64-bit hash of its name."""
    return xxh3_64_intdigest(tenant.encode())
