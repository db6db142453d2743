"""The tenant of a request and the bound of its priority; no other module sets them.

    the caller has a verified identity with a tenant  ->  that tenant, whatever the request says
    else                                              ->  the request's field `tenant`

A service gives each call's Caller to the desk (`Desk.route`, `Desk.steps`, `Desk.item`); a service
that verifies no callers gives UNVERIFIED. `request_codec.read_request` puts the tenant into the
Request, where admission, quotas, shares and metrics read it.
"""

from typing import NamedTuple

from router.fleet.reservations.reservations import Reservation
from router.net.keys.rights import Right
from router.net.keys.usage import Usage


class Caller(NamedTuple):
    """What a service verified of the caller of a request."""

    tenant: str = ""
    """Tenant of the caller's verified token or certificate; empty: none was verified."""
    usage: Usage | None = None
    """Counts and bounds the use of a caller with bounds on models or use; None: it has no bounds.
    """
    owner: str = ""
    """Name of the caller's identity; empty: the service verified none."""

    def allowed(self, priority: int) -> int:
        """Lowers a priority to the highest that the caller's key may have."""
        usage = self.usage
        most = None if usage is None else usage.identity.limits.priority
        return priority if most is None else min(priority, most)

    def owns(self, reservation: Reservation) -> None:
        """Records the caller's identity as the owner of a reservation that its request made."""
        if self.owner and not reservation.owner:
            reservation.owner = self.owner


UNVERIFIED = Caller()


def caller_of(usage: Usage | None) -> Caller:
    """The Caller with a verified identity's usage; None: the service verifies no callers."""
    if usage is None:
        return UNVERIFIED
    identity = usage.identity
    return Caller(identity.tenant, usage if identity.is_bounded else None, identity.name)


class Reporter(NamedTuple):
    """The caller of a Report call, and what its steps may change."""

    owner: str = ""
    """Name of the caller's identity; empty: the service verified none."""
    host: str = ""
    """The caller's address, if known."""
    for_all: bool = False
    """Whether the caller may report on the requests of other identities, too."""
    priority_max: int | None = None
    """Highest priority that the caller's steps may give to a request; None: any."""

    def may(self, owner: str) -> bool:
        """Whether the caller may report on the requests of the identity with the name `owner`."""
        return self.for_all or owner == self.owner


def reporter_of(usage: Usage | None, host: str) -> Reporter:
    """The Reporter with a verified identity's usage; None: the service verifies no callers. host:
    the caller's address."""
    if usage is None:
        return Reporter(host=host)
    identity = usage.identity
    for_all = Right.REPORT_ANY in identity.rights
    return Reporter(identity.name, host, for_all, identity.limits.priority)
