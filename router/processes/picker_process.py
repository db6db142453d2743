"""`kvroute epp`: an endpoint picker for Envoy in a process of its own."""

import asyncio
import logging
import signal

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector

from events.plane.clock import unix_now
from events.plane.tasks import named
from router.config.configurations import PickerConfig
from router.config.keys import ConfigError
from router.config.rendering import render
from router.desk.counters import kvroute_version
from router.front.picker.server import PickerServer
from router.keys.certificates import Certificates, metrics_tls
from router.keys.dialing import dial_options
from router.metrics.http import MetricsServer

log = logging.getLogger("kvroute")


class PickerApp:
    """One picker process."""

    def __init__(self, config: PickerConfig) -> None:
        """Raises ConfigError for what only this process can find wrong."""
        self._config = config
        self._stop = asyncio.Event()
        self._failed: BaseException | None = None
        registry = CollectorRegistry()
        build = Gauge("kvroute_build_info", "Always 1.", ["version"], registry=registry)
        build.labels(kvroute_version()).set(1)
        ProcessCollector(registry=registry)
        routers = [target.strip() for target in config.router.split(",")]
        certificates = Certificates.of(config.tls)
        try:
            self.picker = PickerServer(
                config.epp,
                routers,
                registry,
                clock=unix_now,
                broke=self._broke,
                certificates=certificates,
                dial=dial_options(config.to_router, unix_now),
            )
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{error} - at `$.router`") from error
        self._http: MetricsServer | None = None
        if config.metrics.listen:
            tls = metrics_tls(config.metrics, certificates)
            self._http = MetricsServer(registry, config.metrics.listen, tls)

    async def run(self) -> int:
        """Serves until SIGTERM or SIGINT, then ends its open requests; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        log.info("configuration:\n%s", render(self._config).rstrip())
        try:
            await self.picker.start()
            if self._http is not None:
                await self._http.start()
            log.info("ext_proc on port %d, routers at %s", self.picker.port, self._config.router)
            await self._stop.wait()
            log.info("stopping")
        finally:
            await self.picker.stop()
            if self._http is not None:
                await self._http.stop()
        if self._failed is None:
            return 0
        log.critical("stopped with exit code 1: %s", named(self._failed))
        return 1

    def _broke(self, error: BaseException) -> None:
        self._failed = error
        self._stop.set()
