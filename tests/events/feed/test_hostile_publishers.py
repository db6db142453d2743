"""One relay that misuses its rights on a real NATS server, beside others that don't.

The hostile one writes to the server's socket itself: no client would send what it does.
"""

import asyncio
import inspect
import random
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from events.feed import fence, intake
from events.feed.feed import Feed
from events.feed.fleet_view import FleetView
from events.feed.stream import StreamState
from events.plane import subjects
from events.plane.broker import Broker
from events.plane.clock import unix_now
from events.plane.facts import (
    VERSION,
    Beat,
    Control,
    Epoch,
    FactsMessage,
    Heartbeat,
    Stored,
    encode,
    pack_hashes,
)
from events.plane.nats_client import NatsClient
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from tests.events.feed.on_nats import Publisher, hearing, published
from tests.stage.loopback import a_broker
from tests.stage.nats_server import NatsServer, nats_server
from tests.stage.waiting import until

EPOCH = Epoch(1, 0)
HOSTILE = WorkerKey("a", 0)
HONEST = [WorkerKey(name, 0) for name in "bcdef"]


def with_headers(subject: str, headers: bytes, payload: bytes) -> bytes:
    size = len(headers) + len(payload)
    return b"HPUB %s %d %d\r\n%s%s\r\n" % (subject.encode(), len(headers), size, headers, payload)


@dataclass
class Stream:
    """One relay's stream, from its first message on."""

    worker: WorkerKey
    seq: int = 0
    held: list[int] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def store(self, blocks: int = 1) -> bytes:
        hashes = [self.rng.getrandbits(64) for _ in range(blocks)]
        self.held += hashes
        self.seq += 1
        fact = Stored(pack_hashes(hashes), "device")
        message = encode(FactsMessage(VERSION, EPOCH, self.seq, [fact], unix_now()))
        return published(subjects.facts("f", self.worker), message)

    def beat(self) -> bytes:
        digest = int(np.bitwise_xor.reduce(np.array(self.held, np.uint64))) if self.held else 0
        beat = Beat(VERSION, EPOCH, self.seq, len(self.held), digest, True, unix_now())
        return published(subjects.facts("f", self.worker), encode(beat))


@dataclass
class Ear:
    """A router's ear on a real server."""

    server: NatsServer
    broker: Broker
    view: FleetView
    feed: Feed
    connections: list[bool]
    controls: list[Control]
    publishers: list[Publisher] = field(default_factory=list)

    def publisher(self) -> Publisher:
        self.publishers.append(Publisher(self.server.port))
        return self.publishers[-1]

    def whole(self, *streams: Stream) -> bool:
        return all(
            (source := self.view.sources.get(one.worker)) is not None
            and source.stream.state is StreamState.LIVE
            and source.stream.seq == one.seq
            and self.view.index.count(source.slot) == len(one.held)
            for one in streams
        )


@asynccontextmanager
async def an_ear(folder: Path) -> AsyncIterator[Ear]:
    connections: list[bool] = []
    controls: list[Control] = []
    view = FleetView(NativeIndex(), beat_timeout_s=30.0, forget_s=300.0, workers_max=64)
    async with (
        nats_server(folder, "") as server,
        hearing(server.url, view, controls.append) as (broker, feed),
    ):
        broker.on_connection(connections.append)
        ear = Ear(server, broker, view, feed, connections, controls)
        try:
            yield ear
        finally:
            for publisher in ear.publishers:
                publisher.close()


async def beats(publisher: Publisher, *streams: Stream) -> None:
    """Beats of these streams, as relays send them, until cancelled."""
    while True:
        publisher.send(*(one.beat() for one in streams))
        await asyncio.sleep(0.2)


FACTS = subjects.facts("f", HOSTILE)
CONTROL = subjects.control("f")
NONSENSE = {
    "a subject that is not UTF-8": published(b"kvroute.v1.f.facts.a.\xff", b"x"),
    "a subject with a vertical tab": published(b"kvroute.v1.f.facts.a.\x0b7", b"x"),
    "a subject with a form feed": published(b"kvroute.v1.f.load.a.\x0c9", b"x"),
    "a subject with NUL": published(b"kvroute.v1.f.facts.\x00.0", b"x"),
    "a long subject": published(b"kvroute.v1.f.facts.a." + b"y" * 3000, b"x"),
    "headers that are none": with_headers(FACTS, b"xx", b"x"),
    "headers of one byte": with_headers(FACTS, b"N", b""),
    "only headers": with_headers(FACTS, b"NATS/1.0", b""),
    "a status that is none": with_headers(FACTS, b"NATS/1.0 \xff\xfe\xfd\r\n\r\n", b""),
    "headers that are none, to a listener": with_headers(CONTROL, b"NATS/1.0", b"x"),
    "a status that is none, to a listener": with_headers(
        CONTROL, b"NATS/1.0 200 \xff\xff\r\n\r\n", b"x"
    ),
}


