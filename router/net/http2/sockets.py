"""The sockets of HTTP/2 connections.

Laws:
- nothing is read from a connection while its socket takes no bytes to send, or while bytes already
  received wait for their turn (frames.TURN_WORK);
- an answer of which a peer takes nothing for Bounds.read_s is cut, complete or not;
- a deadline counts from a call's headers; a call that is over within the turn in which it was
  opened gets no timer.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from typing_extensions import override

from router.net.http2.frames import HEADERS_MAX, MESSAGE_MAX, ConnectionFault
from router.net.http2.machine import Connection
from router.net.http2.streams import Service
from router.net.listener.addresses import unmapped
from router.net.listener.held import Held, PortHeld
from router.net.listener.seldom import Seldom

log = logging.getLogger("kvroute.http2")
_faults = Seldom(log)
LOOK_S = 1.0
"""Seconds between two checks for answers that their peer does not read."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one connection: streams, bytes of messages and headers, and waits."""

    streams_max: int
    message_max: int = MESSAGE_MAX
    """Most bytes of a gRPC message."""
    headers_max: int = HEADERS_MAX
    """Most bytes of a call's headers."""
    ping_every_s: float = 0.0
    """Least seconds between two pings of the peer: see calm.Calm."""
    read_s: float = 20.0
    """Seconds within which a peer must take some of the bytes of an answer that wait for it."""


class Timed(Protocol):
    """Interface: a call with a deadline."""

    def await_deadline(self) -> None:
        """Sets a timer for the deadline, if the call is still open."""


