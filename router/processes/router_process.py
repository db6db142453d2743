"""`kvroute serve`: puts the parts together, starts and stops them in order.

NATS (ours or theirs) -> broker -> feed -> view -> core <- gRPC
                            relays in this process, for configured workers
NATS -> peers, a second connection -> link -> core: other replicas
"""

import asyncio
import logging
import os
import random
import re
import secrets
import signal
import socket
from collections.abc import Callable
from math import inf
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from events.feed.feed import Feed
from events.feed.fleet_view import FleetView
from events.feed.stream import StreamState
from events.plane.broker import Broker
from events.plane.clock import unix_now
from events.plane.facts import Control
from events.plane.nats_check import without_secret
from events.plane.settings import EngineSettings, NatsSettings, unusable
from events.plane.tasks import Tasks, named
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from router.audit.observers import Watchers
from router.children.nats_server import NatsChild, NatsChildError
from router.children.own_relays import OwnRelays
from router.config.keys import ConfigError
from router.config.reload import reloaded
from router.config.rendering import render
from router.config.settings.configurations import ServeConfig
from router.config.settings.routing_settings import RoutingSettings
from router.core.admission import Admission
from router.core.core import RouterCore
from router.core.progress import Effects
from router.desk.counters import Metrics
from router.desk.desk import Desk
from router.desk.reports import Reports
from router.discovery.kubernetes import KubernetesDiscovery, NoApi
from router.fleet.topology import PlaceLabels
from router.front.gateway.server import check_address
from router.health.warnings import WarningCode, WarningLog
from router.keys.certificates import Certificates, metrics_tls
from router.keys.control_keys import ControlKeys
from router.keys.door import Door
from router.keys.exposure import check_exposure
from router.keys.followed import Followed
from router.keys.networks import check_engine_networks, networks_of
from router.metrics.http import MetricsServer
from router.metrics.of_audit import WatchCollector
from router.metrics.of_copies import HotPrefixCollector
from router.metrics.of_discovery import DiscoveryCollector
from router.metrics.of_fleet import RouterCollector
from router.metrics.of_keys import KeyCollector
from router.metrics.of_prompts import PromptCollector
from router.metrics.of_queue import QueueCollector
from router.metrics.of_relays import (
    BrokerCollector,
    NatsChildCollector,
    OwnRelaysCollector,
    RelayCollector,
)
from router.metrics.of_replicas import FleetStateCollector, PeerCollector
from router.metrics.of_workers import WorkerCollector
from router.metrics.probes import ProbeServer
from router.policies.configured import DecisionSettings, shadow_policy
from router.processes.discovered import DiscoveredWorkers
from router.processes.model_prompts import model_prompts
from router.processes.own_faces import OwnFaces
from router.prompts.prompts import Prompts
from router.replicas.copy_link import CopyLink
from router.replicas.fleet_commands import ControlDesk
from router.replicas.peer_link import PeerLink
from router.replicas.saved_commands import FleetState
from router.replicas.seal import Seal
from router.request.refusal import Reason, Refusal
from router.service.calls import Guard
from router.service.fleet_service import FleetService
from router.service.local_router import LocalRouter
from router.service.router_service import RouterService
from router.service.server import GrpcServer
from router.service.texts import Texts
from router.service.workers_to_ask import tokens_trouble

TICK_S = 0.25
JUDGED_A_TICK = 5
"""How often in a tick what one caller alone says of workers is judged: every 50 ms."""
WARN_S = 5.0
HELLO_GRACE_S = 1.0
"""After the first connection, how long relays have to say that they are there."""

PEERS_S = 1.2
"""Other replicas say that they are there once a second."""
LINK_S = 5.0
"""For the connection to other replicas, before the router begins without it."""

log = logging.getLogger("kvroute")


