"""Settings of workers' health and capacity: ejection after failures, learned capacity."""

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
    """Learned capacity of workers. A worker at its capacity gets requests only while no worker of
    its pool has room.
    """

    estimate_slots: Annotated[
        bool,
        Meta(
            description="estimate the slots of a worker, where its engine and the configuration"
            " name none, from requests that ran while others waited"
        ),
    ] = True
    count_preemptions: Annotated[
        bool,
        Meta(
            description="when an engine preempts requests, lower the share of its KV blocks that"
            " picks may reserve"
        ),
    ] = True
    prefill_budget_factor: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="a worker takes no further request while its uncomputed prompt tokens"
            " reach this many times its engine's token budget of a step, where the engine"
            " publishes its budget; 0: no such bound",
        ),
    ] = 0.0
    prefill_tokens_max: Annotated[
        int,
        Meta(
            ge=0,
            description="a worker takes no further request while it has this many prompt tokens"
            " to compute, for requests of all routers; 0: no such bound",
        ),
    ] = 0
    prefill_requests_max: Annotated[
        int,
        Meta(
            ge=0,
            description="a worker takes no further request while it computes the prompts of this"
            " many requests of this router; 0: no such bound",
        ),
    ] = 0
    decode_requests_max: Annotated[
        int,
        Meta(
            ge=0,
            description="a worker takes no further request while it generates the answers of this"
            " many requests of this router; 0: no such bound",
        ),
    ] = 0
