"""Metrics of discovery: what the router knows of Kubernetes' pods."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from router.cluster.discovery.kubernetes import KubernetesDiscovery
from router.observe.metrics.families import gauge

_EVENTS = ("list", "added", "modified", "deleted", "bookmark")
_ERRORS = ("failed", "cut", "gone", "unreadable", "too_many")


class DiscoveryCollector(Collector):
    """Exports the state of discovery; made only where discovery is on."""

    def __init__(self, discovery: KubernetesDiscovery) -> None:
        self._discovery = discovery

    @override
    def collect(self) -> Iterator[Metric]:
        discovery = self._discovery
        followed, watched = discovery.followed, discovery.watched
        yield gauge(
            "kvroute_discovery_in_step",
            "1 while a watch of the pods stands, so that they are known as they are.",
            discovery.in_step,
        )
        workers = GaugeMetricFamily(
            "kvroute_discovery_workers",
            "Workers of pods: ready; held back, since their pods are not ready; in trouble, so that"
            " they have no relay.",
            labels=["state"],
        )
        workers.add_metric(["ready"], len(followed.ready()))
        workers.add_metric(["held"], len(followed.held()))
        workers.add_metric(["trouble"], len(followed.troubles()))
        yield workers
        events = CounterMetricFamily(
            "kvroute_discovery_events",
            "Events of discovery: whole lists of pods, and events of watches (watch); faults of"
            " Kubernetes' answers, pods, engines and annotations, and relays without room (error);"
            " relays that started here, were left to another relay of the pod, or are gone with it"
            " (relay).",
            labels=["of", "event"],
        )
        for name in _EVENTS:
            events.add_metric(["watch", name], watched.counts[name])
        for name in _ERRORS:
            events.add_metric(["error", name], watched.counts[name])
        for name in ("silent", "unusable"):
            events.add_metric(["error", name], followed.counts[name])
        for name in ("pool", "nodes", "no_room"):
            events.add_metric(["error", name], discovery.counts[name])
        for name in ("started", "left", "gone"):
            events.add_metric(["relay", name], followed.counts[name])
        yield events
