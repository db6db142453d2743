"""HTTP sessions with engines, for their pages and for tokens of prompts: bodies are read without
decompression, and cookies are ignored.

events/engines/connections.py bounds the bytes before a body.
"""

import aiohttp

from events.engines.connections import Connector

HEAD_BYTES_MAX = 1 << 14


def http_session() -> aiohttp.ClientSession:
    """A session for engines; each request has its own time limit."""
    return aiohttp.ClientSession(
        connector=Connector(HEAD_BYTES_MAX),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
    )
