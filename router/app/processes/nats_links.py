"""The NATS connections of one router, and all that is read from them and sent on them.

facts, heartbeats, fleet commands -> broker -> feed -> view, core, commands
other replicas <-> a second connection <-> link <-> core, reports
hot prefixes -> copies -> broker
"""

import asyncio
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from events.feed.feed import Feed
from events.feed.fleet_view import Pull
from events.plane.broker import Broker
from events.plane.facts import Control
from events.plane.settings import NatsSettings
from events.plane.tasks import Tasks
from indexer.identity import WorkerKey
from router.api.desk.desk import Desk
from router.api.desk.reports import Reports
from router.cluster.children.nats_server import NatsChild, NatsChildError
from router.cluster.replicas.copy_link import CopyLink
from router.cluster.replicas.fleet_commands import FleetCommands
from router.cluster.replicas.replica_link import ReplicaLink
from router.config.keys import ConfigError
from router.config.settings.configurations import ServeConfig
from router.config.settings.routing_settings import RoutingSettings
from router.decide.copies.hot_prefixes import HotPrefixes, recomputed
from router.decide.core.admission import Admission
from router.decide.core.core import RouterCore
from router.fleet.rates import PRIOR_RATE

LINK_S = 5.0
"""Longest wait in seconds for the connection to other replicas; then the router begins without it.
"""


