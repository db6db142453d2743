"""Connections to engines: aiohttp's client, with bounds on what comes before an answer's body.

aiohttp reads interim answers (1xx) for as long as they come, keeps what comes on an idle
connection, lets the reader of a body wait whose bytes can't be parsed, and does not say whether a
connection was used before. `_factory` of its connector makes the protocol of each connection: a
private name, which tests/router/gateway/server/test_engine_answers.py watches.

Laws:
- a head is parsed in pieces of PIECE_BYTES, and the bytes up to its end, those of interim answers
  included, are bounded: HEAD_SLACK times the bound of a head;
- bytes that no request waits for close the connection, and bytes that are no HTTP end the answer;
- a host that answers no packet for DEAD_S fails the connection, whatever waits on it.
"""

import asyncio
import socket
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from typing_extensions import override

INTERIM_MAX = 16
"""Interim answers before an answer; engines send none."""
HEAD_SLACK = 4
"""Multiple of the bound up to which a longer head is still read, to tell a valid long head, which
other workers would send as well, from broken bytes."""
PIECE_BYTES = 1 << 14
DEAD_S = 30
"""Seconds until a dead host is noticed: by TCP keepalive, or TCP_USER_TIMEOUT for sent bytes."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""10 + 4 * 5 s are DEAD_S."""

used: ContextVar[Callable[["AnswerProtocol"], None] | None] = ContextVar("used", default=None)
"""Called with the connection of the request that the current task sends; None: not called."""


class UnusableHead(aiohttp.ClientError):
    """The bytes before an answer's body are no valid head within the bounds."""


class LongHead(aiohttp.ClientError):
    """The head of an answer, which may be valid, is over the bound."""

    def __init__(self, status: int, head_bytes_max: int) -> None:
        super().__init__(f"the answer's head is over {head_bytes_max} bytes")
        self.status_code = status


class AnswerProtocol(ResponseHandler):
    """One connection to a worker."""

    def __init__(self, loop: asyncio.AbstractEventLoop, head_bytes_max: int) -> None:
        super().__init__(loop)
        self._head_bytes_max = head_bytes_max
        self._left: int | None = None
        """Bytes that the awaited head may still take; None: no head is awaited."""
        self._interim = 0
        self._body: aiohttp.StreamReader | None = None
        """The body of the present answer; None: there is none."""
        self.uses = 0
        """Requests so far, the present one included."""
        self.heard = False
        """Whether a byte has come since the present request."""

    @property
    def unanswered_reuse(self) -> bool:
        """Whether the connection was used before, and has no byte of an answer to this request."""
        return self.uses > 1 and not self.heard

    @override
    def set_response_params(self, **params: Any) -> None:
        """Called by aiohttp before it writes a request, whose answer's head is awaited then."""
        self.uses += 1
        self.heard = False
        self._interim = 0
        self._left = slack = HEAD_SLACK * self._head_bytes_max
        own = {"max_line_size": slack, "max_field_size": slack, "max_headers": slack}
        super().set_response_params(**(params | own))  # the bound here counts bytes

    @override
    def data_received(self, data: bytes) -> None:
        if self._left is None:
            super().data_received(data)
        else:
            self._head(data)

    def _head(self, data: bytes) -> None:
        """Parses received bytes, in pieces, up to the end of the awaited head."""
        self.heard = True
        at = 0
        while self._left is not None and at < len(data):
            if not self._left:
                self._refuse(UnusableHead(f"the answer's head has no end within {at} bytes"))
                return
            piece = data[at : at + min(PIECE_BYTES, self._left)]
            self._left -= len(piece)
            at += len(piece)
            super().data_received(piece)
            if self.exception() is not None:
                return
        if at < len(data):
            super().data_received(data[at:])

    @override
    def feed_data(self, data: Any, size: int = 0) -> None:
        """Called by aiohttp with a parsed head: drops an interim head, and closes the connection
        for a head that no request waits for.
        """
        message = data[0]
        if self._left is None:
            self._close()
        elif 100 <= message.code < 200 and message.code != 101:
            self._interim += 1
            if self._interim > INTERIM_MAX:
                self._refuse(UnusableHead(f"over {INTERIM_MAX} interim answers (1xx) came"))
        elif self._long(message):
            self._refuse(LongHead(message.code, self._head_bytes_max))
        else:
            self._left = None
            self._body = data[1]
            super().feed_data(data, size)

    @override
    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        super().set_exception(exc, *cause)
        body, self._body = self._body, None
        if body is not None and not body.is_eof() and body.exception() is None:
            error = aiohttp.ClientPayloadError(f"the answer's body breaks off: {first_line(exc)}")
            body.set_exception(error)
            # A reader that the end of a chunk woke in this turn waits once more before it looks.
            asyncio.get_running_loop().call_soon(body.set_exception, error)

    def _long(self, message: Any) -> bool:
        fields = sum(len(name) + len(value) + 4 for name, value in message.raw_headers)
        return fields + len(message.reason) > self._head_bytes_max

    def _refuse(self, error: Exception) -> None:
        self._left = None
        if self.exception() is None:
            self.set_exception(error)
        self._close()

    def _close(self) -> None:
        self.force_close()
        if self.transport is not None:
            self.transport.abort()

    def leave(self, error: Exception) -> None:
        """Fails the request whose answer's head has yet to come, and closes the connection."""
        self._refuse(error)


class Connector(aiohttp.TCPConnector):
    """Connections to all engines; with force_close, one for each request."""

    def __init__(self, head_bytes_max: int, **options: Any) -> None:
        """head_bytes_max: bound of an answer's head. options: of aiohttp's TCPConnector."""
        super().__init__(socket_factory=_socket, **options)
        loop = asyncio.get_running_loop()
        made: Any = partial(AnswerProtocol, loop, head_bytes_max)
        self._factory = made

    @override
    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        assert isinstance(protocol, AnswerProtocol)
        if (take := used.get()) is not None:
            take(protocol)
        return connection


def first_line(error: BaseException) -> str:
    """The first line of an error's message, 200 characters at most; later lines quote the bytes."""
    return str(getattr(error, "message", error)).split("\n", 1)[0][:200]


def _socket(address: Any) -> socket.socket:
    """A socket that fails when its host has answered no packet for DEAD_S."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    if family in (socket.AF_INET, socket.AF_INET6):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = _KEEPALIVE | {"TCP_USER_TIMEOUT": DEAD_S * 1000}
        for name, value in options.items():
            if number := getattr(socket, name, None):  # not every system has all of them
                made.setsockopt(socket.IPPROTO_TCP, number, value)
    return made
