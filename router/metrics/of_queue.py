"""Metrics of requests that wait for a worker with room."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from router.core.admission import Admission
from router.core.waits import Waits
from router.metrics.families import counter, gauge
from router.queue.bounds import Bound
from router.queue.waiter import Fate


class QueueCollector(Collector):
    """Reads the admission queue at each scrape."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    @override
    def collect(self) -> Iterator[Metric]:
        queue, waits = self._admission.queue, self._admission.waits
        depth = GaugeMetricFamily(
            "kvroute_queue_depth",
            "Requests that wait in this router for a worker with room.",
            labels=["band"],
        )
        depths = Counter(dict.fromkeys(queue.bands, 0))
        depths.update(queue.band(waiter) for _, waiter in queue.waiters())
        for band, count in depths.items():
            depth.add_metric([band], count)
        yield depth
        wait = HistogramMetricFamily(
            "kvroute_queue_wait_seconds",
            "Waits that ended with a worker.",
            labels=["band"],
        )
        for band in dict.fromkeys([*queue.bands, *waits]):
            of_band = waits.get(band) or Waits()
            wait.add_metric([band], of_band.buckets(), of_band.total_s)
        yield wait
        yield gauge("kvroute_queue_bytes", "Memory that waiting requests take.", queue.size_bytes)
        yield gauge(
            "kvroute_queue_bytes_max",
            "What that may be (queue.max_mib).",
            queue.settings.max_mib << 20,
        )
        yield gauge(
            "kvroute_queue_depth_max",
            "Requests that may wait at once (queue.max_waiting).",
            queue.settings.max_waiting,
        )
        yield counter(
            "kvroute_queue_requests",
            "Requests that no worker had room for: arrived, and what became of them since.",
            "fate",
            {str(fate): count for fate, count in queue.counts.items()},
            tuple(Fate),
        )
        yield counter(
            "kvroute_queue_refused",
            "Requests that a bound of the queue refused.",
            "bound",
            {str(bound): count for bound, count in queue.refusals.items()},
            tuple(Bound),
        )
