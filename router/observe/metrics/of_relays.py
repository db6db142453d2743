"""Metrics of relays, of a router's own relays, and of connections to NATS."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from typing_extensions import override

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


class BrokerCollector(Collector):
    """Exports the counters of a process's connections to NATS, and of its relays' process."""

    def __init__(
        self,
        *brokers: Broker,
        others: Callable[[], Iterable[BrokerStatus | None]] = tuple,
    ) -> None:
        """others: connections of child processes; None for one that has not begun."""
        self._brokers = brokers
        self._others = others

    @override
    def collect(self) -> Iterator[Metric]:
        others = [broker for broker in self._others() if broker is not None]
        brokers: list[Broker | BrokerStatus] = [*self._brokers, *others]
        connected = all(broker.connected for broker in brokers)
        text = "1 while connected to NATS: a router by all its connections, its relays' included."
        yield gauge("kvroute_broker_connected", text, connected)
        kinds = ("not_connected", "slow_consumer", "error", "listener_failed")
        counts = {kind: sum(broker.counts.get(kind, 0) for broker in brokers) for kind in kinds}
        counts["unreadable"] = sum(broker.unreadable for broker in brokers)
        yield counter(
            "kvroute_broker_errors",
            "Errors of the connections to NATS, by kind.",
            "kind",
            counts,
            (),
        )


class NatsChildCollector(Collector):
    """Exports the state of the embedded NATS server; made only by a router that runs it."""

    def __init__(self, child: NatsChild) -> None:
        self._child = child

    @override
    def collect(self) -> Iterator[Metric]:
        yield failed("nats", self._child.restarts)


class OwnRelaysCollector(Collector):
    """Exports outcomes of the router's own relays, and of fleet commands."""

    def __init__(self, relays: OwnRelays, commands: FleetCommands) -> None:
        self._relays = relays
        self._commands = commands

    @override
    def collect(self) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            "kvroute_relays_ended",
            "Relays of this router that were stopped for good, by reason.",
            labels=["reason"],
        )
        for reason in ("removed", "never_answered", "pod_gone", "other_relay"):
            ended.add_metric([reason], self._relays.ended[reason])
        yield ended
        yield failed("relay", self._relays.failures)
        commands = CounterMetricFamily(
            "kvroute_fleet_commands",
            "Fleet commands applied, by action; those that a newer one had overtaken; those dated a"
            " day ahead or more, which count as given when they came.",
            labels=["action"],
        )
        for action in ("drain", "undrain", "remove", "resync", "overtaken", "far_ahead"):
            commands.add_metric([action], self._commands.counts[action])
        yield commands


class RelayCollector(Collector):
    """Exports the counters of the relays of this process, or of its child, at each scrape."""

    def __init__(self, relays: Callable[[], Iterable[RelayStatus]]) -> None:
        self._relays = relays

    @override
    def collect(self) -> Iterator[Metric]:
        labels = ["worker", "rank"]
        events = CounterMetricFamily(
            "kvroute_relay_events",
            "Engine events by kind, and by reason what of them was left out.",
            labels=[*labels, "kind"],
        )
        faults = CounterMetricFamily(
            "kvroute_relay_engine_faults",
            "Faults of an engine's events: holes in its own sequence (gap), its new lives"
            " (restart).",
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
        for relay in self._relays():
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
