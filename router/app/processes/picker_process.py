"""The process of `kvroute picker`: an endpoint picker for Envoy, without a router."""

from typing_extensions import override

from events.plane.clock import unix_now
from router.app.processes.port_process import PortApp
from router.config.settings.configurations import PickerConfig
from router.gateway.picker.server import PickerServer
from router.net.keys.certificates import Certificates, metrics_tls
from router.net.listener.http_bounds import HttpBounds
from router.observe.metrics.families import export
from router.observe.metrics.of_http import http_metrics
from router.observe.metrics.ports import MetricsServer, ProbeServer


class PickerApp(PortApp):
    """One picker process."""

    service = "kvroute-picker"

    def __init__(self, config: PickerConfig) -> None:
        """Raises ConfigError for a configuration that can't be used, such as unreadable files."""
        super().__init__(config)
        certificates, bounds = Certificates.of(config.tls), HttpBounds.of(config.http)
        self.picker = PickerServer(
            config.picker,
            self.client,
            self.registry,
            clock=unix_now,
            broke=self._broke,
            bounds=bounds,
            certificates=certificates,
            tracing=self.tracing.spans,
            requests=config.requests,
        )
        self._http: list[MetricsServer | ProbeServer] = []
        self._probes: ProbeServer | None = None
        if config.metrics.listen:
            tls = metrics_tls(config.metrics, certificates)
            metrics = MetricsServer(self.registry, config.metrics.listen, bounds, tls)
            self._http.append(metrics)
        if listen := config.probes.listen:
            self._probes = ProbeServer(listen, lambda: self.picker.ready, bounds)
            self._http.append(self._probes)
        ports = [server.connections for server in (self.picker, *self._http)]
        export(self.registry, http_metrics, *ports)

    @property
    def probes_port(self) -> int:
        """Port of the probes; 0: there is none."""
        return 0 if self._probes is None else self._probes.port

    @override
    async def start(self) -> str:
        await self.picker.start()
        for server in self._http:
            await server.start()
        return f"ext_proc on port {self.picker.port}"

    @override
    async def stop(self) -> None:
        await self.picker.stop()  # probes are answered until its last request ends
        for server in self._http:
            await server.stop()
