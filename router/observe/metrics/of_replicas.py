"""Metrics of messages between replicas, and of the saved fleet commands."""

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from router.cluster.replicas.replica_link import ReplicaLink
from router.cluster.replicas.saved_commands import FleetState
from router.decide.core.core import RouterCore
from router.observe.metrics.families import (
    READS,
    READS_LABELS,
    counters,
    forgotten,
    gauge,
    known,
)


def replica_metrics(
    core: RouterCore, link: ReplicaLink, clock: Callable[[], float]
) -> Iterator[Metric]:
    """Ages and counts of messages of other replicas, and of reports handed to them."""
    ages = core.fleet.replicas.ages_s(clock())
    yield known("replicas", len(ages))
    yield gauge(
        "kvroute_replica_age_seconds",
        "Greatest age of another replica's last message; 0 without other replicas.",
        max(ages.values(), default=0.0),
    )
    loads, reports = core.fleet.replicas.results, link.forwarded
    yield counters(
        "kvroute_replica_messages",
        "Messages of other replicas about their reserved load (load), and Reports handed to the"
        " replica that owns the reservation (report), by result.",
        ["what", "result"],
        {("load", result): count for result, count in loads.items()}
        | {("report", result): count for result, count in reports.items()},
    )
    yield forgotten("replica_workers", {"no_room": link.untold})


def saved_command_metrics(state: FleetState) -> Iterator[Metric]:
    """Numbers of reads and writes of fleet.state_file."""
    results = ("read", "unreadable", "written", "write_failed")
    values = {("fleet_state", result): state.counts[result] for result in results}
    yield counters(*READS, READS_LABELS, values)
