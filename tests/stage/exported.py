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
from router.gateway.server.counters import GatewayCounters, client_metrics
from router.net.keys.followed import Followed
from router.net.listener.connections import Connections, PortBounds
from router.observe.audit.observers import Watchers
from router.observe.console.collector import console_metrics
from router.observe.metrics.families import export
from router.observe.metrics.of_audit import span_metrics, watch_metrics
from router.observe.metrics.of_copies import hot_prefix_metrics
from router.observe.metrics.of_discovery import discovery_metrics
from router.observe.metrics.of_fleet import fleet_metrics
from router.observe.metrics.of_http import http_metrics
from router.observe.metrics.of_keys import key_metrics
from router.observe.metrics.of_prompts import prompt_metrics
from router.observe.metrics.of_queue import queue_metrics
from router.observe.metrics.of_relays import broker_metrics, relay_metrics
from router.observe.metrics.of_replicas import replica_metrics
from router.observe.metrics.of_workers import worker_metrics
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
    export(registry, fleet_metrics, fleet.core, fleet.clock)
    export(registry, worker_metrics, fleet.core)
    admission = Admission(fleet.core, QueueSettings(), random.Random(0))
    export(registry, queue_metrics, admission, fleet.core.fleet, fleet.clock)
    followed = Followed()
    followed.counts["keys", "ok"] = 1
    export(registry, key_metrics, followed, None)
    export(registry, http_metrics, Connections("metrics", PortBounds(10)))
    export(registry, prompt_metrics, Prompts({"m": ModelPrompts()}), lambda: 0)
    export(registry, hot_prefix_metrics, fleet.hot)
    export(registry, watch_metrics, _watchers())
    export(registry, broker_metrics, _nobodys_broker())
    export(registry, replica_metrics, fleet.core, _link(fleet), fleet.clock)
    export(registry, discovery_metrics, _discovery(fleet))
    export(registry, span_metrics, SpanExport(lambda batch: True, 1))
    export(registry, console_metrics, pages_of(play(fleet)))
    return list(registry.collect())


def _discovery(fleet: Fleet) -> KubernetesDiscovery:
    """Of pods, of which there are none."""
    rng = random.Random(7)
    settings = KubernetesSettings(
        enabled=True, namespace="n", selector="app=vllm", api="http://api.invalid"
    )
    workers = DiscoveredWorkers(
        core=fleet.core,
        relays=OwnRelays(_nobodys_relays, clock=fleet.clock, rng=rng),
        commands=FleetCommands(fleet.core, fleet.clock),
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
        broker=_nobodys_broker(),
        core=fleet.core,
        commands=FleetCommands(fleet.core, fleet.clock),
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
    export(registry, relay_metrics, lambda: [relay_status(relay)])
    export(registry, broker_metrics, broker)
    families = list(registry.collect())
    asyncio.run(relay.stop())
    return families


def gateway_families() -> list[Metric]:
    """Of a gateway in a process of its own."""
    registry = CollectorRegistry()
    GatewayCounters(registry)
    export(registry, client_metrics, dict)
    export(registry, http_metrics, Connections("gateway", PortBounds(10)))
    export(registry, key_metrics, Followed(), None)
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
    config = ServeConfig(
        routing=RoutingSettings(shadow_policy="ttft"),
        decision_log=DecisionLogSettings(file=os.devnull),
    )
    asyncio.run(watchers.use(config))
    watchers.log.close()
    return watchers


def _nobodys_broker() -> Broker:
    """A connection that is never made."""
    return Broker(NatsSettings(), "nats://127.0.0.1:4222", "kvroute")
