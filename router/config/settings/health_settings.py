"""Settings of workers' health and capacity: ejection after failures, bounds on a worker's load."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import Settings


class OutlierSettings(Settings, frozen=True):
    """Ejection of workers whose requests fail: for a while they get none."""

    enabled: Annotated[
        bool,
        Meta(description="eject workers whose requests fail: for a while they get no requests"),
    ] = True


class CapacitySettings(Settings, frozen=True):
    """Bounds on the requests of a worker, beside its capacity."""

    prefill_tokens_max: Annotated[
        int,
        Meta(
            ge=0,
            description="bound on a worker's uncomputed prompt tokens, of all routers; a worker"
            " at the bound has no room; 0: none",
        ),
    ] = 0
    prefill_requests_max: Annotated[
        int,
        Meta(
            ge=0,
            description="bound on the requests of this router whose prompts a worker computes;"
            " a worker at the bound has no room; 0: none",
        ),
    ] = 0
    decode_requests_max: Annotated[
        int,
        Meta(
            ge=0,
            description="bound on the requests of this router whose answers a worker generates;"
            " a worker at the bound has no room; 0: none",
        ),
    ] = 0
