"""An HTTP connection with bounds: time for each request's head, time without requests, and a body
that nobody reads.

aiohttp counts no connections, and bounds a head by its size alone. `_waiter` of its RequestHandler
is set while it waits for a head, and `_request_count` counts whole heads: private names, which
tests/router/http/test_port.py watches.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from typing_extensions import override

from router.config.settings.serving_settings import HttpSettings

REASONS = ("full", "slow_head", "idle", "malformed")
"""full: a connection past http.connections_max. slow_head: TLS or a head took longer than
http.head_timeout_s. idle: no request for http.idle_timeout_s. malformed: no HTTP, or a head
past its bounds."""


class Connections:
    """Those of one port."""

    def __init__(self, port: str) -> None:
        """port: its name in metrics."""
        self.port = port
        self.open = 0
        self.closed: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        """By the port itself, by reason."""


class BoundedHandler(web.RequestHandler):
    """One connection, from the end of its TLS handshake on."""

    __slots__ = ("_connections", "_head_timeout_s", "_head_timer", "_left")

    def __init__(
        self,
        server: web.Server,
        bounds: HttpSettings,
        connections: Connections,
        left: Callable[[], None],
        *,
        head_bytes_max: int,
    ) -> None:
        """left: is called at the connection's end. head_bytes_max: of the request line, and of each
        header."""
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None: none is written
            keepalive_timeout=bounds.idle_timeout_s,
            lingering_time=bounds.linger_s,
            max_line_size=head_bytes_max,
            max_field_size=head_bytes_max,
        )
        self._connections = connections
        self._left = left
        self._head_timeout_s = bounds.head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_head()

    @override
    def data_received(self, data: bytes) -> None:
        heads = self._request_count
        super().data_received(data)
        if self._request_count != heads:
            self._cancel_timer()
        elif self._head_timer is None and self._waiter is not None:
            self._await_head()  # of a later request: its first bytes

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)
        self._left()

    @override
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """aiohttp would log and send back bytes of the request, which may be many."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        self._connections.closed["malformed"] += 1
        headers = {"Server": "kvroute"}  # without the versions of Python and aiohttp
        response = web.Response(status=status, text="malformed request\n", headers=headers)
        response.force_close()
        return response

    def _await_head(self) -> None:
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(self._head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        self._connections.closed["slow_head"] += 1
        self.force_close()

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @override
    def _process_keepalive(self) -> None:
        was_open = not self._force_close
        super()._process_keepalive()
        if was_open and self._force_close:
            self._connections.closed["idle"] += 1
