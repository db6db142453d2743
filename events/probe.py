"""Asks an engine over HTTP who it is and how busy it is. The shell around events/engine_load.py."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import aiohttp

from events.engine_events import LoadSample
from events.engine_load import (
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


class EngineSilent(Exception):
    """The engine gave no usable answer; the message says which page and why."""


@dataclass(frozen=True, slots=True)
class EngineHttp:
    """One engine's HTTP face."""

    session: aiohttp.ClientSession
    base: str

    async def page(self, path: str) -> bytes:
        """A page's body; raises EngineSilent."""
        try:
            async with self.session.get(
                self.base + path, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
            ) as response:
                if response.status != 200:
                    raise EngineSilent(f"{path}: status {response.status}")
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > DOCUMENT_BYTES_MAX:
                        raise EngineSilent(f"{path}: more than {DOCUMENT_BYTES_MAX} bytes")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineSilent(f"{path}: {str(error) or type(error).__name__}") from error
        return bytes(body)

    async def optional_page(self, path: str) -> bytes | None:
        """A page that older versions lack; None without it."""
        try:
            return await self.page(path)
        except EngineSilent:
            return None


async def _vllm_who(engine: EngineHttp) -> EngineIdentity:
    models = await engine.page("/v1/models")
    version = await engine.optional_page("/version")
    return vllm_identity(models, version, await engine.optional_page("/kv_event_sources"))


async def _vllm_load(engine: EngineHttp, _who: EngineIdentity) -> Mapping[int, LoadSample]:
    return vllm_loads((await engine.page("/metrics")).decode("utf-8", "replace"))


async def _sglang_who(engine: EngineHttp) -> EngineIdentity:
    info = await engine.page("/server_info")
    models = await engine.optional_page("/v1/models")
    return sglang_identity(info, models, await engine.optional_page("/model_info"))


async def _sglang_load(engine: EngineHttp, who: EngineIdentity) -> Mapping[int, LoadSample]:
    loads = await engine.optional_page("/v1/loads?include=core")
    if loads is not None:
        return sglang_loads(loads, who.block_size or 1)
    page = await engine.page("/metrics")  # before /v1/loads there was only this, and it is older
    return sglang_metrics(page.decode("utf-8", "replace"), who.block_size)


Who = Callable[[EngineHttp], Awaitable[EngineIdentity]]
Load = Callable[[EngineHttp, EngineIdentity], Awaitable[Mapping[int, LoadSample]]]

PROBES: dict[str, tuple[Who, Load]] = {
    "vllm": (_vllm_who, _vllm_load),
    "sglang": (_sglang_who, _sglang_load),
}


class Probe:
    """Identity and load of one engine, as it last told."""

    def __init__(
        self, session: aiohttp.ClientSession, engine: str, base: str, mooncake: str | None = None
    ) -> None:
        """mooncake: the base of its bootstrap server, if it has one."""
        self.identity: EngineIdentity | None = None
        self.loads: Mapping[int, LoadSample] = {}
        self.trouble = ""
        """Why the last question got no answer; empty when it did."""
        self._engine = EngineHttp(session, base.rstrip("/"))
        self._mooncake = EngineHttp(session, mooncake) if mooncake else None
        self._who, self._load = PROBES[engine]

    async def ask_identity(self) -> bool:
        """Whether the engine answered."""
        try:
            who = await self._who(self._engine)
            page = self._mooncake and await self._mooncake.optional_page("/query")
            self.identity = replace(who, kv_engine_ids=mooncake_engine_ids(page)) if page else who
        except (EngineSilent, LoadUnreadable) as error:
            self.trouble = str(error)
            return False
        self.trouble = ""
        return True

    async def ask_load(self) -> bool:
        """Whether the engine answered."""
        try:
            self.loads = await self._load(self._engine, self.identity or EngineIdentity())
        except (EngineSilent, LoadUnreadable) as error:
            self.trouble = str(error)
            return False
        self.trouble = ""
        return True
