"""Streams on their way to routers: when they are sent, and whom a failure concerns."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from events.engines.dynamo import HashesStored, Origin, WorkerEvent
from events.plane import supervisor
from events.plane.facts import (
    Epoch,
    FactsMessage,
    SnapshotChunk,
    SnapshotRequest,
    decode,
    decode_stream,
    encode,
)
from events.plane.supervisor import Supervisor
from events.relay import stream_publisher
from events.relay.dynamo.rank import DynamoRank
from events.relay.stream_publisher import OUT_MESSAGES_MAX, OutgoingStream, StreamPublisher
from indexer.identity import BlockHash, Tier, WorkerKey
from tests.stage.waiting import until
from tests.stage.wire import Wire

Stream = OutgoingStream[DynamoRank]
SNAPSHOT = "kvroute.v1.f.snapshot.{}.0"


class Flushed(DynamoRank):
    """A rank that counts how often it was flushed, and may fail at it."""

    flushes = 0
    error: Exception | None = None

    def flush(self) -> list[bytes]:
        self.flushes += 1
        if self.error is not None:
            raise self.error
        return super().flush()


class Published:
    """Two streams, a and b, of one publisher."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.counts = Counter[str]()
        self.rng = random.Random(1)
        self.supervisor = Supervisor("relay", self.rng)
        self.publisher = StreamPublisher[Stream](
            self.wire,
            fleet="f",
            heartbeat=lambda stream, _: f"heartbeat of {stream.key}".encode(),
            counts=self.counts,
            clock=lambda: 100.0,
            rng=self.rng,
        )
        self.a, self.b = self.stream("a"), self.stream("b")
        self.events = 0

    def stream(self, name: str) -> Stream:
        stream = Stream(WorkerKey(name, 0), Flushed(Epoch(5, 9)), Supervisor(name, self.rng))
        self.publisher.add(stream)
        return stream

    def store(self, stream: Stream, blocks: int = 1) -> None:
        """Blocks arrive at a stream's worker."""
        self.events += 1
        names = [self.events * 100_000 + i for i in range(blocks)]
        stored = HashesStored(Tier.DEVICE, None, names, [BlockHash(name) for name in names])
        event = WorkerEvent(1, 0, stream.rank._next_id or 0, stored)
        self.publisher.queue(stream, stream.rank.on_event(event, Origin(None, None, 0), 100.0))

    def facts(self, name: str) -> list[FactsMessage]:
        sent = self.wire.published[f"kvroute.v1.f.facts.{name}.0"]
        read = [decode_stream(one)[0] for one in sent]
        return [one for one in read if isinstance(one, FactsMessage)]

    def load(self, name: str) -> list[bytes]:
        return self.wire.published[f"kvroute.v1.f.load.{name}.0"]


@pytest.fixture
async def published(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Published]:
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.001)
    monkeypatch.setattr(stream_publisher, "COALESCE_S", 0.0)
    monkeypatch.setattr(stream_publisher, "BEAT_S", 60.0)  # beats come for their own reason
    monkeypatch.setattr(stream_publisher, "HELLO_JITTER_S", 0.0)
    published = Published()
    published.publisher.start(published.supervisor)
    await until(lambda: published.load("b"), "the first beats")
    yield published
    await published.supervisor.close()


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_change_is_sent_and_an_idle_stream_is_left_alone(published: Published) -> None:
    await turns()
    published.store(published.a)
    published.store(published.a)
    await turns()
    assert len(published.facts("a")) == 1, "both changes in one message"
    flushes = published.a.rank.flushes, published.b.rank.flushes
    await turns()
    assert (published.a.rank.flushes, published.b.rank.flushes) == flushes
    assert published.facts("b") == []


async def test_a_change_after_a_pause_is_sent_at_once_and_the_next_ones_wait(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    await turns()
    monkeypatch.setattr(stream_publisher, "COALESCE_S", 60.0)
    published.publisher._sent_at_s -= 60.0
    published.store(published.a)
    await turns()
    assert len(published.facts("a")) == 1
    published.store(published.a)
    published.store(published.b)
    await turns()
    assert (len(published.facts("a")), published.facts("b")) == (1, [])


async def test_messages_over_the_bound_are_dropped_oldest_first(published: Published) -> None:
    messages = [str(i).encode() for i in range(OUT_MESSAGES_MAX + 3)]
    published.publisher.queue(published.a, messages)
    assert list(published.a.out) == messages[3:]
    assert published.counts == {"unsent": 3}


async def test_a_stream_that_fails_to_send_holds_up_no_other(published: Published) -> None:
    published.a.rank.error = ValueError("bad value")
    published.store(published.a)
    published.store(published.b)
    await turns()
    assert len(published.facts("b")) == 1
    assert published.a.supervisor.failures == {"facts": 1}
    published.a.rank.error = None
    published.publisher.beat_soon()
    await turns()
    assert len(published.facts("a")) == 1, "sent with the next beat"
    assert not published.b.supervisor.failures


async def test_a_hello_is_answered_with_heartbeat_and_beat_of_each_stream(
    published: Published,
) -> None:
    counts = [len(published.load(name)) for name in "ab"]
    await published.publisher.on_hello(None)  # type: ignore[arg-type]  # not looked at
    await turns()
    assert [len(published.load(name)) for name in "ab"] == [count + 1 for count in counts]
    assert [len(published.wire.beats(name)) for name in "ab"] == [count + 1 for count in counts]


async def test_hellos_that_come_together_share_their_answer(published: Published) -> None:
    counts = [len(published.load(name)) for name in "ab"]
    for _ in range(100):
        await published.publisher.on_hello(None)  # type: ignore[arg-type]  # not looked at
    await turns()
    assert [len(published.load(name)) for name in "ab"] == [count + 1 for count in counts]
    await published.publisher.on_hello(None)  # type: ignore[arg-type]  # not looked at
    await turns()
    assert [len(published.load(name)) for name in "ab"] == [count + 2 for count in counts]


async def test_a_removed_stream_sends_nothing_more(published: Published) -> None:
    published.store(published.a, 50)
    await turns()
    await published.wire.subscribe(
        SNAPSHOT.format("a"), lambda message: published.publisher.answer(published.a, message)
    )

    await published.wire.say(SNAPSHOT.format("a"), encode(SnapshotRequest()), "us")
    chunk = decode(SnapshotChunk, published.wire.published["us"][0])
    assert isinstance(chunk, SnapshotChunk)
    assert sum(len(fact.hashes) for fact in chunk.facts) == 8 * 50
    sent = len(published.facts("a"))
    published.store(published.a)
    published.publisher.remove(published.a)
    published.publisher.queue(published.a)
    await turns()
    assert len(published.facts("a")) == sent
