"""The gateway and Envoy's endpoint picker inside a router's process, each if configured."""

import asyncio
import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from router.config.settings.configurations import ServeConfig
from router.gateway.picker.server import PickerServer
from router.gateway.routers import Router
from router.gateway.server.gateway import Gateway
from router.net.keys.certificates import Certificates
from router.net.keys.door import Door
from router.net.keys.engine_accesses import EngineAccesses
from router.net.listener.connections import Connections
from router.net.listener.http_bounds import HttpBounds
from router.observe.tracing.spans import Tracing

log = logging.getLogger("kvroute")


class OwnPorts:
    """The gateway and the picker of one router."""

    def __init__(
        self,
        config: ServeConfig,
        router: Router,
        registry: CollectorRegistry,
        *,
        clock: Callable[[], float],
        broke: Callable[[BaseException], None],
        certificates: Certificates | None,
        door: Door | None,
        tracing: Tracing | None = None,
        accesses: EngineAccesses | None = None,
    ) -> None:
        """registry: of the router's and the picker's metrics. Raises ConfigError."""
        self.gateway_registry = CollectorRegistry()
        """The gateway's own metrics, some of which have names of the router's."""
        self._gateway: Gateway | None = None
        if config.gateway.listen:
            self._gateway = Gateway(
                config.gateway,
                router,
                self.gateway_registry,
                clock=clock,
                broke=broke,
                bounds=HttpBounds.of(config.http),
                certificates=certificates,
                door=door,
                tracing=tracing,
                accesses=accesses,
                requests=config.requests,
            )
        self._picker: PickerServer | None = None
        if config.picker.listen:
            self._picker = PickerServer(
                config.picker,
                router,
                registry,
                clock=clock,
                broke=broke,
                bounds=HttpBounds.of(config.http),
                certificates=certificates,
                tracing=tracing,
                requests=config.requests,
            )

    @property
    def gateway_port(self) -> int:
        """Port of the gateway; 0: there is none."""
        return self._gateway.port if self._gateway is not None else 0

    @property
    def picker_port(self) -> int:
        """Port of the picker; 0: there is none."""
        return self._picker.port if self._picker is not None else 0

    @property
    def connections(self) -> tuple[Connections, ...]:
        """Connections of the picker, if there is one; the gateway's metrics are on its own port."""
        return () if self._picker is None else (self._picker.connections,)

    async def start(self) -> None:
        """Listens; raises ConfigError when an address can't be used."""
        if self._gateway is not None:
            await self._gateway.start()
            log.info("HTTP for OpenAI's clients on port %d", self._gateway.port)
        if self._picker is not None:
            await self._picker.start()
            log.info("ext_proc for Envoy on port %d", self._picker.port)

    async def stop(self) -> None:
        """Stops the gateway and the picker after their open requests."""
        ports = (self._gateway, self._picker)
        await asyncio.gather(*(port.stop() for port in ports if port is not None))
