"""The HTTP port of the metrics: /metrics for Prometheus, and what else is served there."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry

from router.net.http.port import HttpPort, application
from router.net.keys.certificates import Contexts
from router.net.listener.connections import Connections
from router.net.listener.http_bounds import HttpBounds
from router.observe.metrics.scrape import Scrapes


class MetricsServer:
    """Serves a registry of metrics over HTTP."""

    def __init__(
        self,
        registry: CollectorRegistry,
        listen: str,
        bounds: HttpBounds,
        tls: Contexts | None = None,
        *,
        also: Callable[[web.Application], None] | None = None,
    ) -> None:
        """also: adds further routes to the application. Raises ConfigError for an invalid
        address.
        """
        self._scrapes = Scrapes(registry)
        app = application()
        app.router.add_get("/metrics", self._metrics)
        if also is not None:
            also(app)
        self._http = HttpPort(app, listen, name="metrics", bounds=bounds, tls=tls)

    def add(self, registry: CollectorRegistry) -> None:
        """Adds a registry whose metrics are served, too."""
        self._scrapes.add(registry)

    @property
    def connections(self) -> Connections:
        return self._http.connections

    @property
    def port(self) -> int:
        return self._http.port

    async def start(self) -> None:
        """Listens; raises ConfigError when the address can't be used."""
        await self._http.start()

    async def stop(self) -> None:
        await self._http.stop()

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = await self._scrapes.text(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})
