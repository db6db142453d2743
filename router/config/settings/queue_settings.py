"""The section `queue`: requests that wait in the router for a worker with room."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from events.plane.settings import FIRST_WEEK, Seconds, Settings

WAITING_MAX = 65_536
"""Largest value of queue.max_waiting: a request that joins the queue has the places behind it
copied in memory (router/decide/queue_turns/line.py)."""

EarlyRefusal = Literal["never", "timeout", "slo"]


class BandSettings(Settings, frozen=True):
    """A priority band: a level of the queue with its own share of the dispatches."""

    name: Annotated[
        str,
        Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="name of the priority band in metrics"),
    ]
    from_priority: Annotated[
        int,
        Meta(
            ge=-(1 << 31),
            lt=1 << 31,
            description="lowest priority of the band's requests; the lowest band takes all lower"
            " priorities, too",
        ),
    ]
    weight: Annotated[
        float,
        Meta(
            gt=0,
            le=1e6,
            description="share of the band in the dispatches, relative to the weights of the"
            " other bands",
        ),
    ] = 1.0
    share_percent: Annotated[
        float,
        Meta(
            gt=0,
            le=100,
            description="percentage of a model's slots and KV blocks up to which requests of"
            " this band get workers; the rest is kept for other bands",
        ),
    ] = 100.0


class TenantSettings(Settings, frozen=True):
    """Weight and bounds of one tenant."""

    weight: Annotated[
        float,
        Meta(
            gt=0,
            le=1e6,
            description="share of the tenant in the dispatches, relative to the weights of the"
            " other tenants",
        ),
    ] = 1.0
    in_flight_max: Annotated[
        int,
        Meta(ge=0, description="most requests of the tenant that run at once; 0: any number"),
    ] = 0
    tokens_per_s: Annotated[
        float,
        Meta(
            ge=0,
            description="most uncached prompt tokens a second that requests of the tenant may"
            " start; 0: any number",
        ),
    ] = 0.0
    priority: Annotated[
        int,
        Meta(
            ge=-(1 << 20),
            le=1 << 20,
            description="points that are added to the priority of each request of the tenant",
        ),
    ] = 0


class TenantsSettings(Settings, frozen=True):
    """How tenants share the dispatches of the queue."""

    fair: Annotated[
        bool,
        Meta(
            description="share a band's dispatches, in uncached prompt tokens, among its waiting"
            " tenants by their weights; false: queue.order alone decides"
        ),
    ] = False
    cached_price: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="cost of a cached prompt token in tenants' shares; an uncached token"
            " costs 1",
        ),
    ] = 0.0
    default: TenantSettings = TenantSettings()
    named: Annotated[
        dict[str, TenantSettings],
        Meta(
            description="settings of tenants that differ from queue.tenants.default, by the"
            " tenant's name"
        ),
    ] = msgspec.field(default_factory=dict)


class SiblingsSettings(Settings, frozen=True):
    """Siblings: requests with the same long uncached prefix, of which the first is dispatched and
    the others wait until its prompt is computed.
    """

    enabled: Annotated[
        bool,
        Meta(
            description="hold requests with the same long prefix until the first one's prompt"
            " is computed, so that the others reuse its blocks"
        ),
    ] = False


class QueueSettings(Settings, frozen=True):
    """The queue in which requests wait, in a configured order, while no worker has room for
    them.
    """

    max_waiting: Annotated[
        int,
        Meta(
            ge=0,
            le=WAITING_MAX,
            description="most requests that wait at once; 0: a request that no worker has room"
            " for is refused at once",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = 4096
    max_mib: Annotated[
        int, Meta(ge=1, le=65_536, description="MiB of memory that waiting requests may take")
    ] = 256
    tenant_share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share (0 to 1) of queue.max_waiting and queue.max_mib that waiting"
            " requests of one tenant may take",
        ),
    ] = 1.0
    timeout_s: Annotated[
        Seconds,
        Meta(
            description="seconds that a request without queue_timeout_ms waits at most",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = 10.0
    early_refusal: Annotated[
        EarlyRefusal,
        Meta(
            description="when to refuse a request before its wait is over. timeout: as soon as"
            " its expected wait is longer than it may wait; slo: also when longer than its"
            " ttft_slo_ms; never: it waits to the end"
        ),
    ] = "never"
    order: Annotated[
        str,
        Meta(
            description="order in which waiting requests are dispatched: fcfs, priority, edf, lof,"
            " shortest-first, wspt, lpm, dfs-weight, las, prefill-first or random; module:function,"
            " one of your own; or several with + between them, of which the next one decides"
            " between equals"
        ),
    ] = "priority"
    aging: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)] | None,
        Meta(
            description="score that a request gains in each second of waiting, in the unit of the"
            " order (points for priority); 0: nothing; none: the order's default"
        ),
    ] = None
    bands: Annotated[
        tuple[BandSettings, ...],
        Meta(
            max_length=32,
            description="priority bands of the queue; none: all requests are in one band, named"
            " `all`",
        ),
    ] = ()
    bands_strict: Annotated[
        bool,
        Meta(
            description="dispatch a band's requests only while no higher band has requests that"
            " could go; false: bands take turns by their weights"
        ),
    ] = False
    bands_aging: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description="points that each second of waiting adds to a request's priority, so that"
            " it rises into higher bands; 0: it stays in its band",
        ),
    ] = 0.1
    tenants: TenantsSettings = TenantsSettings()
    siblings: SiblingsSettings = SiblingsSettings()
