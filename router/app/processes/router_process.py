"""The process of `kvroute serve`: assembles the parts of a router, starts and stops them in order.

NATS (embedded or external) -> links -> view -> core <- desk, reports <- listeners
                               relays in a child process, for configured workers
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

import msgspec
from prometheus_client import CollectorRegistry

from events.feed.fleet_view import FleetView
from events.plane.broker import Broker
from events.plane.clock import unix_now
from events.plane.settings import EngineSettings
from events.plane.tasks import Tasks, named
from indexer.kernel import NativeIndex
from router.api.desk.counters import Metrics
from router.api.desk.desk import Desk
from router.api.desk.reports import Reports
from router.api.service.calls import Guard
from router.api.service.fleet_service import FleetService
from router.api.service.grpc_bounds import GRPC_BOUNDS
from router.api.service.local_router import LocalRouter
from router.api.service.router_service import RouterService
from router.api.service.texts import Texts
from router.api.service.workers_to_ask import proof_trouble, tokens_trouble
from router.app.processes.checks import (
    check_engine,
    check_extras,
    check_files,
    checked_broker,
    checked_file,
)
from router.app.processes.console_port import console_pages
from router.app.processes.descriptors import raise_limit
from router.app.processes.discovered import DiscoveredWorkers
from router.app.processes.listeners import Listeners
from router.app.processes.locks import Locks
from router.app.processes.model_prompts import model_prompts
from router.app.processes.nats_links import NatsLinks
from router.app.processes.process_tracing import ProcessTracing
from router.app.processes.risks import log_risks
from router.app.processes.router_clock import RouterClock
from router.cluster.children.own_relays import OwnRelays
from router.cluster.children.relay_messages import Opening
from router.cluster.discovery.kubernetes import KubernetesDiscovery, NoApi
from router.cluster.replicas.fleet_commands import FleetCommands
from router.cluster.replicas.replica_link import ReplicaLink
from router.cluster.replicas.saved_commands import FleetState
from router.config.keys import ConfigError
from router.config.reload import reloaded
from router.config.rendering import brief
from router.config.settings.configurations import ServeConfig
from router.decide.core.admission import Admission
from router.decide.core.core import RouterCore
from router.decide.policies.configured import DecisionSettings, shadow_policy
from router.fleet.health.warnings import WarningCode
from router.net.keys.engine_accesses import EngineAccesses
from router.net.keys.networks import check_engine_networks
from router.observe.audit.observers import Watchers
from router.observe.metrics.families import export
from router.observe.metrics.of_audit import watch_metrics
from router.observe.metrics.of_copies import hot_prefix_metrics
from router.observe.metrics.of_discovery import discovery_metrics
from router.observe.metrics.of_fleet import fleet_metrics
from router.observe.metrics.of_keys import key_metrics
from router.observe.metrics.of_prompts import prompt_metrics
from router.observe.metrics.of_queue import queue_metrics
from router.observe.metrics.of_relays import (
    broker_metrics,
    nats_child_metrics,
    own_relay_metrics,
    relay_metrics,
)
from router.observe.metrics.of_replicas import replica_metrics, saved_command_metrics
from router.observe.metrics.of_workers import worker_metrics
from router.request.refusal import Reason, Refusal
from router.request.tokens import Prompts

REPLICAS_S = 1.2
"""Seconds in which other replicas, which send a message each second, become known."""

log = logging.getLogger("kvroute")


class RouterApp:
    """One router process.

    Every part of the process is made here, after the parts that it needs, and started, reloaded and
    stopped.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        clock: Callable[[], float] = unix_now,
        read_again: Callable[[], ServeConfig] | None = None,
        seed: int | None = None,
    ) -> None:
        """Raises ConfigError for a configuration that can't be used, such as unreadable files.

        read_again: reads the configuration again, for SIGHUP. seed: seeds the draws between workers
        of equal cost, for a test; None: a random seed.
        """
        check_files(config)
        check_extras(config.models)
        for worker in config.workers:
            check_engine(worker)
        if config.nats.url is not None:
            checked_broker(config.nats, config.nats.url, "")
        self.locks = locks = Locks(config)
        self.config = config
        routing = config.routing
        self._read_again = read_again
        self.clock = clock
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()[:40])
        self.replica = f"{host}-{secrets.token_hex(4)}"  # replica_link.REPLICA_NAME
        self._rng = random.Random(seed)  # None: by the system's
        self.view = FleetView(
            NativeIndex(config.index.bytes_max(), config.index.blocks_max()),
            workers_max=config.fleet.workers_max,
            approximate_ttl_s=routing.approximate_ttl_s,
        )
        self.watchers = Watchers(self.replica, random.Random(), _watcher_failed)
        self.accesses = EngineAccesses.of(config.engines, config.gateway, config.workers)
        if not config.gateway.listen:  # it follows them itself
            locks.followed.add("engine_key", self.accesses)
        self.relays = OwnRelays(
            self._opening_of_relays, clock=clock, rng=self._rng, accesses=self.accesses
        )
        self.accesses.on_model_missing = self.relays.look_at_models
        self.prompts = Prompts(model_prompts(config.models), access=self.accesses.of_worker)
        self.core = RouterCore(
            self.view,
            routing,
            models=config.models,
            replica=self.replica,
            rng=self._rng,
            random_bytes=os.urandom,
            watched=self.watchers,
            troubles={
                WarningCode.RELAY: lambda source, _: self.relays.trouble(source.key.worker_id),
                WarningCode.TOKENS_DIFFER: tokens_trouble(self.prompts),
                WarningCode.TOKENS_UNPROVEN: proof_trouble(self.prompts),
            },
        )
        self.core.fleet.ready = False
        shadow_policy(routing, self.core.policies)  # raises ConfigError
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.tracing = ProcessTracing(config.tracing, "kvroute-router", self.registry)
        self.metrics.index_bytes_max = config.index.bytes_max()
        export(self.registry, watch_metrics, self.watchers)
        self._guard = Guard.of(routing.prompt_tokens_max, self.metrics, locks.door)
        self.commands = FleetCommands(
            self.core,
            clock,
            on_resync=lambda worker_id: self.links.resync(worker_id),
            on_removed=self.relays.on_removed,
        )
        self.links = NatsLinks(
            config=config,
            core=self.core,
            commands=self.commands,
            clock=clock,
            rng=self._rng,
            broke=self._broke,
        )
        self.admission = Admission(self.core, config.queue, random.Random(self._rng.random()))
        self.desk = Desk(
            self.core,
            self.metrics,
            clock,
            fault=self._guard.fault,
            admission=self.admission,
            soon=lambda call: asyncio.get_running_loop().call_soon(call),
            watch=self.watchers.watch,
            on_change=self.links.on_change,
            tracing=self.tracing.spans,
        )
        self.reports = Reports(
            self.core,
            self.metrics,
            clock,
            self.admission,
            self.desk.changed,
            self.prompts.on_answer,
            replicas=lambda: self.links.link,
        )
        self.texts = Texts(self.desk, self.core, self.prompts)
        self.discovery = self._made_discovery()
        self._state: FleetState | None = None
        if config.fleet.state_file is not None:
            path = checked_file(config.fleet.state_file, "fleet.state_file")
            self._state = FleetState(path, config.fleet.name, self.commands)
        self.failed: BaseException | None = None
        self._stop = asyncio.Event()
        self._leaving = False
        self._stopping = asyncio.Event()
        self._tasks = Tasks(self._broke)
        self._reloading: asyncio.Task[None] | None = None
        self.listeners = Listeners(
            config=config,
            locks=locks,
            registry=self.registry,
            clock=clock,
            serving=lambda: self.serving,
            broke=self._broke,
            pages=console_pages(
                config,
                locks,
                self.core,
                self.admission,
                self.watchers,
                self.metrics,
                connected=lambda: self.links.broker is not None and self.links.broker.connected,
                clock=clock,
            ),
            tracing=self.tracing.spans,
            accesses=self.accesses,
        )
        self._timer = RouterClock(
            config=config,
            core=self.core,
            desk=self.desk,
            links=self.links,
            relays=self.relays,
            commands=self.commands,
            clock=clock,
            discovered=self._discovered,
        )

    def _made_discovery(self) -> KubernetesDiscovery | None:
        """Discovery of pods; None: it is off. Raises ConfigError."""
        config = self.config
        if not config.discovery.kubernetes.enabled:
            return None
        self._pods = DiscoveredWorkers(
            core=self.core,
            relays=self.relays,
            commands=self.commands,
            clock=self.clock,
            broker=lambda: self.links.broker,
            completed=self._with_block_size,
            on_change=self.desk.dispatch,
        )
        try:
            return KubernetesDiscovery(
                config.discovery.kubernetes,
                self._pods,
                replica=self.replica,
                copied_labels=config.routing.compared_labels,
                clock=self.clock,
                rng=random.Random(),
            )
        except NoApi as error:
            raise ConfigError(str(error)) from None

    def _discovered(self) -> bool:
        return self.discovery is None or self.discovery.settled(self._pods.knows)

    @property
    def ready(self) -> bool:
        return self.core.fleet.ready

    @property
    def serving(self) -> bool:
        """Whether new calls are taken: the router is ready, and not about to stop."""
        return self.ready and not self._leaving

    async def start(self) -> None:
        """Starts everything; raises ConfigError when an address or the NATS server can't be used.

        Returns without waiting for an external NATS server: requests are answered meanwhile, with
        UNAVAILABLE as long as no worker is known.
        """
        config = self.config
        log.info("configuration: %s", brief(config))
        log_risks(config)
        raise_limit(config)
        await self.watchers.use(config)
        while config is not self.config:  # a reload came meanwhile
            config = self.config
            await self.watchers.use(config)
        broker, replicas, link = await self.links.open(
            self.desk, self.reports, self.admission, self._tasks
        )
        if self._state is not None:
            self._state.restore()
            self._tasks.spawn(self._state.run(), "fleet state file")
        self.links.use_hot_prefixes(self.config.routing)  # a reload may have come meanwhile
        self._export_metrics(broker, replicas, link)
        await self._listen()
        self._tasks.spawn(self._connect(), "connection to NATS")
        self._tasks.spawn(self._run_clock(), "router clock")
        self.tracing.start()

    def _export_metrics(self, broker: Broker, replicas: Broker, link: ReplicaLink) -> None:
        """Registers the metrics that are computed at each scrape."""
        registry = self.registry
        export(registry, own_relay_metrics, self.relays, self.commands)
        export(registry, fleet_metrics, self.core, self.clock)
        export(registry, worker_metrics, self.core)
        export(registry, broker_metrics, broker, replicas, relays=lambda: self.relays.broker)
        export(registry, relay_metrics, self.relays.running)
        export(registry, replica_metrics, self.core, link, self.clock)
        export(registry, hot_prefix_metrics, self.links.hot)
        export(registry, queue_metrics, self.admission, self.core.fleet, self.clock)
        export(registry, key_metrics, self.locks.followed, self.locks.door)
        export(registry, prompt_metrics, self.prompts, lambda: self.texts.open)
        if self.links.child is not None:
            export(registry, nats_child_metrics, self.links.child)
        if self._state is not None:
            export(registry, saved_command_metrics, self._state)
        if self.discovery is not None:
            export(registry, discovery_metrics, self.discovery)

    async def _listen(self) -> None:
        """Opens every port; raises ConfigError for an address that can't be listened on."""
        state = self._state
        stream_age_s = GRPC_BOUNDS.stream_age_s
        fleet = FleetService(
            self.core,
            self.clock,
            self._stopping,
            stream_age_s=stream_age_s,
            admission=self.admission,
            commands=self.commands,
            send_control=self.links.send_control,
            register=self._register_called,
            runs_relay=self.relays.__contains__,
            keep=state.keep if state is not None else None,
            watchers=self.watchers,
        )
        router = RouterService(
            self.desk,
            self.reports,
            self._guard,
            self._stopping,
            texts=self.texts,
            stream_age_s=stream_age_s,
        )
        local = LocalRouter(
            self.texts,
            self.reports,
            self._guard,
            fleet.feed.list,
            rng=random.Random(self._rng.random()),
        )
        await self.listeners.start(router, fleet, local, self._tasks)

    async def run(self) -> int:
        """Serves until SIGTERM or SIGINT; returns the exit code. A second signal ends the process
        at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        try:
            await self.start()
            await self._stop.wait()
        except ConfigError as error:
            log.critical("%s", error)  # before the lines of the end
            raise
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
        self._leaving = True  # probes say so at once, and every call is served meanwhile
        await self.listeners.stop_own_ports()  # first: their open requests report to this router
        self._stopping.set()
        self.desk.close()
        await self.listeners.drain()
        await self.tracing.stop()
        await self._tasks.close()  # before what they start: relays, and copies of prefixes
        if self.discovery is not None:
            await self.discovery.stop()
        await self.prompts.close()
        await self.relays.stop()
        await self.links.stop()
        if self._state is not None:
            await self._state.keep()
        await self.listeners.stop()
        await asyncio.to_thread(self.watchers.log.close)
        await self.links.close()
        log.info("stopped")

    def _on_hangup(self) -> None:
        """Reloads, in the place of an earlier reload that still waits for the disk."""
        if self._reloading is not None:
            self._reloading.cancel()
        self._reloading = self._tasks.spawn_task(self.reload(), "reload of the configuration")

    async def reload(self) -> None:
        """Reads the configuration again: applies the keys that may change now, logs the others."""
        if self._read_again is None or self._stopping.is_set():
            return
        try:
            config, changed, waiting = reloaded(self.config, self._read_again())
            # All that may fail comes before the first change.
            settings = DecisionSettings.of(config.routing, config.models)
            self.admission.queue.check(config.queue)
            await self.watchers.use(config)  # changes nothing if it fails
            self.core.use(settings)
            self.admission.configure(config.queue, self.clock())
            self.config = config
            self._guard.use(config.routing.prompt_tokens_max)
            self.links.use_hot_prefixes(config.routing)
            self.prompts.configure(model_prompts(config.models))
        except Exception as error:
            self.metrics.reads.labels("config", "failed").inc()
            if isinstance(error, ConfigError):
                log.error("configuration not reloaded, all stays as it was: %s", error)
            else:  # a fault of ours, or of a policy of the operator's: we serve on
                log.exception("configuration not reloaded")
            return
        self.metrics.reads.labels("config", "ok").inc()
        log.info("configuration reloaded; changed: %s", ", ".join(changed) or "nothing")
        if waiting:
            log.warning(
                "changed in the configuration, but only with a restart: %s", ", ".join(waiting)
            )

    async def _register_called(self, settings: EngineSettings) -> None:
        """Runs a relay for an engine that a caller of RegisterWorker named; raises Refusal, also
        for an address outside of fleet.register_networks."""
        check_engine_networks(settings, self.locks.networks)
        await self.register(settings)

    async def register(self, settings: EngineSettings) -> None:
        """Runs a relay for an engine, as RegisterWorker wants; raises Refusal."""
        self.relays.check_room(settings.id)
        self.relays.check_sockets(settings)
        broker = self.links.broker
        if broker is None or not broker.connected:
            raise Refusal(
                Reason.NO_BROKER,
                "the router has no connection to NATS, so it can't run a relay",
                retry_after_s=1.0,
            )
        self.relays.start(self._with_block_size(settings), registered=True)

    def _opening_of_relays(self) -> Opening:
        """The first message to the child process that runs relays: how to connect, and settings."""
        if self.links.server is None:
            raise RuntimeError("a relay was started before NatsLinks.open")
        nats, url = self.links.server
        return Opening(
            f"kvroute relays of router {self.replica}",
            nats,
            url,
            self.config.fleet.name,
            self.config.engines,
            self.config.log,
        )

    async def _connect(self) -> None:
        await self.links.connect(self._tasks)
        for settings in self.config.workers:
            self.relays.start(self._with_block_size(settings), registered=False)
        if self.discovery is not None:
            await asyncio.sleep(
                REPLICAS_S
            )  # or every router would seem to be the first for each pod
            self.discovery.start()

    def _with_block_size(self, settings: EngineSettings) -> EngineSettings:
        """An engine's settings with its model's canonical block size, where it has none itself."""
        if settings.block_size is not None:
            return settings
        for model in self.config.models:
            if settings.model in (model.name, *model.aliases) and model.block_size is not None:
                return msgspec.structs.replace(settings, block_size=model.block_size)
        return settings

    async def _run_clock(self) -> None:
        while True:
            was_ready = self.ready
            await self._timer.tick()
            if self.ready and not was_ready:
                self.listeners.set_serving()
            await self._timer.judge()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            log.warning("second signal: leaving at once")
            raise SystemExit(130)
        self._stop.set()

    def _broke(self, error: BaseException) -> None:
        self.failed = error
        self._stop.set()


def _watcher_failed(error: Exception) -> None:
    """Logs a failure to show a decision to watchers, by which no request fails."""
    log.error(
        "showing a decision to watchers failed; further failures are only counted", exc_info=error
    )
