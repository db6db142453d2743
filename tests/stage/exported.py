"""What a router and a relay export at their start: the program itself is asked."""

import asyncio
import os
import random
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from events.plane.broker import Broker
from events.plane.settings import EngineSettings, NatsSettings
from events.relay.relay import Relay
from router.api.desk.counters import Metrics
from router.app.processes.discovered import DiscoveredWorkers
from router.cluster.children.own_relays import OwnRelays
from router.cluster.children.relay_messages import Opening, relay_status
from router.cluster.discovery.kubernetes import KubernetesDiscovery
from router.cluster.replicas.fleet_commands import FleetCommands
from router.cluster.replicas.replica_link import ReplicaLink
from router.config.settings.configurations import ServeConfig
from router.config.settings.discovery_settings import KubernetesSettings
from router.config.settings.queue_settings import QueueSettings
from router.config.settings.routing_settings import HotPrefixSettings, RoutingSettings
from router.config.settings.serving_settings import DecisionLogSettings
from router.decide.core.admission import Admission
from router.gateway.picker.counters import PickerCounters
from router.gateway.server.counters import ClientCollector, GatewayCounters
from router.net.keys.followed import Followed
from router.net.listener.connections import Connections, PortBounds
from router.observe.audit.observers import Watchers
from router.observe.console.collector import ConsoleCollector
from router.observe.metrics.of_audit import SpanCollector, WatchCollector
from router.observe.metrics.of_copies import HotPrefixCollector
from router.observe.metrics.of_discovery import DiscoveryCollector
from router.observe.metrics.of_fleet import RouterCollector
from router.observe.metrics.of_http import HttpCollector
from router.observe.metrics.of_keys import KeyCollector
from router.observe.metrics.of_prompts import PromptCollector
from router.observe.metrics.of_queue import QueueCollector
from router.observe.metrics.of_relays import BrokerCollector, RelayCollector
from router.observe.metrics.of_replicas import ReplicaCollector
from router.observe.metrics.of_workers import WorkerCollector
from router.observe.tracing.export import SpanExport
from router.request.tokens import ModelPrompts, Prompts
from tests.stage.console import pages_of, play
from tests.stage.fleet import START_S, Fleet


class Series(NamedTuple):
    """One time series, without the labels that a scrape adds."""

    name: str
    labels: dict[str, str]
    value: float


def router_families() -> list[Metric]:
    """Of a router with two workers, one with something to mend and one without events, of two
    roles."""
    fleet = Fleet(hot_prefixes=HotPrefixSettings(enabled=True))
    fleet.add("w0", role="prefill", warnings=("an odd thing",))
    fleet.add("w1", role="decode", events=False)
    registry = CollectorRegistry()
    Metrics(registry)
    registry.register(RouterCollector(fleet.core, fleet.clock))
    registry.register(WorkerCollector(fleet.core))
    admission = Admission(fleet.core, QueueSettings(), random.Random(0))
    registry.register(QueueCollector(admission, fleet.core.fleet, fleet.clock))
    followed = Followed()
    followed.counts["keys", "ok"] = 1
    registry.register(KeyCollector(followed, None))
    registry.register(HttpCollector(Connections("metrics", PortBounds(10))))
    registry.register(PromptCollector(Prompts({"m": ModelPrompts()}), lambda: 0))
    registry.register(HotPrefixCollector(fleet.hot))
    registry.register(WatchCollector(_watchers()))
    registry.register(BrokerCollector(_nobodys_broker()))
    registry.register(ReplicaCollector(fleet.core, _link(fleet), fleet.clock))
    registry.register(DiscoveryCollector(_discovery(fleet)))
    registry.register(SpanCollector(SpanExport(lambda batch: True, 1)))
    pages = pages_of(play(fleet))
    registry.register(ConsoleCollector(pages.console, pages))
    return list(registry.collect())


def _discovery(fleet: Fleet) -> KubernetesDiscovery:
    """Of pods, of which there are none."""
    rng = random.Random(7)
    settings = KubernetesSettings(
        enabled=True, namespace="n", selector="app=vllm", api="http://api.invalid"
    )
    workers = DiscoveredWorkers(
        fleet.core,
        OwnRelays(_nobodys_relays, clock=fleet.clock, rng=rng),
        FleetCommands(fleet.core, fleet.clock),
        clock=fleet.clock,
        broker=_nobodys_broker,
        completed=lambda settings: settings,
        on_change=lambda: None,
    )
    return KubernetesDiscovery(
        settings, workers, replica="a", copied_labels=(), clock=fleet.clock, rng=rng
    )


def _nobodys_relays() -> Opening:
    raise AssertionError("there is no relay")


def _link(fleet: Fleet) -> ReplicaLink:
    """To other replicas, of which none is there."""
    return ReplicaLink(
        _nobodys_broker(),
        fleet.core,
        FleetCommands(fleet.core, fleet.clock),
        fleet="default",
        clock=fleet.clock,
        rng=random.Random(7),
        on_report=bytes,
        on_failure=print,
    )


def relay_families() -> list[Metric]:
    """Of the relay of the first of them."""
    broker = _nobodys_broker()
    relay = Relay(
        EngineSettings(id="w0", engine="vllm", address="http://w0", events="tcp://w0:5557"),
        broker,
        fleet="default",
        clock=lambda: START_S,
        rng=random.Random(7),
    )
    registry = CollectorRegistry()
    registry.register(RelayCollector(lambda: [relay_status(relay)]))
    registry.register(BrokerCollector(broker))
    families = list(registry.collect())
    asyncio.run(relay.stop())
    return families


def gateway_families() -> list[Metric]:
    """Of a gateway in a process of its own."""
    registry = CollectorRegistry()
    GatewayCounters(registry)
    registry.register(ClientCollector(dict))
    registry.register(HttpCollector(Connections("gateway", PortBounds(10))))
    registry.register(KeyCollector(Followed(), None))
    return list(registry.collect())


def picker_families() -> list[Metric]:
    """Of an endpoint picker; a router with picker.listen has them beside its own."""
    registry = CollectorRegistry()
    PickerCounters(registry)
    return list(registry.collect())


def names(families: list[Metric]) -> set[str]:
    """As they are queried; a histogram's without its suffixes."""
    return {one.name + ("_total" if one.type == "counter" else "") for one in families}


def series(families: list[Metric]) -> list[Series]:
    """All samples but the times when counters began, which nobody asks for."""
    return [
        Series(sample.name, dict(sample.labels), sample.value)
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


def _watchers() -> Watchers:
    """All that there are, of which none has seen anything."""
    watchers = Watchers("here", random.Random(7), print)
    watchers.use(
        ServeConfig(
            routing=RoutingSettings(shadow_policy="ttft"),
            decision_log=DecisionLogSettings(file=os.devnull),
        )
    )
    watchers.log.close()
    return watchers


def _nobodys_broker() -> Broker:
    """A connection that is never made."""
    return Broker(NatsSettings(), "nats://127.0.0.1:4222", "kvroute")
