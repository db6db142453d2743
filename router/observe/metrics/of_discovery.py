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
            "Lists that were read to their end, and events of watches by type.",
            labels=["type"],
        )
        for name in _EVENTS:
            events.add_metric([name], watched.counts[name])
        yield events
        errors = CounterMetricFamily(
            "kvroute_discovery_errors",
            "Requests to Kubernetes that failed, by kind; pods that can't be read or are too many;"
            " engines that did not say their kind, annotations that can't be used, relays without"
            " room.",
            labels=["kind"],
        )
        for name in _ERRORS:
            errors.add_metric([name], watched.counts[name])
        for name in ("silent", "unusable"):
            errors.add_metric([name], followed.counts[name])
        for name in ("pool", "nodes", "no_room"):
            errors.add_metric([name], discovery.counts[name])
        yield errors
        relays = CounterMetricFamily(
            "kvroute_discovery_relays",
            "Relays of pods: started here; left, since another relay follows the pod; and workers"
            " whose pods are gone.",
            labels=["fate"],
        )
        for name in ("started", "left", "gone"):
            relays.add_metric([name], followed.counts[name])
        yield relays
