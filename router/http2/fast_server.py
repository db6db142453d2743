"""A gRPC server of its own over the small HTTP/2, for handlers that grpc.aio's server takes, too.

A unary call costs it half of the CPU that it costs grpc.aio, or less: one thread, one event loop,
no task for an answer that needs no wait.

Laws:
- a connection that answers no ping for KEEPALIVE_TIMEOUT_S after keepalive_s of silence is closed;
- one that is older than age_s (a tenth more or less) gets a GOAWAY, and is closed
  after its last call, at the latest after age_grace_s;
- at most connections_max are open; a further one is closed at once.
"""

import asyncio
import random
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from router.http2.calls import Call, Calls, Handler
from router.http2.sockets import Bounds, Http2Protocol
from router.listener.listener import Listener

KEEPALIVE_TIMEOUT_S = 20.0
"""What a peer has to answer a ping."""
LOOK_S = 1.0
"""Between two looks at the connections' ages."""
CLOSED = ("full", "slow_head", "malformed", "tls", "keepalive", "age")
"""Why a connection is closed from here. full: one past connections_max. slow_head: TLS or HTTP/2's
preface took too long. malformed: no HTTP/2, or past one of its bounds. tls: with TLS where there
is none, or without it. keepalive: no answer to a ping. age: calls that go on after age_grace_s."""
FAREWELL_S = 1.0
"""Between a GOAWAY and the refusal of new calls: calls that are on their way are served."""


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """Of one server."""

    connection: Bounds
    connections_max: int
    keepalive_s: float
    age_s: float | None
    """None: connections get as old as their peers want."""
    age_grace_s: float


class Counts:
    """What metrics read of a server: as router.http.bounded.Connections."""

    port = "fast_grpc"

    def __init__(self, server: "FastServer") -> None:
        self._server = server
        self.closed = Counter(dict.fromkeys(CLOSED, 0))
        """Connections closed by the server, by reason."""

    @property
    def open(self) -> int:
        """Open connections."""
        return self._server.connections


class FastServer:
    """One port."""

    def __init__(
        self,
        bounds: ServerBounds,
        *,
        rng: random.Random,
        at_once: Collection[str] = (),
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        allows_plain: bool = True,
    ) -> None:
        """rng: draws how much older or younger than age_s each connection gets. at_once: see
        Calls. tls: in force now; None: connections with TLS are closed."""
        self._bounds = bounds
        self._rng = rng
        self._at_once = at_once
        self._methods: dict[str, Handler] = {}
        self._connections: dict[Http2Protocol, float] = {}
        """-> when it gets a GOAWAY, by the loop's clock."""
        self._leaving: dict[Http2Protocol, float] = {}
        """Those that got one -> when they are closed."""
        self._open: set[Call] = set()
        self._listener = Listener(
            self._connection,
            tls,
            allows_plain=allows_plain,
            came=self._came,
            first_byte_s=bounds.connection.preface_s,
        )
        self._looking: asyncio.Task[None] | None = None
        self.counts = Counts(self)

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._connections)

    @property
    def calls(self) -> int:
        """Open ones."""
        return len(self._open)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """As grpc.aio's server has it."""
        self._methods |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    async def start(self, host: str, port: int) -> None:
        """Listens; raises OSError."""
        await self._listener.start(host, port)
        self._looking = asyncio.get_running_loop().create_task(self._look())

    async def stop(self, grace_s: float) -> None:
        """Takes no more connections and calls, and ends after the open ones, at the latest after
        grace_s."""
        await self._listener.stop()
        for connection in list(self._connections):
            self._go_away(connection, last=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._open:  # noqa: ASYNC110  # ends of calls set no event
                    await asyncio.sleep(0.01)
        if self._looking is not None:
            self._looking.cancel()
        for connection in list(self._connections):
            connection.close()
        for call in list(self._open):
            call.reset()
        self._open.clear()

    def _connection(self) -> Http2Protocol:
        connection = Http2Protocol(
            lambda protocol: Calls(protocol, self._methods, self._at_once, self._open),
            bounds=self._bounds.connection,
            left=self._left,
        )
        if len(self._connections) >= self._bounds.connections_max:
            connection.fault = "full"
            return connection
        age_s = self._bounds.age_s
        now_s = asyncio.get_running_loop().time()
        until_s = float("inf") if age_s is None else now_s + age_s * self._rng.uniform(0.9, 1.1)
        self._connections[connection] = until_s
        return connection

    def _came(self, kind: str) -> None:
        if kind == "refused":
            self.counts.closed["tls"] += 1

    def _left(self, connection: Http2Protocol) -> None:
        if connection.fault:
            self.counts.closed[connection.fault] += 1
        self._connections.pop(connection, None)
        self._leaving.pop(connection, None)

    async def _look(self) -> None:
        """Pings silent connections, and ends old ones."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = loop.time()
            for connection, until_s in list(self._connections.items()):
                silent_s = now_s - connection.received_s
                if silent_s > self._bounds.keepalive_s + KEEPALIVE_TIMEOUT_S:
                    self.counts.closed["keepalive"] += 1
                    connection.abort()
                elif silent_s > self._bounds.keepalive_s and not connection.pinged:
                    connection.ping()
                if connection in self._leaving:
                    self._end(connection, now_s)
                elif now_s >= until_s:
                    self._go_away(connection, last=False)
                    self._leaving[connection] = now_s + self._bounds.age_grace_s

    def _end(self, connection: Http2Protocol, now_s: float) -> None:
        """Closes an old connection once it has no more calls, or its grace is over."""
        away_s = self._leaving[connection] - self._bounds.age_grace_s
        if now_s >= self._leaving[connection]:
            self.counts.closed["age"] += 1
            connection.close()
        elif not connection.http2.streams and now_s >= away_s + FAREWELL_S:
            self._go_away(connection, last=True)
            connection.close()

    def _go_away(self, connection: Http2Protocol, *, last: bool) -> None:
        connection.http2.go_away(last=last)
        connection.flush()
