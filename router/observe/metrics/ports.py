"""The HTTP ports of metrics and of probes.

GET /metrics  a registry's values, for Prometheus; the console may stand beside it
GET /livez    200 while the process answers
GET /readyz   200 while the router is ready, else 503

Probes are plain HTTP, for kubelet, which brings no certificate and no key. Law: their answers say
serving or not serving, and nothing else.
"""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry

from router.net.http.port import HttpPort, application
from router.net.keys.certificates import Contexts
from router.net.listener.http_bounds import HttpBounds
from router.observe.metrics.scrape import Scrapes


class MetricsServer(HttpPort):
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
        self.scrapes = Scrapes(registry)
        app = application()
        app.router.add_get("/metrics", self._metrics)
        if also is not None:
            also(app)
        super().__init__(app, listen, name="metrics", bounds=bounds, tls=tls)

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = await self.scrapes.text(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})


class ProbeServer(HttpPort):
    """Serves the pages of liveness and readiness."""

    def __init__(self, listen: str, ready: Callable[[], bool], bounds: HttpBounds) -> None:
        """ready: returns whether the process serves. Raises ConfigError for an invalid address."""
        self._ready = ready
        app = application()
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        super().__init__(app, listen, name="probes", bounds=bounds)

    async def _livez(self, _request: web.Request) -> web.Response:
        return _answer(True)

    async def _readyz(self, _request: web.Request) -> web.Response:
        return _answer(self._ready())


def _answer(serving: bool) -> web.Response:
    text = "serving\n" if serving else "not serving\n"
    return web.Response(text=text, status=200 if serving else 503)
