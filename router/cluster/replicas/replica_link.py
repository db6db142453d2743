"""Connects router replicas over NATS: exchanges reserved load, forwards reports to their owners.

    core.fleet.loads, and what waits here ──at once when they change──> inflight.<us>
                 inflight.<others> ──> core.fleet.replicas
    Report of another's reservation ──> report.<its owner> ──> there, and its outcome back
    hello of a replica that starts, or our own connection back ──> the fleet commands in force

All state changes happen on the event loop.
"""

import asyncio
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from events.feed.demand import Demand
from events.feed.replicas import FULL_S, Teller
from events.plane import subjects
from events.plane.broker import Broker, OnMessage
from events.plane.facts import Epoch, Hello, Unreadable, decode, encode
from events.plane.tasks import OnFailure, Tasks
from router.cluster.replicas.fleet_commands import FleetCommands
from router.decide.core.core import RouterCore

HEARD_PER_S = 500
"""Most messages about reserved load that a replica receives in a second from all others together:
each pauses for it between two messages. Until a message comes, others may pick the same worker."""
FORWARD_TIMEOUT_S = 2.0
FORWARDS_MAX = 256
"""Most Report calls of clients that are forwarded to other replicas at the same time."""
REPLICA_NAME = re.compile(r"[A-Za-z0-9._-]{1,127}")
"""What a replica may be called; see RouterApp.replica."""
HELLO_JITTER_S = 0.2
HELLO_S = 1.0
"""Least seconds between two answers to hellos; a hello that comes sooner is answered later."""

log = logging.getLogger("kvroute.replicas")


