"""Short constructors of metric families, for collectors."""

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
)

from router.observe.audit.shadow_policy import Balance


def gauge(name: str, description: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, description, value=value)


def change(name: str, description: str, balance: Balance) -> CounterMetricFamily:
    """A counter family with two series, the gains and the losses, since a counter of their
    difference could fall.
    """
    family = CounterMetricFamily(name, description, labels=["change"])
    family.add_metric(["gain"], balance.gain)
    family.add_metric(["loss"], balance.loss)
    return family


def counter(
    name: str, description: str, label: str, counts: dict[str, int], known: tuple[str, ...]
) -> CounterMetricFamily:
    """A counter family of one label; known values start at 0, so that alerts see their first
    increase.
    """
    family = CounterMetricFamily(name, description, labels=[label])
    for value in dict.fromkeys((*known, *sorted(counts))):
        family.add_metric([value], counts.get(value, 0))
    return family