async def test_messages_that_nobody_can_read_cost_no_other_worker_anything(
    tmp_path: Path,
) -> None:
    async with an_ear(tmp_path) as ear:
        honest, hostile = ear.publisher(), ear.publisher()
        streams = [Stream(worker) for worker in HONEST]
        for message in NONSENSE.values():
            hostile.send(message)
            hostile.taken()
            honest.send(*(one.store() for one in streams))
        beating = asyncio.create_task(beats(honest, *streams))
        await until(lambda: ear.whole(*streams), "every store of the honest workers")
        resync = Control(VERSION, "1", "resync", "b")
        honest.send(published(CONTROL, encode(resync)))
        await until(lambda: ear.controls == [resync], "the listeners to listen still")
        assert ear.connections == [], "the connection was not lost"
        assert ear.view.gaps == 0
        assert ear.broker.unreadable == 2, "those of a listener with headers that are none"
        assert ear.view.dropped["bad_subject"] == 5
        beating.cancel()


@pytest.mark.parametrize("kind", ["of one byte", "valid"])
async def test_a_flood_is_its_publishers_loss_and_nobody_elses(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "BUDGET_COST", 2 * 1024 * 1024)
    async with an_ear(tmp_path) as ear:
        honest, hostile = ear.publisher(), ear.publisher()
        streams, flooding = [Stream(worker) for worker in HONEST], Stream(HOSTILE)
        honest.send(*(one.beat() for one in [*streams, flooding]))
        await until(lambda: ear.whole(*streams, flooding), "live streams")
        if kind == "valid":
            flood = b"".join(flooding.store(16) for _ in range(10_000))
        else:
            flood = published(FACTS, b"x") * 40_000
        flooded = asyncio.create_task(asyncio.to_thread(hostile.send, flood))
        for _ in range(100):
            honest.send(*(one.store(4) for one in streams))
            await asyncio.sleep(0)
        beating = asyncio.create_task(beats(honest, *streams))
        await flooded
        hostile.taken()
        await until(lambda: ear.whole(*streams), "every store of the honest workers")
        assert ear.connections == [], "the connection was not lost, for anybody"
        assert ear.broker.counts["slow_consumer"] == 0
        assert ear.view.gaps <= 1, "the flood's own"
        await until(lambda: ear.view.lost["a"], "the flood's losses")
        assert ear.view.shut_out["facts"] > 0
        lost = ear.view.dropped["publisher_too_fast"] + ear.view.dropped["publisher_queue_full"]
        assert ear.view.lost == {"a": lost}
        assert ear.view.sources[HOSTILE].stream.state is not StreamState.LIVE
        beating.cancel()


