"""HTTP connections to engines, for their pages and for questions: bodies are read without
decompression, and cookies are ignored.

The bounds are those of connections.py.
"""

import aiohttp

from events.engines.connections import Connector

HEAD_BYTES_MAX = 1 << 14


def http_session() -> aiohttp.ClientSession:
    """A session for engines; each request names its limits."""
    return aiohttp.ClientSession(
        connector=Connector(HEAD_BYTES_MAX),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
    )
