"""Common part of the gateway's and the picker's process: client of routers, registry, signals."""

import asyncio
import logging
import signal
from abc import ABC, abstractmethod

from prometheus_client import CollectorRegistry

from events.plane.clock import unix_now
from events.plane.tasks import named
from kvroute.client import KvRouteClient
from router.api.desk.counters import process_metrics
from router.app.processes.checks import check_files
from router.app.processes.descriptors import raise_limit
from router.app.processes.process_tracing import ProcessTracing
from router.app.processes.risks import log_risks
from router.config.keys import ConfigError
from router.config.rendering import brief
from router.config.settings.configurations import GatewayConfig, PickerConfig
from router.net.keys.dialing import dial_options

log = logging.getLogger("kvroute")


class PortApp(ABC):
    """A process with a gateway or a picker, which calls routers over gRPC."""

    service: str
    """Name of the process in traces."""

    def __init__(self, config: GatewayConfig | PickerConfig) -> None:
        """Raises ConfigError for an invalid address of a router."""
        check_files(config)
        self._config = config
        self._stop = asyncio.Event()
        self._failed: BaseException | None = None
        self.registry = registry = CollectorRegistry()
        self.tracing = ProcessTracing(config.tracing, self.service, registry)
        process_metrics(registry)
        targets = [target.strip() for target in config.router.split(",")]
        try:
            self.client = KvRouteClient(targets, **dial_options(config.to_router, unix_now))
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{error} - at `$.router`") from error

    @abstractmethod
    async def start(self) -> str:
        """Listens; returns a text for the log about the addresses. Raises ConfigError."""

    @abstractmethod
    async def stop(self) -> None:
        """Lets the open requests end, then stops everything. Safe after a start that failed half
        way."""

    async def run(self) -> int:
        """Serves until SIGTERM or SIGINT; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        log.info("configuration: %s", brief(self._config))
        log_risks(self._config)
        raise_limit(self._config)
        try:
            log.info("%s, routers at %s", await self.start(), self._config.router)
            self.tracing.start()
            await self._stop.wait()
            log.info("stopping")
        finally:
            await self.stop()
            await self.tracing.stop()
        if self._failed is None:
            return 0
        log.critical("stopped with exit code 1: %s", named(self._failed))
        return 1

    def _broke(self, error: BaseException) -> None:
        self._failed = error
        self._stop.set()
