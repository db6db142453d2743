"""One HTTP/2 port: the connections of a TCP port and a unix socket, their pings and ages.

Laws:
- a connection that answers no ping for KEEPALIVE_TIMEOUT_S after keepalive_s of silence is closed;
- a connection older than age_s (a tenth more or less) gets a GOAWAY, and is closed after its last
  call, at the latest after age_grace_s;
- an old connection without calls is closed once its peer has read all bytes, or FAREWELL_S later;
- a connection with TLS has agreed on `h2` by ALPN.
"""

import asyncio
import random
import ssl
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

from router.net.http2.sockets import Bounds, Http2Protocol
from router.net.http2.streams import Service
from router.net.listener.connections import Connections, PortBounds
from router.net.listener.held import PortHeld
from router.net.listener.listener import Listener, Speaks

KEEPALIVE_TIMEOUT_S = 20.0
"""Seconds within which a peer must answer a ping."""
LOOK_S = 1.0
"""Seconds between two checks of the connections' silence and age."""
FAREWELL_S = 1.0
"""Most seconds between a GOAWAY and the refusal of new calls, so that calls on their way are
served. Also the most seconds that a peer has to read the last bytes before its connection is
closed: if it sends to a closed connection, TCP resets that, and drops what the peer has not read.
"""


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """Bounds of one port and of its connections: counts, bytes, and seconds of silence and age."""

    connection: Bounds
    port: PortBounds
    keepalive_s: float
    age_s: float | None
    """Seconds after which a connection gets a GOAWAY; None: never."""
    age_grace_s: float = inf


class Http2Port:
    """One HTTP/2 port."""

    def __init__(
        self,
        name: str,
        service: Callable[[Http2Protocol], Service],
        bounds: ServerBounds,
        *,
        rng: random.Random,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        allows_plain: bool = True,
        came: Callable[[str], None] = lambda _kind: None,
    ) -> None:
        """name: of the port in metrics. service: makes the service of a connection. rng: draws by
        how much each connection's age differs from age_s. tls: returns the present context; None:
        connections with TLS are closed. came: see Listener.
        """
        self._service = service
        self._bounds = bounds
        self._rng = rng
        self.connections = Connections(name, bounds.port)
        """The port's connections: the open ones, and counts of closed ones."""
        self._held = self.connections.held = PortHeld()
        self._unpacking = asyncio.Lock()
        self.open: set[Http2Protocol] = set()
        speaks = Speaks(tls, allows_plain, "h2")
        self._listener = Listener(self._connection, self.connections, speaks, came=came)
        self._unix = Listener(self._connection, self.connections, Speaks())
        self._looking: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return self._listener.port

    async def start(self, host: str, port: int) -> None:
        """Listens on TCP, port 0: a free one; raises OSError."""
        await self._listener.start(host, port)
        self._looking = asyncio.get_running_loop().create_task(self._look())

    def start_unix(self, path: Path, mode: int) -> None:
        """Listens on a unix socket, too, without TLS. mode: permissions of its file. Raises
        OSError.
        """
        self._unix.start_unix(path, mode)

    async def stop_accepting(self) -> None:
        await self._listener.stop()
        await self._unix.stop()

    def go_away(self, *, last: bool) -> None:
        """Sends every peer a GOAWAY. last: whether new streams are refused from now on."""
        for connection in list(self.open):
            self._go_away(connection, last=last)

    async def farewell(self) -> None:
        """Sends every peer a GOAWAY, and refuses new streams once those on their way have come:
        when each peer has acknowledged, or after FAREWELL_S.
        """
        self.go_away(last=False)
        try:
            await _while_any(_reads_on, self.open, FAREWELL_S)
        finally:
            self.go_away(last=True)

    async def until_read(self) -> None:
        """Returns once the peers have read all bytes, or FAREWELL_S after the kernel has them."""
        await _while_any(lambda connection: connection.unsent_bytes > 0, self.open)
        for connection in list(self.open):
            _send_last(connection)
        await _while_any(_has_unread, self.open, FAREWELL_S)

    def close(self) -> None:
        """Closes the connections after the bytes that were written."""
        if self._looking is not None:
            self._looking.cancel()
        for connection in list(self.open):
            connection.close()

    def _connection(self, left: Callable[[], None]) -> Http2Protocol:
        connection = Http2Protocol(
            self._service,
            bounds=self._bounds.connection,
            left=partial(self._left, left),
            held=self._held,
            unpacking=self._unpacking,
        )
        if (age_s := self._bounds.age_s) is not None:
            now_s = asyncio.get_running_loop().time()
            connection.until_s = now_s + age_s * self._rng.uniform(0.9, 1.1)
        self.open.add(connection)
        return connection

    def _left(self, left: Callable[[], None], connection: Http2Protocol) -> None:
        left()
        if connection.fault:
            self.connections.closed[connection.fault] += 1
        self.open.discard(connection)

    async def _look(self) -> None:
        """Checks the age and silence of all connections repeatedly."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_S)
            self._look_at_all(loop.time())

    def _look_at_all(self, now_s: float) -> None:
        """Pings silent connections, and ends old ones."""
        for connection in list(self.open):
            silent_s = now_s - connection.received_s
            if silent_s > self._bounds.keepalive_s + KEEPALIVE_TIMEOUT_S:
                connection.fault = "keepalive"
                connection.abort()
            elif silent_s > self._bounds.keepalive_s and not connection.pinged:
                connection.ping()
            if connection.left_s < inf:
                self._end(connection, now_s)
            elif now_s >= connection.until_s:
                self._go_away(connection, last=False)
                connection.left_s = now_s

    def _end(self, connection: Http2Protocol, now_s: float) -> None:
        """Closes an old connection once it has no more calls, or its grace is over."""
        left_s = now_s - connection.left_s
        if connection.fault:  # it was closed, and its peer does not read the last bytes
            connection.abort()
        elif left_s >= self._bounds.age_grace_s:
            connection.fault = "age"
            connection.close()
        elif connection.http2.last_sent:
            if connection.http2.read_all or now_s - connection.farewell_s >= FAREWELL_S:
                connection.close()
        elif not connection.http2.streams and left_s >= FAREWELL_S:
            self._go_away(connection, last=True)
            _send_last(connection)
            connection.farewell_s = now_s

    def _go_away(self, connection: Http2Protocol, *, last: bool) -> None:
        connection.http2.go_away(last=last)
        connection.flush()


async def _while_any(
    holds: Callable[[Http2Protocol], bool],
    connections: Collection[Http2Protocol],
    most_s: float | None = None,
) -> None:
    """Returns once `holds` is False for all connections, or after most_s seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            while any(map(holds, connections)):  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.01)


def _reads_on(connection: Http2Protocol) -> bool:
    """Whether a GOAWAY may still be on its way to the peer."""
    return connection.begun and not connection.http2.acknowledged


def _send_last(connection: Http2Protocol) -> None:
    connection.http2.send_last()
    connection.flush()


def _has_unread(connection: Http2Protocol) -> bool:
    """Whether the last bytes may still be on their way to the peer."""
    return connection.begun and not connection.http2.read_all
