"""HTTP requests to workers, over pooled connections; no answer is unpacked, no redirect followed.

The one reader of engines' answers to requests of clients: a head, then bytes, or an exception that
kvroute/client/requests/failures.py judges.

Laws:
- a request fails if its worker sends nothing for gateway.silence_s while bytes are waited for;
- a connection that was used before and closes without a byte of an answer is no failure of its
  worker: the request goes there once more, on a fresh one;
- a request without a byte of an answer can be taken away from its worker (leave).
"""

import asyncio
import io
import ssl
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import aiohttp
from yarl import URL

from events.engines.connections import (
    AnswerProtocol,
    Connector,
    LongHead,
    UnusableHead,
    first_line,
    used,
)
from kvroute.client import UnusableAnswer
from kvroute.client.requests.failures import Kind, judge, of_status
from router.config.settings.gateway_settings import GatewaySettings
from router.gateway.exchange import UPSTREAM_ANSWER_MAX, Upstream, returned

IDLE_S = 3.0
"""Seconds for which an idle connection is kept: less than the 5 s of vLLM's and SGLang's server, so
that few requests meet a connection that the worker is closing."""
LOOKS = 4
"""Looks within gateway.silence_s, so that silence is noticed up to a fourth of that time late."""
CONNECT_TIMEOUT_S = 5.0
"""Seconds for a connection to a worker: one that takes longer has lost packets more than once."""
HEADER_KIB_MAX = 16
"""Most KiB of a header of a client's request, and of the whole head of a worker's answer: tokens of
issuers take a few KiB, and no head is worth more memory before its request is known."""
RAW_BODY_MAX = 1 << 16
"""Bytes of a body that are written at once; a longer body goes in pieces."""
FAILED_BODY_S = 1.0
"""Longest wait for the body of a failed answer, in seconds; the bytes that have come are kept."""


class WorkerGone(Exception):
    """The router reports a worker silent that has sent nothing of its answer."""

    failure = Kind.GONE


class HeadTooLong(UnusableAnswer):
    """The head of a worker's answer is too long to be passed on."""

    failure = Kind.LONG_HEAD


class WorkerAnswered(Exception):
    """A worker's answer with a failure status: the request may be tried on another worker, and the
    client gets the answer if there is none.
    """

    def __init__(
        self, status: int, headers: Sequence[tuple[str, str]], body: bytes, model: str = ""
    ) -> None:
        """model: the model of the request, if the worker may lack it."""
        super().__init__(f"the worker answered with status {status}")
        self.status = status
        self.headers = headers
        self.body = body
        lacks = status == 404 and bool(model) and model.encode(errors="replace") in body
        self.failure = Kind.NO_MODEL if lacks else of_status(status)

    @classmethod
    async def read(cls, answer: aiohttp.ClientResponse, model: str = "") -> Self:
        """Reads a failed answer: UPSTREAM_ANSWER_MAX bytes at most, for FAILED_BODY_S at most.
        Raises UnusableAnswer for a status that no client may get, such as 3xx.
        """
        if of_status(answer.status) is Kind.UNUSABLE:
            raise UnusableAnswer(
                f"the worker answered with status {answer.status}; expected 200, 4xx or 5xx"
            )
        body = bytearray()
        try:
            async with asyncio.timeout(FAILED_BODY_S):
                while len(body) < UPSTREAM_ANSWER_MAX and (chunk := await answer.content.readany()):
                    body += chunk
        except (aiohttp.ClientError, OSError):
            pass  # TimeoutError among them: the status says that it failed, and this is all of it
        kept = bytes(body[:UPSTREAM_ANSWER_MAX])
        return cls(answer.status, returned(answer.headers.items()), kept, model)


class Seat(NamedTuple):
    """The worker that a request is sent to, and whether another worker may take the request."""

    worker_id: str
    dp_rank: int
    model: str
    movable: bool


