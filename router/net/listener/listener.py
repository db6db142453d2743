"""Accepts the connections of one port, and sees them through their TLS handshake.

The first byte of a connection says whether it has TLS (0x16 begins a handshake), so that one port
serves both: some gateways connect with TLS, others without, and some can't choose.

Laws:
- every port of the router has its connections from here, with the bounds of Connections;
- a connection has its place from its acceptance on, and gives it back on every way out;
- until its first byte a connection costs its socket, until the end of its handshake its TLS state:
  what serves it is made after that;
- once a connection is over, no object that served it is in a reference cycle: objects are freed at
  once, and not when Python looks for cycles, which is seldom (router/app/cli/run.py);
- where a port names a protocol, it takes no connection with TLS that has not agreed on it by ALPN;
- whatever comes, a turn of the event loop accepts ACCEPTED_TURN connections, begins
  HANDSHAKES_TURN handshakes, and closes LATE_TURN that are late, at most.
"""

import asyncio
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from typing_extensions import override

from router.net.listener.addresses import (
    UNIX_CLIENT,
    client_of,
    listening,
    listening_unix,
    unmapped,
)
from router.net.listener.connections import Begins, Connections, Place
from router.net.listener.seldom import Seldom

ACCEPTED_TURN = 16
HANDSHAKES_TURN = 4
"""TLS handshakes that begin in one turn: the first step of each costs about 1 ms."""
HANDSHAKE_SPARE_S = 10.0
LATE_TURN = 256
NO_DESCRIPTORS_S = 0.1
"""Seconds from a failed attempt to accept a connection to the next one."""
LINGER_S = 1.0
"""Seconds for which the rest of a refused request is read, so that its client sees the answer; also
those after which an idle connection that was closed to make room is aborted."""
_LINGER_BYTES = 1 << 20
_LINGER_READ = 1 << 16
_TLS_HANDSHAKE = 0x16
_SPEAKS_TLS = b"this port speaks TLS\n"
NO_TLS = (
    b"HTTP/1.1 400 Bad Request\r\nServer: kvroute\r\nContent-Type: text/plain\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(_SPEAKS_TLS), _SPEAKS_TLS)
)
"""Answer to a client that speaks plain HTTP/1 to a port with TLS."""
_HTTP2 = b"PRI "
"""The first bytes of HTTP/2 without TLS. On a port with TLS its clients get no answer: they can't
read one of HTTP/1, and would send a call again without end that HTTP/2 refuses."""

log = logging.getLogger("kvroute.connections")