@dataclass(kw_only=True, eq=False)
class ReplicaLink:
    """Connects one replica to the others."""

    broker: Broker
    """A connection for replicas' messages alone: a connection is read in order, and an ejection by
    another replica would wait behind the facts of relays."""
    core: RouterCore
    commands: FleetCommands
    fleet: str
    clock: Callable[[], float]
    rng: random.Random
    tells: bool = True
    """Whether reserved load is published and read; False for comparison."""
    on_report: Callable[[bytes], bytes]
    """Answers another replica's ReportRequest with bytes of a ReportResponse."""
    on_heard: Callable[[], None] = lambda: None
    """Called when another replica's reserved load has changed."""
    demand: Callable[[float], Sequence[Demand]] = lambda _: ()
    """Returns the requests that wait in this router at a time, in sums."""
    stopped: Callable[[], Sequence[Demand]] = lambda: ()
    """Returns the requests that waited, and were refused, when this router stopped."""
    on_failure: InitVar[OnFailure]
    forwarded: Counter[str] = field(default_factory=Counter)
    """Report calls handed on to another replica, by their outcome."""
    _due: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is news for other replicas."""
    _commands_due: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when other replicas may lack fleet commands in force."""
    _forwards: int = 0
    _subscriptions: list[Subscription] = field(default_factory=list)

    def __post_init__(self, on_failure: OnFailure) -> None:
        self._our_subject = subjects.inflight(self.fleet, self.core.replica)
        self._tasks = Tasks(on_failure)
        epoch = Epoch(round(self.clock() * 1e9), self.rng.getrandbits(62))
        self._teller = Teller(self.core.replica, epoch)

    async def start(self) -> None:
        """Subscribes, and begins to publish. The broker must be connected."""
        replica = self.core.replica
        await self._listen(subjects.report(self.fleet, replica), self._report_came)
        await self._listen(subjects.hello(self.fleet), self._hello_came)
        self.broker.on_connection(self._connection_changed)
        self._tasks.spawn(self._say_commands(), "commands for other replicas")
        if self.tells:
            await self._listen(subjects.every_inflight(self.fleet), self._inflight_came)
            self._tasks.spawn(self._tell(), "telling other replicas")

    @property
    def untold(self) -> int:
        """Number of workers that did not fit in a message about reserved load."""
        return self._teller.untold

    async def stop(self) -> None:
        """Stops the exchange: handles pending reports first, then ends its tasks. Reports of other
        replicas then fail at once, and not after FORWARD_TIMEOUT_S.
        """
        for subscription in self._subscriptions:
            await self.broker.unsubscribe(subscription)
        self._subscriptions.clear()
        await self._tasks.close()

    async def _listen(self, subject: str, listener: OnMessage) -> None:
        self._subscriptions.append(await self.broker.subscribe(subject, listener))

    def owner(self, reservation_id: str) -> str:
        """Name of the other replica that a reservation's id names; empty: this replica's, or no
        valid name.

        A caller can choose any id, whose name becomes a subject of NATS; the server closes the
        connection of a client that sends a line over 4 KiB. So only names that a replica can have
        count. The replica need not have sent any message.
        """
        owner, _, _ = reservation_id.rpartition("-")
        if owner == self.core.replica or REPLICA_NAME.fullmatch(owner) is None:
            return ""
        return owner

    async def forward(self, owner: str, report: bytes) -> bytes | None:
        """Forwards a ReportRequest to another replica; returns its answer, or None when there is
        none.
        """
        if self._forwards >= FORWARDS_MAX:
            self.forwarded["busy"] += 1
            return None
        self._forwards += 1
        try:
            subject = subjects.report(self.fleet, owner)
            answer = await self.broker.request(subject, report, FORWARD_TIMEOUT_S)
        finally:
            self._forwards -= 1
        self.forwarded["no_answer" if answer is None else "answered"] += 1
        return answer

    def on_change(self) -> None:
        """Called when reserved load or waiting requests may have changed."""
        if self.core.fleet.replicas:
            self._due.set()

    async def _tell(self) -> None:
        """Publishes this replica's load to other replicas: at once when there is news, but with a
        pause after each message (HEARD_PER_S), and else every FULL_S."""
        while True:
            wait_s = FULL_S
            if self.broker.connected:
                now_s = self.clock()
                message: bytes | None = self._teller.presence()
                if self.core.fleet.replicas:
                    verdicts = self.core.fleet.outliers.verdicts(now_s)
                    sessions = self.core.fleet.sessions
                    moved = sessions.take_moved()
                    message = self._teller.message(
                        self.core.fleet.loads,
                        now_s,
                        verdicts,
                        moved,
                        self.demand(now_s),
                        self.stopped(),
                    )
                    wait_s = self._teller.full_due_s - now_s
                    if self._teller.is_cut or sessions.unannounced:
                        self._due.set()
                if message is not None:
                    await self.broker.publish(self._our_subject, message)
            await asyncio.sleep(len(self.core.fleet.replicas) / HEARD_PER_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._due.wait()
            self._due.clear()

    async def _inflight_came(self, message: Msg) -> None:
        if message.subject == self._our_subject:
            return
        met = self.core.fleet.replicas.met
        self.core.on_inflight(message.data, self.clock())
        self.on_heard()
        if self.core.fleet.replicas.met > met:
            self._teller.begin_anew()
            self.core.fleet.sessions.announce_all()
            self._due.set()

    async def _report_came(self, message: Msg) -> None:
        if message.reply:
            await self.broker.publish(message.reply, self.on_report(message.data))

    async def _hello_came(self, message: Msg) -> None:
        hello = decode(Hello, message.data)
        if isinstance(hello, Unreadable):
            self.core.fleet.view.dropped[hello.reason] += 1
            return
        if hello.replica != self.core.replica:
            self._commands_due.set()

    def _connection_changed(self, connected: bool) -> None:
        """Publishes the fleet commands in force after an outage: another replica's hello may have
        been missed, and a command that was given here meanwhile has reached no replica."""
        if connected:
            self._commands_due.set()

    async def _say_commands(self) -> None:
        """Publishes the commands in force whenever they are due, with a pause of HELLO_S after each
        time, and a random delay of HELLO_JITTER_S at most before it, since all replicas answer a
        hello with the same commands."""
        while True:
            await self._commands_due.wait()
            await asyncio.sleep(self.rng.uniform(0, HELLO_JITTER_S))
            self._commands_due.clear()
            if in_force := self.commands.in_force():
                log.info("telling other replicas of %d fleet commands in force", len(in_force))
            for control in in_force:
                await self.broker.publish(subjects.control(self.fleet), encode(control))
            await asyncio.sleep(HELLO_S)
