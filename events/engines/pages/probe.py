"""Reads an engine's identity and load over HTTP; events/engines/pages/load.py has their form.

Redirects are never followed: the server at an engine's address could send the relay to any URL in
the relay's network.
"""

import asyncio
import errno
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import aiohttp

from events.engines.access import EngineAccess, refused_key
from events.engines.endpoints import masked
from events.engines.engine import Loads
from events.engines.pages.load import EngineIdentity, LoadUnreadable
from events.engines.pages.metrics_page import own_numbers
from events.engines.table import READINGS
from events.engines.vllm.pages import mooncake_engine_ids

DOCUMENT_BYTES_MAX = 8 * 1024 * 1024
SHORT_BYTES = 256 * 1024
"""Bytes of a metrics page that is parsed on the event loop: two ranks have 118 KiB, most of which
is skipped. Longer pages are parsed in a thread."""
REASON_CHARS = 300

log = logging.getLogger("kvroute.relay")

Read = TypeVar("Read")


class EngineSilent(Exception):
    """The engine gave no usable answer; the message says which page and why, without passwords."""

    def __init__(self, reason: str, *, refused: bool = False, status: int | None = None) -> None:
        super().__init__(masked(reason)[:REASON_CHARS])
        self.refused = refused
        """Whether the connection was refused: no process listens at the engine's port."""
        self.status = status
        """HTTP status of an answer that says nothing that can be used; None: no answer."""


class Answer(Enum):
    """The outcome of a request for a page."""

    USABLE = "usable"
    ODD = "odd"
    """A process answers, with nothing that can be used: a page without a known value, a client's
    mistake (401, 404). It is no fault of the process, which may serve requests."""
    NONE = "none"

    def __bool__(self) -> bool:
        return self is Answer.USABLE


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
                    raise EngineSilent(
                        f"the engine's page {path} can't be read: {redirect}",
                        status=response.status,
                    )
                if response.status != 200:
                    status = response.status
                    why = refused_key(status) or f"status {status}"
                    raise EngineSilent(
                        f"the engine's page {path} can't be read: {why}", status=status
                    )
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > DOCUMENT_BYTES_MAX:
                        reason = f"the engine's page {path}: more than {DOCUMENT_BYTES_MAX} bytes"
                        raise EngineSilent(reason, status=response.status)
        # ValueError: a URL that aiohttp or the resolver can't use.
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
            reason = f"the engine's page {path}: {str(error) or type(error).__name__}"
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


Pages = tuple[bytes | None, ...]
"""The pages of an identity, in the order of its engine's record."""


async def _parsed(read: Callable[[], Read], *pages: bytes | None) -> Read:
    """Calls `read`, which parses these pages; in a thread if they are longer than SHORT_BYTES."""
    if sum(len(page) for page in pages if page is not None) <= SHORT_BYTES:
        return read()
    return await asyncio.to_thread(read)