class RouterApp:
    """One router process.

    Over 300 lines: it makes, starts, reloads and stops every part of the process, in order.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        clock: Callable[[], float] = unix_now,
        read_again: Callable[[], ServeConfig] | None = None,
    ) -> None:
        """Raises ConfigError for mistakes that only this process can notice.

        Over 60 lines: each part of the process is made here, after the parts that it needs.
        read_again: reads the configuration again, for SIGHUP.
        """
        for worker in config.workers:
            check_engine(worker)
        if config.nats.url is not None:
            checked_broker(config.nats, config.nats.url, "")
        self.certificates = Certificates.of(config.tls)
        self._followed = Followed()
        if self.certificates is not None:
            self._followed.add("certificates", self.certificates)
        self._networks = networks_of(config.fleet.register_networks)
        self._door = door = Door.of(config.keys, self.certificates, clock=unix_now)
        keyed = door is not None
        if door is not None:
            door.follow(self._followed)
        self._open_to_all = check_exposure(
            config.grpc.listen,
            key="grpc.listen",
            guarded=keyed,
            switch="grpc.any_address",
            allowed=config.grpc.any_address,
        )
        if config.gateway.listen:
            check_address(config.gateway, keyed)
        self._metrics_tls = metrics_tls(config.metrics, self.certificates)
        self.config = config
        routing = config.routing
        self._read_again = read_again
        self.clock = clock
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()[:40])
        self.replica = f"{host}-{secrets.token_hex(4)}"  # peer_link.REPLICA_NAME
        seed = routing.seed
        self._rng = random.Random(seed if seed is not None else secrets.randbits(64))
        self.view = FleetView(
            NativeIndex(config.index.bytes_max(), config.index.blocks_max()),
            beat_timeout_s=config.fleet.beat_timeout_s,
            forget_s=config.fleet.forget_s,
            workers_max=config.fleet.workers_max,
            predicted_ttl_s=routing.predicted_ttl_s,
            approximate_ttl_s=routing.approximate_ttl_s,
        )
        labels = PlaceLabels(routing.host_label, routing.rack_label, routing.cluster_label)
        rng = random.Random(secrets.randbits(64))
        self.watchers = Watchers(self.replica, labels, rng, _watcher_failed)
        self.relays = OwnRelays(fleet=config.fleet.name, clock=clock, rng=self._rng)
        self.prompts = Prompts(model_prompts(config.models))
        self.core = RouterCore(
            self.view,
            routing,
            models=config.models,
            model_memory_s=config.fleet.model_memory_s,
            tombstone_s=config.fleet.tombstone_s,
            replica=self.replica,
            rng=self._rng,
            random_bytes=os.urandom,
            watched=self.watchers,
            troubles={
                WarningCode.RELAY: lambda source, _: self.relays.trouble(source.key.worker_id),
                WarningCode.TOKENS_DIFFER: tokens_trouble(self.prompts),
            },
        )
        self.core.fleet.ready = False
        shadow_policy(routing, self.core.policies)  # raises ConfigError
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.metrics.index_bytes_max.set(config.index.bytes_max())
        self.registry.register(WatchCollector(self.watchers))
        self._guard = Guard.of(config.grpc, routing.prompt_tokens_max, self.metrics, door)
        self.admission = Admission(self.core, config.queue, random.Random(self._rng.random()))
        self.desk = Desk(
            self.core,
            self.metrics,
            clock,
            fault=self._guard.fault,
            admission=self.admission,
            soon=lambda call: asyncio.get_running_loop().call_soon(call),
            observed=self.watchers,
            on_change=self._on_change,
        )
        self.reports = Reports(
            self.core,
            self.metrics,
            clock,
            self.admission,
            self.desk.changed,
            self.prompts.on_answer,
            peers=lambda: self.link,
        )
        self.texts = Texts(self.desk, self.core, self.prompts)
        self.commands = ControlDesk(
            self.core, clock, on_resync=self._resync, on_removed=self.relays.on_removed
        )
        self.seal = self._made_seal(config)
        self.discovery = self._made_discovery(config)
        self._state: FleetState | None = None
        if config.fleet.state_file is not None:
            path = checked_file(config.fleet.state_file, "fleet.state_file")
            self._state = FleetState(path, config.fleet.name, self.commands)
        self.failed: BaseException | None = None
        self._warning_log = WarningLog()
        self._warned_at_s = -inf
        self._stop = asyncio.Event()
        self._stopping = asyncio.Event()
        self._tasks = Tasks(self._broke)
        self._nats: NatsChild | None = None
        self.broker: Broker | None = None
        self.peers: Broker | None = None
        """A second connection, for what replicas say to one another: a connection is read in order,
        and on the first one a verdict would wait behind all that a relay sends."""
        self.feed: Feed | None = None
        self.link: PeerLink | None = None
        self.copy_link: CopyLink | None = None
        """None: hot prefixes were never copied yet."""
        self._grpc: GrpcServer | None = None
        self._http: MetricsServer | None = None
        self._probes: ProbeServer | None = None
        if config.probes.listen:
            self._probes = ProbeServer(config.probes.listen, lambda: self.serving)
        self._faces: OwnFaces | None = None
        """The HTTP face and Envoy's picker, where they are configured."""
        self._started_at_s = clock()
        self._connected_at_s: float | None = None

    def _made_seal(self, config: ServeConfig) -> Seal:
        """Signatures on fleet commands. Raises ConfigError."""
        keys = ControlKeys.of(config.control)
        if keys is not None:
            self._followed.add("control", keys)
        return Seal(
            keys,
            fleet=config.fleet.name,
            require_signed=config.control.require_signed,
            clock=unix_now,
            random_bytes=os.urandom,
        )

    def _made_discovery(self, config: ServeConfig) -> KubernetesDiscovery | None:
        """Discovery of pods; None: it is off. Raises ConfigError."""
        if not config.discovery.kubernetes.enabled:
            return None
        self.discovered = DiscoveredWorkers(
            self.core,
            self.relays,
            self.commands,
            clock=self.clock,
            broker=lambda: self.broker,
            completed=self._with_block_size,
            on_change=self.desk.turns,
        )
        try:
            return KubernetesDiscovery(
                config.discovery.kubernetes,
                self.discovered,
                replica=self.replica,
                host_label=config.routing.host_label,
                rack_label=config.routing.rack_label,
                clock=self.clock,
                rng=random.Random(secrets.randbits(64)),
            )
        except NoApi as error:
            raise ConfigError(str(error)) from None

    @property
    def ready(self) -> bool:
        return self.core.fleet.ready

    @property
    def serving(self) -> bool:
        """Whether new calls are welcome: ready, and not about to stop."""
        return self.ready and not self._stopping.is_set()

    @property
    def probes_port(self) -> int:
        return self._probes.port if self._probes is not None else 0

    @property
    def grpc_port(self) -> int:
        return self._grpc.port if self._grpc is not None else 0

    @property
    def metrics_port(self) -> int:
        return self._http.port if self._http is not None else 0

    @property
    def gateway_port(self) -> int:
        return self._faces.gateway_port if self._faces is not None else 0

    @property
    def picker_port(self) -> int:
        """Port of Envoy's endpoint picker; 0: there is none."""
        return self._faces.picker_port if self._faces is not None else 0

    async def start(self) -> None:
        """Starts everything; raises ConfigError when an address or the broker can't be had.

        Returns without waiting for a broker that is not ours: requests are answered meanwhile, with
        UNAVAILABLE as long as no worker is known.
        """
        config = self.config
        log.info("configuration:\n%s", render(config).rstrip())
        if self._open_to_all:
            log.warning(
                "grpc.any_address is set: all that reach %s may call every method, fleet commands"
                " among them, without keys",
                config.grpc.listen,
            )
        if config.grpc.max_message_mib is not None:
            log.warning(
                "grpc.max_message_mib is deprecated: it bounds the limits by method from above;"
                " grpc.route_kib_max, explain_kib_max, batch_kib_max, report_kib_max and"
                " message_kib_max are those limits"
            )
        self.watchers.use(config)
        nats, url = config.nats, config.nats.url
        if url is None:
            nats, url = await self._embedded_nats()
        self.broker = broker = Broker(nats, url, f"kvroute router {self.replica}")
        self.peers = peers = Broker(nats, url, f"kvroute router {self.replica}, to replicas")
        if self._state is not None:
            self._state.restore()
            self._tasks.spawn(self._state.run(), "fleet state file")
        self.feed = feed = self._made_feed(broker)
        self.link = link = self._made_link(peers)
        self._use_hot_prefixes(config.routing)
        self._register_collectors(broker, peers, link)
        await self._listen()
        if self._faces is not None:
            await self._faces.start()
        linked = self._tasks.spawn_task(self._link(peers, link), "connection to replicas")
        self._tasks.spawn(self._connect(broker, feed, linked), "connection to NATS")
        self._tasks.spawn(self._tick(), "router clock")

    async def _embedded_nats(self) -> tuple[NatsSettings, str]:
        """Starts the embedded NATS server; how to connect to it. Raises ConfigError."""
        try:
            self._nats = child = NatsChild(secrets.token_urlsafe(32))
            await child.start()
        except (NatsChildError, OSError) as error:
            raise ConfigError(
                f"nats.url is empty, and the embedded NATS server can't be started: {error}"
            ) from error
        self._tasks.spawn(child.keep(), "embedded NATS")
        self.registry.register(NatsChildCollector(child))
        return child.settings(), child.url

    def _made_feed(self, broker: Broker) -> Feed:
        """Facts, heartbeats and fleet commands from NATS to the view and the core."""
        return Feed(
            broker,
            self.view,
            fleet=self.config.fleet.name,
            replica=self.replica,
            clock=self.clock,
            on_heartbeat=self._on_heartbeat,
            on_forgotten=self._on_forgotten,
            on_control=self._on_control,
            on_failure=self._broke,
            rng=self._rng,
        )

    def _on_control(self, control: Control) -> None:
        """A fleet command from NATS; our own come back, and all of them are repeated."""
        if not self.commands.knows(control):
            opened = self.seal.opened(control)
            if opened is not None:
                self.commands.apply(opened)

    def _resync(self, worker_id: str) -> None:
        """Has a worker's relay send all that it holds again, if there is a connection to it."""
        if self.feed is not None:
            self.feed.recover(self.view.resync(worker_id, self.clock()))

    def _on_change(self) -> None:
        """What is reserved here may have changed."""
        if self.link is not None:
            self.link.on_change()

    def _on_heartbeat(self, key: WorkerKey, now_s: float) -> None:
        self.core.on_heartbeat(key, now_s)
        self.desk.turns()

    def _on_forgotten(self, workers: list[WorkerKey], now_s: float) -> None:
        self.core.on_forgotten(workers, now_s)
        self.desk.turns()

    def _made_link(self, peers: Broker) -> PeerLink:
        """Messages between replicas, from desk and reports to NATS and back."""
        return PeerLink(
            peers,
            self.core,
            self.commands,
            fleet=self.config.fleet.name,
            clock=self.clock,
            rng=self._rng,
            tells=self.config.fleet.inflight,
            sealed=self.seal.sealed,
            on_report=self.reports.of_peer,
            on_heard=self.desk.turns,
            demand=self.admission.fleet_turns.demand,
            stopped=lambda: self.admission.fleet_turns.stopped,
            on_failure=self._broke,
        )

    def _register_collectors(self, broker: Broker, peers: Broker, link: PeerLink) -> None:
        """Everything that is read at a scrape, beside what is registered as it begins."""
        for collector in (
            OwnRelaysCollector(self.relays, self.commands, self.seal),
            RouterCollector(self.core, self.clock),
            WorkerCollector(self.core),
            BrokerCollector(broker, peers),
            RelayCollector(self.relays.running),
            PeerCollector(self.core, link, self.clock),
            HotPrefixCollector(self.core),
            QueueCollector(self.admission, self.core.fleet, self.clock),
            KeyCollector(self._followed, self._door),
            PromptCollector(self.prompts, lambda: self.texts.open),
        ):
            self.registry.register(collector)
        if self._state is not None:
            self.registry.register(FleetStateCollector(self._state))
        if self.discovery is not None:
            self.registry.register(DiscoveryCollector(self.discovery))

    async def _listen(self) -> None:
        """Starts gRPC and metrics; raises ConfigError for an address that can't be had."""
        config, state = self.config, self._state
        fleet = FleetService(
            self.core,
            self.clock,
            self._stopping,
            stream_age_s=config.grpc.stream_age_s,
            admission=self.admission,
            commands=self.commands,
            send_control=self._send_control,
            register=self._register_called,
            runs_relay=self.relays.__contains__,
            keep=state.keep if state is not None else None,
            watches_max=config.grpc.watches_max,
        )
        self._grpc = GrpcServer(
            config.grpc,
            RouterService(
                self.desk,
                self.reports,
                self._guard,
                self._stopping,
                texts=self.texts,
                stream_age_s=config.grpc.stream_age_s,
            ),
            fleet,
            certificates=self.certificates,
        )
        await self._grpc.start()
        log.info("gRPC on %s (port %d)", config.grpc.listen, self._grpc.port)
        if config.metrics.listen:
            self._http = MetricsServer(self.registry, config.metrics.listen, self._metrics_tls)
            await self._http.start()
            log.info("metrics on %s (port %d)", config.metrics.listen, self._http.port)
        if self._probes is not None:
            await self._probes.start()
            log.info("probes on %s (port %d)", config.probes.listen, self._probes.port)
        self._tasks.spawn(self._followed.run(), "files of keys")
        if self._door is not None:
            self._tasks.spawn(self._door.run(), "keys of issuers")
        self._faces = OwnFaces(
            config,
            LocalRouter(
                self.texts,
                self.reports,
                self._guard,
                fleet.feed.list,
                rng=random.Random(self._rng.random()),
            ),
            self.registry,
            clock=self.clock,
            broke=self._broke,
            certificates=self.certificates,
            door=self._door,
        )

    async def run(self) -> int:
        """Serves until SIGTERM or SIGINT; returns the exit code. A second one ends it at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        try:
            await self.start()
            await self._stop.wait()
        finally:
            await self.stop()
        if self.failed is None:
            return 0
        # Once more as the last line: what was logged when it failed is far above by now.
        log.critical("stopped with exit code 1: %s", named(self.failed))
        return 1

    async def stop(self) -> None:
        """Drains, then stops everything. Safe after a start that failed half way."""
        log.info("draining")
        if self._faces is not None:
            await self._faces.stop()  # first: their open requests still report to this router
        self._stopping.set()
        self.desk.close()
        if self._grpc is not None:
            await self._grpc.drain(self.config.drain_timeout_s)
        await self._tasks.close()  # before what they start: relays, and copies of prefixes
        if self.discovery is not None:
            await self.discovery.stop()
        await self.prompts.close()
        await self.relays.stop()
        if self.copy_link is not None:
            await self.copy_link.stop()
        if self.link is not None:
            await self.link.stop()
        if self.feed is not None:
            await self.feed.stop()
        if self._state is not None:
            await self._state.keep()
        if self._http is not None:
            await self._http.stop()
        if self._probes is not None:
            await self._probes.stop()
        await asyncio.to_thread(self.watchers.log.close)
        await asyncio.gather(
            *(link.close() for link in (self.broker, self.peers) if link is not None)
        )
        if self._nats is not None:
            await self._nats.stop()
        log.info("stopped")

    def reload(self) -> None:
        """Reads the configuration again: applies the keys that may change now, logs the others."""
        if self._read_again is None or self._stopping.is_set():
            return
        try:
            config, changed, waiting = reloaded(self.config, self._read_again())
            # All that may fail comes before the first change.
            settings = DecisionSettings.of(config.routing, config.models)
            self.admission.queue.check(config.queue)
            self.watchers.use(config)  # changes nothing if it fails
            self.core.use(settings)
            self.admission.configure(config.queue, self.clock())
        except ConfigError as error:
            self.metrics.config_reloads.labels("failed").inc()
            log.error("configuration not reloaded, all stays as it was: %s", error)
            return
        except Exception:  # a fault of ours, or of a policy of the operator's: we serve on
            self.metrics.config_reloads.labels("failed").inc()
            log.exception("configuration not reloaded")
            return
        self.config = config
        self._use_hot_prefixes(config.routing)
        self.prompts.configure(model_prompts(config.models))
        self.metrics.config_reloads.labels("ok").inc()
        log.info("configuration reloaded; changed: %s", ", ".join(changed) or "nothing")
        if waiting:
            log.warning(
                "changed in the configuration, but only with a restart: %s", ", ".join(waiting)
            )

    def _use_hot_prefixes(self, routing: RoutingSettings) -> None:
        """Starts, stops or changes the copying of hot prefixes."""
        effects = self.core.copy_prefixes(routing.hot_prefixes)
        if self.copy_link is not None:
            self.copy_link.perform(effects)
        elif self.core.hot is not None and self.broker is not None:
            self.copy_link = CopyLink(
                self.broker,
                self.core.hot,
                fleet=self.config.fleet.name,
                replica=self.replica,
                clock=self.clock,
                on_failure=self._broke,
            )

    async def _register_called(self, settings: EngineSettings) -> None:
        """A caller of RegisterWorker names an engine; raises Refusal."""
        check_engine_networks(settings, self._networks)
        await self.register(settings)

    async def register(self, settings: EngineSettings) -> None:
        """Runs a relay for an engine that has none; raises Refusal."""
        self.relays.check_room(settings.id)
        if self.broker is None or not self.broker.connected:
            raise Refusal(Reason.NO_BROKER, "NATS is away", retry_after_s=1.0)
        self.relays.start(self._with_block_size(settings), self.broker, registered=True)

    async def _link(self, peers: Broker, link: PeerLink) -> None:
        await peers.connect()
        await link.start()

    async def _connect(self, broker: Broker, feed: Feed, linked: asyncio.Task[None]) -> None:
        await broker.connect()
        # The link first: of two replicas that start together each has to hear the other's hello,
        # which asks for fleet commands. But a server that refuses the second connection (its limit
        # of connections is reached) keeps no router from its workers.
        await asyncio.wait([linked], timeout=LINK_S)
        await feed.start()
        self._connected_at_s = self.clock()
        for settings in self.config.workers:
            self.relays.start(self._with_block_size(settings), broker, registered=False)
        if self.discovery is not None:
            await asyncio.sleep(PEERS_S)  # or every router would seem to be the first for each pod
            self.discovery.start()

    def _with_block_size(self, settings: EngineSettings) -> EngineSettings:
        """An engine's settings with its model's canonical block size, where it has none itself."""
        if settings.block_size is not None:
            return settings
        for model in self.config.models:
            if settings.model in (model.name, *model.aliases) and model.block_size is not None:
                return msgspec.structs.replace(settings, block_size=model.block_size)
        return settings

    async def _tick(self) -> None:
        while True:
            now_s = self.clock()
            effects = self.core.on_time(now_s)
            expired = effects.expired
            while self.core.behind(now_s):
                await asyncio.sleep(0)  # other calls have a turn between two slices
                expired += self.core.catch_up(now_s)
            if expired:
                self.metrics.reservations_expired.inc(expired)
                log.warning("%d reservations expired: no Report came in time", expired)
            self._perform(effects)
            self.desk.turns()
            if self.core.hot is not None and self.copy_link is not None:
                self.copy_link.tick()
            self.relays.tick()
            self._warn(now_s)
            if not self.ready and self._is_ready(now_s) and self._grpc is not None:
                self.core.fleet.ready = True
                await self._grpc.set_serving(ready=True)
            for _ in range(JUDGED_A_TICK):
                await asyncio.sleep(TICK_S / JUDGED_A_TICK)
                self.core.fleet.outliers.judge(self.clock())
                self.desk.turns()

    def _perform(self, effects: Effects) -> None:
        """Does what the core wants done since time went by."""
        for pull in effects.resyncs:
            log.warning("%s: its engine reuses less than the index says", pull.worker)
        if effects.resyncs and self.feed is not None:
            self.feed.recover(effects.resyncs)
        for line in effects.news:
            log.warning("%s", line)

    def _warn(self, now_s: float) -> None:
        """Says now and then what an operator should mend."""
        if now_s - self._warned_at_s < WARN_S:
            return
        self._warned_at_s = now_s
        if error := self.core.decider.take_policy_error():
            log.warning("%s; the default policy decided", error)
        current = (
            (key, warning)
            for key, source in self.view.sources.items()
            for warning in self.core.fleet.warnings(source, now_s)
        )
        for line in self._warning_log.lines(current, now_s):
            log.warning("%s", line)

    def _is_ready(self, now_s: float) -> bool:
        """Whether the index can be trusted, or we have waited long enough for it."""
        sources = self.view.sources.values()
        streams = [source.stream for source in sources]
        complete = self._connected_at_s is not None and (
            now_s - self._connected_at_s >= HELLO_GRACE_S
        )
        known = {source.key.worker_id for source in sources}
        complete = complete and all(
            worker.id in known or self.commands.removed(worker.id) for worker in self.config.workers
        )
        if self.discovery is not None:
            complete = complete and self.discovery.settled(self.discovered.knows)
        if complete and streams and all(stream.state is StreamState.LIVE for stream in streams):
            log.info("ready: %s", self.view.summary())
            return True
        if now_s - self._started_at_s >= self.config.ready_timeout_s:
            log.warning(
                "ready after ready_timeout_s, though not every stream is trusted: %s",
                self.view.summary(),
            )
            return True
        return False

    async def _send_control(self, control: Control) -> bool:
        sealed = self.seal.sealed(control)
        return self.feed is not None and await self.feed.send_control(sealed)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            log.warning("second signal: leaving at once")
            raise SystemExit(130)
        self._stop.set()

    def _broke(self, error: BaseException) -> None:
        self.failed = error
        self._stop.set()


def _watcher_failed(error: Exception) -> None:
    """A fault of ours, which no request pays for."""
    log.error("looking at a decision failed; the next ones are only counted", exc_info=error)


def checked_broker(settings: NatsSettings, url: str, name: str) -> Broker:
    """A connection yet to be made; raises ConfigError for one that never could be."""
    broker = Broker(settings, url, name)
    try:
        if broker.check():
            log.warning(
                "nats.allow_plaintext is set: the network can read all that goes to and from %s,"
                " credentials and prompts included",
                without_secret(url),
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"nats: {error}") from error
    return broker


def check_engine(settings: EngineSettings) -> None:
    """Raises ConfigError when an engine can never be followed as it is configured."""
    if error := unusable(settings):
        raise ConfigError(f"worker {settings.id!r}: {error}")


def checked_file(name: str, key: str) -> Path:
    """A file that can be written in its folder; raises ConfigError."""
    path = Path(name)
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"can't write to {name} - at `$.{key}`")
    return path
