"""Accepts connections: TLS and plain ones on one port.

Gateways come either way, some without a choice: the first byte of a connection tells (0x16 is TLS's
handshake, `P` begins HTTP/2's preface).

Law: a connection that has sent nothing after FIRST_BYTE_S, or what its server says, is closed;
PEEKING_MAX wait at most.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

FIRST_BYTE_S = 10.0
PEEKING_MAX = 1024
"""Connections that have sent nothing yet; the one that came first is closed for the next."""
_TLS_HANDSHAKE = b"\x16"

log = logging.getLogger("kvroute.http2")


class Listener:
    """Accepts connections on one port, with TLS or without."""

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext | None],
        *,
        allows_plain: bool,
        came: Callable[[str], None],
        first_byte_s: float | None = None,
    ) -> None:
        """tls: in force now; None: connections with TLS are closed. allows_plain: else connections
        without TLS are closed. came: is called with `tls`, `plain` or `refused` for each.
        first_byte_s: None: FIRST_BYTE_S."""
        self._make = make
        self._tls = tls
        self._allows_plain = allows_plain
        self._came = came
        self._first_byte_s = first_byte_s
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._peeking: dict[socket.socket, None] = {}
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listens; raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(1024)
            listening.setblocking(False)
        except OSError:
            listening.close()
            raise
        self._socket = listening
        self.port = listening.getsockname()[1]
        self._spawn(self._accept(listening))

    async def stop(self) -> None:
        """Accepts no more."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in list(self._peeking):
            peer.close()
        self._peeking.clear()
        if self._socket is not None:
            self._socket.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listening)
            except OSError as error:  # no file descriptors are left
                log.warning("a connection can't be accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            peer.setblocking(False)
            if len(self._peeking) >= PEEKING_MAX:
                oldest = next(iter(self._peeking))
                del self._peeking[oldest]
                oldest.shutdown(socket.SHUT_RDWR)
            self._peeking[peer] = None
            self._spawn(self._serve(peer))

    async def _serve(self, peer: socket.socket) -> None:
        try:
            first = await self._first_byte(peer)
        except (TimeoutError, OSError):
            first = b""
        held = self._peeking.pop(peer, False) is None
        tls = self._tls() if first == _TLS_HANDSHAKE else None
        if not held or not first or (tls is None and not self._may_be_plain(first)):
            if held and first:
                self._came("refused")
            peer.close()
            return
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._came("plain" if tls is None else "tls")
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(self._make, peer, ssl=tls)
        except (OSError, ssl.SSLError) as error:
            log.info("a connection with TLS failed: %s", error)
            peer.close()

    def _may_be_plain(self, first: bytes) -> bool:
        return self._allows_plain and first != _TLS_HANDSHAKE

    async def _first_byte(self, peer: socket.socket) -> bytes:
        """The first byte, which stays to be read; raises TimeoutError and OSError."""
        loop = asyncio.get_running_loop()
        readable = loop.create_future()

        def ready() -> None:
            if not readable.done():
                readable.set_result(None)

        loop.add_reader(peer.fileno(), ready)
        try:
            async with asyncio.timeout(self._first_byte_s or FIRST_BYTE_S):
                await readable
        finally:
            loop.remove_reader(peer.fileno())
        return peer.recv(1, socket.MSG_PEEK)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
