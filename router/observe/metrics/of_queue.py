"""Metrics of requests that wait for a worker with room, and of how full pools are."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from router.decide.core.admission import WAITS_S, Admission
from router.decide.core.saturation import pool_loads
from router.decide.queue.admission_queue import TENANTS_SHOWN
from router.decide.queue.views import OTHER, Depth, sums
from router.decide.queue_limits.bounds import Bound
from router.decide.waiter import Fate
from router.fleet.histogram import Histogram
from router.fleet.state import Fleet
from router.observe.metrics.families import (
    buckets,
    counter,
    counters,
    gauge,
    gauges,
    held,
    held_at_most,
)


def queue_metrics(
    admission: Admission, fleet: Fleet, clock: Callable[[], float]
) -> Iterator[Metric]:
    """State of the admission queue."""
    now_s = clock()
    totals = sums(admission.queue, now_s)
    yield from _bands(admission, totals.bands, now_s)
    yield _tenants(admission, totals.tenants)
    yield from _pools(admission, fleet)
    yield from _wholes(admission)


def _bands(admission: Admission, bands: Mapping[str, Depth], now_s: float) -> Iterator[Metric]:
    queue, waits = admission.queue, admission.waits
    depth = GaugeMetricFamily(
        "kvroute_queue_depth",
        "Requests that wait for a worker with room, in this router (here), or in other replicas"
        " by this router's bands (elsewhere).",
        labels=["band", "where"],
    )
    ages = GaugeMetricFamily(
        "kvroute_queue_age_seconds",
        "Longest wait so far, 0 if no request waits (oldest); expected wait of a request that"
        " comes now, absent while requests wait and none of their pool got a worker yet"
        " (predicted); longest wait of a request that names none (timeout: queue.timeout_s)."
        " Kinds are not for adding up.",
        labels=["band", "kind"],
    )
    for band, of_band in bands.items():
        depth.add_metric([band, "here"], of_band.count)
        ages.add_metric([band, "oldest"], of_band.oldest_s)
    for band, of_replicas in zip(queue.bands, admission.fleet_turns.elsewhere(), strict=True):
        depth.add_metric([band, "elsewhere"], of_replicas.count)
    for band, wait_s in queue.band_waits_s(now_s).items():
        if wait_s is not None:
            ages.add_metric([band, "predicted"], wait_s)
    ages.add_metric(["", "timeout"], queue.settings.timeout_s)
    yield from (depth, ages)
    wait = HistogramMetricFamily(
        "kvroute_queue_wait_seconds",
        "Waits that ended with a worker.",
        labels=["band"],
    )
    for band in dict.fromkeys([*queue.bands, *waits]):
        ended = waits.get(band) or Histogram(WAITS_S)
        wait.add_metric([band], buckets(WAITS_S, ended.counts), ended.total)
    yield wait


def _tenants(admission: Admission, counts: Mapping[str, int]) -> Metric:
    shown = Counter({OTHER: 0, **dict.fromkeys(admission.queue.recent_tenants, 0)})
    for tenant, count in counts.items():
        shown[tenant if tenant in shown else OTHER] += count
    return gauges(
        "kvroute_queue_tenant_depth",
        f"Requests that wait in this router: of the {TENANTS_SHOWN} tenants whose requests waited"
        f" most recently each, and of the rest as `{OTHER}`.",
        ["tenant"],
        {(tenant,): count for tenant, count in shown.items()},
    )


def _pools(admission: Admission, fleet: Fleet) -> Iterator[Metric]:
    labels = ["model", "role"]
    requests = GaugeMetricFamily(
        "kvroute_pool_requests",
        "Requests of a model and role: active at workers, or waiting in this router.",
        labels=[*labels, "state"],
    )
    slots = GaugeMetricFamily(
        "kvroute_pool_slots",
        "Requests that the workers of a model and role run at once, known or estimated; absent:"
        " no worker's slots are known.",
        labels=labels,
    )
    for pool, load in pool_loads(fleet, admission.waiting()).items():
        requests.add_metric([*pool, "active"], load.active)
        requests.add_metric([*pool, "waiting"], load.waiting)
        if load.slots is not None:
            slots.add_metric(pool, load.slots)
    yield from (requests, slots)


def _wholes(admission: Admission) -> Iterator[Metric]:
    queue = admission.queue
    yield held("queue", queue.size_bytes)
    yield held_at_most("queue", queue.settings.max_mib << 20)
    yield gauge(
        "kvroute_queue_depth_max",
        "Requests that may wait at once (queue.max_waiting).",
        queue.settings.max_waiting,
    )
    yield counters(
        "kvroute_queue_requests",
        "Requests for which no worker had room, by fate: arrived, and how their waits ended; of"
        " refused ones, the queue's bound that refused them (bound). Fates are not for adding"
        " up: arrived counts all.",
        ["fate", "bound"],
        {(fate, ""): queue.counts[fate] for fate in Fate if fate is not Fate.REFUSED}
        | {(Fate.REFUSED, bound): queue.refusals[bound] for bound in Bound},
    )
    yield CounterMetricFamily(
        "kvroute_queue_vain_attempts",
        "Attempts to place a waiting request that no worker had room for; their cost is bounded"
        " to a tenth of a core.",
        value=admission.in_vain.count + admission.sheddable_in_vain.count,
    )
    moved = admission.moved_waits
    yield counter(
        "kvroute_queue_of_replicas",
        "Events of queues in several replicas: requests that claim a wait in a router that is"
        " gone (moved_claimed), of these the accepted ones (moved_believed); claims of other"
        " replicas' bands on unused room that were put aside (claim_rested).",
        "event",
        {
            "moved_claimed": moved["claimed"],
            "moved_believed": moved["believed"],
            "claim_rested": admission.fleet_turns.rests,
        },
    )
