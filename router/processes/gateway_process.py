"""`kvroute gateway`: a gateway in a process of its own."""

import asyncio
import logging
import signal

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector

from events.plane.clock import unix_now
from events.plane.tasks import named
from router.config.configurations import GatewayConfig
from router.config.keys import ConfigError
from router.config.rendering import render
from router.desk.counters import kvroute_version
from router.front.gateway.gateway import Gateway
from router.keys.certificates import Certificates
from router.keys.dialing import dial_options
from router.keys.door import Door

log = logging.getLogger("kvroute")


class GatewayApp:
    """One gateway process."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError for what only this process can find wrong."""
        self._config = config
        self._stop = asyncio.Event()
        self._failed: BaseException | None = None
        registry = CollectorRegistry()
        build = Gauge("kvroute_build_info", "Always 1.", ["version"], registry=registry)
        build.labels(kvroute_version()).set(1)
        ProcessCollector(registry=registry)
        routers = [target.strip() for target in config.router.split(",")]
        try:
            certificates = Certificates.of(config.tls)
            door = Door.of(config.keys, certificates, clock=unix_now)
            self.gateway = Gateway(
                config.gateway,
                routers,
                registry,
                clock=unix_now,
                broke=self._broke,
                certificates=certificates,
                door=door,
                dial=dial_options(config.to_router, unix_now),
            )
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{error} - at `$.router`") from error

    async def run(self) -> int:
        """Serves until SIGTERM or SIGINT, then ends its open requests; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        log.info("configuration:\n%s", render(self._config).rstrip())
        try:
            await self.gateway.start()
            log.info("HTTP on port %d, routers at %s", self.gateway.port, self._config.router)
            await self._stop.wait()
            log.info("stopping")
        finally:
            await self.gateway.stop()
        if self._failed is None:
            return 0
        log.critical("stopped with exit code 1: %s", named(self._failed))
        return 1

    def _broke(self, error: BaseException) -> None:
        self._failed = error
        self._stop.set()
