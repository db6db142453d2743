"""Reads an engine's identity and load over HTTP. The shell around events/engines/pages/load.py.

Redirects are never followed: the server at an engine's address could send the relay to any URL in
the relay's network. Bodies are read without decompression, and cookies are ignored.
"""

import asyncio
import errno
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import aiohttp

from events.engines.access import EngineAccess, refused_key
from events.engines.endpoints import masked
from events.engines.events import LoadSample
from events.engines.pages.load import EngineIdentity, LoadUnreadable
from events.engines.pages.sglang_load import sglang_identity, sglang_loads, sglang_metrics
from events.engines.pages.vllm_load import mooncake_engine_ids, vllm_identity, vllm_loads

DOCUMENT_BYTES_MAX = 8 * 1024 * 1024
SHORT_BYTES = 256 * 1024
"""Bytes of a metrics page that is parsed on the event loop: two ranks have 118 KiB, most of which
is skipped. Longer pages are parsed in a thread."""
REASON_CHARS = 300

Loads = Mapping[int, LoadSample]


class EngineSilent(Exception):
    """The engine gave no usable answer; the message says which page and why, without passwords."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(masked(reason)[:REASON_CHARS])
        self.refused = refused
        """Whether the connection was refused: no process listens at the engine's port."""


def http_session() -> aiohttp.ClientSession:
    """A session for an engine's pages, without decompression and cookies."""
    return aiohttp.ClientSession(
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def redirect_of(response: aiohttp.ClientResponse) -> str:
    """Why a redirect is no answer; empty: the response is no redirect."""
    location = response.headers.get("Location")
    if location is None or not 300 <= response.status < 400:
        return ""
    return f"answered with a redirect to {location[:200]}: name the engine's own address"


@dataclass(frozen=True, slots=True)
class EngineHttp:
    """One engine's HTTP server."""

    session: aiohttp.ClientSession
    access: EngineAccess

    async def page(self, path: str) -> bytes:
        """A page's body; raises EngineSilent."""
        try:
            async with self.session.get(
                self.access.url(path),
                headers=self.access.headers(),
                ssl=self.access.tls,
                timeout=aiohttp.ClientTimeout(total=self.access.timeout_s),
                allow_redirects=False,
            ) as response:
                if redirect := redirect_of(response):
                    raise EngineSilent(f"{path}: {redirect}")
                if response.status != 200:
                    status = response.status
                    raise EngineSilent(f"{path}: {refused_key(status) or f'status {status}'}")
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > DOCUMENT_BYTES_MAX:
                        raise EngineSilent(f"{path}: more than {DOCUMENT_BYTES_MAX} bytes")
        # ValueError: a URL that aiohttp or the resolver can't use.
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
            reason = f"{path}: {str(error) or type(error).__name__}"
            raise EngineSilent(reason, refused=refused) from None
        return bytes(body)

    async def optional_page(self, path: str) -> bytes | None:
        """A page that older releases lack; None without it. Raises EngineSilent when the connection
        is refused."""
        try:
            return await self.page(path)
        except EngineSilent as error:
            if error.refused:
                raise
            return None


async def _vllm_identity(engine: EngineHttp) -> EngineIdentity:
    models = await engine.page("/v1/models")
    version = await engine.optional_page("/version")
    sources = await engine.optional_page("/kv_event_sources")
    # In development mode only. The first answer inspects the whole machine and may come too late;
    # the engine keeps the result for later answers.
    info = await engine.optional_page("/server_info?config_format=json")
    return vllm_identity(models, version, sources, info)


async def _read(page: bytes, read: Callable[[str], Loads]) -> Loads:
    """The loads in a metrics page; long pages are parsed in a thread."""
    text = page.decode("utf-8", "replace")
    if len(page) <= SHORT_BYTES:
        return read(text)
    return await asyncio.to_thread(read, text)


async def _vllm_load(engine: EngineHttp, _identity: EngineIdentity) -> Loads:
    return await _read(await engine.page("/metrics"), vllm_loads)


async def _sglang_identity(engine: EngineHttp) -> EngineIdentity:
    info = await engine.page("/server_info")
    models = await engine.optional_page("/v1/models")
    return sglang_identity(info, models, await engine.optional_page("/model_info"))


async def _sglang_load(engine: EngineHttp, identity: EngineIdentity) -> Loads:
    loads = await engine.optional_page("/v1/loads?include=core")
    if loads is not None:
        return sglang_loads(loads, identity.block_size or 1)
    page = await engine.page("/metrics")  # releases before /v1/loads; its values are older
    return await _read(page, partial(sglang_metrics, page_size=identity.block_size))


ReadIdentity = Callable[[EngineHttp], Awaitable[EngineIdentity]]
ReadLoad = Callable[[EngineHttp, EngineIdentity], Awaitable[Loads]]

PROBES: dict[str, tuple[ReadIdentity, ReadLoad]] = {
    "vllm": (_vllm_identity, _vllm_load),
    "sglang": (_sglang_identity, _sglang_load),
}


class Probe:
    """Identity and load of one engine, as last read. The three `ask_` methods may run together."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        engine: str,
        access: EngineAccess,
        mooncake: str | None = None,
        counts: Counter[str] | None = None,
    ) -> None:
        """mooncake: the URL of its bootstrap server, if it has one. counts: `malformed_page` for
        unreadable answers."""
        self.identity: EngineIdentity | None = None
        self.loads: Loads = {}
        self.refused = False
        """Whether the engine refused a connection, and has not answered since."""
        self._engine = EngineHttp(session, access)
        # A server of its own, which needs no key.
        self._mooncake = EngineHttp(session, EngineAccess(mooncake)) if mooncake else None
        self._kv_engine_ids: Mapping[int, str] = {}
        self._troubles: dict[str, str] = {}
        """load, identity or mooncake -> why its last request failed."""
        self._counts = Counter[str]() if counts is None else counts
        self._read_identity, self._read_load = PROBES[engine]

    @property
    def trouble(self) -> str:
        """Why the last requests failed; empty: none failed."""
        return next(
            (
                self._troubles[page]
                for page in ("load", "identity", "mooncake")
                if page in self._troubles
            ),
            "",
        )

    async def ask_identity(self) -> bool:
        """Reads the identity; returns whether the engine answered."""
        try:
            self.identity = await self._read_identity(self._engine)
        except (EngineSilent, LoadUnreadable) as error:
            return self._failed("identity", error)
        self._set_engine_ids(self._kv_engine_ids)
        return self._answered("identity")

    async def ask_load(self) -> bool:
        """Reads the load; returns whether the engine answered."""
        try:
            self.loads = await self._read_load(self._engine, self.identity or EngineIdentity())
        except (EngineSilent, LoadUnreadable) as error:
            return self._failed("load", error)
        return self._answered("load")

    async def ask_mooncake(self) -> bool:
        """Reads the engine_ids; returns whether Mooncake's bootstrap server answered. If not, the
        engine is healthy all the same."""
        if self._mooncake is None:
            return True
        self._troubles.pop("mooncake", None)
        try:
            ids = mooncake_engine_ids(await self._mooncake.page("/query"))
        except EngineSilent:
            ids = {}
        except LoadUnreadable as error:
            ids = {}
            self._counts["malformed_page"] += 1
            self._troubles["mooncake"] = masked(str(error))
        self._set_engine_ids(ids)
        return bool(ids)

    def _set_engine_ids(self, ids: Mapping[int, str]) -> None:
        self._kv_engine_ids = ids
        if self.identity is not None:
            self.identity = replace(self.identity, kv_engine_ids=ids)

    def _answered(self, page: str) -> bool:
        self._troubles.pop(page, None)
        self.refused = False
        return True

    def _failed(self, page: str, error: EngineSilent | LoadUnreadable) -> bool:
        self._troubles[page] = masked(str(error))
        if isinstance(error, LoadUnreadable):
            self._counts["malformed_page"] += 1
        else:
            self.refused = self.refused or error.refused
        return False
