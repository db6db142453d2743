"""HTTP connections to engines, for their pages and for questions: bodies are read without
decompression, and cookies are ignored.

Law: an answer has INTERIM_MAX interim heads (status 1xx) at most. A server that sends them without
end would keep the event loop busy, since aiohttp reads them one by one, and would never be late.
"""

import asyncio
from functools import partial

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from typing_extensions import override

INTERIM_MAX = 16


class _Handler(ResponseHandler):
    """Counts interim heads."""

    _interim = 0

    @override
    def feed_data(
        self, data: tuple[RawResponseMessage, aiohttp.StreamReader], size: int = 0
    ) -> None:
        is_interim = 100 <= data[0].code < 200 and data[0].code != 101
        if is_interim:
            self._interim += 1
        elif self._interim <= INTERIM_MAX:
            self._interim = 0
        if self._interim <= INTERIM_MAX:
            super().feed_data(data, size)
            return
        self.set_exception(aiohttp.ServerDisconnectedError("interim answers without end"))
        if self.transport is not None:
            self.transport.abort()


class _Connector(aiohttp.TCPConnector):
    def __init__(self) -> None:
        super().__init__()
        handler: type[ResponseHandler] = _Handler
        self._factory = partial(handler, loop=asyncio.get_running_loop())


def http_session() -> aiohttp.ClientSession:
    """A session for engines; each request names its limits."""
    return aiohttp.ClientSession(
        connector=_Connector(),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
    )
