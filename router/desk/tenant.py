"""Whose request it is: the one place where a request gets its tenant.

    the caller has a verified identity with a tenant  ->  that tenant, whatever the request says
    else                                              ->  the request's field `tenant`

A face gives each call's Caller to the desk (`Desk.route`, `Desk.steps`, `Desk.items`); faces that
verify nobody give none. `codec.read_request` puts the tenant into the Request, where admission,
quotas, shares and metrics find it. The fast path reads no tenant: it answers only requests that no
rule about tenants can hold (`Admission.has_rules`, `Admission.is_idle`).
"""

from typing import NamedTuple

from router.keys.usage import Usage


class Caller(NamedTuple):
    """What a face verified of the caller of a request."""

    tenant: str = ""
    """Of the caller's token or certificate; empty: the face verified none."""
    usage: Usage | None = None
    """Takes part in each request of a caller whose models or use have bounds; None: they have
    none."""


UNVERIFIED = Caller()


def caller_of(usage: Usage | None) -> Caller:
    """usage: of the identity that a face verified; None: it verifies nobody."""
    if usage is None:
        return UNVERIFIED
    identity = usage.identity
    return Caller(identity.tenant, usage if identity.is_bounded else None)


def tenant_of(field: str, caller: Caller) -> str:
    """The tenant of a request. field: what the request says; empty: no tenant."""
    return caller.tenant or field