class Probe:
    """Identity and load of one engine, as last read. Its `ask_` methods may run together.

    Law: whatever the engine answers, and at whatever pace, ends within its time limit in an Answer;
    no exception leaves a method.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        engine: str,
        access: EngineAccess,
        mooncake: str | None = None,
        counts: Counter[str] | None = None,
        own_numbers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """engine: a name of events.engines.table.READINGS. mooncake: the URL of its bootstrap
        server, if it has one. counts: `malformed_page` for unreadable answers. own_numbers: the
        operator's, name to metric."""
        self.identity: EngineIdentity | None = None
        self.loads: Loads = {}
        self.refused = False
        """Whether the engine refused a connection, and has not answered since."""
        self._engine = EngineHttp(session, access)
        # A server of its own, which needs no key.
        self._mooncake = EngineHttp(session, EngineAccess(mooncake)) if mooncake else None
        self._kv_engine_ids: Mapping[int, str] = {}
        self._kept: Pages | None = None
        self._troubles: dict[str, str] = {}
        """load, identity, mooncake or numbers -> why its last request failed."""
        self._counts = Counter[str]() if counts is None else counts
        self._reading = READINGS[engine]
        self._own_numbers = own_numbers
        self._load_path = ""
        self._looked_for: set[str] = set()
        """Own numbers that a page had, or that the log has named as missing."""
        self._own: dict[int | None, dict[str, float]] = {}
        """Own numbers of the last page of metrics, by rank; None: of the whole engine."""

    @property
    def trouble(self) -> str:
        """Why a last request for a page failed; empty: none failed."""
        return next(
            (
                self._troubles[page]
                for page in ("load", "identity", "mooncake", "numbers")
                if page in self._troubles
            ),
            "",
        )

    async def ask_identity(self, *, whole: bool = True) -> Answer:
        """Reads the identity. whole=False: of the pages that were read before, only those that
        change."""
        try:
            identity = await self._read_identity(None if whole else self._kept)
        except (EngineSilent, LoadUnreadable) as error:
            return self._failed("identity", error)
        self.identity = replace(identity, kv_engine_ids=self._kv_engine_ids)
        return self._answered("identity", "; ".join(identity.troubles))

    async def ask_load(self) -> Answer:
        """Reads the load of all ranks, from the first load page that the engine has."""
        try:
            await self._read_load()
        except (EngineSilent, LoadUnreadable) as error:
            return self._failed("load", error)
        return self._answered("load")

    async def ask_mooncake(self) -> bool:
        """Reads the ranks' engine_ids; returns whether Mooncake's bootstrap server gave any. The
        engine's health does not depend on it."""
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

    async def _read_identity(self, kept: Pages | None) -> EngineIdentity:
        """Reads the identity's pages. kept: pages of an earlier identity, of which those that
        rarely change are not read again; None: all are read."""
        pages: list[bytes | None] = []
        for index, page in enumerate(self._reading.identity_pages):
            if kept is not None and not page.changes:
                pages.append(kept[index])
            elif page.required:
                pages.append(await self._engine.page(page.path))
            else:
                pages.append(await self._engine.optional_page(page.path))
        read = partial(self._reading.read_identity, *pages)
        identity = await _parsed(read, *pages)
        self._kept = tuple(pages)
        return identity

    async def _read_load(self) -> None:
        *optional, last = self._reading.load_pages
        for page in optional:
            if (content := await self._engine.optional_page(page.path)) is not None:
                break
        else:
            page, content = last, await self._engine.page(last.path)
        block_size = None if self.identity is None else self.identity.block_size
        self.loads = await _parsed(partial(page.read, content, block_size), content)
        self._load_path = page.path
        if self._own_numbers:
            if page.path == self._reading.metrics_path:
                await self._read_own_numbers(content)
            for rank, load in self.loads.items():
                load.own_numbers = {**self._own.get(None, {}), **self._own.get(rank, {})}

    async def ask_own_numbers(self) -> None:
        """Reads the operator's numbers, for the next loads, where the load is not on the page of
        metrics. Call after the load, which a slow page would delay."""
        path = self._reading.metrics_path
        if self._own_numbers and self._load_path != path:
            try:
                content = await self._engine.page(path)
            except (EngineSilent, LoadUnreadable) as error:
                self._own = {}
                self._troubles["numbers"] = masked(str(error))
            else:
                await self._read_own_numbers(content)

    async def _read_own_numbers(self, content: bytes | None) -> None:
        reading, wanted = self._reading, self._own_numbers
        self._troubles.pop("numbers", None)
        self._own = {}
        try:
            read = partial(own_numbers, content or b"", wanted, reading.rank_label)
            numbers = await _parsed(read, content)
        except LoadUnreadable as error:
            self._counts["malformed_page"] += 1
            self._troubles["numbers"] = masked(str(error))
            return
        self._own = numbers
        there = {name for of_rank in numbers.values() for name in of_rank}
        for name in wanted.keys() - there - self._looked_for:
            page = masked(self._engine.access.url(reading.metrics_path))
            log.warning("%s has no %s yet (engines.numbers.%s)", page, wanted[name], name)
        self._looked_for.update(wanted)

    def _set_engine_ids(self, ids: Mapping[int, str]) -> None:
        self._kv_engine_ids = ids
        if self.identity is not None:
            self.identity = replace(self.identity, kv_engine_ids=ids)

    def _answered(self, page: str, trouble: str = "") -> Answer:
        self._troubles.pop(page, None)
        if trouble:
            self._counts["malformed_page"] += 1
            self._troubles[page] = masked(trouble)
        self.refused = False
        return Answer.USABLE

    def _failed(self, page: str, error: EngineSilent | LoadUnreadable) -> Answer:
        self._troubles[page] = masked(str(error))
        if isinstance(error, LoadUnreadable):
            self._counts["malformed_page"] += 1
            self.refused = False
            return Answer.ODD
        if error.status is not None and error.status < 500:
            self.refused = False
            return Answer.ODD
        self.refused = self.refused or error.refused
        return Answer.NONE
