"""The process of `kvroute relay`: relays beside engines, without a router."""

import asyncio
import errno
import logging
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from events.engines.endpoints import masked
from events.plane.broker import Broker
from events.plane.clock import unix_now
from events.plane.nats_check import on_loopback, without_secret
from events.plane.permissions import beyond_relay
from events.plane.settings import DynamoSettings, NatsSettings
from events.plane.subjects import control
from events.plane.tasks import Tasks, named
from events.relay.dynamo.relay import DynamoRelay
from events.relay.relay import Relay
from router.api.desk.counters import process_metrics
from router.app.processes.checks import check_engine, check_files, checked_broker
from router.app.processes.descriptors import raise_limit
from router.app.processes.risks import log_risks
from router.cluster.children.relay_messages import relay_status
from router.config.keys import ConfigError
from router.config.rendering import brief
from router.config.settings.configurations import RelayConfig
from router.net.keys.certificates import Certificates, metrics_tls
from router.net.keys.engine_accesses import EngineAccesses
from router.net.keys.followed import Followed
from router.net.listener.http_bounds import HttpBounds
from router.observe.metrics.families import export
from router.observe.metrics.of_http import http_metrics
from router.observe.metrics.of_relays import broker_metrics, relay_metrics
from router.observe.metrics.ports import MetricsServer

log = logging.getLogger("kvroute")