@dataclass(kw_only=True, eq=False)
class NatsLinks:
    """The connections of one router, from `open` to `close`."""

    config: ServeConfig
    core: RouterCore
    commands: FleetCommands
    clock: Callable[[], float]
    rng: random.Random
    broke: Callable[[BaseException], None]
    child: NatsChild | None = None
    """The embedded NATS server; None: nats.url names another one."""
    server: tuple[NatsSettings, str] | None = None
    """How and where to connect to NATS; None before `open`."""
    broker: Broker | None = None
    replicas: Broker | None = None
    """A second connection, for messages between replicas: a connection is read in order, and on the
    first one they would wait behind all that relays send."""
    feed: Feed | None = None
    link: ReplicaLink | None = None
    copies: CopyLink | None = None
    """Sends hot prefixes to be copied; None: copying was never on."""
    connected_at_s: float | None = None
    """When facts could first be read; None: not yet."""

    def __post_init__(self) -> None:
        hot_prefixes = self.config.routing.hot_prefixes
        self.hot = HotPrefixes(self.core.fleet, hot_prefixes, recomputed(PRIOR_RATE))

    async def open(
        self, desk: Desk, reports: Reports, admission: Admission, tasks: Tasks
    ) -> tuple[Broker, Broker, ReplicaLink]:
        """Makes all parts without connecting; starts the embedded NATS server if nats.url is empty.
        Raises ConfigError."""
        nats, url = self.config.nats, self.config.nats.url
        if url is None:
            nats, url = await self._embedded(tasks)
        self.server = nats, url
        name = f"kvroute router {self.core.replica}"
        self.broker = broker = Broker(nats, url, name)
        self.replicas = replicas = Broker(nats, url, f"{name}, to replicas")
        self.feed = self._made_feed(broker, desk.dispatch)
        self.link = link = self._made_link(replicas, desk, reports, admission)
        return broker, replicas, link

    async def _embedded(self, tasks: Tasks) -> tuple[NatsSettings, str]:
        """Starts the embedded NATS server; returns how and where to connect to it. Raises
        ConfigError."""
        try:
            self.child = child = NatsChild(secrets.token_urlsafe(32))
            await child.start()
        except (NatsChildError, OSError) as error:
            raise ConfigError(
                f"nats.url is empty, and the embedded NATS server can't be started: {error}"
            ) from error
        tasks.spawn(child.keep(), "embedded NATS")
        return child.settings(), child.url

    def _made_feed(self, broker: Broker, turns: Callable[[], None]) -> Feed:
        """Makes the feed, which brings facts, heartbeats and fleet commands from NATS to the view
        and the core."""

        def on_heartbeat(key: WorkerKey, now_s: float) -> None:
            self.core.on_heartbeat(key, now_s)
            turns()

        def on_forgotten(workers: list[WorkerKey], now_s: float) -> None:
            self.core.on_forgotten(workers, now_s)
            turns()

        return Feed(
            broker,
            self.core.fleet.view,
            fleet=self.config.fleet.name,
            replica=self.core.replica,
            clock=self.clock,
            on_heartbeat=on_heartbeat,
            on_forgotten=on_forgotten,
            on_control=self._on_control,
            on_failure=self.broke,
            rng=self.rng,
        )

    def _on_control(self, control: Control) -> None:
        """Applies a fleet command from NATS, unless it is known: this router's own come back, and
        all are repeated."""
        if not self.commands.knows(control):
            self.commands.apply(control)

    def _made_link(
        self, replicas: Broker, desk: Desk, reports: Reports, admission: Admission
    ) -> ReplicaLink:
        """Makes the link, which carries messages between replicas: from desk and reports to NATS,
        and back."""
        turns = admission.fleet_turns
        return ReplicaLink(
            broker=replicas,
            core=self.core,
            commands=self.commands,
            fleet=self.config.fleet.name,
            clock=self.clock,
            rng=self.rng,
            on_report=reports.of_replica,
            on_heard=desk.dispatch,
            demand=turns.demand,
            stopped=lambda: turns.stopped,
            on_failure=self.broke,
        )

    async def connect(self, tasks: Tasks) -> None:
        """Connects and subscribes; returns when facts are read. Waits for as long as there is no
        server."""
        broker, replicas, feed, link = self.broker, self.replicas, self.feed, self.link
        if broker is None or replicas is None or feed is None or link is None:
            raise RuntimeError("NatsLinks.connect was called before NatsLinks.open")

        async def connect_replicas() -> None:
            await replicas.connect()
            await link.start()

        linked = tasks.spawn_task(connect_replicas(), "connection to replicas")
        await broker.connect()
        # The link first: of two replicas that start together each has to hear the other's hello,
        # which asks for fleet commands. But a server that refuses the second connection (its limit
        # of connections is reached) keeps no router from its workers.
        await asyncio.wait([linked], timeout=LINK_S)
        await feed.start()
        self.connected_at_s = self.clock()

    def on_change(self) -> None:
        """Has other replicas get this router's reserved load, which may have changed."""
        if self.link is not None:
            self.link.on_change()

    def recover(self, pulls: list[Pull]) -> None:
        """Has event streams read again, if there is a connection to their relays."""
        if pulls and self.feed is not None:
            self.feed.recover(pulls)

    def resync(self, worker_id: str) -> None:
        """Has a worker's relay send all that it holds again, if there is a connection to it."""
        if self.feed is not None:
            self.recover(self.core.fleet.view.resync(worker_id, self.clock()))

    async def send_control(self, control: Control) -> bool:
        """Sends a fleet command; returns whether NATS has taken it."""
        return self.feed is not None and await self.feed.send_control(control)

    def use_hot_prefixes(self, routing: RoutingSettings) -> None:
        """Starts, stops or changes the copying of hot prefixes."""
        effects = self.hot.reconfigure(routing.hot_prefixes)
        self.core.observe_picks(self.hot, self.hot.enabled)
        if self.copies is not None:
            self.copies.perform(effects)
        elif self.hot.enabled and self.broker is not None:
            self.copies = CopyLink(
                broker=self.broker,
                hot=self.hot,
                fleet=self.config.fleet.name,
                replica=self.core.replica,
                clock=self.clock,
                on_failure=self.broke,
            )

    def tick(self) -> None:
        if self.hot.enabled and self.copies is not None:
            self.copies.tick()

    async def stop(self) -> None:
        """Stops reading and sending; the connections stay open."""
        if self.copies is not None:
            await self.copies.stop()
        if self.link is not None:
            await self.link.stop()
        if self.feed is not None:
            await self.feed.stop()

    async def close(self) -> None:
        """Closes the connections; the embedded server ends last."""
        await asyncio.gather(
            *(link.close() for link in (self.broker, self.replicas) if link is not None)
        )
        if self.child is not None:
            await self.child.stop()
