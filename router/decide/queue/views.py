"""Waiting requests, as metrics and `kvroute queue` show them. Reads only. Pure."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from router.decide.queue.admission_queue import AdmissionQueue
from router.decide.waiter import Waiter

_ARRIVED_S, _TENANT = attrgetter("arrived_s"), attrgetter("tenant")
OTHER = "other"
"""Name under which the requests of all tenants that are not listed are summed up."""


@dataclass(frozen=True, slots=True)
class Row:
    """One waiting request."""

    pool: Hashable
    place: int
    """Number of requests of its pool in front of it, if these go by band, tenant and line."""
    request_id: str
    band: str
    tenant: str
    priority: int
    waited_s: float
    expires_in_s: float
    held_by: str
    """Why the request still waits: `turn` (other requests of the pool go first), `replicas`
    (requests of other replicas go first), `room` (it is the first, or no worker had room when it
    was its turn), `sibling` (another request computes the prefix that it shares), or the key of the
    quota that holds it."""
    behind: str
    """Id of the request in front of it in its pool; empty: there is none, or it has no id."""


@dataclass(slots=True)
class Depth:
    """Waiting requests of one band."""

    count: int = 0
    oldest_s: float = 0.0
    """Longest wait of these requests so far, seconds."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Numbers of waiting requests, by band and by tenant."""

    bands: dict[str, Depth]
    """Every band of the configuration, the lowest first."""
    tenants: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """Number of waiting requests."""
        return self.tenants.total()

    def largest_tenants(self, most: int) -> list[tuple[str, int]]:
        """The tenants with the most waiting requests, at most `most`, with their numbers; the sum
        of the other tenants comes last as OTHER.
        """
        ranked = self.tenants.most_common()
        if rest := sum(count for _, count in ranked[most:]):
            return [*ranked[:most], (OTHER, rest)]
        return ranked


def rows(
    queue: AdmissionQueue,
    now_s: float,
    most: int,
    wanted: Callable[[Hashable], bool] = lambda _: True,
    held: Callable[[Hashable, int, float], bool] = lambda *_: False,
) -> Iterator[Row]:
    """Yields the first waiting requests of each pool, at most `most` in all. wanted: whether a pool
    is included. held: whether requests of other replicas go before a band of a pool now; gets the
    pool, the band's number and now_s.

    Places and bands are those of the moment of the call; between two rows requests may come and go.
    """
    waiting = islice(queue.waiters(wanted), most)
    bands = queue.bands
    shown = [(pool, waiter, bands[waiter.level]) for pool, waiter in waiting]
    return _rows(queue, shown, now_s, held)


def sums(
    queue: AdmissionQueue, now_s: float, wanted: Callable[[Hashable], bool] = lambda _: True
) -> Sums:
    """Counts all waiting requests by band and by tenant. wanted: whether a pool is included."""
    totals = Sums({band: Depth() for band in queue.bands})
    for band, waiting in queue.of_bands(wanted):
        depth = totals.bands[band]
        depth.count += len(waiting)
        depth.oldest_s = max(depth.oldest_s, now_s - min(map(_ARRIVED_S, waiting), default=now_s))
        totals.tenants.update(map(_TENANT, waiting))
    return totals


def _rows(
    queue: AdmissionQueue,
    waiting: Sequence[tuple[Hashable, Waiter, str]],
    now_s: float,
    held: Callable[[Hashable, int, float], bool],
) -> Iterator[Row]:
    by_replicas: dict[tuple[Hashable, int], bool] = {}
    places: Counter[Hashable] = Counter()
    last: dict[Hashable, str] = {}
    for pool, waiter, band in waiting:
        of_band = pool, waiter.level
        if of_band not in by_replicas:
            by_replicas[of_band] = held(*of_band, now_s)
        yield Row(
            pool,
            places[pool],
            waiter.request_id,
            band,
            waiter.tenant,
            waiter.priority,
            now_s - waiter.arrived_s,
            waiter.expires_s - now_s,
            _held_by(queue, waiter, places[pool], now_s, by_replicas[of_band]),
            last.get(pool, ""),
        )
        places[pool] += 1
        last[pool] = waiter.request_id


def _held_by(
    queue: AdmissionQueue, waiter: Waiter, place: int, now_s: float, by_replicas: bool
) -> str:
    if held_by := queue.rules.held_by(waiter, now_s):
        return held_by
    if by_replicas:
        return "replicas"
    return "turn" if place and waiter.passed_at is None else "room"
