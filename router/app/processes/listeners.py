"""The listening sockets of one router: gRPC, metrics, probes, the gateway and Envoy's picker."""

import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from events.plane.tasks import Tasks
from router.api.service.fleet_service import FleetService
from router.api.service.router_service import RouterService
from router.api.service.server import GrpcServer
from router.app.processes.console_port import ConsolePort
from router.app.processes.locks import Locks
from router.app.processes.own_ports import OwnPorts
from router.config.settings.configurations import ServeConfig
from router.gateway.routers import Router
from router.net.keys.engine_accesses import EngineAccesses
from router.net.listener.http_bounds import HttpBounds
from router.observe.console.console import Console
from router.observe.metrics.http import MetricsServer
from router.observe.metrics.of_http import HttpCollector
from router.observe.metrics.probes import ProbeServer
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
        console: ConsolePort | None = None,
        tracing: Tracing | None = None,
        accesses: EngineAccesses | None = None,
    ) -> None:
        """serving: returns whether new calls are taken. console: on the port of the metrics.
        tracing: spans of requests at the gateway and the picker. accesses: credentials for engines.
        Raises ConfigError for an invalid address.
        """
        self._config = config
        self._locks = locks
        self._registry = registry
        self._clock = clock
        self._broke = broke
        self._console = console
        self._grpc: GrpcServer | None = None
        self._http: MetricsServer | None = None
        self._probes: ProbeServer | None = None
        if config.probes.listen:
            self._probes = ProbeServer(config.probes.listen, serving, HttpBounds.of(config.http))
        self._own_ports: OwnPorts | None = None
        self._tracing = tracing
        self._accesses = accesses

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
    def console(self) -> Console | None:
        """The console; None: it is off."""
        return None if self._console is None else self._console.console

    @property
    def gateway_port(self) -> int:
        return self._own_ports.gateway_port if self._own_ports is not None else 0

    @property
    def picker_port(self) -> int:
        """Port of Envoy's endpoint picker."""
        return self._own_ports.picker_port if self._own_ports is not None else 0

    async def start(
        self, router: RouterService, fleet: FleetService, local: Router, tasks: Tasks
    ) -> None:
        """Listens on all configured addresses. local: the router as the gateway and the picker call
        it. Raises ConfigError for an address that can't be used.
        """
        config, locks = self._config, self._locks
        self._grpc = GrpcServer(
            config.grpc,
            router,
            fleet,
            certificates=locks.certificates,
            http=HttpBounds.of(config.http),
        )
        await self._grpc.start()
        log.info("gRPC on %s (port %d)", config.grpc.listen, self._grpc.port)
        if config.metrics.listen:
            console = self._console
            self._http = MetricsServer(
                self._registry,
                config.metrics.listen,
                HttpBounds.of(config.http),
                locks.metrics_tls,
                also=None if console is None else console.pages.add_to,
            )
            await self._http.start()
            log.info("metrics on %s (port %d)", config.metrics.listen, self._http.port)
            if console is not None:
                self._registry.register(console.collector)
                tasks.spawn(console.console.run(), "console")
                log.info("console at /console/ on the same port")
        if self._probes is not None:
            await self._probes.start()
            log.info("probes on %s (port %d)", config.probes.listen, self._probes.port)
        tasks.spawn(locks.followed.run(), "files of keys")
        if locks.door is not None:
            tasks.spawn(locks.door.run(), "keys of issuers")
        self._own_ports = OwnPorts(
            config,
            local,
            self._registry,
            clock=self._clock,
            broke=self._broke,
            certificates=locks.certificates,
            door=locks.door,
            tracing=self._tracing,
            accesses=self._accesses,
        )
        if self._http is not None:
            self._http.add(self._own_ports.gateway_registry)
        servers = (self._grpc, self._http, self._probes)
        ports = [server.connections for server in servers if server is not None]
        self._registry.register(HttpCollector(*ports, *self._own_ports.connections))
        await self._own_ports.start()

    def set_serving(self) -> None:
        """Sets the health service to SERVING."""
        if self._grpc is not None:
            self._grpc.set_serving(ready=True)

    async def stop_own_ports(self) -> None:
        """Stops the gateway and the picker after their open requests."""
        if self._own_ports is not None:
            await self._own_ports.stop()

    async def drain(self) -> None:
        """Stops gRPC after its open calls, or after drain_timeout_s."""
        if self._grpc is not None:
            await self._grpc.drain(self._config.drain_timeout_s)

    async def stop(self) -> None:
        """Stops metrics, the console and probes."""
        if self._console is not None:
            self._console.console.stop()
        if self._http is not None:
            await self._http.stop()
        if self._probes is not None:
            await self._probes.stop()
