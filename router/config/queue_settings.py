"""The section `queue`: requests that wait in the router for a worker with room."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import Seconds, Settings

WAITING_MAX = 65_536
"""Largest bound on waiting requests: their places move by memory copies (router/queue/line.py)."""


class QueueSettings(Settings, frozen=True):
    """Requests that no worker has room for wait here, in an order."""

    max_waiting: Annotated[
        int,
        Meta(
            ge=0,
            le=WAITING_MAX,
            description="requests that wait at once; 0: a request without room is refused at once",
        ),
    ] = 4096
    max_mib: Annotated[
        int, Meta(ge=1, le=65_536, description="MiB of memory that waiting requests take")
    ] = 256
    max_waiting_per_tenant: Annotated[
        int,
        Meta(
            ge=0,
            le=WAITING_MAX,
            description="requests of one tenant that wait at once; 0: as many as queue.max_waiting",
        ),
    ] = 0
    max_mib_per_tenant: Annotated[
        int,
        Meta(
            ge=0,
            le=65_536,
            description="MiB of memory that waiting requests of one tenant take; 0: as many as"
            " queue.max_mib",
        ),
    ] = 0
    timeout_s: Annotated[
        Seconds,
        Meta(description="longest wait of a request that names no queue_timeout_ms"),
    ] = 10.0
    order: Annotated[
        str,
        Meta(
            description="order in which waiting requests go: fcfs, priority, edf, lof,"
            " shortest-first, wspt, prefill-first or random"
        ),
    ] = "priority"
    aging: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)] | None,
        Meta(
            description="what a second of waiting adds to a request's score, in the unit of the"
            " order, which is points for priority; 0: nothing; none: the order's own"
        ),
    ] = None
    look_past: Annotated[
        int,
        Meta(
            ge=0,
            le=256,
            description="requests without room that later requests may overtake at a time; 0: the"
            " first request that has no room holds those behind it",
        ),
    ] = 16
    preempt_threshold: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 31,
            description="points by which a request's priority must exceed the lowest waiting"
            " priority to take that place in a full queue",
        ),
    ] = 10