class Http2Protocol(asyncio.Protocol):
    """The asyncio protocol of one HTTP/2 connection."""

    def __init__(
        self,
        service: Callable[["Http2Protocol"], Service],
        *,
        bounds: Bounds,
        left: Callable[["Http2Protocol"], None],
        held: PortHeld,
        unpacking: asyncio.Lock,
    ) -> None:
        """service: makes the connection's service. left: called when the connection is gone. held:
        counts the bytes that all connections of the port hold. unpacking: see port_unpacking.
        """
        self.unpacking = asyncio.Lock()
        """Locked while a message of this connection is unpacked, or waits for that."""
        self.port_unpacking = unpacking
        """Locked while any connection of the port unpacks a message: connections take turns."""
        self._clock = asyncio.get_running_loop().time
        self.http2 = Connection(
            service(self),
            clock=self._clock,
            streams_max=bounds.streams_max,
            message_max=bounds.message_max,
            headers_max=bounds.headers_max,
            ping_every_s=bounds.ping_every_s,
            held=Held(held, self._drop),
        )
        self._read_s = bounds.read_s
        self._left = left
        self._transport: Any = None
        self.received_s = self._clock()
        """Loop time when the peer last sent something."""
        self.until_s = inf
        """Loop time at which the port sends a GOAWAY for the connection's age; inf: never."""
        self.left_s = inf
        """Loop time when the GOAWAY for its age was sent; inf: it was not."""
        self.farewell_s = inf
        """Loop time when the last bytes of a connection closed for its age were sent; inf: they
        were not."""
        self.fault = ""
        """Why this side closed the connection, one of connections.REASONS; empty: for none of
        them, or it is open."""
        self._look: asyncio.TimerHandle | None = None
        """Timer of the next check for unread answers; None: no bytes wait for the peer."""
        self.pinged = False
        """Whether a ping of ours was sent since the peer last sent something."""
        self._room: asyncio.Future[None] | None = None
        """Future that is done once the socket takes bytes again; None: the socket takes bytes."""
        self._receiving = False
        self.timed: list[Timed] = []
        """Calls with a deadline that were opened by the bytes being received. Only those that are
        still open after these bytes, mostly few, get a timer."""
        self._waits = False
        """Whether bytes of the peer, or calls that ended with the connection, wait for the next
        turn."""
        self._paused = False
        """Whether reading from the socket is paused."""
        self._gone = False
        self._flushing = False
        """Whether a write is due in the loop's next turn."""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.http2.held.open()
        self.flush()

    @override
    def data_received(self, data: bytes) -> None:
        self.received_s = self._clock()
        self.pinged = False
        self._receive(data)

    def _receive(self, data: bytes) -> None:
        if self.fault:
            return  # it is being closed
        self._receiving = True
        try:
            if self.http2.receive(data, self.received_s):
                self._take_turn()
        except ConnectionFault as fault:
            self.fault = "malformed"
            self.timed.clear()
            _faults.log(self.received_s, "%s: the connection is closed: %s", self.peer, fault)
            self._write()
            self._transport.close()
            return
        finally:
            self._receiving = False
        if self.timed:
            timed, self.timed = self.timed, []
            for call in timed:
                call.await_deadline()
        if self.http2.trouble:
            _faults.log(self.received_s, "%s: %s", self.peer, self.http2.trouble)
            self.http2.trouble = ""
        self._write()

    def flush(self) -> None:
        """Has all pending bytes written: after the bytes that are being received, else in the
        loop's next turn, so that messages sent in the same turn are one write.
        """
        if not self._receiving and not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._write)

    @override
    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()
        self.http2.stuff(full=True)
        self._read_or_pause()

    @override
    def resume_writing(self) -> None:
        self._has_room()
        self.http2.stuff(full=False)
        self._read_or_pause()
        self.flush()

    @property
    def has_room(self) -> bool:
        """Whether the socket takes more bytes."""
        return self._room is None

    async def room(self) -> None:
        """Returns once the socket takes more bytes, or is closed."""
        if self._room is not None:
            await asyncio.shield(self._room)

    @override
    def connection_lost(self, error: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        self._gone = True
        self._has_room()
        if not self._waits:
            self._end_calls()

    def _end_calls(self) -> None:
        """Ends the calls of a connection that is gone, some in each turn of the loop."""
        if self.http2.lost():
            self._take_turn()
        else:
            self._left(self)

    def _take_turn(self) -> None:
        """Has the loop call `_on_turn` after its other work; nothing is read until then."""
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
        """Closes the connection after the bytes that were written."""
        self._write()
        if self._transport is not None:
            self._transport.close()

    def ping(self) -> None:
        """Sends a PING, to see whether the peer is alive."""
        self.pinged = True
        self.http2.ping()
        self.flush()

    def abort(self) -> None:
        """Closes the connection at once, without its pending bytes."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def begun(self) -> bool:
        """Whether HTTP/2's preface has come whole."""
        return self.http2.began

    @property
    def idle(self) -> bool:
        """Whether the connection has begun, and has no open stream but those of health and
        reflection: with these a caller without a key could keep its place."""
        return self.http2.began and len(self.http2.streams) == self.http2.aside

    def give_up(self) -> None:
        """Closes an idle connection after a GOAWAY, which says that calls on their way are not
        served and may be sent again."""
        self.http2.go_away(last=True)
        self.close()

    @property
    def unsent_bytes(self) -> int:
        """Bytes for the peer that the kernel does not have yet."""
        transport = self._transport
        buffered = 0 if transport is None else transport.get_write_buffer_size()
        return self.http2.waiting_bytes + sum(map(len, self.http2.out)) + int(buffered)

    @property
    def socket(self) -> Any:
        """The asyncio transport."""
        return self._transport

    @property
    def peer(self) -> str:
        """Address of the peer."""
        name = self._transport.get_extra_info("peername") if self._transport else None
        return f"{unmapped(name[0])}:{name[1]}" if isinstance(name, tuple) else str(name or "?")

    def _has_room(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _write(self) -> None:
        self._flushing = False
        transport, http2 = self._transport, self.http2
        if transport is None:
            return
        if transport.is_closing():
            http2.out.clear()
            return
        waits = http2.waiting_bytes > 0
        more = waits and http2.pump()
        if http2.out:
            transport.write(b"".join(http2.out))
            http2.out.clear()
        if more:
            self.flush()
        if waits and self._look is None and http2.waiting_bytes:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._end_unread)

    def _end_unread(self) -> None:
        self._look = None
        now_s = self._clock()
        if ended := self.http2.end_unread(now_s, self._read_s):
            words = "%s: %d answers are cut: the client read nothing of them for %g s"
            _faults.log(now_s, words, self.peer, ended, self._read_s)
        self._write()

    def _drop(self) -> None:
        """Closes the connection: it holds the most bytes of its port, which holds too many."""
        self.fault = "held"
        _faults.log(
            self._clock(), "%s: closed: it held most of the bytes of a full port", self.peer
        )
        self.abort()