class Serves(Begins, Protocol):
    """Interface: an asyncio protocol that serves a connection, and calls `left` at its end."""

    def give_up(self) -> None:
        """Closes the connection, which is idle."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...


@dataclass(frozen=True, slots=True)
class Speaks:
    """The protocols of a port."""

    tls: Callable[[], ssl.SSLContext | None] = lambda: None
    """Returns the present TLS context; None: connections with TLS are closed."""
    plain: bool = True
    """Whether connections without TLS are served; False: they are closed."""
    alpn: str | None = None
    """Protocol on which connections with TLS must have agreed by ALPN; None: any."""


class Listener:
    """Accepts the connections of one port."""

    def __init__(
        self,
        make: Callable[[Callable[[], None]], Serves],
        connections: Connections,
        speaks: Speaks,
        *,
        came: Callable[[str], None] = lambda _kind: None,
    ) -> None:
        """make: makes the protocol of a connection; its argument `left` must be called at the
        connection's end. came: called with `tls`, `plain` or `refused` for each connection that
        sends anything.
        """
        self._make = make
        self._connections = connections
        self._speaks = speaks
        self._came = came
        self._sockets: list[socket.socket] = []
        self._path: Path | None = None
        """The file of a Unix socket; None: there is none."""
        self._hellos: deque[tuple[socket.socket, Place]] = deque()
        """Connections whose TLS handshake is to begin, with their places."""
        self._late: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._full = Seldom(log)
        self._strange = Seldom(log)
        self._failed = Seldom(log, logging.INFO)
        self.port = 0

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> None:
        """Listens on a host's addresses, port 0: a free one; raises OSError."""
        self._listen(await listening(host, port, reuse_port=reuse_port))
        self.port = self._sockets[0].getsockname()[1]

    def start_unix(self, path: Path, mode: int) -> None:
        """Listens on a unix socket. mode: permissions of its file. Raises OSError."""
        self._listen([listening_unix(path, mode)])
        self._path = path

    def _listen(self, sockets: list[socket.socket]) -> None:
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        for each in sockets:
            self._loop.add_reader(each, self._accept, each)

    async def stop(self) -> None:
        """Accepts no more connections, and closes those whose handshake is not over."""
        for each in self._sockets:
            self._loop.remove_reader(each)
            each.close()
        self._sockets = []
        if self._path is not None:
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:  # the next router replaces a socket that nobody serves
                log.warning("Unix socket %s can't be removed: %s", self._path, error.strerror)
            self._path = None
        if self._late is not None:
            self._late.cancel()
        for place in self._connections.unserved():
            self._connections.leave(place)
            place.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # From acceptance to the first byte

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_TURN):
            try:
                peer, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:  # such as: no file descriptors are left
                self._warn(self._full, "a connection can't be accepted: %s", error.strerror)
                if (place := self._connections.give_up_one()) is not None:
                    place.close()
                self._loop.remove_reader(listening)
                self._loop.call_later(NO_DESCRIPTORS_S, self._accept_again, listening)
                return
            self._admit(peer, address[0] if isinstance(address, tuple) else UNIX_CLIENT)

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _admit(self, peer: socket.socket, host: str) -> None:
        place, left = self._connections.admit(client_of(host), self._loop.time())
        if left is not None:
            left.close()
        if place is None:
            peer.close()
            open_ = self._connections.open
            words = "a connection of %s is closed: the port or this client has too many, %d in all"
            self._warn(self._full, words, unmapped(host), open_)
            return
        peer.setblocking(False)
        place.close = partial(self._close, peer)
        self._loop.add_reader(peer, self._readable, peer, place)
        self._watch()

    def _close(self, peer: socket.socket) -> None:
        self._loop.remove_reader(peer)
        peer.close()

    def _watch(self) -> None:
        """Sets a timer that checks for connections which are late."""
        late_s = self._connections.late_s
        if self._late is None and late_s is not None:
            self._late = self._loop.call_at(late_s, self._end_late)

    def _end_late(self) -> None:
        self._late = None
        late = self._connections.late(self._loop.time(), LATE_TURN)
        for place in late:
            place.close()
        if late:
            words = "%d connections are closed: no whole TLS or first request head after %g s"
            self._warn(self._failed, words, len(late), self._connections.bounds.begin_s)
        self._watch()

    # From the first byte to the end of the handshake

    def _readable(self, peer: socket.socket, place: Place) -> None:
        self._loop.remove_reader(peer)
        try:
            first = peer.recv(len(_HTTP2), socket.MSG_PEEK)
        except BlockingIOError:
            self._loop.add_reader(peer, self._readable, peer, place)
            return
        except OSError:
            first = b""
        if not first:
            self._end(peer, place)
        elif first[0] != _TLS_HANDSHAKE:
            if self._speaks.plain:
                self._spawn(peer, place, self._serve(peer, place, None))
            else:
                self._refused("%s sends plain text, but this port speaks TLS", peer)
                self._spawn(peer, place, self._refuse(peer, b"" if first == _HTTP2 else NO_TLS))
        elif self._speaks.tls() is None:
            self._refused("%s begins TLS, but this port speaks plain text", peer)
            self._end(peer, place)
        else:
            place.close = peer.close
            self._hellos.append((peer, place))
            if len(self._hellos) == 1:
                self._loop.call_soon(self._shake_hands)

    def _shake_hands(self) -> None:
        for _ in range(min(HANDSHAKES_TURN, len(self._hellos))):
            peer, place = self._hellos.popleft()
            if place.open:
                self._spawn(peer, place, self._serve(peer, place, self._speaks.tls()))
        if self._hellos:
            self._loop.call_soon(self._shake_hands)

    async def _serve(
        self, peer: socket.socket, place: Place, context: ssl.SSLContext | None
    ) -> None:
        """Hands a connection over to what serves it, after its handshake if it has TLS."""
        about: dict[str, Any] = {}
        if context is not None:
            # Longer than begin_s, at which the place is late: one bound ends it, and is counted.
            timeout_s = self._connections.bounds.begin_s + HANDSHAKE_SPARE_S
            about = {"ssl": context, "ssl_handshake_timeout": timeout_s}
        try:
            if peer.family != socket.AF_UNIX:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                lambda: _Doorway(partial(self._enter, place)), peer, **about
            )
        except (OSError, ssl.SSLError) as error:
            if place.open and context is not None:
                self._connections.closed["tls"] += 1
                words = "a TLS handshake of %s failed: %s"
                self._warn(self._failed, words, place.client, error)

    def _enter(self, place: Place, transport: asyncio.Transport) -> None:
        """Gives a connection, after any TLS handshake, its protocol; closes it if ALPN failed."""
        if not place.open:
            transport.abort()
            return
        secured = transport.get_extra_info("ssl_object")
        wanted = self._speaks.alpn
        if secured and wanted and secured.selected_alpn_protocol() != wanted:
            words = f"%s has TLS, but has not agreed on {wanted} by ALPN"
            self._refused(words, transport.get_extra_info("socket"))
            transport.abort()
            return
        self._came("tls" if secured else "plain")
        place.served_by = serving = self._make(partial(self._left, place))
        place.close = partial(self._give_up, serving, transport)
        transport.set_protocol(serving)  # type: ignore[arg-type]  # it has all that is called
        serving.connection_made(transport)

    def _left(self, place: Place) -> None:
        """Frees the place of a connection that was served and is over."""
        self._connections.leave(place)
        place.served_by, place.close = None, _nothing

    def _give_up(self, serving: Serves, transport: asyncio.Transport) -> None:
        if serving.idle:
            serving.give_up()
            self._loop.call_later(LINGER_S, transport.abort)
        else:
            transport.abort()

    async def _refuse(self, peer: socket.socket, answer: bytes) -> None:
        """Closes a connection after an answer, as soon as its client closes it, too."""
        try:
            async with asyncio.timeout(LINGER_S):
                await self._loop.sock_sendall(peer, answer)
                peer.shutdown(socket.SHUT_WR)
                for _ in range(_LINGER_BYTES // _LINGER_READ):
                    if not await self._loop.sock_recv(peer, _LINGER_READ):
                        break
        except (OSError, TimeoutError) as error:
            log.debug("port %s: an answer was not taken: %s", self._connections.port, error)

    def _refused(self, words: str, peer: Any) -> None:
        self._connections.closed["tls"] += 1
        self._came("refused")
        self._warn(self._strange, words + ": it is closed", _name(peer))

    def _warn(self, subject: Seldom, words: str, *about: object) -> None:
        subject.log(self._loop.time(), "port %s: " + words, self._connections.port, *about)

    def _spawn(self, peer: socket.socket, place: Place, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        place.close = task.cancel
        self._tasks.add(task)
        task.add_done_callback(partial(self._over, peer, place))

    def _over(self, peer: socket.socket, place: Place, task: asyncio.Task[None]) -> None:
        """Closes a connection whose task is over, or cancelled, without a protocol to serve it."""
        self._tasks.discard(task)
        if place.served_by is None:
            self._end(peer, place)

    def _end(self, peer: socket.socket, place: Place) -> None:
        self._connections.leave(place)
        peer.close()


class _Doorway(asyncio.Protocol):
    """First protocol of a connection: calls `enter`, after the TLS handshake if there is one."""

    def __init__(self, enter: Callable[[asyncio.Transport], None]) -> None:
        self._enter = enter

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._enter(cast("asyncio.Transport", transport))


def _nothing() -> None: ...


def _name(peer: Any) -> str:
    try:
        name = peer.getpeername()
    except OSError:
        return "a client"
    return f"{unmapped(name[0])}:{name[1]}" if isinstance(name, tuple) else "a client"
