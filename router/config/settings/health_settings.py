"""Settings of what a worker can take: ejections after failures, and its learned capacity."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import Seconds, Settings


class OutlierSettings(Settings, frozen=True):
    """Workers at which requests fail get none for a while."""

    enabled: Annotated[bool, Meta(description="eject workers at which requests fail")] = True
    failures: Annotated[
        int,
        Meta(
            ge=1,
            description="failures in a row that eject a worker; a single refused connection does,"
            " too",
        ),
    ] = 5
    failure_percent: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="percentage of a worker's last requests whose failure ejects the worker",
        ),
    ] = 30
    requests_min: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="requests of a worker in the window from which on the percentage of"
            " failures counts",
        ),
    ] = 10
    window_s: Annotated[
        Seconds,
        Meta(
            description="seconds for which a request's outcome counts for the percentage of"
            " failures"
        ),
    ] = 10.0
    pool_percent: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description="percentage of the workers of a model and role that failed requests alone"
            " keep ejected, at most",
        ),
    ] = 50
    ejection_s: Annotated[
        Seconds, Meta(description="seconds of a first ejection; each further one is twice as long")
    ] = 1.0
    ejection_max_s: Annotated[Seconds, Meta(description="seconds of the longest ejection")] = 20.0
    calm_s: Annotated[
        Seconds,
        Meta(description="seconds without a failure after which ejections begin short again"),
    ] = 60.0
    probes: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="requests that a worker must serve after an ejection before it counts as"
            " well",
        ),
    ] = 3
    alone_s: Annotated[
        Seconds,
        Meta(
            description="seconds for which one caller's failures wait for those of other callers"
            " before they eject"
        ),
    ] = 1.0
    refused_alone_s: Annotated[
        Seconds,
        Meta(
            description="seconds for which one caller's refused connection waits for other"
            " callers' requests before it ejects: an engine that is gone refuses all"
            " callers"
        ),
    ] = 0.3
    grace_s: Annotated[
        Seconds,
        Meta(
            description="seconds after a failure within which a success doesn't undo it: reports"
            " of two callers come in any order"
        ),
    ] = 0.1
    sample_after_s: Annotated[
        Seconds,
        Meta(
            description="seconds by which an engine's answer to its relay must be later than a"
            " refused connection to count as later: clocks of two hosts differ"
        ),
    ] = 0.5
    hang_s: Annotated[
        Seconds,
        Meta(
            description="seconds that a first token may come after hang_factor times the"
            " predicted time before its request counts as hanging"
        ),
    ] = 1.0
    hang_factor: Annotated[
        float,
        Meta(
            ge=1,
            le=1000,
            description="multiple of the predicted time to first token that a request may take,"
            " and hang_s more, before it counts as hanging",
        ),
    ] = 3.0
    hang_requests: Annotated[
        int, Meta(ge=1, description="hanging requests that eject a worker")
    ] = 3


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
    slots_block_percent_max: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="percentage of a worker's KV blocks in use from which on waiting requests"
            " may wait for blocks, so that the running ones don't count for the"
            " estimate of slots",
        ),
    ] = 90
    count_preemptions: Annotated[
        bool,
        Meta(
            description="let preemptions lower the share of a worker's KV blocks that picks promise"
        ),
    ] = True
    preemption_percent: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="percentage of a worker's KV blocks by which each preempted request"
            " lowers the share that picks promise",
        ),
    ] = 5.0
    served_percent: Annotated[
        float,
        Meta(
            gt=0,
            le=100,
            description="percentage of a worker's KV blocks by which each request that is served"
            " to its end raises that share again",
        ),
    ] = 1.0
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
    block_percent_min: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="percentage of a worker's KV blocks that picks promise at least, however"
            " many requests it preempts",
        ),
    ] = 50
