"""HTTP requests to workers, over pooled connections; bytes are neither decoded nor followed."""

import io
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp.client import _RequestContextManager

from router.config.gateway_settings import GatewaySettings
from router.front.exchange import UPSTREAM_ANSWER_MAX, Upstream, returned

IDLE_S = 3.0
"""Seconds for which an idle connection is kept: less than the 5 s of vLLM's and SGLang's server, so
that no request meets a connection that the worker is closing."""
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
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.silence_s
            ),
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

    def post(self, upstream: Upstream) -> _RequestContextManager:
        """Sends a request; leaving the context before the answer's end closes its connection."""
        assert self._session is not None
        body = upstream.body
        data: bytes | io.BytesIO = body if len(body) <= RAW_BODY_MAX else io.BytesIO(body)
        return self._session.post(
            upstream.url, data=data, headers=upstream.headers, allow_redirects=False
        )
