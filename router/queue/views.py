"""What waits, as metrics and `kvroute queue` show it. Reads only. Pure."""

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from router.queue.admission_queue import AdmissionQueue
from router.queue.waiter import Waiter


@dataclass(frozen=True, slots=True)
class Row:
    """One waiting request."""

    pool: Hashable
    place: int
    """Requests of its pool in front of it, as if they went by band, tenant and line."""
    request_id: str
    band: str
    tenant: str
    priority: int
    waited_s: float
    expires_in_s: float
    held_by: str
    """Why it has not gone: `turn` (others go first), `room` (no worker had room when it was its
    turn), or the key of the rule that holds it."""
    behind: str
    """Id of the request in front of it in its pool; empty: none."""


@dataclass(frozen=True, slots=True)
class Depth:
    """A band's waiting requests."""

    count: int
    oldest_s: float
    """Longest wait of them so far."""


def rows(queue: AdmissionQueue, now_s: float, most: int) -> Iterator[Row]:
    """The first waiting requests of each pool, so many in all at most."""
    places: Counter[Hashable] = Counter()
    last: dict[Hashable, str] = {}
    for number, (pool, waiter) in enumerate(queue.waiters()):
        if number == most:
            return
        yield Row(
            pool,
            places[pool],
            waiter.request_id,
            queue.band(waiter),
            waiter.tenant,
            waiter.priority,
            now_s - waiter.arrived_s,
            waiter.expires_s - now_s,
            _held_by(queue, waiter, now_s),
            last.get(pool, ""),
        )
        places[pool] += 1
        last[pool] = waiter.request_id


def by_band(queue: AdmissionQueue, now_s: float) -> dict[str, Depth]:
    """Every band of the configuration, the lowest first."""
    counts: Counter[str] = Counter()
    oldest: dict[str, float] = {}
    for _, waiter in queue.waiters():
        band = queue.band(waiter)
        counts[band] += 1
        oldest[band] = max(oldest.get(band, 0.0), now_s - waiter.arrived_s)
    return {name: Depth(counts[name], oldest.get(name, 0.0)) for name in queue.bands}


def by_tenant(queue: AdmissionQueue, most: int) -> list[tuple[str, int]]:
    """The tenants with the most waiting requests, so many at most."""
    return Counter(waiter.tenant for _, waiter in queue.waiters()).most_common(most)


def _held_by(queue: AdmissionQueue, waiter: Waiter, now_s: float) -> str:
    quota = queue.tenants.held_by(waiter.tenant, now_s)
    if quota is not None:
        return quota
    return "turn" if waiter.passed_at is None else "room"
