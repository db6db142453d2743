"""Bounds on waiting requests, in number and bytes: of all tenants together, and of each. Pure.

Law: no count is kept for a tenant without a waiting request.
"""

from collections.abc import Iterable
from enum import StrEnum
from operator import attrgetter

from router.config.settings.queue_settings import QueueSettings
from router.decide.waiter import Waiter

MIB = 1 << 20


class Bound(StrEnum):
    """A bound of the queue, named by its key under `queue`."""

    WAITING = "max_waiting"
    MIB = "max_mib"
    TENANT = "tenant_share"


class Bounds:
    """Counts of waiting requests, in all and of each tenant, held against the bounds."""

    def __init__(self, settings: QueueSettings, waiting: Iterable[Waiter] = ()) -> None:
        self._settings = settings
        self._all = _Tally()
        self._tenants: dict[str, _Tally] = {}
        """Counts by tenant; empty where one tenant may fill the whole queue (tenant_share 1)."""
        self._by_tenant = settings.tenant_share < 1
        self._tenant_waiting = max(1, int(settings.tenant_share * settings.max_waiting))
        self._tenant_bytes = settings.tenant_share * settings.max_mib * MIB
        for waiter in waiting:
            self.add(waiter)

    @property
    def count(self) -> int:
        return self._all.count

    @property
    def size_bytes(self) -> int:
        return self._all.size_bytes

    def add(self, waiter: Waiter) -> None:
        """Counts a request that begins to wait."""
        self._all.add(waiter)
        if self._by_tenant:
            self._tenants.setdefault(waiter.tenant, _Tally()).add(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Removes a request from the counts."""
        self._all.remove(waiter)
        if self._by_tenant:
            tally = self._tenants[waiter.tenant]
            tally.remove(waiter)
            if not tally.count:
                del self._tenants[waiter.tenant]

    def breached(self, waiter: Waiter, without: Waiter | None = None) -> Bound | None:
        """The first bound that a new request would exceed once the waiting request `without` has
        left; None: it would exceed no bound.
        """
        settings = self._settings
        tenant = self._tenants.get(waiter.tenant, _NONE)
        leaves_tenant = without if without and without.tenant == waiter.tenant else None
        if self._by_tenant and (
            tenant.count_with(leaves_tenant) > self._tenant_waiting
            or tenant.bytes_with(waiter, leaves_tenant) > self._tenant_bytes
        ):
            return Bound.TENANT
        if self._all.count_with(without) > settings.max_waiting:
            return Bound.WAITING
        if self._all.bytes_with(waiter, without) > settings.max_mib * MIB:
            return Bound.MIB
        return None

    def worst(self, waiter: Waiter, bound: Bound) -> Waiter | None:
        """The waiting request that a bound counts together with a new one and that has the lowest
        priority, of equal ones the last that came; None: the bound counts no waiting request.
        """
        of_tenant = bound is Bound.TENANT
        tally = self._tenants.get(waiter.tenant, _NONE) if of_tenant else self._all
        return tally.worst()

    def sentence(self, bound: Bound) -> str:
        """Sentence for a refusal: which bound was reached."""
        settings = self._settings
        match bound:
            case Bound.WAITING:
                return (
                    f"the queue is full: at most {settings.max_waiting} requests may wait"
                    " (queue.max_waiting)"
                )
            case Bound.MIB:
                return (
                    f"the queue is full: waiting requests may take at most {settings.max_mib} MiB"
                    " (queue.max_mib)"
                )
            case Bound.TENANT:
                mib = self._tenant_bytes / MIB
                return (
                    "the tenant's part of the queue is full: at most"
                    f" {self._tenant_waiting} requests of a tenant, of {mib:g} MiB, may wait"
                    " (queue.tenant_share)"
                )


class _Tally:
    """Waiting requests that are counted together."""

    __slots__ = ("_by_points", "_lowest", "count", "size_bytes")

    def __init__(self) -> None:
        self.count = 0
        self.size_bytes = 0
        self._by_points: dict[int, dict[Waiter, None]] = {}
        """Waiting requests by priority (Waiter.points), the one that came last at the end."""
        self._lowest: int | None = None
        """The lowest priority of a waiting request; None: `worst` computes it again."""

    def add(self, waiter: Waiter) -> None:
        self.count += 1
        self.size_bytes += waiter.size_bytes
        alike = self._by_points.get(waiter.points)
        if alike is None:
            self._by_points[waiter.points] = {waiter: None}
            if self._lowest is not None and waiter.points < self._lowest:
                self._lowest = waiter.points
        else:
            is_last = next(reversed(alike)).seq < waiter.seq
            alike[waiter] = None
            if not is_last:  # it waited before, with another priority
                self._by_points[waiter.points] = dict.fromkeys(sorted(alike, key=attrgetter("seq")))

    def remove(self, waiter: Waiter) -> None:
        self.count -= 1
        self.size_bytes -= waiter.size_bytes
        alike = self._by_points[waiter.points]
        del alike[waiter]
        if not alike:
            del self._by_points[waiter.points]
            if waiter.points == self._lowest:
                self._lowest = None

    def worst(self) -> Waiter | None:
        """The request of the lowest priority, of equal ones the last that came."""
        if not self._by_points:
            return None
        if self._lowest is None:
            self._lowest = min(self._by_points)
        return next(reversed(self._by_points[self._lowest]))

    def count_with(self, without: Waiter | None) -> int:
        """Number of waiting requests once one more has come and `without`, if any, has left."""
        return self.count + (1 if without is None else 0)

    def bytes_with(self, waiter: Waiter, without: Waiter | None) -> int:
        return self.size_bytes + waiter.size_bytes - (without.size_bytes if without else 0)


_NONE = _Tally()
"""The tally of a tenant without a waiting request; never changed."""
