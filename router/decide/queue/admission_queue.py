"""All requests that wait for room, of all pools: their bounds, their turns and their ends. Pure.

    offered -> waiting -> dispatched
       |          +-----> expired, cancelled, displaced
       +-> refused

Laws: those of router/decide/queue/__init__.py.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from math import inf
from operator import attrgetter
from random import Random

from typing_extensions import override

from router.config.settings.queue_settings import QueueSettings
from router.decide.queue_limits.bounds import Bound, Bounds
from router.decide.queue_limits.standing import Standing
from router.decide.queue_limits.tenants import Tenants
from router.decide.queue_order.own_order import OwnFailure
from router.decide.queue_order.ranking import rankings
from router.decide.queue_order.sight import Fleet, Sight
from router.decide.queue_turns.bands import Bands
from router.decide.queue_turns.line import Level
from router.decide.queue_turns.pool_queue import PoolQueue
from router.decide.queue_turns.round import Rules
from router.decide.queue_turns.siblings import Siblings
from router.decide.waiter import Fate, Waiter
from router.request.refusal import Reason, Refusal

RETRY_MIN_S, RETRY_MAX_S = 0.05, 10.0
"""Bounds of the RetryInfo of refusals, in seconds."""
RETRY_UNKNOWN_S = 1.0
"""RetryInfo before any request was dispatched, seconds."""
IDLE_POOLS_MAX = 1024
"""Pools beyond which those without waiting requests are dropped, with their drain rates."""
TENANTS_SHOWN = 32
"""Tenants that metrics show by name."""
LOOK_EACH_S = 1.0
"""Seconds between two checks whether a request's wait can still end in time: for 4,096 waiting
requests they take about a hundredth of a core."""
LOOK_PAST = 16
"""Requests without room that later ones may overtake in one round of turns: a long prompt without
room holds no request behind it, and the round still ends after few attempts."""
PREEMPT_POINTS = 10
"""Points by which a request's priority must exceed the lowest waiting one to take its place in a
full queue, so that two requests can't displace one another."""


class QueueFull(Refusal):
    """Refusal of a request by a bound of the queue, or because a request of higher priority took
    its place.
    """


