"""Metrics of relays, of a router's own relays, and of connections to NATS."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from events.plane.broker import Broker
from router.cluster.children.nats_server import NatsChild
from router.cluster.children.own_relays import OwnRelays
from router.cluster.children.relay_messages import BrokerStatus, RelayStatus
from router.cluster.replicas.fleet_commands import FleetCommands
from router.observe.metrics.families import counter, failed, gauge

_SOCKET_ERRORS = (
    "engine_silent",
    "events_failed",
    "implausible_load",
    "malformed_frame",
    "malformed_load",
    "malformed_page",
    "malformed_request",
    "ledger_not_saved",
    "ledger_unusable",
    "replay_timeout",
    "replay_too_large",
    "replay_too_slow",
    "unsent",
    "warm_busy",
    "warm_failed",
    "warm_malformed",
)


def broker_metrics(
    *brokers: Broker, relays: Callable[[], BrokerStatus | None] = lambda: None
) -> Iterator[Metric]:
    """Counters of a process's connections to NATS, and of its relays' process. relays: returns the
    status of that process's connection; None: it has not begun."""
    of_relays = relays()
    every: list[Broker | BrokerStatus] = [*brokers, *([of_relays] if of_relays else [])]
    yield gauge(
        "kvroute_broker_connected",
        "1 while connected to NATS: a router by all its connections, its relays' included.",
        all(broker.connected for broker in every),
    )
    kinds = ("not_connected", "slow_consumer", "error", "listener_failed")
    counts = {kind: sum(broker.counts.get(kind, 0) for broker in every) for kind in kinds}
    counts["unreadable"] = sum(broker.unreadable for broker in every)
    yield counter(
        "kvroute_broker_errors", "Errors of the connections to NATS, by kind.", "kind", counts
    )


def nats_child_metrics(child: NatsChild) -> Iterator[Metric]:
    """State of the embedded NATS server; exported only by a router that runs it."""
    yield failed("nats", child.restarts)


def own_relay_metrics(relays: OwnRelays, commands: FleetCommands) -> Iterator[Metric]:
    """Outcomes of the router's own relays, and of fleet commands."""
    yield counter(
        "kvroute_relays_ended",
        "Relays of this router that were stopped for good, by reason.",
        "reason",
        relays.ended,
        ("removed", "never_answered", "pod_gone", "other_relay"),
    )
    yield failed("relay", relays.failures)
    yield counter(
        "kvroute_fleet_commands",
        "Fleet commands that were applied, by action; those without effect, since a newer one had"
        " been applied (overtaken); those dated more than a day ahead, which count as given when"
        " they came (far_ahead).",
        "action",
        commands.counts,
        ("drain", "undrain", "remove", "resync", "overtaken", "far_ahead"),
    )


def relay_metrics(relays: Callable[[], Iterable[RelayStatus]]) -> Iterator[Metric]:
    """Counters of the relays of this process, or of its child."""
    labels = ["worker", "rank"]
    events = CounterMetricFamily(
        "kvroute_relay_events",
        "Events of engines by kind, and parts of events that were left out, by reason.",
        labels=[*labels, "kind"],
    )
    faults = CounterMetricFamily(
        "kvroute_relay_engine_faults",
        "Faults of an engine's events: holes in their numbers (gap), restarts of it (restart).",
        labels=[*labels, "fault"],
    )
    entries = GaugeMetricFamily(
        "kvroute_relay_ledger_entries", "Engine blocks in the relay's ledger.", labels=labels
    )
    socket_errors = CounterMetricFamily(
        "kvroute_relay_socket_errors",
        "Errors of a relay's sockets and of its saved ledgers, by kind.",
        labels=["worker", "kind"],
    )
    for relay in relays():
        for rank in relay.ranks:
            names = [rank.key.worker_id, str(rank.key.dp_rank)]
            for kind, count in sorted(rank.counts.items()):
                events.add_metric([*names, kind], count)
            faults.add_metric([*names, "gap"], rank.engine_gaps)
            faults.add_metric([*names, "restart"], rank.engine_restarts)
            entries.add_metric(names, rank.ledger_entries)
        for kind in dict.fromkeys((*_SOCKET_ERRORS, *sorted(relay.counts))):
            socket_errors.add_metric([relay.worker_id, kind], relay.counts.get(kind, 0))
    yield from (events, faults, entries, socket_errors)
