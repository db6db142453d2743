"""The settings of requests at the gateway and at the endpoint picker: frozen, with bounds."""

from typing import Annotated, Literal

from msgspec import Meta

from events.plane.settings import Seconds, Settings


class RequestSettings(Settings, frozen=True):
    """Times and sizes of requests at a gateway and at an endpoint picker, and their priority."""

    route_timeout_s: Annotated[
        Seconds,
        Meta(
            description="seconds that a request waits at most for a router's pick, the router's"
            " queue included"
        ),
    ] = 30.0
    body_mib_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="MiB of the largest body of a request, after unpacking; of a larger one"
            " the gateway answers 413, and the picker picks by load alone",
        ),
    ] = 64
    bodies_mib_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="MiB that the bodies of all open requests may take; beyond it the"
            " gateway refuses requests, and the picker picks by load alone",
        ),
    ] = 1024
    priority: Annotated[
        Literal["higher", "lower"],
        Meta(
            description="whether requests with a higher or with a lower `priority` in their body"
            " go first"
        ),
    ] = "higher"
    accept_after_stop_s: Annotated[
        Seconds,
        Meta(
            description="seconds after SIGTERM in which new requests are still served, while"
            " load balancers and gateways change to other replicas"
        ),
    ] = 5.0
    drain_timeout_s: Annotated[
        Seconds,
        Meta(
            description="seconds that open requests may go on after SIGTERM: counted from SIGTERM"
            " at the gateway, from the end of requests.accept_after_stop_s at the picker"
        ),
    ] = 300.0
