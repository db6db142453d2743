"""Liveness and readiness over plain HTTP, for kubelet, which brings no certificate and no key.

GET /livez   200 while the process answers
GET /readyz  200 while the router is ready, else 503

Law: an answer says serving or not serving, and nothing else.
"""

from collections.abc import Callable

from aiohttp import web

from router.net.http.port import HttpPort, application
from router.net.listener.connections import Connections
from router.net.listener.http_bounds import HttpBounds


class ProbeServer:
    """Serves the pages of liveness and readiness."""

    def __init__(self, listen: str, ready: Callable[[], bool], bounds: HttpBounds) -> None:
        """ready: returns whether the process serves. Raises ConfigError for an invalid address."""
        self._ready = ready
        app = application()
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        self._http = HttpPort(app, listen, name="probes", bounds=bounds)

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

    async def _livez(self, _request: web.Request) -> web.Response:
        return _answer(True)

    async def _readyz(self, _request: web.Request) -> web.Response:
        return _answer(self._ready())


def _answer(serving: bool) -> web.Response:
    text = "serving\n" if serving else "not serving\n"
    return web.Response(text=text, status=200 if serving else 503)
