"""nats-py's client, with fixes for faults of networks, servers and publishers after which it would
stay disconnected.

The overridden methods have no public name in nats-py: tests/events/plane/test_nats_client.py holds
each private name to its signature, and tests/events/plane/test_broker.py shows the reason for each
override against a real server.
"""

import asyncio
import json
from collections import Counter, UserString
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import Error, StaleConnectionError, UnexpectedEOF
from typing_extensions import override

from events.plane.nats_check import user_jwt
from events.plane.nats_wire import Frames, WireError

PING_S = 0.7
PINGS_MAX = 2
"""PINGs in a row without a PONG or a message, after which a connection is dead: 2.1 s at most,
before workers count as silent (beat_timeout_s). A server that is a second late is only busy."""
TURN_COST = 64 * 1024
"""Cost (bytes, and 512 for each message) of the messages read in a turn of the event loop: the cost
of a slice of an intake (events/feed/intake.py), so that messages don't pile up there."""
_MESSAGE_COST = 512
_READ_BYTES = 32 * 1024
_BROKEN_S = 1.0
"""Seconds before the next attempt to connect to a server whose bytes could not be read."""
_CLOSED_S = 2.0
"""Most seconds that a client waits for the end of a TCP connection."""
_LASTING_ERRORS = ("permissions violation",)
"""Errors after which the server keeps the connection."""


OnRaw = Callable[[bytes, bytes], None]
"""Called with a message's subject and payload while it is read: must be quick, and not await."""


class RawSubscription(NamedTuple):
    """A subscription whose listener is called with each message while it is read."""

    sid: int
    subscription: Subscription


class _Tcp(TcpTransport):
    """Raises OSError for each write to a connection that is gone.

    uvloop raises RuntimeError once the socket is closed. nats-py takes that for the end of the
    event loop: its flusher ends without an error, the client counts as connected, and each publish
    after that raises RuntimeError, too.
    """

    @override
    def __bool__(self) -> bool:
        return True  # nats-py would replace a transport that is not connected yet by its own

    @override
    def write(self, payload: bytes) -> None:
        try:
            super().write(payload)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise ConnectionResetError(str(error)) from error

    @override
    def writelines(self, payload: Iterable[bytes]) -> None:
        try:
            super().writelines(payload)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise ConnectionResetError(str(error)) from error

    @override
    async def connect_tls(self, *about: Any, **named: Any) -> None:
        """Connects with TLS as nats-py does, and marks the connection's asyncio protocol, made
        before the handshake, as over TLS: else asyncio warns of each connection that a server ends.
        """
        await super().connect_tls(*about, **named)
        assert self._io_writer is not None  # the handshake is over
        self._io_writer.transport.get_protocol()._over_ssl = True  # type: ignore[attr-defined]

    @override
    async def wait_closed(self) -> None:
        """Raises TimeoutError after _CLOSED_S: asyncio never learns that a connection is gone whose
        TLS handshake failed, and nats-py would wait for ever.

        Only the task's own cancellation ends the wait with CancelledError. All that wait for the
        end of a connection share a future, and the first of them that is cancelled cancels it: a
        reconnect, say, which the client's close() cancels before it waits here.
        """
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        try:
            async with asyncio.timeout(_CLOSED_S):
                await super().wait_closed()  # type: ignore[no-untyped-call]
        except asyncio.CancelledError:
            if task is None or task.cancelling() > before:
                raise


