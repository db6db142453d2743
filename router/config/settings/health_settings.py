"""Settings of workers' health and capacity: ejection after failures, bounds on a worker's load."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import Settings


class OutlierSettings(Settings, frozen=True):
    """Ejection of workers whose requests fail: for a while they get no new requests."""

    enabled: Annotated[
        bool,
        Meta(description="eject workers whose requests fail: for a while they get no new requests"),
    ] = True


class CapacitySettings(Settings, frozen=True):
    """Bounds on a worker's requests and prompt tokens, beside its slots and KV blocks."""

    prefill_tokens_max: Annotated[
        int,
        Meta(
            ge=0,
            description="bound on a worker's prompt tokens that are not computed yet, of requests"
            " of all routers; a worker at the bound has no room; 0: no bound",
        ),
    ] = 0
    prefill_requests_max: Annotated[
        int,
        Meta(
            ge=0,
            description="bound on the requests of this router whose prompts a worker computes;"
            " a worker at the bound has no room; 0: no bound",
        ),
    ] = 0
    decode_requests_max: Annotated[
        int,
        Meta(
            ge=0,
            description="bound on the requests of this router whose answers a worker generates;"
            " a worker at the bound has no room; 0: no bound",
        ),
    ] = 0
