"""HTTP requests to workers, over pooled connections; bytes are neither decoded nor followed.

Law: a worker that sends nothing for gateway.silence_s, while its bytes are waited for, is left.
"""

import asyncio
import io
import ssl
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import aiohttp

from router.config.settings.gateway_settings import GatewaySettings
from router.front.exchange import UPSTREAM_ANSWER_MAX, Upstream, returned

IDLE_S = 3.0
"""Seconds for which an idle connection is kept: less than the 5 s of vLLM's and SGLang's server, so
that no request meets a connection that the worker is closing."""
LOOKS = 4
"""In the time for which a worker may be silent: it is noticed up to a fourth of it later."""
RAW_BODY_MAX = 1 << 16
"""Bytes of a body that are written at once; a longer body goes in pieces."""


class WorkerAnswered(Exception):
    """A worker's answer that another worker may better; passed on if there is none."""

    def __init__(self, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        super().__init__(f"the worker answered with status {status}")
        self.status = status
        """Which kvroute.client reads, too: see failure_reason."""
        self.headers = headers
        self.body = body

    @classmethod
    async def read(cls, answer: aiohttp.ClientResponse) -> Self:
        """Reads the answer as far as its bound."""
        body = b""
        async for chunk in answer.content.iter_any():
            body += chunk
            if len(body) > UPSTREAM_ANSWER_MAX:
                body = body[:UPSTREAM_ANSWER_MAX]
                break
        return cls(answer.status, returned(answer.headers.items()), body)


class Upstreams:
    """The gateway's connections to all workers."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        settings = self._settings
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def post(self, upstream: Upstream, tls: ssl.SSLContext | bool = True) -> "Sent":
        """Sends a request when it is entered; leaving it before the answer's end closes its
        connection. tls: see EngineAccess."""
        assert self._session is not None
        return Sent(self._session, upstream, self._settings.silence_s, tls)


class Sent:
    """A request to a worker, until its answer is read.

    aiohttp's own limit of silence (sock_read) sets a timer at each chunk, 3 us each. This one looks
    now and then whether bytes have come.
    """

    __slots__ = ("_answer", "_bytes", "_idle_looks", "_look_s", "_looks", "_session", "_silence_s",
                 "_tls", "_upstream", "writing")  # fmt: skip

    def __init__(
        self,
        session: aiohttp.ClientSession,
        upstream: Upstream,
        silence_s: float,
        tls: ssl.SSLContext | bool = True,
    ) -> None:
        self.writing = False
        """Whether the client takes its time, and not the worker; set around each write."""
        self._session = session
        self._upstream = upstream
        self._tls = tls
        self._silence_s = silence_s
        self._look_s = silence_s / LOOKS
        self._answer: aiohttp.ClientResponse | None = None
        self._looks: asyncio.TimerHandle | None = None
        self._bytes = 0
        self._idle_looks = 0

    async def __aenter__(self) -> aiohttp.ClientResponse:
        """The answer's head; raises TimeoutError for a worker that is silent."""
        upstream = self._upstream
        body = upstream.body
        data: bytes | io.BytesIO = body if len(body) <= RAW_BODY_MAX else io.BytesIO(body)
        async with asyncio.timeout(self._silence_s):
            self._answer = await self._session.post(
                upstream.url,
                data=data,
                headers=upstream.headers,
                allow_redirects=False,
                ssl=self._tls,
            )
        self._looks = asyncio.get_running_loop().call_later(self._look_s, self._look)
        return self._answer

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._looks is not None:
            self._looks.cancel()
        if self._answer is not None:
            self._answer.release()
            await self._answer.wait_for_close()

    def _look(self) -> None:
        assert self._answer is not None
        content = self._answer.content
        if self.writing or content.total_bytes != self._bytes:
            self._bytes, self._idle_looks = content.total_bytes, 0
        else:
            self._idle_looks += 1
        if self._idle_looks >= LOOKS:
            content.set_exception(
                aiohttp.SocketTimeoutError(f"nothing came for {self._silence_s:g} s")
            )
            return
        self._looks = asyncio.get_running_loop().call_later(self._look_s, self._look)
