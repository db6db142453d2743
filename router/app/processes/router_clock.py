"""What a router does at intervals: leases, warnings, readiness, dispatch of waiting requests."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from events.feed.stream import StreamState
from router.api.desk.desk import Desk
from router.app.processes.nats_links import NatsLinks
from router.cluster.children.own_relays import OwnRelays
from router.cluster.replicas.fleet_commands import FleetCommands
from router.config.settings.configurations import ServeConfig
from router.decide.core.core import RouterCore
from router.decide.core.progress import Effects
from router.fleet.health.silence import SilenceLog
from router.fleet.health.warnings import WarningLog

TICK_S = 0.25
JUDGED_A_TICK = 5
"""Judgements in a tick, one every 50 ms, of workers of which one caller alone has reported
failures."""
WARN_S = 5.0
HELLO_GRACE_S = 1.0
"""Seconds after the first connection in which relays have to say that they are there."""

log = logging.getLogger("kvroute")


@dataclass(kw_only=True, eq=False)
class RouterClock:
    """Does the periodic work of one router."""

    config: ServeConfig
    core: RouterCore
    desk: Desk
    links: NatsLinks
    relays: OwnRelays
    commands: FleetCommands
    clock: Callable[[], float]
    discovered: Callable[[], bool]
    """Whether discovery has settled; true where there is none."""

    def __post_init__(self) -> None:
        self._started_at_s = self.clock()
        self._warning_log = WarningLog()
        self._silence_log = SilenceLog()
        self._warned_at_s = -inf

    async def tick(self) -> None:
        """Does the work of one tick, which is due each TICK_S seconds. Sets fleet.ready when the
        router is ready."""
        core, now_s = self.core, self.clock()
        effects = core.on_time(now_s)
        expired = effects.expired
        while core.behind(now_s):
            await asyncio.sleep(0)  # other calls have a turn between two slices
            expired += core.catch_up(now_s)
        if expired:
            log.warning("%d reservations expired: no Report came in time", expired)
        self._perform(effects)
        self.desk.dispatch()
        self.links.tick()
        self.relays.tick()
        for line in self._silence_log.lines(core.fleet.view.sources.values()):
            log.warning("%s", line)
        self._warn(now_s)
        core.fleet.ready = core.fleet.ready or self._is_ready(now_s)

    async def judge(self) -> None:
        """Judges workers by what callers say of them, until the next tick is due."""
        for _ in range(JUDGED_A_TICK):
            await asyncio.sleep(TICK_S / JUDGED_A_TICK)
            self.core.fleet.outliers.judge(self.clock())
            self.desk.dispatch()

    def _perform(self, effects: Effects) -> None:
        """Performs the effects that the core has by time: recoveries of streams, and lines for the
        log."""
        for pull in effects.resyncs:
            log.warning(
                "%s: its engine reuses less than the index says; its blocks are read again",
                pull.worker,
            )
        self.links.recover(effects.resyncs)
        for line in effects.news:
            log.warning("%s", line)

    def _warn(self, now_s: float) -> None:
        """Logs what an operator should mend, every WARN_S seconds at most: errors of policies, and
        warnings about workers."""
        if now_s - self._warned_at_s < WARN_S:
            return
        self._warned_at_s = now_s
        fleet = self.core.fleet
        if error := self.core.decider.take_policy_error():
            log.warning("%s; dynamo-adaptive decided", error)
        current = (
            (key, warning)
            for key, source in fleet.view.sources.items()
            for warning in fleet.warnings(source, now_s)
        )
        for line in self._warning_log.lines(current, now_s):
            log.warning("%s", line)

    def _is_ready(self, now_s: float) -> bool:
        """Whether all streams are trusted, or ready_timeout_s is over."""
        view, since_s = self.core.fleet.view, self.links.connected_at_s
        sources = view.sources.values()
        streams = [source.stream for source in sources]
        known = {source.key.worker_id for source in sources}
        complete = (
            since_s is not None
            and now_s - since_s >= HELLO_GRACE_S
            and all(
                worker.id in known or self.commands.removed(worker.id)
                for worker in self.config.workers
            )
            and self.discovered()
        )
        if complete and streams and all(stream.state is StreamState.LIVE for stream in streams):
            log.info("ready: %s", view.summary())
            return True
        if now_s - self._started_at_s >= self.config.ready_timeout_s:
            log.warning(
                "ready after ready_timeout_s, though not every stream is trusted: %s",
                view.summary(),
            )
            return True
        return False
