"""The shell of the router's ear: what it says to the fleet."""

import asyncio
import random

from typing_extensions import override

from events.broker import Broker
from events.feed import HELLO_S, Feed
from events.settings import NatsSettings
from events.view import FleetView
from indexer.reference import ReferenceIndex


class Silent(Broker):
    """A broker that takes down what it is to publish."""

    def __init__(self) -> None:
        super().__init__(NatsSettings(), "nats://127.0.0.1:1", "test")
        self.published: list[str] = []

    @override
    async def publish(self, subject: str, payload: bytes) -> bool:
        self.published.append(subject)
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_router_too_slow_for_what_it_hears_asks_for_more_once_a_second_at_most() -> None:
    clock, broker = Clock(), Silent()
    broken: list[BaseException] = []
    feed = Feed(
        broker,
        FleetView(ReferenceIndex(), beat_timeout_s=3.0, forget_s=30.0, workers_max=8),
        fleet="f",
        replica="r",
        clock=clock,
        on_heartbeat=lambda _key: None,
        on_forgotten=lambda _keys: None,
        on_control=lambda _control: None,
        on_failure=broken.append,
        rng=random.Random(1),
    )
    for hellos in (1, 2, 3):
        for _ in range(100):  # as the broker tells of each message that it dropped
            feed._connection_changed(False)
            feed._connection_changed(True)
        await asyncio.sleep(0)
        assert broker.published == ["kvroute.v1.f.hello"] * hellos
        clock.now_s += HELLO_S
    await feed.stop()
    assert broken == []