class Upstreams:
    """A gateway's connections to all workers."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._sessions: tuple[aiohttp.ClientSession, ...] = ()
        """A session of pooled connections, and one of fresh connections that are used once."""
        self._open: dict[Sent, None] = {}

    async def __aenter__(self) -> Self:
        self._sessions = self._made(keepalive_timeout=IDLE_S), self._made(force_close=True)
        return self

    def _made(self, **options: object) -> aiohttp.ClientSession:
        head_bytes_max = HEADER_KIB_MAX * 1024
        return aiohttp.ClientSession(
            connector=Connector(head_bytes_max, limit=0, **options),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
        )

    async def __aexit__(self, *_: object) -> None:
        for session in self._sessions:
            await session.close()

    def post(self, upstream: Upstream, seat: Seat, tls: ssl.SSLContext | bool = True) -> "Sent":
        """A request that is sent when it is entered; leaving it before the answer's end closes its
        connection. tls: see EngineAccess.
        """
        return Sent(self._sessions, upstream, self._settings.silence_s, self._open, seat, tls)

    def waiting(self, since_s: float) -> Iterator["Sent"]:
        """Requests sent before since_s that may move to another worker and have no byte of an
        answer.
        """
        return (sent for sent in list(self._open) if sent.waits(since_s))


_NOTHING = Upstream("", {}, b"")


class Sent:
    """A request to a worker, until its answer is read.

    aiohttp's own limit of silence (sock_read) sets a timer at each chunk, 3 us each. Here a timer
    looks LOOKS times in gateway.silence_s whether bytes have come.
    """

    __slots__ = ("_answer", "_bytes", "_idle_looks", "_look_s", "_looks", "_open", "_protocol",
                 "_sent_s", "_sessions", "_silence_s", "_tls", "_upstream", "seat",
                 "writing")  # fmt: skip

    def __init__(
        self,
        sessions: tuple[aiohttp.ClientSession, ...],
        upstream: Upstream,
        silence_s: float,
        open_: dict["Sent", None],
        seat: Seat,
        tls: ssl.SSLContext | bool,
    ) -> None:
        """sessions: one of pooled and one of fresh connections. open_: has this request while it is
        open."""
        self.writing = False
        """Whether a write to the client is under way, so that the worker's silence does not count;
        set by the caller."""
        self.seat = seat
        self._sessions = sessions
        self._upstream = upstream
        self._tls = tls
        self._silence_s = silence_s
        self._look_s = silence_s / LOOKS
        self._open = open_
        self._sent_s = 0.0
        self._answer: aiohttp.ClientResponse | None = None
        self._protocol: AnswerProtocol | None = None
        self._looks: asyncio.TimerHandle | None = None
        self._bytes = 0
        self._idle_looks = 0

    async def __aenter__(self) -> aiohttp.ClientResponse:
        """Sends the request, and returns the answer once its head has come; raises TimeoutError if
        it does not come for gateway.silence_s, and UnusableAnswer for bytes that are no head."""
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()
        self._open[self] = None
        try:
            async with asyncio.timeout(self._silence_s):
                self._answer = await self._headed()
        except BaseException:
            self._over()
            raise
        self._looks = loop.call_later(self._look_s, self._look)
        return self._answer

    async def _headed(self) -> aiohttp.ClientResponse:
        pooled, fresh = self._sessions
        try:
            try:
                return await self._post(pooled)
            except (aiohttp.ClientError, OSError) as error:
                reused = self._protocol is not None and self._protocol.unanswered_reuse
                if judge(error, unanswered_reuse=reused) is not Kind.STALE:
                    raise
            return await self._post(fresh)
        except UnusableHead as error:
            raise UnusableAnswer(str(error)) from error
        except LongHead as error:
            status = error.status_code
            passes = 200 <= status < 300 or of_status(status) is Kind.REJECTED
            kind = HeadTooLong if passes else UnusableAnswer
            raise kind(str(error)) from error
        except UnicodeError as error:  # a label of a wrong length: DNS has no such name
            raise UnusableAnswer(f"the worker's host can be no name: {error}") from error
        except aiohttp.ClientResponseError as error:
            # aiohttp's own for bytes that are no HTTP. Its status is 400, by which it would pass
            # for the client's mistake.
            raise UnusableAnswer(f"the worker's answer is no HTTP: {first_line(error)}") from error

    async def _post(self, session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
        upstream, body = self._upstream, self._upstream.body
        data: bytes | io.BytesIO = body if len(body) <= RAW_BODY_MAX else io.BytesIO(body)
        token = used.set(self._use)
        try:
            return await session.post(
                URL(upstream.url, encoded=True),  # a query goes on as the client wrote it
                data=data,
                headers=upstream.headers,
                allow_redirects=False,
                ssl=self._tls,
            )
        finally:
            used.reset(token)

    def _over(self) -> None:
        self._open.pop(self, None)
        # A connection of the pool has the context of its first request, and so this object.
        self._upstream = _NOTHING

    def _use(self, protocol: AnswerProtocol) -> None:
        self._protocol = protocol

    async def __aexit__(self, *_: object) -> None:
        self._over()
        self._protocol = None
        if self._looks is not None:
            self._looks.cancel()
        if self._answer is not None:
            self._answer.release()
            await self._answer.wait_for_close()

    def waits(self, since_s: float) -> bool:
        """Whether the request may move, was sent before since_s, and has no byte of an answer."""
        movable = self.seat.movable and self._sent_s <= since_s
        if not movable or self._answer is None:
            return movable
        content = self._answer.content
        return not content.total_bytes and not content.is_eof()

    def leave(self) -> None:
        """Ends the request with WorkerGone; only for one that `waits`."""
        error = WorkerGone("the router reports the worker silent, and no byte of its answer came")
        if self._answer is not None:
            self._answer.content.set_exception(error)
        elif self._protocol is not None:
            self._protocol.leave(error)  # while it connects, CONNECT_TIMEOUT_S ends it

    def _look(self) -> None:
        assert self._answer is not None
        content = self._answer.content
        if self.writing or content.total_bytes != self._bytes:
            self._bytes, self._idle_looks = content.total_bytes, 0
        else:
            self._idle_looks += 1
        if self._idle_looks >= LOOKS:
            content.set_exception(
                aiohttp.SocketTimeoutError(f"the worker sent nothing for {self._silence_s:g} s")
            )
            return
        self._looks = asyncio.get_running_loop().call_later(self._look_s, self._look)
