"""Settings of what a worker can take: ejections after failures, and its learned capacity."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import Settings


class OutlierSettings(Settings, frozen=True):
    """Workers at which requests fail get none for a while."""

    enabled: Annotated[bool, Meta(description="eject workers at which requests fail")] = True


class CapacitySettings(Settings, frozen=True):
    """Learning of how much workers can take. A worker over its capacity gets requests only
    while no worker of its pool has room."""

    estimate_slots: Annotated[
        bool,
        Meta(
            description="estimate how many requests a worker runs at once, where its"
            " engine and the configuration name no slots, from requests that ran while"
            " others waited"
        ),
    ] = True
    count_preemptions: Annotated[
        bool,
        Meta(
            description="let preemptions lower the share of a worker's KV blocks that picks promise"
        ),
    ] = True
    prefill_budget_factor: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="a worker has no room while it has so many times its engine's token"
            " budget of prompt tokens to compute, where the engine says its budget; 0:"
            " no such bound",
        ),
    ] = 0.0
    prefill_tokens_max: Annotated[
        int,
        Meta(
            ge=0,
            description="a worker has no room while it has so many prompt tokens to compute, of"
            " all routers' requests; 0: no such bound",
        ),
    ] = 0
    prefill_requests_max: Annotated[
        int,
        Meta(
            ge=0,
            description="a worker has no room while so many requests of this router have their"
            " prompts computed there; 0: no such bound",
        ),
    ] = 0
    decode_requests_max: Annotated[
        int,
        Meta(
            ge=0,
            description="a worker has no room while so many requests of this router, whose"
            " prompts are computed, run there; 0: no such bound",
        ),
    ] = 0
