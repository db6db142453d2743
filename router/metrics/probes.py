"""Liveness and readiness over plain HTTP, for kubelet, which brings no certificate and no key.

GET /livez   200 while the process answers
GET /readyz  200 while the router is ready, else 503

Law: an answer says serving or not serving, and nothing else.
"""

from collections.abc import Callable

from aiohttp import web

from router.config.keys import ConfigError
from router.metrics.http import split_address


class ProbeServer:
    """Answers probes."""

    def __init__(self, listen: str, ready: Callable[[], bool]) -> None:
        """Raises ConfigError for an address that is none."""
        self._host, self._port = split_address(listen)
        self._ready = ready
        app = web.Application()
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        self._runner = web.AppRunner(app, access_log=None)
        self.port = 0

    async def start(self) -> None:
        """Listens; raises ConfigError when the address can't be had."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"can't answer probes on {self._host}:{self._port}: {error.strerror}"
                " - at `$.probes.listen`"
            ) from error
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _livez(self, _request: web.Request) -> web.Response:
        return _answer(True)

    async def _readyz(self, _request: web.Request) -> web.Response:
        return _answer(self._ready())


def _answer(serving: bool) -> web.Response:
    headers = {"Server": "kvroute"}  # without the versions of Python and aiohttp
    text = "serving\n" if serving else "not serving\n"
    return web.Response(text=text, status=200 if serving else 503, headers=headers)
