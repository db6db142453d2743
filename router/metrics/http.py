"""The HTTP port: only /metrics, for Prometheus."""

import asyncio
import ssl

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

from router.config.keys import ConfigError
from router.metrics.scrape import Scrape


class MetricsServer:
    """Serves a registry."""

    def __init__(
        self, registry: CollectorRegistry, listen: str, tls: ssl.SSLContext | None = None
    ) -> None:
        self._registry = registry
        self._tls = tls
        self._host, self._port = split_address(listen)
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None)
        self.port = 0

    async def start(self) -> None:
        """Listens; raises ConfigError when the address can't be had."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, ssl_context=self._tls)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"can't serve metrics on {self._host}:{self._port}: {error.strerror}"
            ) from error
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _metrics(self, _request: web.Request) -> web.Response:
        scrape = Scrape(self._registry)  # on the event loop: it reads the core
        body = await asyncio.to_thread(scrape.text)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def split_address(address: str) -> tuple[str, int]:
    """host:port, or [v6]:port; raises ConfigError."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{address!r} is no address: write host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
