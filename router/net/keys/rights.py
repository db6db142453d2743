"""The right that each RPC needs. Pure.

Law: a method that is not in the table is refused to every caller with keys.
"""

from enum import StrEnum


class Right(StrEnum):
    """A right, which allows a group of RPCs."""

    ROUTE = "route"
    """Picks a worker and reserves load there; makes tokens of prompts."""
    REPORT = "report"
    """Moves reservations on, and ends them."""
    REPORT_ANY = "report_any"
    """Extends `report` to requests of other identities."""
    OBSERVE = "observe"
    """Reads the state of fleet and queue, and explanations; changes nothing."""
    ADMINISTER = "administer"
    """Registers, drains, removes and resyncs workers."""
    ENGINE_FIELDS = "engine_fields"
    """Sends, through a gateway, requests with fields that are internal to engines and routers."""


ALL = frozenset(Right)

_ROUTER = "/kvroute.v1.Router/"
_FLEET = "/kvroute.v1.Fleet/"
_PROMPTS = "/kvroute.v1.Prompts/"
_REFLECTION = "/grpc.reflection.v1.ServerReflection/"
_REFLECTION_ALPHA = "/grpc.reflection.v1alpha.ServerReflection/"
_HEALTH = "/grpc.health.v1.Health/"

RIGHTS: dict[str, Right | None] = {
    _ROUTER + "Route": Right.ROUTE,
    _ROUTER + "RouteStream": Right.ROUTE,
    _ROUTER + "Report": Right.REPORT,
    _ROUTER + "Explain": Right.OBSERVE,
    _PROMPTS + "Render": Right.ROUTE,
    _PROMPTS + "ListTokenizers": Right.OBSERVE,
    _FLEET + "ListWorkers": Right.OBSERVE,
    _FLEET + "WatchWorkers": Right.OBSERVE,
    _FLEET + "WatchDecisions": Right.OBSERVE,
    _FLEET + "FindDecisions": Right.OBSERVE,
    _FLEET + "ListQueue": Right.OBSERVE,
    _FLEET + "GetIndexStats": Right.OBSERVE,
    _FLEET + "RegisterWorker": Right.ADMINISTER,
    _FLEET + "DrainWorker": Right.ADMINISTER,
    _FLEET + "RemoveWorker": Right.ADMINISTER,
    _FLEET + "ResyncWorker": Right.ADMINISTER,
    _REFLECTION + "ServerReflectionInfo": Right.OBSERVE,
    _REFLECTION_ALPHA + "ServerReflectionInfo": Right.OBSERVE,
    # Serving or not, and nothing else: for every caller.
    _HEALTH + "Check": None,
    _HEALTH + "Watch": None,
    _HEALTH + "List": None,
}
"""The right of each method, by /package.Service/Method; None: it needs no key."""
