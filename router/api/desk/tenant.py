"""The tenant of a request and the bound of its priority, which are set here alone.

    the caller has a verified identity with a tenant  ->  that tenant, whatever the request says
    else                                              ->  the request's field `tenant`

A service gives each call's Caller to the desk (`Desk.route`, `Desk.steps`, `Desk.item`); services
that verify nobody give none. `request_codec.read_request` puts the tenant into the Request, where
admission, quotas, shares and metrics find it.
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
    """Takes part in each request of a caller whose models or use have bounds; None: they have
    none."""
    owner: str = ""
    """Name of the caller's identity; empty: the service verified none."""

    def allowed(self, priority: int) -> int:
        """Lowers a priority to the highest that the caller's key may have."""
        usage = self.usage
        most = None if usage is None else usage.identity.limits.priority
        return priority if most is None else min(priority, most)

    def owns(self, reservation: Reservation) -> None:
        """The caller's request made a reservation."""
        if self.owner and not reservation.owner:
            reservation.owner = self.owner


UNVERIFIED = Caller()


def caller_of(usage: Usage | None) -> Caller:
    """usage: of the identity that a service verified; None: it verifies nobody."""
    if usage is None:
        return UNVERIFIED
    identity = usage.identity
    return Caller(identity.tenant, usage if identity.is_bounded else None, identity.name)


class Reporter(NamedTuple):
    """Whose steps a Report call brings."""

    owner: str = ""
    """Name of the caller's identity; empty: the service verified none."""
    host: str = ""
    """The caller's address, if known."""
    for_all: bool = False
    """Whether it may report on the requests of others."""
    priority_max: int | None = None
    """The greatest that its steps may give; None: any."""

    def may(self, owner: str) -> bool:
        """Whether it may report on the requests of an identity."""
        return self.for_all or owner == self.owner


def reporter_of(usage: Usage | None, host: str) -> Reporter:
    """usage: of the identity that a service verified; None: it verifies nobody."""
    if usage is None:
        return Reporter(host=host)
    identity = usage.identity
    for_all = Right.REPORT_ANY in identity.rights
    return Reporter(identity.name, host, for_all, identity.limits.priority)
