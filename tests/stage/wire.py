"""A broker in memory: what relays publish, and the listeners that they have."""

import fnmatch
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from typing_extensions import override

from events.plane.broker import Broker, OnMessage
from events.plane.facts import Beat, Heartbeat, decode, decode_stream
from events.plane.settings import NatsSettings


class Wire(Broker):
    """Delivers nothing by itself; `say` does."""

    def __init__(self) -> None:
        super().__init__(NatsSettings(), "nats://127.0.0.1:1", "wire")
        self.published: defaultdict[str, list[bytes]] = defaultdict(list)
        self.listeners: list[tuple[SimpleNamespace, OnMessage]] = []
        """Subscriptions"""
        self.on_publish: Callable[[str], None] = lambda _: None
        """Called before a message is taken; may raise."""
        self.on_subscribe: Callable[[str], None] = lambda _: None

    @property
    @override
    def connected(self) -> bool:
        return True

    @override
    async def publish(self, subject: str, payload: bytes) -> bool:
        self.on_publish(subject)
        self.published[subject].append(payload)
        return True

    @override
    async def subscribe(self, subject: str, listener: OnMessage) -> Subscription:
        self.on_subscribe(subject)
        subscription = SimpleNamespace(subject=subject, pending_msgs=0)
        self.listeners.append((subscription, listener))
        return cast(Subscription, subscription)

    @override
    async def unsubscribe(self, subscription: Subscription) -> None:
        self.listeners = [one for one in self.listeners if one[0] is not subscription]

    def hears(self, subject: str) -> bool:
        return any(one.subject == subject for one, _ in self.listeners)

    async def say(self, subject: str, data: bytes = b"", reply: str = "") -> None:
        """Has the listeners of a subject hear a message."""
        message: Any = SimpleNamespace(subject=subject, data=data, reply=reply)
        for subscription, listener in list(self.listeners):
            if fnmatch.fnmatchcase(subject, subscription.subject.replace(">", "*")):
                await listener(cast(Msg, message))

    def heartbeats(self, worker: str, rank: int = 0) -> list[Heartbeat]:
        read = [decode(Heartbeat, one) for one in self._of("load", worker, rank)]
        assert all(isinstance(one, Heartbeat) for one in read)
        return cast(list[Heartbeat], read)

    def beats(self, worker: str, rank: int = 0) -> list[Beat]:
        read = [decode_stream(one)[0] for one in self._of("facts", worker, rank)]
        return [one for one in read if isinstance(one, Beat)]

    def _of(self, kind: str, worker: str, rank: int) -> list[bytes]:
        return self.published[f"kvroute.v1.f.{kind}.{worker}.{rank}"]
