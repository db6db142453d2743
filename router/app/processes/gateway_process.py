"""The process of `kvroute gateway`: a gateway without a router."""

from typing_extensions import override

from events.plane.clock import unix_now
from router.app.processes.port_process import PortApp
from router.config.settings.configurations import GatewayConfig
from router.gateway.server.gateway import Gateway
from router.net.keys.certificates import Certificates
from router.net.keys.door import Door
from router.net.keys.engine_accesses import EngineAccesses
from router.net.listener.http_bounds import HttpBounds


class GatewayApp(PortApp):
    """One gateway process."""

    service = "kvroute-gateway"

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError for a configuration that can't be used, such as unreadable files."""
        super().__init__(config)
        certificates = Certificates.of(config.tls)
        self.gateway = Gateway(
            config.gateway,
            self.client,
            self.registry,
            clock=unix_now,
            broke=self._broke,
            bounds=HttpBounds.of(config.http),
            certificates=certificates,
            door=Door.of(config.keys, certificates, clock=unix_now),
            tracing=self.tracing.spans,
            accesses=EngineAccesses.of(config.engines, config.gateway),
            requests=config.requests,
        )

    @override
    async def start(self) -> str:
        await self.gateway.start()
        return f"HTTP on port {self.gateway.port}"

    @override
    async def stop(self) -> None:
        await self.gateway.stop()
