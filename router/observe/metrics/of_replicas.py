"""Metrics of messages between replicas, and of the saved fleet commands."""

from collections.abc import Callable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from router.cluster.replicas.replica_link import ReplicaLink
from router.cluster.replicas.saved_commands import FleetState
from router.decide.core.core import RouterCore
from router.observe.metrics.families import READS, READS_LABELS, forgotten, gauge, known


class ReplicaCollector(Collector):
    """Exports the state of other replicas at each scrape."""

    def __init__(self, core: RouterCore, link: ReplicaLink, clock: Callable[[], float]) -> None:
        self._core = core
        self._link = link
        self._clock = clock

    @override
    def collect(self) -> Iterator[Metric]:
        ages = self._core.fleet.replicas.ages_s(self._clock())
        yield known("replicas", len(ages))
        yield gauge(
            "kvroute_replica_age_seconds",
            "Age of the oldest last message of any replica; 0 without replicas.",
            max(ages.values(), default=0.0),
        )
        messages = CounterMetricFamily(
            "kvroute_replica_messages",
            "Messages of other replicas about their reserved load (load), and Reports handed to the"
            " replica that owns the reservation (report), by result.",
            labels=["what", "result"],
        )
        for result, count in self._core.fleet.replicas.results.items():
            messages.add_metric(["load", result], count)
        for result, count in self._link.forwarded.items():
            messages.add_metric(["report", result], count)
        yield messages
        yield forgotten("replica_workers", {"no_room": self._link.untold})


class FleetStateCollector(Collector):
    """Exports the numbers of reads and writes of fleet.state_file."""

    def __init__(self, state: FleetState) -> None:
        self._state = state

    @override
    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(*READS, labels=READS_LABELS)
        for result in ("read", "unreadable", "written", "write_failed"):
            family.add_metric(["fleet_state", result], self._state.counts[result])
        yield family
