"""One HTTP port: listens, accepts connections within bounds, and ends them.

Law: a connection counts from its acceptance to its end, its TLS handshake included.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine

from aiohttp import web
from aiohttp.http import SERVER_SOFTWARE
from aiohttp.http_exceptions import HttpProcessingError

from router.config.keys import ConfigError
from router.config.settings.serving_settings import HttpSettings
from router.http.bounded import BoundedHandler, Connections, malformed
from router.keys.certificates import Contexts
from router.keys.exposure import split_address

BACKLOG = 1024
NO_DESCRIPTORS_S = 0.1
"""Before the next attempt to accept a connection, after one failed."""
_HEAD_BYTES_MAX = 8190

log = logging.getLogger("kvroute.http")


class HttpPort:
    """Serves one application."""

    def __init__(
        self,
        app: web.Application,
        listen: str,
        *,
        name: str,
        bounds: HttpSettings,
        tls: Contexts | None = None,
        reuse_port: bool = False,
        cancels: bool = False,
        head_bytes_max: int = _HEAD_BYTES_MAX,
        shutdown_timeout_s: float = 60.0,
        malformed: Callable[[HttpProcessingError], web.Response] = malformed,
    ) -> None:
        """name: in metrics and errors, and of the configuration's section. cancels: a request whose
        client leaves is cancelled. head_bytes_max: of the request line, and of each header.
        malformed: the answer to what is no HTTP. Raises ConfigError for an address that is none."""
        self._host, self._port = split_address(listen)
        app.on_response_prepare.append(_named)
        self._bounds = bounds
        self._tls = tls
        self._reuse_port = reuse_port
        self._head_bytes_max = head_bytes_max
        self._malformed = malformed
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=cancels,
            shutdown_timeout=shutdown_timeout_s,
        )
        self.connections = Connections(name)
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers: set[socket.socket] = set()
        """Connections that count."""
        self.port = 0

    async def start(self) -> None:
        """Listens; raises ConfigError when the address can't be had."""
        await self._runner.setup()
        try:
            self._sockets = await _listening(self._host, self._port, reuse_port=self._reuse_port)
        except OSError as error:
            await self._runner.cleanup()
            name = self.connections.port
            raise ConfigError(
                f"can't serve {name} on {self._host}:{self._port}: {error.strerror}"
                f" - at `$.{name}.listen`"
            ) from error
        self.port = self._sockets[0].getsockname()[1]
        for listening in self._sockets:
            self._spawn(self._accept(listening))

    async def stop(self) -> None:
        """Accepts no more; open requests may go on for shutdown_timeout_s."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listening in self._sockets:
            listening.close()
        self._sockets = []
        await self._runner.cleanup()

    def close_idle(self) -> None:
        """Ends every connection that no request is on."""
        server = self._runner.server
        for connection in () if server is None else server.connections:
            if isinstance(connection, BoundedHandler):
                connection.close_if_idle()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listening)
            except OSError as error:  # such as: no file descriptors are left
                log.warning("a connection can't be accepted: %s", error)
                await asyncio.sleep(NO_DESCRIPTORS_S)
                continue
            if self.connections.open >= self._bounds.connections_max:
                self.connections.closed["full"] += 1
                peer.close()
                continue
            peer.setblocking(False)
            self._peers.add(peer)
            self.connections.open += 1
            self._spawn(self._serve(peer))

    async def _serve(self, peer: socket.socket) -> None:
        """Hands a connection over to its handler, after the TLS handshake if there is one."""
        context = None if self._tls is None else self._tls.now

        def left() -> None:
            if peer in self._peers:
                self._peers.remove(peer)
                self.connections.left()

        def handler() -> BoundedHandler:
            server = self._runner.server
            if server is None:
                raise ConnectionError("the server is closed")
            return BoundedHandler(
                server,
                self._bounds,
                self.connections,
                left,
                head_bytes_max=self._head_bytes_max,
                malformed=self._malformed,
            )

        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                handler,
                peer,
                ssl=context,
                ssl_handshake_timeout=None if context is None else self._bounds.head_timeout_s,
            )
        except (OSError, ssl.SSLError, asyncio.CancelledError) as error:
            left()
            peer.close()
            if isinstance(error, asyncio.CancelledError):
                raise
            if isinstance(error, ConnectionAbortedError):  # the handshake took too long
                self.connections.closed["slow_head"] += 1
            log.info("a connection with TLS failed: %s", error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _named(_request: web.Request, response: web.StreamResponse) -> None:
    """Answers don't tell the versions of Python and aiohttp."""
    if response.headers.get("Server") == SERVER_SOFTWARE:
        response.headers["Server"] = "kvroute"


async def _listening(host: str, port: int, *, reuse_port: bool) -> list[socket.socket]:
    """Sockets for each address of a host; raises OSError."""
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            sockets.append(listening := socket.socket(family, kind, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
            listening.setblocking(False)
    except OSError:
        for each in sockets:
            each.close()
        raise
    return sockets