async def test_a_flooding_publisher_is_shut_out_at_the_server_and_let_in_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(intake, "BUDGET_COST", 2 * 1024 * 1024)
    monkeypatch.setattr(fence, "PAUSE_S", 3600.0)
    monkeypatch.setattr(fence, "PAUSE_MAX_S", 3600.0)
    async with an_ear(tmp_path) as ear:
        honest, hostile = ear.publisher(), ear.publisher()
        streams, late = [Stream(worker) for worker in HONEST[:4]], Stream(HONEST[4])
        honest.send(*(one.beat() for one in streams))
        beating = asyncio.create_task(beats(honest, *streams))
        await until(lambda: ear.whole(*streams), "live streams")
        hostile.send(published(FACTS, b"x") * 16_000)
        named = {("facts", worker.worker_id.encode()) for worker in HONEST[:4]} | {("load", b"")}
        await until(lambda: ear.feed._subscriptions.running.keys() == named, "a fence")
        dropped = ear.view.dropped.total()
        hostile.send(published(FACTS, b"x") * 16_000)
        hostile.taken()
        honest.send(*(one.store(4) for one in streams))
        await until(lambda: ear.whole(*streams), "every store of the honest workers")
        assert ear.view.dropped.total() <= dropped + 16_000, "of the first flood"
        assert ear.view.shut_out == {"facts": 1}
        assert [record.message for record in caplog.records if "floods" in record.message] == [
            "worker a floods its subject of facts: not subscribed to for 3600 s"
        ]
        # A worker that comes meanwhile is known by its heartbeat, and followed from then on.
        heartbeat = Heartbeat(epoch=EPOCH, address="http://f", engine="vllm", sent_at_s=unix_now())
        honest.send(published(subjects.load("f", late.worker), encode(heartbeat)))
        subscribed = ("facts", late.worker.worker_id.encode())
        await until(lambda: subscribed in ear.feed._subscriptions.running, "its subscription")
        honest.send(late.beat())
        await until(lambda: ear.whole(late), "the new worker")
        # The pause is over, and so is the second of the flood.
        ear.feed._intake._spent.clear()
        for here in ear.feed._subscriptions.fence._planes.values():
            here.until_s = 0.0
        await until(
            lambda: ear.feed._subscriptions.running.keys() == {("facts", b""), ("load", b"")}, "all"
        )
        flooding = Stream(HOSTILE)
        honest.send(*(one.store(4) for one in streams), flooding.beat())
        await until(lambda: ear.whole(*streams, flooding), "its stream, too")
        assert ear.view.gaps == 0
        assert ear.connections == []
        beating.cancel()


OVERRIDDEN = {
    "_attempt_reconnect": (),
    "_connect_to_server": ("s",),
    "_process_err": ("err_msg",),
    "_process_info": ("info", "initial_connection"),
    "_ping_interval": (),
    "_read_creds_user_jwt": ("creds",),
    "_read_loop": (),
}
CALLED = {
    "_process_msg": ("sid", "subject", "reply", "data", "headers"),
    "_process_op_err": ("e",),
    "_process_ping": (),
    "_process_pong": (),
    "_send_ping": ("future",),
}
READ = {"_error_cb", "_pings_outstanding", "_sid", "_status", "_transport"}


def test_what_is_overridden_of_nats_py_is_there_and_its_releases_have_a_bound() -> None:
    """None of it has a public name. On failure: read the new release's client.py first."""
    ours = {
        name
        for name, member in vars(NatsClient).items()
        if inspect.isfunction(member) and hasattr(Client, name) and name != "__init__"
    }
    assert ours == set(OVERRIDDEN)
    for name, parameters in (OVERRIDDEN | CALLED).items():
        signature = inspect.signature(getattr(Client, name))
        assert tuple(signature.parameters) == ("self", *parameters), name
    assert vars(Client()).keys() >= READ
    assert "NatsClient" not in inspect.getsource(Client)
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (bound,) = (one for one in project["dependencies"] if one.startswith("nats-py"))
    assert "<" in bound


async def test_a_message_of_ours_is_what_nats_py_hands_out(tmp_path: Path) -> None:
    """Requests, answers without responders and plain messages go through our reader."""
    async with nats_server(tmp_path, "") as server, a_broker(server.url, "one") as broker:
        heard: list[bytes] = []

        async def answer(message: Msg) -> None:
            heard.append(message.data)
            if message.reply:
                await broker.publish(message.reply, message.data * 2)

        await broker.subscribe("q", answer)
        large = random.Random(1).randbytes(1 << 20)
        assert await broker.request("q", b"x", 10.0) == b"xx"
        assert await broker.request("nobody", b"x", 10.0) is None
        await broker.publish("q", large)
        await until(lambda: heard == [b"x", large], "a large message")


async def test_no_message_is_missed_as_subscriptions_change(tmp_path: Path) -> None:
    came: set[int] = set()
    sent = 0

    def listen(_subject: bytes, payload: bytes) -> None:
        came.add(int(payload))

    async with an_ear(tmp_path) as ear:
        publisher = ear.publisher()
        running = await ear.broker.change_raw(["test.*"], [], listen)
        for switch in range(24):
            batch = b"".join(published("test.a", b"%d" % at) for at in range(sent, sent + 2000))
            sent += 2000
            sending = asyncio.create_task(asyncio.to_thread(publisher.send, batch))
            subject = "test.*" if switch % 2 else "test.a"
            running = await ear.broker.change_raw([subject], running, listen)
            await sending
        publisher.taken()
        await until(lambda: len(came) == sent, "every message")