class AdmissionQueue:
    """The requests that wait in one router."""

    def __init__(
        self,
        settings: QueueSettings,
        rng: Random,
        fleet: Fleet,
        look_past: int = LOOK_PAST,
    ) -> None:
        """Raises ConfigError for an unknown order, and for two bands of one name.

        fleet: facts about the workers, which some orders read. look_past: number of requests
        without room that later ones may overtake at a time.
        """
        self.counts: Counter[Fate] = Counter()
        self.refusals: Counter[Bound] = Counter()
        """Refused requests, by the bound that refused."""
        self.own_failures: Counter[OwnFailure] = Counter()
        """Failures of the operator's own order functions, by kind."""
        self._sight = Sight(rng, fleet)
        self.settings = settings
        """The settings in force."""
        self.look_past = look_past
        self.tenants = Tenants(settings.tenants)
        """Tenants' quotas. The driver calls `took` for each request that got a worker, and `ended`
        for each request in flight that ends."""
        self.siblings = Siblings(fleet)
        self.rules = self._rules_of(settings)
        self._bounds = Bounds(settings)
        self._pools: dict[Hashable, PoolQueue] = {}
        self._by_id: dict[str, list[Waiter]] = {}
        """Waiting requests by their id, in order of arrival."""
        self._expiries = Standing()
        self._looks = Standing()
        """Time at which each request is next checked for a wait that can't end in time; empty
        without queue.early_refusal."""
        self.recent_tenants: dict[str, None] = {}
        """The last TENANTS_SHOWN tenants whose requests began to wait, the most recent last."""
        self._seq = 0
        self._next_retry_s = -inf

    def __len__(self) -> int:
        return self._bounds.count

    @override
    def __repr__(self) -> str:
        ends = ", ".join(f"{self.counts[fate]} {fate}" for fate in list(Fate)[1:])
        return f"<AdmissionQueue {len(self)} waiting, {ends}>"

    @property
    def size_bytes(self) -> int:
        """Bytes of memory of the waiting requests, as their drivers counted them."""
        return self._bounds.size_bytes

    def check(self, settings: QueueSettings) -> None:
        """Raises ConfigError for settings that `configure` would refuse; changes nothing."""
        self._rules_of(settings)

    def configure(self, settings: QueueSettings, now_s: float) -> None:
        """Puts other settings in force; requests beyond new bounds stay. Raises ConfigError."""
        rules = self._rules_of(settings)
        waiting = sorted((waiter for _, waiter in self.waiters()), key=attrgetter("seq"))
        self.settings, self.rules = settings, rules
        self.tenants.configure(settings.tenants)
        self._looks = Standing()
        for waiter in waiting:
            self._look_later(waiter, now_s)
            self._set_points(waiter)
        self._bounds = Bounds(settings, waiting)
        for pool, queue in self._pools.items():
            self._pools[pool] = queue.under(rules, now_s)

    def waiting(self, pool: Hashable) -> int:
        """Number of waiting requests of a pool."""
        queue = self._pools.get(pool)
        return queue.count if queue is not None else 0

    def pools(self) -> list[Hashable]:
        """The pools that requests wait for, those first whose `put_last` is longest ago."""
        return [pool for pool, queue in self._pools.items() if queue.count]

    def find(self, request_id: str) -> Sequence[Waiter]:
        """The waiting requests with an id, in order of arrival: a caller may send an id twice."""
        return tuple(self._by_id.get(request_id, ()))

    def levels(self, pool: Hashable) -> list[Level]:
        """The bands of a pool with their waiting requests, the lowest first; empty: nothing
        waits.
        """
        queue = self._pools.get(pool)
        return queue.levels if queue is not None and queue.count else []

    @property
    def bands(self) -> list[str]:
        """Names of all bands, the lowest first."""
        return [band.name for band in self.rules.bands.settings]

    @property
    def needs_prefixes(self) -> bool:
        """Whether some rule in force reads prompts and the blocks that workers hold of them."""
        return self.settings.siblings.enabled or self.rules.rankings.configured.needs_fleet

    def band(self, waiter: Waiter) -> str:
        """Name of the band that a request is in, or was in last."""
        return self.rules.bands.settings[waiter.level].name

    def share_of(self, waiter: Waiter, now_s: float) -> float:
        """Share of a pool, 0 to 1, that may be in use for requests of a waiter's band to get
        workers. The waiter need not be in the queue.
        """
        if not waiter.waits:
            self._set_points(waiter)
        bands = self.rules.bands
        return bands.settings[bands.level(waiter, now_s)].share_percent / 100

    @property
    def has_shares(self) -> bool:
        """Whether some band may use only a share of a pool."""
        return any(band.share_percent < 100 for band in self.rules.bands.settings)

    def waiters(
        self, wanted: Callable[[Hashable], bool] = lambda _: True
    ) -> Iterator[tuple[Hashable, Waiter]]:
        """All waiting requests with their pools, by band, tenant and line. wanted: whether a pool
        is included.
        """
        return (
            (pool, waiter)
            for pool, queue in self._pools.items()
            if wanted(pool)
            for waiter in queue
        )

    def of_bands(
        self, wanted: Callable[[Hashable], bool] = lambda _: True
    ) -> Iterator[tuple[str, list[Waiter]]]:
        """The waiting requests of each band of each pool, with the band's name. wanted: whether a
        pool is included.
        """
        for pool, queue in self._pools.items():
            if queue.count and wanted(pool):
                yield from ((band, queue.of_band(n)) for n, band in enumerate(self.bands))

    def band_waits_s(self, now_s: float) -> dict[str, float | None]:
        """Expected wait, by band, of a request that comes last in the band, in seconds, in the pool
        where that wait is longest; None: some pool with waiting requests has dispatched none yet.
        """
        queues = [queue for queue in self._pools.values() if queue.count]
        waits: dict[str, float | None] = {}
        for number, band in enumerate(self.bands):
            of_pools = [queue.wait_s(number, now_s) for queue in queues]
            known = [wait_s for wait_s in of_pools if wait_s is not None]
            waits[band] = max(known, default=0.0) if len(known) == len(of_pools) else None
        return waits

    def offer(self, pool: Hashable, waiter: Waiter, now_s: float) -> Waiter | None:
        """Queues a request; returns the request that had to leave for it, if any.

        Raises QueueFull, and ValueError for a request that waits already.
        """
        if waiter.waits:
            raise ValueError(f"{waiter} waits already")
        self.counts[Fate.ARRIVED] += 1
        self._number(waiter)
        displaced = self._displaced_by(waiter, now_s)
        if displaced is not None:
            self._leave(displaced, Fate.DISPLACED, now_s)
        self._enter(pool, waiter, now_s)
        return displaced

    def candidates(
        self,
        pool: Hashable,
        version: int,
        now_s: float,
        held: Callable[[int], bool] | None = None,
    ) -> Iterator[Waiter]:
        """Yields waiting requests in the order of their turns. The driver decides each, and calls
        `dispatched` or `passed` before it takes the next. Removes none by itself.

        version: number that rises whenever a worker may have got room (Fleet.room); requests that
        no worker had room for at this version are left out. held: gets the number of a band, and
        returns whether the band must not have a turn now.
        """
        queue = self._pools.get(pool)
        return queue.candidates(version, now_s, held) if queue is not None else iter(())

    def passed(self, waiter: Waiter, version: int) -> None:
        """Records that no worker had room for a request, at this version of the pool's room."""
        waiter.passed_at = version

    def dispatched(
        self, waiter: Waiter, uncached_tokens: int, cached_tokens: int, now_s: float
    ) -> None:
        """Removes a request that got its worker, and charges the shares of its tenant and band.
        uncached_tokens, cached_tokens: of its prompt. Raises ValueError if it does not wait.
        """
        if not waiter.waits:
            raise ValueError(f"{waiter} does not wait")
        cost = self.tenants.cost(uncached_tokens, cached_tokens)
        queue = self._pools[waiter.pool]
        queue.charge(waiter, cost)
        if self.rules.rankings.configured.looks_at_service:
            self._sight.service.add(waiter.tenant, cost, now_s)
        if waiter.run is not None:
            self.siblings.went(waiter, now_s)
        queue.rate.went(now_s)
        self._leave(waiter, Fate.DISPATCHED, now_s)

    def put_last(self, pool: Hashable) -> None:
        """Puts a pool behind the others, which have their turns before it."""
        self._pools[pool] = self._pools.pop(pool)

    def cancel(self, waiter: Waiter, now_s: float) -> bool:
        """Removes the request of a caller that has left; returns whether it waited."""
        if not waiter.waits:
            return False
        self._leave(waiter, Fate.CANCELLED, now_s)
        return True

    def unserved(self, waiter: Waiter, now_s: float) -> None:
        """Removes a request that is refused for another reason than want of room."""
        self._leave(waiter, Fate.UNSERVED, now_s)

    @property
    def refuses_early(self) -> bool:
        """Whether requests are refused whose wait can't end in time (see `too_long`)."""
        return self.settings.early_refusal != "never"

    def outlook(self, waiter: Waiter, now_s: float) -> tuple[int, float | None]:
        """Number of requests of the pool that go before a waiting request, and its expected further
        wait in seconds; None: no request of the pool went yet.
        """
        queue = self._pools[waiter.pool]
        places = queue.places(waiter, now_s)
        return _before(places), queue.rate.wait_s(places, now_s)

    def take_doubtful(self, now_s: float, most: int) -> list[Waiter]:
        """Returns waiting requests that `too_long` should check now, at most `most` of them."""
        doubtful: list[Waiter] = []
        while len(doubtful) < most and (waiter := self._looks.due(now_s)) is not None:
            self._look_later(waiter, now_s)
            doubtful.append(waiter)
        return doubtful

    def too_long(self, pool: Hashable, waiter: Waiter, now_s: float) -> Refusal | None:
        """The refusal of a new or waiting request whose expected wait is too long; None: it is not
        too long, or unknown. The driver calls this only while no worker has room.

            expected wait = requests that go until this one has gone / drain rate
            too long:       now_s + expected wait > end of the wait, or, with early_refusal `slo`,
                            the time at which ttft_slo_ms wants the first token if that is earlier

        A request with no other in front of it is never refused, since the drain rate is known only
        from waiting requests.
        """
        queue = self._pools.get(pool)
        if queue is None:
            return None
        if not waiter.waits:
            self._number(waiter)
        places = queue.places(waiter, now_s)
        wait_s = queue.rate.wait_s(places, now_s) if places > 1 else None
        due_s = waiter.expires_s
        if self.settings.early_refusal == "slo":
            due_s = min(due_s, waiter.deadline_s)
        if wait_s is None or (short_s := now_s + wait_s - due_s) <= 0:
            return None
        if waiter.waits:
            self._leave(waiter, Fate.TOO_LONG, now_s)
        else:
            self.counts.update((Fate.ARRIVED, Fate.TOO_LONG))
        return Refusal(
            Reason.WAIT_TOO_LONG,
            f"the request would wait for about {wait_s:.3f} s more, which is {short_s:.3f} s longer"
            " than it may (queue.early_refusal)",
            retry_after_s=min(max(self._retry_after_s(now_s), short_s), RETRY_MAX_S),
        )

    def clear(self, now_s: float) -> list[Waiter]:
        """Removes all waiting requests, and returns them."""
        waiting = [waiter for _, waiter in self.waiters()]
        for waiter in waiting:
            self._leave(waiter, Fate.UNSERVED, now_s)
        return waiting

    def over(self, now_s: float) -> Waiter | None:
        """A request whose wait is over, the earliest end first; None: there is none. The driver
        decides it a last time, and calls `dispatched` or `expired`."""
        return self._expiries.due(now_s)

    def expired(self, waiter: Waiter, now_s: float) -> None:
        """Removes a request whose wait is over, and that got no worker."""
        self._leave(waiter, Fate.EXPIRED, now_s)

    def reprioritize(self, waiter: Waiter, priority: int, now_s: float) -> bool:
        """Gives a request another priority; returns whether it waited."""
        if not waiter.waits:
            return False
        queue = self._pools[waiter.pool]
        queue.remove(waiter)
        self._bounds.remove(waiter)
        waiter.priority = priority
        self._set_points(waiter)
        self._bounds.add(waiter)
        queue.add(waiter, now_s)
        return True

    def backdate(self, waiter: Waiter, arrived_s: float, now_s: float) -> None:
        """Sets an earlier arrival for a waiting request: the time at which it came to another
        replica. The end of its wait stays.
        """
        queue = self._pools[waiter.pool]
        queue.remove(waiter)
        waiter.arrived_s = arrived_s
        queue.add(waiter, now_s)

    def timeout(self, waiter: Waiter, now_s: float) -> Refusal:
        """The refusal of a request whose wait is over. Where the caller's own deadline has passed,
        the driver reports that instead.
        """
        waited_s = now_s - waiter.arrived_s
        return Refusal(
            Reason.QUEUE_TIMEOUT,
            f"the request waited {waited_s:.3f} s and no worker had room for it",
            retry_after_s=self._retry_after_s(now_s),
        )

    def displacement(self, now_s: float) -> QueueFull:
        """The refusal of a request whose place a request of higher priority took."""
        return QueueFull(
            Reason.QUEUE_FULL,
            "the queue is full, and a request of higher priority took this one's place",
            retry_after_s=self._retry_after_s(now_s),
        )

    def _rules_of(self, settings: QueueSettings) -> Rules:
        return Rules(
            rankings(settings, self._sight, self.own_failures),
            Bands.of(settings.bands, settings.bands_aging),
            self.tenants,
            self.siblings,
            settings.bands_strict,
            self.look_past,
        )

    def _number(self, waiter: Waiter) -> None:
        """Sets a new request's number, behind all earlier ones, and its points."""
        waiter.seq = self._seq + 1
        self._set_points(waiter)

    def _set_points(self, waiter: Waiter) -> None:
        """Sets a request's points. `Bounds` finds it by them, and so must not count it now."""
        waiter.points = waiter.priority + self.tenants.of(waiter.tenant).priority

    def _displaced_by(self, waiter: Waiter, now_s: float) -> Waiter | None:
        """The waiting request whose place a new one takes; None: the queue has a place. Raises
        QueueFull if the new request has to be refused.
        """
        bound = self._bounds.breached(waiter)
        if bound is None:
            return None
        worst = self._bounds.worst(waiter, bound)
        if worst is not None and waiter.points - worst.points > PREEMPT_POINTS:
            bound = self._bounds.breached(waiter, without=worst)
            if bound is None:
                return worst
        self.counts[Fate.REFUSED] += 1
        self.refusals[bound] += 1
        raise QueueFull(
            Reason.QUEUE_FULL,
            self._bounds.sentence(bound),
            retry_after_s=self._retry_after_s(now_s),
            metadata={"key": f"queue.{bound}"},
        )

    def _retry_after_s(self, now_s: float) -> float:
        """Seconds after which a refused caller should retry: callers get times one after the other,
        as far apart as requests are dispatched."""
        rate = sum(queue.rate.per_s(now_s) for queue in self._pools.values() if queue.count)
        if rate <= 0:
            return RETRY_UNKNOWN_S
        pace_s = 1.0 / rate
        self._next_retry_s = min(max(self._next_retry_s, now_s) + pace_s, now_s + RETRY_MAX_S)
        return max(self._next_retry_s - now_s, RETRY_MIN_S)

    def _enter(self, pool: Hashable, waiter: Waiter, now_s: float) -> None:
        queue = self._pools.get(pool)
        if queue is None:
            queue = self._pools[pool] = PoolQueue(self.rules)
        if not queue.count:
            queue.rate.began(now_s)
        self._seq = waiter.seq
        waiter.pool, waiter.passed_at = pool, None
        waiter.run = self.siblings.run_of(waiter) if self.settings.siblings.enabled else None
        self._bounds.add(waiter)
        self._note_tenant(waiter.tenant)
        self._expiries.put(waiter, waiter.expires_s)
        self._look_later(waiter, now_s)
        if waiter.request_id:
            self._by_id.setdefault(waiter.request_id, []).append(waiter)
        queue.add(waiter, now_s)
        waiter.ahead = _before(queue.places(waiter, now_s))

    def _leave(self, waiter: Waiter, fate: Fate, now_s: float) -> None:
        queue = self._pools[waiter.pool]
        queue.remove(waiter)
        self._bounds.remove(waiter)
        self._expiries.discard(waiter)
        self._looks.discard(waiter)
        if waiter.request_id:
            of_id = self._by_id[waiter.request_id]
            of_id.remove(waiter)
            if not of_id:
                del self._by_id[waiter.request_id]
        self.counts[fate] += 1
        if not queue.count:
            queue.rate.ended(now_s)
            self._forget_idle_pools()
        waiter.pool = None

    def _look_later(self, waiter: Waiter, now_s: float) -> None:
        if self.refuses_early:
            self._looks.put(waiter, now_s + LOOK_EACH_S)

    def _note_tenant(self, tenant: str) -> None:
        self.recent_tenants.pop(tenant, None)
        self.recent_tenants[tenant] = None
        if len(self.recent_tenants) > TENANTS_SHOWN:
            del self.recent_tenants[next(iter(self.recent_tenants))]

    def _forget_idle_pools(self) -> None:
        if len(self._pools) > IDLE_POOLS_MAX:
            idle = next((pool for pool, queue in self._pools.items() if not queue.count), None)
            if idle is not None:
                del self._pools[idle]


def _before(places: float) -> int:
    """Number of requests that go before a request; places: that number with the request itself."""
    return max(0, round(places) - 1)
