"""The HTTP pages of one engine, which its relay polls: identity, load, health.

events/engines/pages/probe.py reads the pages; this module has the timers, and decides whether the
engine is healthy.

Laws:
- any usable answer makes the engine healthy, and of an engine whose model is configured any answer
  of a process (401, a page without a known value); a refused connection, or HEALTH_S without such
  an answer, makes it unhealthy;
- a page that says nothing is requested at growing intervals, up to BACKOFF_MAX_S.
"""

import asyncio
import logging
from asyncio import sleep
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from math import inf

import aiohttp

from events.engines.access import EngineAccess
from events.engines.events import LoadSample
from events.engines.pages.load import EngineIdentity
from events.engines.pages.probe import Answer, Probe
from events.engines.sessions import http_session
from events.engines.table import READINGS
from events.plane.settings import EngineSettings
from events.plane.supervisor import Supervisor

PROBE_S = 0.9
"""Seconds from one request for the load to the next, which waits for the answer. Below BEAT_S of
stream_publisher.py: each answer makes a heartbeat, so that the timer's is not due."""
MODELS_S = 2.0
"""Seconds between two requests for the models of an engine that answers: LoRAs are loaded and
unloaded while it runs."""
IDENTITY_S = 30.0
"""Seconds between two requests for all pages of the engine's identity."""
HEALTH_S = 3.0
BACKOFF_MAX_S = 30.0
"""Longest interval between two requests for a load page that says nothing."""

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
        own_numbers: Mapping[str, str],
    ) -> None:
        """on_health: called when the health changes, and when the first probe has ended.

        on_loads: called with the samples of each answer, by rank. counts: of `engine_silent`, and
        of the failures of the probe. own_numbers: see Probe.
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
        self._own_numbers = own_numbers
        self._refused = False
        """The last probe's connection was refused: the engine is gone."""
        self._identified = asyncio.Event()
        self._asked = asyncio.Event()
        """Set when a request for the identity has ended, with or without an answer."""
        self._identity_due = asyncio.Event()
        """Set when the engine may have been replaced."""
        self._models_due = asyncio.Event()
        """Set when the engine may have been replaced, or its models may have changed."""
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
    def rank_numbers(self) -> Collection[int]:
        """The engine's numbers of its ranks, as its load page has them; empty: unknown."""
        return self.probe.loads.keys() if self.probe is not None else ()

    @property
    def trouble(self) -> str:
        """Why the pages can't be read; empty: they can."""
        return self.probe.trouble if self.probe is not None else ""

    def start(self, access: EngineAccess, supervisor: Supervisor) -> aiohttp.ClientSession:
        """Reads the pages of this engine until the supervisor closes; call `close` after that."""
        settings = self._settings
        self.session = http_session()
        about = settings.engine, access, settings.mooncake, self._counts, self._own_numbers
        probe = Probe(self.session, *about)
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

    def look_at_models(self) -> None:
        """Reads the engine's list of models now, or PROBE_S after the last time. Call when a
        request was answered as if the engine lacked a model that it had listed."""
        self._models_due.set()

    async def _ask_identity(self, probe: Probe) -> None:
        """Reads the identity, for ever; in a task of its own, so that it delays no load."""
        loop, whole_at_s = asyncio.get_running_loop(), -inf
        while True:
            self._models_due.clear()
            whole = self._identity_due.is_set() or loop.time() >= whole_at_s + IDENTITY_S
            if whole:
                self._identity_due.clear()
                whole_at_s = loop.time()
            try:
                answer = await probe.ask_identity(whole=whole)
            finally:
                self._asked.set()
            self._answered(probe, answer)
            if answer:
                self._identified.set()
            else:
                whole_at_s = -inf
                self._counts["engine_silent"] += not self._identified.is_set()
            await sleep(PROBE_S)
            if answer is not Answer.NONE and not self._identity_due.is_set():
                await _within(self._models_due, MODELS_S - PROBE_S)

    async def _ask_load(self, probe: Probe) -> None:
        """Reads the load, for ever."""
        if READINGS[self._settings.engine].loads_need_identity:
            await self._identified.wait()
        else:
            await self._asked.wait()
        wait_s = PROBE_S
        loop = asyncio.get_running_loop()
        while True:
            asked_s = loop.time()
            answer = await probe.ask_load()
            self._answered(probe, answer)
            if answer:
                self._on_loads(probe.loads)
                await probe.ask_own_numbers()
            else:
                self._counts["engine_silent"] += 1
            took_s = loop.time() - asked_s
            is_odd = answer is Answer.ODD
            wait_s = min(2 * wait_s, BACKOFF_MAX_S) if is_odd else PROBE_S
            if answer is Answer.NONE:  # another engine may answer next
                self._identity_due.set()
                self._models_due.set()
                self._mooncake_due.set()
            await sleep(wait_s if is_odd else max(0.0, wait_s - took_s))

    async def _ask_mooncake(self, probe: Probe) -> None:
        """Reads the ranks' engine_ids from Mooncake's bootstrap server, for ever."""
        while True:
            self._mooncake_due.clear()
            answered = await probe.ask_mooncake()
            await _within(self._mooncake_due, IDENTITY_S if answered else PROBE_S)

    def _answered(self, probe: Probe, answer: Answer) -> None:
        """Updates the health after a probe; a change makes a heartbeat at once."""
        now_s = self._clock()
        before = self.probed, self.is_healthy(now_s)
        self._refused, self.probed = probe.refused, True
        if answer or (answer is Answer.ODD and self._settings.model is not None):
            if now_s - self.answered_at_s >= HEALTH_S:
                log.info("the engine of %s answers", self._settings.id)
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