class RelayApp:
    """One relay process, for one engine or several, or for a Dynamo fleet."""

    def __init__(self, config: RelayConfig, dynamo: Sequence[DynamoSettings] = ()) -> None:
        """Raises ConfigError for a configuration that can't be used, such as unreadable files."""
        url = _checked_url(config, dynamo)
        self._config = config
        self._stop = asyncio.Event()
        self._failed: BaseException | None = None
        state_dir = _writable(config.state_dir) if config.state_dir else None
        self._tasks = Tasks(self._broke)
        self._broker = checked_broker(config.nats, url, "kvroute relay")
        rng = random.Random()
        accesses = EngineAccesses.of(config.engines, workers=config.workers)
        self._relays = [
            Relay(
                worker,
                self._broker,
                fleet=config.fleet.name,
                clock=unix_now,
                rng=rng,
                state_dir=state_dir,
                access=accesses.of_engine(worker),
                own_numbers=config.engines.numbers,
            )
            for worker in config.workers
        ]
        self._dynamo: list[DynamoRelay] = []
        self._sources: list[Broker | None] = []
        """The connection of each Dynamo relay to its fleet's own NATS server."""
        for settings in dynamo:
            source = _source(settings, allow_plaintext=config.nats.allow_plaintext)
            relay = DynamoRelay(
                settings,
                self._broker,
                source=source,
                fleet=config.fleet.name,
                clock=unix_now,
                rng=rng,
            )
            self._dynamo.append(relay)
            self._sources.append(source)
        registry = CollectorRegistry()
        process_metrics(registry)
        export(registry, relay_metrics, lambda: map(relay_status, self._all))
        export(registry, broker_metrics, self._broker)
        certificates = Certificates.of(config.tls)
        self._followed = Followed()
        self._followed.add("engine_key", accesses)
        if certificates is not None:
            self._followed.add("certificates", certificates)
        self._http = None
        bounds = HttpBounds.of(config.http)
        if config.metrics.listen:
            tls = metrics_tls(config.metrics, certificates)
            self._http = MetricsServer(registry, config.metrics.listen, bounds, tls)
            export(registry, http_metrics, self._http.connections)

    async def run(self) -> int:
        """Relays until SIGTERM or SIGINT; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        log.info("configuration: %s", brief(self._config))
        log_risks(self._config)
        raise_limit(self._config)
        for fleet in self._dynamo:
            log.info("Dynamo fleet: %s", masked(f"{fleet.settings}"))
        try:
            if self._http is not None:
                await self._http.start()
                log.info("metrics on %s", self._config.metrics.listen)
            self._tasks.spawn(self._followed.run(), "files of keys")
            self._tasks.spawn(self._connect(), "connection to NATS")
            await self._stop.wait()
        finally:
            await self._tasks.close()  # first: relays start in them
            for relay in self._all:
                await relay.stop()
            for broker in (self._broker, *self._sources):
                if broker is not None:
                    await broker.close()
            if self._http is not None:
                await self._http.stop()
            log.info("stopped")
        if self._failed is None:
            return 0
        # Once more as the last line: what was logged when it failed is far above by now.
        log.critical("stopped with exit code 1: %s", named(self._failed))
        return 1

    async def _connect(self) -> None:
        await self._broker.connect()
        await self._check_rights()
        for relay in self._relays:
            await relay.start()
        for dynamo, source in zip(self._dynamo, self._sources, strict=True):
            work = self._start_dynamo(dynamo, source)
            self._tasks.spawn(work, f"connection of {dynamo.settings.id}")

    async def _check_rights(self) -> None:
        """Warns when the credentials let this relay send commands to the fleet. Logs without a
        warning when they let it publish for the fleet's other workers alone: then relays share a
        user.

        Skipped where there are no credentials and the server is on loopback.
        """
        nats, fleet = self._config.nats, self._config.fleet.name
        given = nats.user or nats.credentials_file
        if not given and not nats.tls_certificate_file and on_loopback(nats.url or ""):
            return
        excess = await self._broker.allowed(beyond_relay(fleet))
        if excess and all(attempt.subject != control(fleet) for attempt in excess):
            log.info("relays share the NATS user of this one: it may publish for all their workers")
        elif excess:
            log.warning(
                "the NATS credentials of this relay allow more than it needs: it could %s."
                " `kvroute nats-permissions --fleet %s --worker ID` prints what it needs",
                ", ".join(attempt.allows for attempt in excess),
                fleet,
            )

    async def _start_dynamo(self, relay: DynamoRelay, source: Broker | None) -> None:
        """Starts a Dynamo relay once `source`, its fleet's own NATS server, is connected; an absent
        server delays no other relay."""
        if source is not None:
            await source.connect()
        await relay.start()

    @property
    def _all(self) -> list[Relay | DynamoRelay]:
        return [*self._relays, *self._dynamo]

    def _broke(self, error: BaseException) -> None:
        self._failed = error
        self._stop.set()


def _checked_url(config: RelayConfig, dynamo: Sequence[DynamoSettings]) -> str:
    """The URL of the routers' NATS; raises ConfigError for a configuration by which no relay can
    run."""
    if not config.workers and not dynamo:
        raise ConfigError(
            "no engine to relay: give --worker-id and --address, or `workers:` in the file"
        )
    if config.nats.url is None:
        raise ConfigError("a relay needs the routers' NATS: give --nats URL (nats.url)")
    check_files(config)
    if dynamo and config.state_dir:
        raise ConfigError(
            "the relay of a Dynamo fleet saves no blocks, since nothing would show after its"
            " restart which of them the workers removed meanwhile; leave --state-dir out - at"
            " `$.state_dir`"
        )
    for worker in config.workers:
        check_engine(worker)
    return config.nats.url


def _source(settings: DynamoSettings, *, allow_plaintext: bool) -> Broker | None:
    """The connection to a Dynamo fleet's own NATS server; None: the fleet shares the routers'
    server."""
    if settings.nats_url is None:
        return None
    nats = NatsSettings(
        credentials_file=settings.nats_credentials_file, allow_plaintext=allow_plaintext
    )
    broker = checked_broker(nats, settings.nats_url, "kvroute relay of a Dynamo fleet")
    if broker.check():
        log.warning(
            "nats.allow_plaintext is set: the network can read all that goes to and from %s,"
            " credentials included",
            without_secret(settings.nats_url),
        )
    return broker


def _writable(folder: str) -> Path:
    """The folder, made if need be; raises ConfigError when nothing can be written there."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(f"can't write to {folder}: {error.strerror} - at `$.state_dir`") from None
    return path
