"""Metrics of discovery: what the router knows of Kubernetes' pods."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from router.cluster.discovery.kubernetes import KubernetesDiscovery
from router.observe.metrics.families import counters, gauge, gauges

_EVENTS = ("list", "added", "modified", "deleted", "bookmark")
_ERRORS = ("failed", "cut", "gone", "unreadable", "too_many")


def discovery_metrics(discovery: KubernetesDiscovery) -> Iterator[Metric]:
    """State of discovery; exported only where discovery is on."""
    followed, watched = discovery.followed, discovery.watched
    yield gauge(
        "kvroute_discovery_in_step",
        "1 while a watch of the pods is open, so that the router knows their present state.",
        discovery.in_step,
    )
    yield gauges(
        "kvroute_discovery_workers",
        "Workers of pods: ready; held back, since their pods are not ready; in trouble, so that"
        " they have no relay.",
        ["state"],
        {
            ("ready",): len(followed.ready()),
            ("held",): len(followed.held()),
            ("trouble",): len(followed.troubles()),
        },
    )
    yield counters(
        "kvroute_discovery_events",
        "Events of discovery: whole lists of pods, and events of watches (watch); faults of"
        " Kubernetes' answers, pods, engines and annotations, and relays without room (error);"
        " relays that started here, were left to another relay of the pod, or are gone with it"
        " (relay).",
        ["of", "event"],
        {
            (of, name): counts[name]
            for of, names, counts in (
                ("watch", _EVENTS, watched.counts),
                ("error", _ERRORS, watched.counts),
                ("error", ("silent", "unusable"), followed.counts),
                ("error", ("pool", "nodes", "no_room"), discovery.counts),
                ("relay", ("started", "left", "gone"), followed.counts),
            )
            for name in names
        },
    )
