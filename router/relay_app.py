"""`kvroute relay`: relays beside engines, without a router."""

import asyncio
import logging
import random
import secrets
import signal

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector

from events.broker import Broker
from events.clock import unix_now
from events.relay import Relay
from events.tasks import Tasks
from router.app import check_engine
from router.config import ConfigError, RelayConfig, render
from router.http import MetricsServer
from router.metrics import BrokerCollector, RelayCollector, kvroute_version

log = logging.getLogger("kvroute")


class RelayApp:
    """One relay process, for one engine or several."""

    def __init__(self, config: RelayConfig) -> None:
        """Raises ConfigError for what only this process can find wrong."""
        if not config.workers:
            raise ConfigError("no engine to relay: give --worker-id and its like, or `workers:`")
        if config.nats.url is None:
            raise ConfigError("a relay needs the routers' NATS: give --nats URL (nats.url)")
        for worker in config.workers:
            check_engine(worker)
        self._config = config
        self._stop = asyncio.Event()
        self._failed: BaseException | None = None
        self._tasks = Tasks(self._broke)
        self._broker = Broker(config.nats, config.nats.url, "kvroute relay")
        rng = random.Random(secrets.randbits(64))
        self._relays = [
            Relay(
                worker,
                self._broker,
                fleet=config.fleet,
                clock=unix_now,
                on_failure=self._broke,
                rng=rng,
            )
            for worker in config.workers
        ]
        registry = CollectorRegistry()
        build = Gauge("kvroute_build_info", "Always 1.", ["version"], registry=registry)
        build.labels(kvroute_version()).set(1)
        ProcessCollector(registry=registry)
        registry.register(RelayCollector(lambda: self._relays))
        registry.register(BrokerCollector(self._broker))
        self._http = (
            MetricsServer(registry, config.metrics.listen) if config.metrics.listen else None
        )

    async def run(self) -> int:
        """Relays until SIGTERM or SIGINT; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        log.info("configuration:\n%s", render(self._config).rstrip())
        try:
            if self._http is not None:
                await self._http.start()
                log.info("metrics on %s", self._config.metrics.listen)
            self._tasks.spawn(self._connect(), "connection to NATS")
            await self._stop.wait()
        finally:
            for relay in self._relays:
                await relay.stop()
            await self._tasks.close()
            await self._broker.close()
            if self._http is not None:
                await self._http.stop()
            log.info("stopped")
        return 1 if self._failed is not None else 0

    async def _connect(self) -> None:
        await self._broker.connect()
        for relay in self._relays:
            await relay.start()

    def _broke(self, error: BaseException) -> None:
        self._failed = error
        self._stop.set()
