"""An HTTP connection with bounds on the time for each request's head, the time without requests,
the time in which its client takes nothing of an answer, and the rest of a body that no handler
reads.

Laws:
- a request's head has at most HEAD_TIMES x head_bytes_max bytes, whether it ends or not;
- a body is given to its handler as it came: nothing on this connection is decompressed;
- after its request's answer, the rest of a body is dropped, at most REST_BYTES_MAX bytes; unless
  the body is known to be short (REST_SHORT), the answer says that the connection ends.

aiohttp counts no connections, and bounds a head by its size alone. `_waiter` of its RequestHandler
is set while it waits for a head, `_request_count` counts whole heads, and `_current_request` is the
one that is being answered: private names, which tests/router/net/http/test_port.py watches.
"""

import asyncio
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import _ErrInfo
from typing_extensions import override

from router.net.listener.connections import Connections
from router.net.listener.http_bounds import HttpBounds

HEAD_TIMES = 4
"""Most bytes of a head, as a multiple of those of a line: nginx has four buffers of 8 KiB."""
REST_BYTES_MAX = 1 << 25
"""Most bytes that are read and dropped of an answered request's body; more close the connection."""
REST_SHORT = 1 << 16
"""Most bytes of a body whose rest is dropped without ending the connection after the answer; a body
of unknown length ends it."""
READ_BYTES = 1 << 14
"""Bytes of a body that wait for its handler; above twice as many, the connection is not read.
READ_BYTES / 16 is the most chunks (RFC 9112, 7.1) that wait."""


def malformed(error: HttpProcessingError) -> web.Response:
    """The answer of most ports to bytes that are no HTTP, or to a head past its bounds."""
    status = 431 if isinstance(error, LineTooLong) else 400
    return web.Response(status=status, text="malformed request\n")


