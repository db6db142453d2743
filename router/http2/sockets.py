"""Sockets of HTTP/2: TLS and plain connections on one port.

Gateways come either way, some without a choice: the first byte of a connection tells (0x16 is TLS's
handshake, `P` begins HTTP/2's preface).

Laws:
- a connection that has sent nothing after FIRST_BYTE_S, or what its server says, is closed;
  PEEKING_MAX wait at most;
- so is a connection whose preface is not whole after Bounds.preface_s;
- nothing is read from a connection while bytes for it wait in the socket, or bytes of it wait for
  their turn (frames.TURN_STREAMS).
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from typing_extensions import override

from router.http2.frames import HEADERS_MAX, MESSAGE_MAX, ConnectionFault
from router.http2.machine import Connection
from router.http2.messages import Service

FIRST_BYTE_S = 10.0
LOG_S = 10.0
"""Between two log lines about connections that broke HTTP/2 or a bound."""
PEEKING_MAX = 1024
"""Connections that have sent nothing yet; the one that came first is closed for the next."""
_TLS_HANDSHAKE = b"\x16"

log = logging.getLogger("kvroute.http2")


class Seldom:
    """Warnings that anybody may cause, as often as they like: one in LOG_S at most."""

    def __init__(self) -> None:
        self._logged_s = -inf
        self._more = 0
        """Since the last one."""

    def log(self, now_s: float, words: str, *about: object) -> None:
        """now_s: of a clock that only goes forward."""
        if now_s - self._logged_s < LOG_S:
            self._more += 1
            return
        others = f" ({self._more} more since the last such line)" if self._more else ""
        self._logged_s, self._more = now_s, 0
        log.warning(words + "%s", *about, others)


_faults = Seldom()


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one connection."""

    streams_max: int
    message_max: int = MESSAGE_MAX
    """Bytes of a gRPC message."""
    headers_max: int = HEADERS_MAX
    """Bytes of a call's headers."""
    ping_every_s: float = 0.0
    """See machine.Calm."""
    preface_s: float = 20.0
    """In which TLS and HTTP/2's preface are over."""


class Http2Protocol(asyncio.Protocol):
    """One connection."""

    def __init__(
        self,
        service: Callable[["Http2Protocol"], Service],
        *,
        bounds: Bounds,
        left: Callable[["Http2Protocol"], None],
    ) -> None:
        """service: made for each connection. left: is called when the connection is gone."""
        self.http2 = Connection(
            service(self),
            streams_max=bounds.streams_max,
            message_max=bounds.message_max,
            headers_max=bounds.headers_max,
            ping_every_s=bounds.ping_every_s,
        )
        self._bounds = bounds
        self._left = left
        self._transport: Any = None
        self._clock = asyncio.get_running_loop().time
        self.received_s = self._clock()
        """When the peer last sent something."""
        self.fault = ""
        """Why it is closed from here: `malformed`, `slow_head`; empty: for another reason. One that
        has a reason before it is made is closed at once."""
        self.pinged = False
        """Whether a ping of ours was sent since the peer last sent something."""
        self._preface: asyncio.TimerHandle | None = None
        self._room: asyncio.Future[None] | None = None
        """Done once the socket takes bytes again; None: it does."""
        self._receiving = False
        self._waits = False
        """Whether bytes of the peer, or calls that ended with the connection, wait for the next
        turn."""
        self._paused = False
        """Whether nothing is read."""
        self._gone = False
        self._flushing = False
        """Whether a write is due in the loop's next turn."""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self.fault:
            self.abort()
            return
        loop = asyncio.get_running_loop()
        self._preface = loop.call_later(self._bounds.preface_s, self._end_unless_begun)
        self.flush()

    @override
    def data_received(self, data: bytes) -> None:
        self.received_s = self._clock()
        self.pinged = False
        self._receive(data)

    def _receive(self, data: bytes) -> None:
        self._receiving = True
        try:
            if self.http2.receive(data, self.received_s):
                self._take_turn()
        except ConnectionFault as fault:
            self.fault = "malformed"
            _faults.log(self.received_s, "%s: the connection is closed: %s", self.peer, fault)
            self._write()
            self._transport.close()
            return
        finally:
            self._receiving = False
        self._write()

    def flush(self) -> None:
        """Writes what is to be written, all at once: after the bytes that are being read, else in
        the loop's next turn, so that an endpoint and the body behind it are one write."""
        if not self._receiving and not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._write)

    @override
    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()
        self._read_or_pause()

    @override
    def resume_writing(self) -> None:
        self._has_room()
        self._read_or_pause()

    async def room(self) -> None:
        """Returns once the socket takes bytes, or is closed."""
        if self._room is not None:
            await asyncio.shield(self._room)

    @override
    def connection_lost(self, error: Exception | None) -> None:
        if self._preface is not None:
            self._preface.cancel()
        self._gone = True
        self._has_room()
        if not self._waits:
            self._end_calls()

    def _end_calls(self) -> None:
        """The connection is gone, and so are its calls."""
        if self.http2.lost():
            self._take_turn()
        else:
            self._left(self)

    def _take_turn(self) -> None:
        """Has the loop come back to this connection after the others."""
        if not self._waits:
            self._waits = True
            asyncio.get_running_loop().call_soon(self._on_turn)
            self._read_or_pause()

    def _on_turn(self) -> None:
        self._waits = False
        if self._gone:
            self._end_calls()
            return
        self._receive(b"")
        self._read_or_pause()

    def _read_or_pause(self) -> None:
        pauses = self._waits or self._room is not None
        if pauses == self._paused or self._transport.is_closing():
            return
        self._paused = pauses
        if pauses:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def close(self) -> None:
        """Closes the connection after what was written."""
        self._write()
        if self._transport is not None:
            self._transport.close()

    def ping(self) -> None:
        """Asks the peer for a sign of life."""
        self.pinged = True
        self.http2.ping()
        self.flush()

    def abort(self) -> None:
        """Closes the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def socket(self) -> Any:
        """The asyncio transport, for what it knows of its other side."""
        return self._transport

    @property
    def peer(self) -> str:
        """Address of the other side."""
        name = self._transport.get_extra_info("peername") if self._transport else None
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name or "?")

    def _end_unless_begun(self) -> None:
        self._preface = None
        if not self.http2.began:
            self.fault = "slow_head"
            log.info("%s: no HTTP/2 after %g s", self.peer, self._bounds.preface_s)
            self.abort()

    def _has_room(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _write(self) -> None:
        self._flushing = False
        out = self.http2.out
        if out and self._transport is not None:
            self._transport.write(b"".join(out))
            out.clear()


class Listener:
    """Accepts connections on one port, with TLS or without."""

    def __init__(
        self,
        make: Callable[[], Http2Protocol],
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
