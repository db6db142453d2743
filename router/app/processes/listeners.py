"""The listening sockets of one router: gRPC, metrics, probes, the gateway and Envoy's picker."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from events.plane.tasks import Tasks
from router.api.service.fleet_service import FleetService
from router.api.service.router_service import RouterService
from router.api.service.server import GrpcServer
from router.app.processes.locks import Locks
from router.config.settings.configurations import ServeConfig
from router.gateway.picker.server import PickerServer
from router.gateway.routers import Router
from router.gateway.server.gateway import Gateway
from router.net.keys.engine_accesses import EngineAccesses
from router.net.listener.connections import Connections
from router.net.listener.http_bounds import HttpBounds
from router.observe.console.collector import console_metrics
from router.observe.console.pages import ConsolePages
from router.observe.metrics.families import export
from router.observe.metrics.of_http import http_metrics
from router.observe.metrics.ports import MetricsServer, ProbeServer
from router.observe.tracing.spans import Tracing

log = logging.getLogger("kvroute")


@dataclass(kw_only=True, eq=False)
class Listeners:
    """The listening sockets of one router, each if configured. A port is 0 until its socket
    listens."""

    config: ServeConfig
    locks: Locks
    registry: CollectorRegistry
    clock: Callable[[], float]
    serving: Callable[[], bool]
    """Returns whether new calls are taken."""
    broke: Callable[[BaseException], None]
    pages: ConsolePages | None = None
    """Pages of the console, served on the port of the metrics; None: no console."""
    tracing: Tracing | None = None
    """Makes spans of requests at the gateway and the picker; None: no spans."""
    accesses: EngineAccesses | None = None
    """Credentials for engines."""
    grpc_port: int = 0
    metrics_port: int = 0
    probes_port: int = 0
    gateway_port: int = 0
    picker_port: int = 0
    _grpc: GrpcServer | None = None
    _http: list[MetricsServer | ProbeServer] = field(default_factory=list)
    _own: list[Gateway | PickerServer] = field(default_factory=list)
    """The gateway and the picker, which call this router."""

    def __post_init__(self) -> None:
        self._bounds = HttpBounds.of(self.config.http)

    async def start(
        self, router: RouterService, fleet: FleetService, local: Router, tasks: Tasks
    ) -> None:
        """Listens on all configured addresses. local: the router as the gateway and the picker call
        it. Raises ConfigError for an address that can't be used.
        """
        config, locks = self.config, self.locks
        self._grpc = grpc = GrpcServer(
            config.grpc, router, fleet, certificates=locks.certificates, http=self._bounds
        )
        await grpc.start()
        self.grpc_port = grpc.port
        log.info("gRPC on %s (port %d)", config.grpc.listen, grpc.port)
        of_gateway = CollectorRegistry()  # some of its metrics have names of the router's
        if config.metrics.listen:
            await self._start_metrics(of_gateway, tasks)
        if config.probes.listen:
            probes = ProbeServer(config.probes.listen, self.serving, self._bounds)
            self._http.append(probes)
            await probes.start()
            self.probes_port = probes.port
            log.info("probes on %s (port %d)", config.probes.listen, probes.port)
        tasks.spawn(locks.followed.run(), "files of keys")
        if locks.door is not None:
            tasks.spawn(locks.door.run(), "keys of issuers")
        # The gateway's connections are in its own registry.
        ports = [server.connections for server in (grpc, *self._http)]
        if config.gateway.listen:
            await self._start_gateway(local, of_gateway)
        if config.picker.listen:
            ports.append(await self._start_picker(local))
        export(self.registry, http_metrics, *ports)

    async def _start_metrics(self, of_gateway: CollectorRegistry, tasks: Tasks) -> None:
        listen, pages = self.config.metrics.listen, self.pages
        metrics = MetricsServer(
            self.registry,
            listen,
            self._bounds,
            self.locks.metrics_tls,
            also=None if pages is None else pages.add_to,
        )
        metrics.scrapes.add(of_gateway)
        self._http.append(metrics)
        await metrics.start()
        self.metrics_port = metrics.port
        log.info("metrics on %s (port %d)", listen, metrics.port)
        if pages is not None:
            export(self.registry, console_metrics, pages)
            tasks.spawn(pages.console.run(), "console")
            log.info("console at /console/ on the same port")

    async def _start_gateway(self, local: Router, registry: CollectorRegistry) -> None:
        config, locks = self.config, self.locks
        gateway = Gateway(
            config.gateway,
            local,
            registry,
            clock=self.clock,
            broke=self.broke,
            bounds=self._bounds,
            certificates=locks.certificates,
            door=locks.door,
            tracing=self.tracing,
            accesses=self.accesses,
            requests=config.requests,
        )
        self._own.append(gateway)
        await gateway.start()
        self.gateway_port = gateway.port
        log.info("HTTP for OpenAI's clients on port %d", gateway.port)

    async def _start_picker(self, local: Router) -> Connections:
        picker = PickerServer(
            self.config.picker,
            local,
            self.registry,
            clock=self.clock,
            broke=self.broke,
            bounds=self._bounds,
            certificates=self.locks.certificates,
            tracing=self.tracing,
            requests=self.config.requests,
        )
        self._own.append(picker)
        await picker.start()
        self.picker_port = picker.port
        log.info("ext_proc for Envoy on port %d", picker.port)
        return picker.connections

    def set_serving(self) -> None:
        """Sets gRPC's health service to SERVING."""
        if self._grpc is not None:
            self._grpc.set_serving(ready=True)

    async def stop_own_ports(self) -> None:
        """Stops the gateway and the picker after their open requests."""
        await asyncio.gather(*(port.stop() for port in self._own))

    async def drain(self) -> None:
        """Stops gRPC when its open calls have ended, after drain_timeout_s at the latest."""
        if self._grpc is not None:
            await self._grpc.drain(self.config.drain_timeout_s)

    async def stop(self) -> None:
        """Stops metrics, the console and probes."""
        if self.pages is not None:
            self.pages.console.stop()
        for server in self._http:
            await server.stop()
