"""Waiting requests of a router, as its messages to other routers describe them. Pure: values only.

Law: a message has DEMANDS_MAX entries at most, of NAME_BYTES_MAX and TENANTS_MAX tenants each:
below 56 KiB.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from events.plane.facts import Count, SequenceNumber

DEMANDS_MAX = 64
"""Entries in a message, one for a band of a pool; those with fewest waiting requests are left out.
"""
TENANTS_MAX = 16
"""Tenants of an entry that are named; the others count as one."""
NAME_BYTES_MAX = 512
"""Bytes of a model's name; pools of models with longer names are left out."""

_HASH_MAX = (1 << 64) - 1


class Demand(NamedTuple):
    """Waiting requests of one router for the workers of one model and role, in one band."""

    model: str
    role: str
    from_priority: int
    """The lowest priority of the band, by which routers with other bands know the band."""
    waiting: int
    """Requests, 1 at least."""
    oldest_s: float = 0.0
    """Longest wait so far of these requests, seconds."""
    went: int = 0
    """Requests that have got a worker after waiting there, since the router began to count."""
    credit: float = 0.0
    """Turns that the band is owed; see router/decide/queue_turns/pool_share.py."""
    tenants: tuple[tuple[int, int], ...] = ()
    """(64 bits of a tenant's hash, its waiting requests), where tenants share."""

    @property
    def news(self) -> tuple[object, ...]:
        """Values whose change makes a message due; ages are sent with the next message."""
        return (*self[:4], self.went, round(self.credit))


class DemandEntry(msgspec.Struct, frozen=True, array_like=True):
    """A Demand in a message."""

    model: Annotated[str, Meta(max_length=NAME_BYTES_MAX)]
    role: Annotated[str, Meta(max_length=64)]
    from_priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
    waiting: Annotated[int, Meta(ge=1, lt=1 << 31)]
    oldest_s: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    went: SequenceNumber = 0
    credit: Annotated[float, Meta(ge=-1e6, le=1e6)] = 0.0
    tenants: Annotated[list[tuple[int, Count]], Meta(max_length=TENANTS_MAX)] = []

    @classmethod
    def of(cls, demand: Demand) -> "DemandEntry":
        return cls(
            *demand[:4],
            min(max(0.0, demand.oldest_s), 1e6),
            demand.went,
            demand.credit,
            list(demand.tenants[:TENANTS_MAX]),
        )

    @property
    def demand(self) -> Demand:
        return Demand(
            self.model,
            self.role,
            self.from_priority,
            self.waiting,
            self.oldest_s,
            self.went,
            self.credit,
            tuple(self.tenants),
        )

    @property
    def is_sound(self) -> bool:
        """Whether every tenant's number has 64 bits at most."""
        return all(0 <= tenant <= _HASH_MAX for tenant, _ in self.tenants)


def entries(demand: Sequence[Demand]) -> list[DemandEntry]:
    """The entries of a message: at most DEMANDS_MAX, those with the most waiting requests."""
    fit = [each for each in demand if len(each.model.encode()) <= NAME_BYTES_MAX]
    if len(fit) > DEMANDS_MAX:
        fit = sorted(fit, key=lambda each: -each.waiting)[:DEMANDS_MAX]
    return [DemandEntry.of(each) for each in fit]
