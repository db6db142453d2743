"""A router's ear over a broker, and a publisher that writes to the server's socket itself."""

import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from events.feed.feed import Feed
from events.feed.fleet_view import FleetView
from events.plane.broker import Broker
from events.plane.clock import unix_now
from events.plane.facts import Control
from events.plane.settings import NatsSettings


def a_feed(
    broker: Broker,
    view: FleetView,
    clock: Callable[[], float],
    broken: list[BaseException],
    on_control: Callable[[Control], None] = lambda _control: None,
) -> Feed:
    """broken: gets what the feed's tasks raise."""
    return Feed(
        broker,
        view,
        fleet="f",
        replica="r",
        clock=clock,
        on_heartbeat=lambda _key, _now_s: None,
        on_forgotten=lambda _keys, _now_s: None,
        on_control=on_control,
        on_failure=broken.append,
        rng=random.Random(1),
    )


class Publisher:
    """A connection to the server that sends any bytes."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.recv(1 << 16)
        self._socket.sendall(b'CONNECT {"verbose":false,"headers":true}\r\n')
        self.taken()

    def send(self, *messages: bytes) -> None:
        self._socket.sendall(b"".join(messages))

    def taken(self) -> None:
        """Returns when the server has taken all."""
        self._socket.sendall(b"PING\r\n")
        heard = b""
        while not heard.endswith(b"PONG\r\n"):
            heard += self._socket.recv(1 << 16)
            assert b"-ERR" not in heard

    def close(self) -> None:
        self._socket.close()


def published(subject: bytes | str, payload: bytes) -> bytes:
    name = subject if isinstance(subject, bytes) else subject.encode()
    return b"PUB %s %d\r\n%s\r\n" % (name, len(payload), payload)


@asynccontextmanager
async def hearing(
    url: str, view: FleetView, on_control: Callable[[Control], None] = lambda _control: None
) -> AsyncIterator[tuple[Broker, Feed]]:
    """A router's ear on a server, none of whose tasks may raise."""
    broken: list[BaseException] = []
    broker = Broker(NatsSettings(), url, "router")
    feed = a_feed(broker, view, unix_now, broken, on_control)
    try:
        await broker.connect()
        await feed.start()
        yield broker, feed
    finally:
        await feed.stop()
        await broker.close()
    assert broken == []
