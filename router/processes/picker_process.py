"""`kvroute epp`: an endpoint picker for Envoy in a process of its own."""

from typing_extensions import override

from events.plane.clock import unix_now
from router.config.settings.configurations import PickerConfig
from router.front.picker.server import PickerServer
from router.keys.certificates import Certificates, metrics_tls
from router.metrics.http import MetricsServer
from router.metrics.of_http import HttpCollector
from router.processes.face_process import FaceApp


class PickerApp(FaceApp):
    """One picker process."""

    service = "kvroute-epp"

    def __init__(self, config: PickerConfig) -> None:
        """Raises ConfigError for what only this process can find wrong."""
        super().__init__(config)
        certificates = Certificates.of(config.tls)
        self.picker = PickerServer(
            config.epp,
            self.client,
            self.registry,
            clock=unix_now,
            broke=self._broke,
            certificates=certificates,
            tracing=self.tracing.spans,
        )
        self._http: MetricsServer | None = None
        if config.metrics.listen:
            tls = metrics_tls(config.metrics, certificates)
            self._http = MetricsServer(self.registry, config.metrics.listen, config.http, tls)
            self.registry.register(HttpCollector(self._http.connections))

    @override
    async def start(self) -> str:
        await self.picker.start()
        if self._http is not None:
            await self._http.start()
        return f"ext_proc on port {self.picker.port}"

    @override
    async def stop(self) -> None:
        await self.picker.stop()
        if self._http is not None:
            await self._http.stop()