class BoundedHandler(web.RequestHandler):
    """One HTTP connection, from the end of its TLS handshake on."""

    __slots__ = (
        "_connections", "_dropped", "_drops", "_head_bytes", "_head_bytes_max", "_head_timeout_s",
        "_head_timer", "_left", "_malformed", "_read_s", "_read_timer", "_resumes", "_unread",
    )  # fmt: skip

    def __init__(
        self,
        server: web.Server,
        bounds: HttpBounds,
        connections: Connections,
        left: Callable[[], None],
        *,
        head_bytes_max: int,
        malformed: Callable[[HttpProcessingError], web.Response],
    ) -> None:
        """left: called at the connection's end. head_bytes_max: most bytes of the request line, and
        of each header. malformed: makes the answer to bytes that are no HTTP.
        """
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None: none is written
            keepalive_timeout=bounds.idle_timeout_s,
            lingering_time=bounds.linger_s,
            max_line_size=head_bytes_max,
            max_field_size=head_bytes_max,
            read_bufsize=READ_BYTES,
            auto_decompress=False,
        )
        self._dropped = self._head_bytes = 0
        self._drops = self._resumes = False
        """_drops: whether received bytes are dropped unparsed, as the rest of a body in chunks
        (RFC 9112, 7.1), which would cost far more to parse. _resumes: whether `_resume` is due."""
        self._head_bytes_max = HEAD_TIMES * head_bytes_max
        self._connections = connections
        self._left = left
        self._malformed = malformed
        self._head_timeout_s = bounds.head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_s = bounds.read_s
        self._read_timer: asyncio.TimerHandle | None = None
        self._unread = 0
        """Bytes that waited for the client when it was last looked at; -1: all have gone since."""

    @property
    def begun(self) -> bool:
        """Whether the first request's head is complete; until then the listener's timer runs."""
        return self._request_count > 0

    @override
    def data_received(self, data: bytes) -> None:
        heads = self._request_count
        if self._current_request is None and self._waiter is None:  # an answered request's rest
            self._dropped += len(data)
            if self._dropped > REST_BYTES_MAX:
                self.force_close()
        if self._drops:
            return
        super().data_received(data)
        if self._request_count != heads:
            self._cancel_timer()
            self._dropped = self._head_bytes = 0
            self._look_for_fault()
        elif self._waiter is not None:  # a part of a head
            if heads and self._head_timer is None:
                self._await_head()  # of a later request: its first bytes
            self._head_bytes += len(data)
            if self._head_bytes > self._head_bytes_max and not self._waiter.done():
                self._refuse_head(self._waiter)

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        if self._read_timer is None:
            self._await_reader()

    @override
    def resume_writing(self) -> None:
        self._unread = -1
        super().resume_writing()

    def _await_reader(self) -> None:
        """Looks again in read_s whether the client has taken something."""
        assert self.transport is not None  # it paused
        self._unread = self.transport.get_write_buffer_size()
        loop = asyncio.get_running_loop()
        self._read_timer = loop.call_later(self._read_s, self._look_for_reader)

    def _await_end(self, transport: asyncio.Transport | None) -> None:
        """Ends a closed connection after read_s though its client has not taken the rest of its
        answers, for which the transport's close() waits without a bound."""
        try:
            if transport is None or not transport.get_write_buffer_size():
                return
        except AttributeError:  # asyncio's own, of TLS that was closed twice
            return
        if self._read_timer is not None:
            self._read_timer.cancel()
        loop = asyncio.get_running_loop()
        self._read_timer = loop.call_later(self._read_s, self._end_unread, transport)

    def _end_unread(self, transport: asyncio.Transport) -> None:
        self._connections.closed["unread"] += 1
        transport.abort()

    @override
    async def start(self) -> None:
        await super().start()
        self._await_end(self.transport)

    @override
    def force_close(self) -> None:
        transport = self.transport
        super().force_close()
        self._await_end(transport)

    def _look_for_reader(self) -> None:
        self._read_timer = None
        transport = self.transport
        if transport is None or not self.writing_paused:
            return
        if transport.get_write_buffer_size() != self._unread:
            self._await_reader()
            return
        self._end_unread(transport)

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        self._cancel_timer()
        if self._read_timer is not None:
            self._read_timer.cancel()
        self._messages.clear()  # their bodies refer to this connection: a cycle
        super().connection_lost(exc)
        self._left()

    @override
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to an error; aiohttp's own would log and send back bytes of the request, which
        may be many.
        """
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        self._connections.closed["malformed"] += 1
        response = self._malformed(exc)
        response.headers["Server"] = "kvroute"  # without the versions of Python and aiohttp
        response.force_close()
        return response

    @override
    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if not request.content.is_eof():
            length = request.content_length
            self._drops = length is None
            if length is None or length > REST_SHORT or "Expect" in request.headers:
                resp.force_close()
        return await super().finish_response(request, resp, start_time)

    @override
    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resumes reading in a later turn of the loop; aiohttp would parse buffered bytes at once,
        in the middle of a handler's read.
        """
        if not resume_parser:
            super().resume_reading(resume_parser=False)
        elif self._reading_paused and not self._resumes:
            self._resumes = True
            asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        self._resumes = False
        if self.transport is not None:
            super().resume_reading()

    def _look_for_fault(self) -> None:
        """Gives a body's reader the parser's error about that body: aiohttp queues the error as the
        next message, and leaves the reader waiting. Drops the error's traceback, whose frames
        refer to this connection."""
        fault = getattr(self._messages[-1][0], "exc", None) if self._messages else None
        if not isinstance(fault, HttpProcessingError):
            return
        fault.__traceback__ = None
        if self._current_request is not None:
            content = self._current_request.content
            error = web.RequestPayloadError(fault.message)
            content.set_exception(error)
            # A reader that the end of a chunk woke in this turn waits once more before it looks.
            asyncio.get_running_loop().call_soon(content.set_exception, error)

    def _refuse_head(self, waiter: "asyncio.Future[None]") -> None:
        """Queues a 431 and ends the connection, as aiohttp does for a line that is too long."""
        error = LineTooLong(b"", self._head_bytes_max)
        self._cancel_timer()
        self._request_count += 1
        self._messages.append((_ErrInfo(431, error, error.message), EMPTY_PAYLOAD))
        self._close = True  # no more is read
        waiter.set_result(None)

    @property
    def idle(self) -> bool:
        """Whether a request was served, and no request or part of one is on the connection."""
        return self.begun and self._waiter is not None and self._head_timer is None

    def close_if_idle(self) -> None:
        """Closes the connection if no request or part of one is on it."""
        if self.idle:
            self.force_close()

    def give_up(self) -> None:
        """Closes an idle connection."""
        self.force_close()

    def _await_head(self) -> None:
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(self._head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        self._connections.closed["slow_head"] += 1
        self.force_close()

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @override
    def _process_keepalive(self) -> None:
        was_open = not self._force_close
        super()._process_keepalive()
        if was_open and self._force_close:
            self._connections.closed["idle"] += 1
