"""The listening sockets of one router: gRPC, metrics, probes, the gateway and Envoy's picker."""

import asyncio
import logging
from collections.abc import Callable

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


class Listeners:
    """The sockets of one router, each if configured. A port is 0 until it listens."""

    def __init__(
        self,
        config: ServeConfig,
        locks: Locks,
        registry: CollectorRegistry,
        *,
        clock: Callable[[], float],
        serving: Callable[[], bool],
        broke: Callable[[BaseException], None],
        pages: ConsolePages | None = None,
        tracing: Tracing | None = None,
        accesses: EngineAccesses | None = None,
    ) -> None:
        """serving: returns whether new calls are taken. pages: of the console, on the port of the
        metrics. tracing: spans of requests at the gateway and the picker. accesses: credentials for
        engines.
        """
        self.grpc_port = self.metrics_port = self.probes_port = 0
        self.gateway_port = self.picker_port = 0
        self.pages = pages
        self._config = config
        self._locks = locks
        self._registry = registry
        self._clock = clock
        self._serving = serving
        self._broke = broke
        self._tracing = tracing
        self._accesses = accesses
        self._bounds = HttpBounds.of(config.http)
        self._grpc: GrpcServer | None = None
        self._http: list[MetricsServer | ProbeServer] = []
        self._own: list[Gateway | PickerServer] = []
        """The gateway and the picker, which call this router."""

    async def start(
        self, router: RouterService, fleet: FleetService, local: Router, tasks: Tasks
    ) -> None:
        """Listens on all configured addresses. local: the router as the gateway and the picker call
        it. Raises ConfigError for an address that can't be used.
        """
        config, locks = self._config, self._locks
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
            probes = ProbeServer(config.probes.listen, self._serving, self._bounds)
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
        export(self._registry, http_metrics, *ports)

    async def _start_metrics(self, of_gateway: CollectorRegistry, tasks: Tasks) -> None:
        listen, pages = self._config.metrics.listen, self.pages
        metrics = MetricsServer(
            self._registry,
            listen,
            self._bounds,
            self._locks.metrics_tls,
            also=None if pages is None else pages.add_to,
        )
        metrics.scrapes.add(of_gateway)
        self._http.append(metrics)
        await metrics.start()
        self.metrics_port = metrics.port
        log.info("metrics on %s (port %d)", listen, metrics.port)
        if pages is not None:
            export(self._registry, console_metrics, pages)
            tasks.spawn(pages.console.run(), "console")
            log.info("console at /console/ on the same port")

    async def _start_gateway(self, local: Router, registry: CollectorRegistry) -> None:
        config, locks = self._config, self._locks
        gateway = Gateway(
            config.gateway,
            local,
            registry,
            clock=self._clock,
            broke=self._broke,
            bounds=self._bounds,
            certificates=locks.certificates,
            door=locks.door,
            tracing=self._tracing,
            accesses=self._accesses,
            requests=config.requests,
        )
        self._own.append(gateway)
        await gateway.start()
        self.gateway_port = gateway.port
        log.info("HTTP for OpenAI's clients on port %d", gateway.port)

    async def _start_picker(self, local: Router) -> Connections:
        picker = PickerServer(
            self._config.picker,
            local,
            self._registry,
            clock=self._clock,
            broke=self._broke,
            bounds=self._bounds,
            certificates=self._locks.certificates,
            tracing=self._tracing,
            requests=self._config.requests,
        )
        self._own.append(picker)
        await picker.start()
        self.picker_port = picker.port
        log.info("ext_proc for Envoy on port %d", picker.port)
        return picker.connections

    def set_serving(self) -> None:
        """Sets the health service to SERVING."""
        if self._grpc is not None:
            self._grpc.set_serving(ready=True)

    async def stop_own_ports(self) -> None:
        """Stops the gateway and the picker after their open requests."""
        await asyncio.gather(*(port.stop() for port in self._own))

    async def drain(self) -> None:
        """Stops gRPC after its open calls, or after drain_timeout_s."""
        if self._grpc is not None:
            await self._grpc.drain(self._config.drain_timeout_s)

    async def stop(self) -> None:
        """Stops metrics, the console and probes."""
        if self.pages is not None:
            self.pages.console.stop()
        for server in self._http:
            await server.stop()
