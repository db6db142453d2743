"""One HTTP port: aiohttp's server behind the listener.

Laws:
- a path with more than PARTS_MAX slashes is answered with 404 without a search: aiohttp would look
  up each of its beginnings, 24 ms for 8,000 slashes;
- an Expect header other than 100-continue is answered with 417, whatever bytes it has.
"""

from collections.abc import Callable

from aiohttp import web
from aiohttp.http import SERVER_SOFTWARE
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_urldispatcher import MatchInfoError
from typing_extensions import override

from router.config.keys import ConfigError
from router.net.http.bounded import BoundedHandler, malformed
from router.net.keys.certificates import Contexts
from router.net.keys.exposure import split_address
from router.net.listener.connections import Connections
from router.net.listener.http_bounds import HttpBounds
from router.net.listener.listener import Listener, Speaks

PARTS_MAX = 8
_HEAD_BYTES_MAX = 8190


class HttpPort:
    """A port that serves one aiohttp application."""

    def __init__(
        self,
        app: web.Application,
        listen: str,
        *,
        name: str,
        bounds: HttpBounds,
        tls: Contexts | None = None,
        reuse_port: bool = False,
        cancels: bool = False,
        head_bytes_max: int = _HEAD_BYTES_MAX,
        shutdown_timeout_s: float = 60.0,
        malformed: Callable[[HttpProcessingError], web.Response] = malformed,
    ) -> None:
        """name: of the port in metrics and errors, and of its section in the configuration.
        cancels: whether a request is cancelled when its client leaves. head_bytes_max: most bytes
        of the request line, and of each header. malformed: makes the answer to bytes that are no
        HTTP. Raises ConfigError for an invalid address.
        """
        self._host, self._port = split_address(listen)
        app.on_response_prepare.append(_named)
        self._bounds = bounds
        self._reuse_port = reuse_port
        self._head_bytes_max = head_bytes_max
        self._malformed = malformed
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=cancels,
            shutdown_timeout=shutdown_timeout_s,
        )
        self.connections = Connections(name, bounds.port)
        speaks = Speaks() if tls is None else Speaks(lambda: tls.now, plain=False)
        self._listener = Listener(self._handler, self.connections, speaks)

    @property
    def port(self) -> int:
        return self._listener.port

    async def start(self) -> None:
        """Listens; raises ConfigError when the address can't be used."""
        await self._runner.setup()
        try:
            await self._listener.start(self._host, self._port, reuse_port=self._reuse_port)
        except OSError as error:
            await self._runner.cleanup()
            name = self.connections.port
            raise ConfigError(
                f"can't serve {name} on {self._host}:{self._port}: {error.strerror}"
                f" - at `$.{name}.listen`"
            ) from error

    async def stop(self) -> None:
        """Accepts no more connections; open requests may go on for shutdown_timeout_s."""
        await self._listener.stop()
        await self._runner.cleanup()

    def close_idle(self) -> frozenset[object]:
        """Closes every connection without a request, and returns the others, each of which is the
        `protocol` of its requests.
        """
        server = self._runner.server
        connections = [] if server is None else list(server.connections)
        for connection in connections:
            if isinstance(connection, BoundedHandler):
                connection.close_if_idle()
        return frozenset(connections if server is None else server.connections)

    def _handler(self, left: Callable[[], None]) -> BoundedHandler:
        server = self._runner.server
        if server is None:
            raise ConnectionError("the HTTP server is closed")
        return BoundedHandler(
            server,
            self._bounds,
            self.connections,
            left,
            head_bytes_max=self._head_bytes_max,
            malformed=self._malformed,
        )


async def _named(_request: web.Request, response: web.StreamResponse) -> None:
    """Replaces aiohttp's Server header, which shows the versions of Python and aiohttp."""
    if response.headers.get("Server") == SERVER_SOFTWARE:
        response.headers["Server"] = "kvroute"


class Paths(web.UrlDispatcher):
    """Dispatcher of a port with few paths: a path of too many parts is answered with 404, an Expect
    other than 100-continue with 417.
    """

    @override
    async def resolve(self, request: web.Request) -> web.UrlMappingMatchInfo:
        expected = request.headers.get("Expect", "")
        if expected and expected.strip().lower() != "100-continue":
            return _refused(web.HTTPExpectationFailed())
        if request.rel_url.raw_path.count("/") > PARTS_MAX:
            return _refused(web.HTTPNotFound())
        return await super().resolve(request)


def application() -> web.Application:
    """A new aiohttp application whose dispatcher is Paths."""
    app = web.Application()
    app._router = Paths()
    return app


def _refused(error: web.HTTPException) -> web.UrlMappingMatchInfo:
    refused = MatchInfoError(error)
    # aiohttp's own writes what was expected into its answer, and fails at bytes that are no text.
    refused.route._expect_handler = _ignored
    return refused


async def _ignored(_request: web.Request) -> None:
    """Does nothing at an Expect header: the handler answers the request."""
