"""Metric families of one line, for collectors, and those that several collectors share.

A shared family has its text here; each collector gives its own series, and scrapes join them.
"""

from collections.abc import Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
)

from router.observe.audit.shadow_policy import Balance


def gauge(name: str, description: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, description, value=value)


def change(name: str, description: str, balance: Balance) -> CounterMetricFamily:
    """Two counters, since one of their difference could fall."""
    family = CounterMetricFamily(name, description, labels=["change"])
    family.add_metric(["gain"], balance.gain)
    family.add_metric(["loss"], balance.loss)
    return family


def counter(
    name: str, description: str, label: str, counts: dict[str, int], known: tuple[str, ...]
) -> CounterMetricFamily:
    """A counter of one label, known values from 0 on, so that alerts work before the first."""
    family = CounterMetricFamily(name, description, labels=[label])
    for value in dict.fromkeys((*known, *sorted(counts))):
        family.add_metric([value], counts.get(value, 0))
    return family


def forgotten(what: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    """counts: entries of the table `what` that were forgotten, by reason."""
    family = CounterMetricFamily(
        "kvroute_forgotten",
        "Entries of bounded tables that were forgotten: for want of room (no_room), for their age"
        " (expired), or with their worker (silent, removed). Of the index: placements of blocks; of"
        " working_sets: sampled blocks; of callers: their reports on a worker; of peer_workers:"
        " workers without room in a message about our reserved load.",
        labels=["what", "reason"],
    )
    for reason, count in counts.items():
        family.add_metric([what, reason], count)
    return family
