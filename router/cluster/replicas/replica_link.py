"""Connects router replicas over NATS: exchanges reserved load, forwards reports to their owners.

    core.fleet.loads, and what waits here ──at once when they change──> inflight.<us>
                 inflight.<others> ──> core.fleet.replicas
    Report of another's reservation ──> report.<its owner> ──> there, and its outcome back
    hello of a replica that starts, or our own connection back ──> the fleet commands in force

It awaits, then calls. All state changes happen on the event loop.
"""

import asyncio
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from events.feed.demand import Demand
from events.feed.replicas import FULL_S, Teller
from events.plane import subjects
from events.plane.broker import Broker, OnMessage
from events.plane.facts import Control, Epoch, Hello, Unreadable, decode, encode
from events.plane.tasks import OnFailure, Tasks
from router.cluster.replicas.fleet_commands import FleetCommands
from router.decide.core.core import RouterCore

HEARD_PER_S = 500
"""Messages about reserved load that a replica hears from all others together, at most: so much time
is between two that it sends. As long as a pick of ours is unknown to them, they may pick alike."""
FORWARD_TIMEOUT_S = 2.0
FORWARDS_MAX = 256
"""Calls to other replicas under way. Each is a Report call of a client."""
REPLICA_NAME = re.compile(r"[A-Za-z0-9._-]{1,127}")
"""What a replica may be called; see RouterApp.replica."""
HELLO_JITTER_S = 0.2
HELLO_S = 1.0
"""Least seconds between two answers to hellos."""

log = logging.getLogger("kvroute.replicas")


class ReplicaLink:
    """Connects one replica to the others."""

    def __init__(
        self,
        broker: Broker,
        core: RouterCore,
        commands: FleetCommands,
        *,
        fleet: str,
        clock: Callable[[], float],
        rng: random.Random,
        tells: bool = True,
        on_report: Callable[[bytes], bytes],
        on_heard: Callable[[], None] = lambda: None,
        demand: Callable[[float], Sequence[Demand]] = lambda _: (),
        stopped: Callable[[], Sequence[Demand]] = lambda: (),
        on_failure: OnFailure,
    ) -> None:
        """broker: a connection of its own, since messages of a connection are read in order, and a
        verdict about a worker would wait behind the facts of relays.

        tells: whether reserved load is published and read; False for comparison.

        on_report: answers another replica's ReportRequest with bytes of a ReportResponse. on_heard:
        called when another replica's reserved load has changed. demand: returns what waits in this
        router at a time.
        """
        self._broker = broker
        self._core = core
        self._commands = commands
        self._fleet = fleet
        self._clock = clock
        self._rng = rng
        self._tells = tells
        self._due = asyncio.Event()
        """There is something to tell."""
        self._our_subject = subjects.inflight(fleet, core.replica)
        self._on_report = on_report
        self._on_heard = on_heard
        self._demand = demand
        self._stopped = stopped
        self._forwards = 0
        self._hello_at_s = -HELLO_S
        self._tasks = Tasks(on_failure)
        self._subscriptions: list[Subscription] = []
        epoch = Epoch(round(clock() * 1e9), rng.getrandbits(62))
        self._teller = Teller(core.replica, epoch)
        self.forwarded: Counter[str] = Counter()
        """Report calls handed on to another replica, by their outcome."""

    async def start(self) -> None:
        """Subscribes, and begins to publish. The broker must be connected."""
        replica = self._core.replica
        await self._listen(subjects.report(self._fleet, replica), self._report_came)
        await self._listen(subjects.hello(self._fleet), self._hello_came)
        self._broker.on_connection(self._connection_changed)
        if self._tells:
            await self._listen(subjects.every_inflight(self._fleet), self._inflight_came)
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
            await self._broker.unsubscribe(subscription)
        self._subscriptions.clear()
        await self._tasks.close()

    async def _listen(self, subject: str, listener: OnMessage) -> None:
        self._subscriptions.append(await self._broker.subscribe(subject, listener))

    def owner(self, reservation_id: str) -> str:
        """Name of the other replica that a reservation's id names; empty: this replica's, or no
        valid name.

        A caller can choose any id, whose name becomes a subject of NATS; the server closes the
        connection of a client that sends a line over 4 KiB. So only names that a replica can have
        count. The replica need not have sent any message.
        """
        owner, _, _ = reservation_id.rpartition("-")
        if owner == self._core.replica or REPLICA_NAME.fullmatch(owner) is None:
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
            subject = subjects.report(self._fleet, owner)
            answer = await self._broker.request(subject, report, FORWARD_TIMEOUT_S)
        finally:
            self._forwards -= 1
        self.forwarded["no_answer" if answer is None else "answered"] += 1
        return answer

    def on_change(self) -> None:
        """Called when reserved load or waiting requests may have changed."""
        if self._core.fleet.replicas:
            self._due.set()

    async def _tell(self) -> None:
        """Publishes this replica's load to other replicas: at once when there is news, and then not
        again for a while."""
        while True:
            wait_s = FULL_S
            if self._broker.connected:
                now_s = self._clock()
                message: bytes | None = self._teller.presence()
                if self._core.fleet.replicas:
                    verdicts = self._core.fleet.outliers.verdicts(now_s)
                    sessions = self._core.fleet.sessions
                    moved = sessions.take_moved()
                    message = self._teller.message(
                        self._core.fleet.loads,
                        now_s,
                        verdicts,
                        moved,
                        self._demand(now_s),
                        self._stopped(),
                    )
                    wait_s = self._teller.full_due_s - now_s
                    if self._teller.is_cut or sessions.unannounced:
                        self._due.set()
                if message is not None:
                    await self._broker.publish(self._our_subject, message)
            await asyncio.sleep(len(self._core.fleet.replicas) / HEARD_PER_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._due.wait()
            self._due.clear()

    async def _inflight_came(self, message: Msg) -> None:
        if message.subject == self._our_subject:
            return
        met = self._core.fleet.replicas.met
        self._core.on_inflight(message.data, self._clock())
        self._on_heard()
        if self._core.fleet.replicas.met > met:
            self._teller.begin_anew()
            self._core.fleet.sessions.announce_all()
            self._due.set()

    async def _report_came(self, message: Msg) -> None:
        if message.reply:
            await self._broker.publish(message.reply, self._on_report(message.data))

    async def _hello_came(self, message: Msg) -> None:
        hello = decode(Hello, message.data)
        if isinstance(hello, Unreadable):
            self._core.fleet.view.dropped[hello.reason] += 1
            return
        now_s = self._clock()
        if hello.replica == self._core.replica or now_s - self._hello_at_s < HELLO_S:
            return
        self._say_commands(now_s, f"commands for {hello.replica}")

    def _connection_changed(self, connected: bool) -> None:
        """Says fleet commands again after an outage: others may have said hello before we were back
        to hear it, and a command that was given here meanwhile has reached nobody."""
        if connected:
            self._say_commands(self._clock(), "commands after an outage")

    def _say_commands(self, now_s: float, why: str) -> None:
        self._hello_at_s = now_s
        if in_force := self._commands.in_force():
            self._tasks.spawn(self._answer(in_force), why)

    async def _answer(self, in_force: list[Control]) -> None:
        """Publishes after a random delay: all replicas answer a hello with the same commands."""
        await asyncio.sleep(self._rng.uniform(0, HELLO_JITTER_S))
        log.info("telling other replicas of %d fleet commands in force", len(in_force))
        publish = partial(self._broker.publish, subjects.control(self._fleet))
        for control in in_force:
            await publish(encode(control))
