"""The HTTP pages of one engine, which its relay polls: identity, load, health.

The shell around events/engines/pages/probe.py: timers, and the decision whether the engine is
healthy.

Law: any usable answer makes the engine healthy; a refused connection, or HEALTH_S without an
answer, makes it unhealthy.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import aiohttp

from events.engines.access import EngineAccess
from events.engines.events import LoadSample
from events.engines.pages.load import EngineIdentity
from events.engines.pages.probe import Probe, http_session
from events.plane.settings import EngineSettings
from events.plane.supervisor import Supervisor

PROBE_S = 0.5
"""Seconds between two requests for the load."""
IDENTITY_S = 30.0
"""Seconds between two requests for the identity of an engine that answers."""
HEALTH_S = 3.0

log = logging.getLogger("kvroute.relay")


class EnginePages:
    """Identity, load and health of one engine."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        clock: Callable[[], float],
        counts: Counter[str],
        on_health: Callable[[], None],
        on_loads: Callable[[Mapping[int, LoadSample]], None],
    ) -> None:
        """on_health: called when the health changes, and when the first probe has ended.

        on_loads: called with the samples of each answer, by rank. counts: of `engine_silent`, and
        of the failures of the probe.
        """
        self.heard = False
        """Whether the engine has ever answered."""
        self.answered_at_s = -HEALTH_S
        self.probed = settings.http is None
        """Whether a probe has ended; before that, the engine's state is unknown."""
        self.probe: Probe | None = None
        self.session: aiohttp.ClientSession | None = None
        """Shared with the warmers, which send requests to the same engine."""
        self._settings = settings
        self._clock = clock
        self._counts = counts
        self._on_health = on_health
        self._on_loads = on_loads
        self._refused = False
        """The last probe's connection was refused: the engine is gone."""
        self._identified = asyncio.Event()
        self._identity_due = asyncio.Event()
        """Set when the engine may have been replaced."""
        self._mooncake_due = asyncio.Event()
        """Set when the engine may have been replaced."""

    @property
    def identity(self) -> EngineIdentity:
        """The last identity that was read; empty before the first answer."""
        return (self.probe.identity if self.probe is not None else None) or EngineIdentity()

    @property
    def dp_ranks(self) -> int | None:
        """Data-parallel ranks of the engine, once it has an identity; None: unknown."""
        probe = self.probe
        if probe is None or probe.identity is None:
            return None
        return probe.identity.dp_ranks or len(probe.loads) or None

    @property
    def trouble(self) -> str:
        """Why the pages can't be read; empty: they can."""
        return self.probe.trouble if self.probe is not None else ""

    def start(self, access: EngineAccess, supervisor: Supervisor) -> aiohttp.ClientSession:
        """Reads the pages of this engine until the supervisor closes; call `close` after that."""
        settings = self._settings
        self.session = http_session()
        probe = Probe(self.session, settings.engine, access, settings.mooncake, self._counts)
        self.probe = probe
        _ = supervisor.keep(partial(self._ask_identity, probe), "identity")
        _ = supervisor.keep(partial(self._ask_load, probe), "load")
        if settings.mooncake is not None:
            _ = supervisor.keep(partial(self._ask_mooncake, probe), "mooncake")
        return self.session

    async def close(self) -> None:
        """Closes the connections."""
        if self.session is not None:
            await self.session.close()

    async def _ask_identity(self, probe: Probe) -> None:
        """Reads the identity, for ever; apart from the load, so that neither delays the other."""
        while True:
            self._identity_due.clear()
            answered = await probe.ask_identity()
            self._answered(probe, answered=answered)
            if answered:
                self._identified.set()
            elif not self._identified.is_set():
                self._counts["engine_silent"] += 1
            await _within(self._identity_due, IDENTITY_S if answered else PROBE_S)

    async def _ask_load(self, probe: Probe) -> None:
        """Reads the load, for ever."""
        await self._identified.wait()  # SGLang's load is in tokens, the identity has the block size
        while True:
            answered = await probe.ask_load()
            self._answered(probe, answered=answered)
            if answered:
                self._on_loads(probe.loads)
            else:
                self._counts["engine_silent"] += 1
                self._identity_due.set()  # another engine may answer next
                self._mooncake_due.set()
            await asyncio.sleep(PROBE_S)

    async def _ask_mooncake(self, probe: Probe) -> None:
        """Reads the engine's name at Mooncake's bootstrap server, for ever."""
        while True:
            self._mooncake_due.clear()
            answered = await probe.ask_mooncake()
            await _within(self._mooncake_due, IDENTITY_S if answered else PROBE_S)

    def _answered(self, probe: Probe, *, answered: bool) -> None:
        """A probe has ended: updates the health; a change makes a heartbeat at once."""
        now_s = self._clock()
        before = self.probed, self.is_healthy(now_s)
        self._refused, self.probed = probe.refused, True
        if answered:
            if now_s - self.answered_at_s >= HEALTH_S:
                log.info("%s answers", self._settings.id)
            self.answered_at_s = now_s
            self.heard = True
        if (True, self.is_healthy(now_s)) != before:
            self._on_health()

    def is_healthy(self, now_s: float) -> bool:
        """Whether the engine answers; an engine without pages counts as healthy."""
        if self.probe is None:
            return True
        return not self._refused and now_s - self.answered_at_s < HEALTH_S


async def _within(event: asyncio.Event, seconds: float) -> None:
    """Waits for an event for at most so many seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
