"""Asks an engine over HTTP who it is and how busy it is. The shell around events/engines/load.py.

Redirects are never followed: an engine, or what stands at its address, could send the relay to any
URL that the relay's network reaches. Bodies are read as they come, without compression or cookies.
"""

import asyncio
import errno
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import aiohttp

from events.engines.endpoints import masked
from events.engines.events import LoadSample
from events.engines.load import (
    EngineIdentity,
    LoadUnreadable,
    mooncake_engine_ids,
    sglang_identity,
    sglang_loads,
    sglang_metrics,
    vllm_identity,
    vllm_loads,
)

TIMEOUT_S = 2.0
DOCUMENT_BYTES_MAX = 8 * 1024 * 1024
SHORT_BYTES = 256 * 1024
"""Of a metrics page that is read at once: two ranks have 118 KiB, most of which is skipped."""
REASON_CHARS = 300

Loads = Mapping[int, LoadSample]


class EngineSilent(Exception):
    """The engine gave no usable answer; the message says which page and why, without passwords."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(masked(reason)[:REASON_CHARS])
        self.refused = refused
        """Nothing listens at the engine's port."""


def http_session() -> aiohttp.ClientSession:
    """For an engine's pages: no page can grow by decompression, or leave cookies here."""
    return aiohttp.ClientSession(
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def redirect_of(response: aiohttp.ClientResponse) -> str:
    """Why a redirect is no answer; empty when the answer is none."""
    location = response.headers.get("Location")
    if location is None or not 300 <= response.status < 400:
        return ""
    return f"answered with a redirect to {location[:200]}: name the engine's own address"


@dataclass(frozen=True, slots=True)
class EngineHttp:
    """One engine's HTTP face."""

    session: aiohttp.ClientSession
    base: str

    async def page(self, path: str) -> bytes:
        """A page's body; raises EngineSilent."""
        try:
            async with self.session.get(
                self.base + path,
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
                allow_redirects=False,
            ) as response:
                if redirect := redirect_of(response):
                    raise EngineSilent(f"{path}: {redirect}")
                if response.status != 200:
                    raise EngineSilent(f"{path}: status {response.status}")
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
        """A page that older versions lack; None without it. Raises EngineSilent when the engine
        refuses the connection."""
        try:
            return await self.page(path)
        except EngineSilent as error:
            if error.refused:
                raise
            return None


async def _vllm_who(engine: EngineHttp) -> EngineIdentity:
    models = await engine.page("/v1/models")
    version = await engine.optional_page("/version")
    sources = await engine.optional_page("/kv_event_sources")
    # In development mode alone. Its first answer looks at the whole machine and may come too late;
    # the engine keeps that, so that later ones don't.
    info = await engine.optional_page("/server_info?config_format=json")
    return vllm_identity(models, version, sources, info)


async def _read(page: bytes, read: Callable[[str], Loads]) -> Loads:
    """A metrics page, read where a long one holds up nobody else."""
    text = page.decode("utf-8", "replace")
    if len(page) <= SHORT_BYTES:
        return read(text)
    return await asyncio.to_thread(read, text)


async def _vllm_load(engine: EngineHttp, _who: EngineIdentity) -> Loads:
    return await _read(await engine.page("/metrics"), vllm_loads)


async def _sglang_who(engine: EngineHttp) -> EngineIdentity:
    info = await engine.page("/server_info")
    models = await engine.optional_page("/v1/models")
    return sglang_identity(info, models, await engine.optional_page("/model_info"))


async def _sglang_load(engine: EngineHttp, who: EngineIdentity) -> Loads:
    loads = await engine.optional_page("/v1/loads?include=core")
    if loads is not None:
        return sglang_loads(loads, who.block_size or 1)
    page = await engine.page("/metrics")  # before /v1/loads there was only this, and it is older
    return await _read(page, partial(sglang_metrics, page_size=who.block_size))


Who = Callable[[EngineHttp], Awaitable[EngineIdentity]]
Load = Callable[[EngineHttp, EngineIdentity], Awaitable[Loads]]

PROBES: dict[str, tuple[Who, Load]] = {
    "vllm": (_vllm_who, _vllm_load),
    "sglang": (_sglang_who, _sglang_load),
}


class Probe:
    """Identity and load of one engine, as last read. The three questions may run side by side."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        engine: str,
        base: str,
        mooncake: str | None = None,
        counts: Counter[str] | None = None,
    ) -> None:
        """mooncake: the base of its bootstrap server, if it has one. counts: gets malformed_page
        for answers that can't be read."""
        self.identity: EngineIdentity | None = None
        self.loads: Loads = {}
        self.refused = False
        """The engine refused a connection, and nothing has been answered since."""
        self._engine = EngineHttp(session, base.rstrip("/"))
        self._mooncake = EngineHttp(session, mooncake) if mooncake else None
        self._kv_engine_ids: Mapping[int, str] = {}
        self._troubles: dict[str, str] = {}
        """Question -> why it got no answer the last time; load before identity."""
        self._counts = Counter[str]() if counts is None else counts
        self._who, self._load = PROBES[engine]

    @property
    def trouble(self) -> str:
        """Why the last questions got no answer; empty when each did."""
        return next(
            (
                self._troubles[one]
                for one in ("load", "identity", "mooncake")
                if one in self._troubles
            ),
            "",
        )

    async def ask_identity(self) -> bool:
        """Whether the engine answered."""
        try:
            self.identity = await self._who(self._engine)
        except (EngineSilent, LoadUnreadable) as error:
            return self._failed("identity", error)
        self._set_engine_ids(self._kv_engine_ids)
        return self._answered("identity")

    async def ask_load(self) -> bool:
        """Whether the engine answered."""
        try:
            self.loads = await self._load(self._engine, self.identity or EngineIdentity())
        except (EngineSilent, LoadUnreadable) as error:
            return self._failed("load", error)
        return self._answered("load")

    async def ask_mooncake(self) -> bool:
        """Whether Mooncake's bootstrap server answered. Its silence is no trouble of the engine."""
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

    def _answered(self, question: str) -> bool:
        self._troubles.pop(question, None)
        self.refused = False
        return True

    def _failed(self, question: str, error: EngineSilent | LoadUnreadable) -> bool:
        self._troubles[question] = masked(str(error))
        if isinstance(error, LoadUnreadable):
            self._counts["malformed_page"] += 1
        else:
            self.refused = self.refused or error.refused
        return False