class NatsClient(Client):
    """nats-py's client, but one that always reconnects."""

    def __init__(self, *, needs_tls: bool = False) -> None:
        """needs_tls: refuse a server that offers no TLS, before it gets the credentials."""
        super().__init__()
        self._needs_tls = needs_tls
        self.unreadable: Counter[str] = Counter()
        """Class of the error -> unreadable messages dropped"""
        self._raw: dict[int, OnRaw] = {}
        """Subscription -> listener, of subscriptions that bypass nats-py's own queues."""

    async def subscribe_raw(self, subject: str, listener: OnRaw) -> RawSubscription:
        """Calls the listener with the messages of a subject while they are read."""

        async def unused(_message: Msg) -> None: ...

        sid = self._sid + 1
        self._raw[sid] = listener  # before the first message can come
        return RawSubscription(sid, await self.subscribe(subject, cb=unused))

    def forget_raw(self, raw: RawSubscription) -> None:
        """Drops all further messages of a subscription that has ended."""
        self._raw.pop(raw.sid, None)

    def abort(self) -> None:
        """Ends the TCP connection at once, without sending what is buffered."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    @override
    async def _attempt_reconnect(self) -> None:
        # nats-py waits until its buffer is written to a server that may have stopped reading.
        self.abort()
        while True:
            try:
                await super()._attempt_reconnect()
                return
            except Exception as error:  # nats-py would stay disconnected for good
                await self._error_cb(error)
                await asyncio.sleep(_BROKEN_S)
                self._status = Client.RECONNECTING

    @override
    async def _connect_to_server(self, s: Srv) -> None:
        self.abort()  # an earlier attempt without an answer would stay open
        if not self._transport and s.uri.scheme not in ("ws", "wss"):
            self._transport = _Tcp()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)

    @override
    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # nats-py goes on in plain text where the server's first line, which anybody between the two
        # can write, does not say "tls_required".
        scheme = self._current_server.uri.scheme if self._current_server is not None else ""
        if self._needs_tls and initial_connection and scheme not in ("ws", "wss"):
            if not info.get("tls_required") and not info.get("tls_available"):
                raise Error("nats: the server offers no TLS, which this connection needs")
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    @override
    def _read_creds_user_jwt(self, creds: str | UserString | Path) -> bytes:
        # nats-py's never returns from a file without a JWT, such as one that is being replaced.
        return user_jwt(Path(str(creds)).read_bytes(), str(creds))

    @override
    async def _process_err(self, err_msg: str) -> None:
        # nats-py closes for good when a server refuses it, as a server that is reloaded with other
        # users may do for a moment.
        if any(lasting in err_msg for lasting in _LASTING_ERRORS):
            await super()._process_err(err_msg)
            return
        error = Error(f"nats: {err_msg}")
        await self._error_cb(error)
        await self._process_op_err(error)

    @override
    async def _ping_interval(self) -> None:
        # nats-py accepts only pongs as a sign of life, which may come long after other messages
        # that the server has queued for a busy router.
        seen = self.stats["in_msgs"]
        while True:
            await asyncio.sleep(PING_S)
            if self.stats["in_msgs"] != seen:
                seen = self.stats["in_msgs"]
                self._pings_outstanding = 0
            if self._pings_outstanding >= PINGS_MAX:
                error = StaleConnectionError()
                await self._error_cb(error)
                await self._process_op_err(error)
                return
            self._pings_outstanding += 1
            try:
                await self._send_ping()
            except OSError as error:  # the reader may have much to read before it sees the end
                await self._error_cb(error)
                await self._process_op_err(error)
                return

    @override
    async def _read_loop(self) -> None:
        # nats-py's loop ends, and its connection with it, at a subject that isn't UTF-8 or at a
        # malformed header; and it reads without a pause while there are bytes to read.
        frames = Frames()
        try:
            while self._transport is not None and not (self.is_closed or self.is_reconnecting):
                if self._transport.at_eof():
                    raise UnexpectedEOF
                await self._take(frames, await self._transport.read(_READ_BYTES))
        except Exception as error:
            await self._error_cb(error)
            await self._process_op_err(error)

    async def _take(self, frames: Frames, data: bytes) -> None:
        cost = messages = 0
        for frame in frames.feed(data):
            if isinstance(frame, bytes):
                await self._process_line(frame)
                if self.is_closed or self.is_reconnecting:
                    return
                continue
            sid, subject, reply, headers, payload = frame
            cost += len(payload) + _MESSAGE_COST
            try:
                if (listener := self._raw.get(sid)) is not None:
                    messages += 1
                    listener(subject, payload)
                else:
                    await self._process_msg(sid, subject, reply, payload, headers)
            except Exception as error:  # from a publisher's bytes: only that message is lost
                self.unreadable[type(error).__name__] += 1
            if cost >= TURN_COST:
                cost = 0
                self.stats["in_msgs"] += messages  # a sign of life, for the pings
                messages = 0
                await asyncio.sleep(0)
        self.stats["in_msgs"] += messages
        if cost:
            await asyncio.sleep(0)

    async def _process_line(self, line: bytes) -> None:
        word, _, rest = line.partition(b" ")
        match word:
            case b"PING":
                await self._process_ping()
            case b"PONG":
                if self._pongs and self._pongs[0].done():
                    # A flush that was cancelled, or too late, left it behind: nats-py would raise,
                    # and the connection would end with the loop that reads.
                    self._pongs[0] = asyncio.get_running_loop().create_future()
                await self._process_pong()
            case b"INFO":
                await self._process_info(json.loads(rest))
            case b"-ERR":
                await self._process_err(rest.decode(errors="replace").lower())
            case b"+OK" | b"":
                pass
            case _:
                raise WireError(f"the NATS server sent an unknown line: {line[:80]!r}")
