"""What a link of replicas publishes, and when: on a broker that keeps what it is handed."""

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
from nats.aio.msg import Msg

from events.plane import subjects
from events.plane.broker import OnMessage
from events.plane.facts import VERSION, Control, Hello, encode
from router.cluster.replicas import replica_link
from router.cluster.replicas.fleet_commands import FleetCommands
from router.cluster.replicas.replica_link import ReplicaLink
from tests.stage.fleet import Fleet
from tests.stage.waiting import until


class Kept:
    """A broker that keeps what is published, and whose messages the test brings."""

    connected = True

    def __init__(self) -> None:
        self.published: list[tuple[str, bytes]] = []
        self.listeners: dict[str, OnMessage] = {}
        self.changed: Callable[[bool], None] = bool

    def on_connection(self, listener: Callable[[bool], None]) -> None:
        self.changed = listener

    async def subscribe(self, subject: str, listener: OnMessage) -> str:
        self.listeners[subject] = listener
        return subject

    async def unsubscribe(self, subject: str) -> None:
        del self.listeners[subject]

    async def publish(self, subject: str, payload: bytes) -> bool:
        self.published.append((subject, payload))
        return True


async def test_a_hello_that_comes_just_after_an_outage_is_answered_with_the_commands_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_link, "HELLO_S", 0.05)
    monkeypatch.setattr(replica_link, "HELLO_JITTER_S", 0.0)
    fleet, broker, failures = Fleet("w0"), Kept(), list[BaseException]()
    commands = FleetCommands(fleet.core, fleet.clock)
    link = ReplicaLink(
        broker=cast(Any, broker),
        core=fleet.core,
        commands=commands,
        fleet="default",
        clock=fleet.clock,  # stands still: both come at once
        rng=random.Random(7),
        tells=False,
        on_report=bytes,
        on_failure=failures.append,
    )
    await link.start()
    drain = Control(VERSION, "here-1", "drain", "w0", at_s=fleet.now_s)
    commands.apply(drain)
    told = subjects.control("default"), encode(drain)
    broker.changed(True)
    await until(lambda: broker.published == [told], "the commands after an outage")
    subject = subjects.hello("default")
    hello = Msg(cast(Any, None), subject, data=encode(Hello(VERSION, "there")))
    await broker.listeners[subject](hello)
    await until(lambda: broker.published == [told, told], "the answer to the hello")
    await link.stop()
    assert failures == []
