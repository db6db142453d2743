"""The shell of the router's ear: what it says to the fleet, and what it asks of relays."""

import asyncio
import builtins
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
import pytest
from nats.aio.msg import Msg
from typing_extensions import override

from events.feed import feed as module
from events.feed import intake as intake_module
from events.feed.feed import HELLO_S
from events.feed.fleet_view import SLICE_BYTES, SLICE_FACTS, FleetView
from events.feed.stream import StreamState
from events.plane import subjects
from events.plane.broker import Broker
from events.plane.clock import unix_now
from events.plane.facts import (
    VERSION,
    Beat,
    Cleared,
    Epoch,
    FactsMessage,
    Heartbeat,
    SnapshotChunk,
    SnapshotRequest,
    Stored,
    encode,
    pack_hashes,
)
from events.plane.settings import NatsSettings
from events.relay.ledger import Placed
from events.relay.outbox import Outbox
from indexer.hashing import HashArray
from indexer.identity import PrefixHash, Tier, WorkerKey
from indexer.kernel import NativeIndex
from indexer.reference import ReferenceIndex
from tests.events.feed.on_nats import Publisher, a_feed, hearing, published
from tests.stage.loopback import a_broker
from tests.stage.nats_server import NatsServer, nats_server
from tests.stage.waiting import until

EPOCH = Epoch(1, 0)
WORKER = WorkerKey("w", 0)
Answer = Callable[[SnapshotRequest], SnapshotChunk | bytes | None]


class Scripted(Broker):
    """A broker that takes down what it is to publish, and answers from a table."""

    def __init__(self) -> None:
        super().__init__(NatsSettings(), "nats://127.0.0.1:1", "test")
        self.published: list[str] = []
        self.answers: dict[str, Answer] = {}
        self.asked: list[SnapshotRequest] = []
        self.released = asyncio.Event()
        """Answers come once it is set."""
        self.released.set()

    @override
    async def publish(self, subject: str, payload: bytes) -> bool:
        self.published.append(subject)
        return True

    @override
    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes | None:
        request = msgspec.msgpack.decode(payload, type=SnapshotRequest)
        self.asked.append(request)
        await asyncio.sleep(0)  # recoveries take turns
        await self.released.wait()
        answer = self.answers[subject](request)
        return encode(answer) if isinstance(answer, SnapshotChunk) else answer


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Ear:
    """A feed over a scripted broker, and streams that have to recover."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.broker = Scripted()
        self.broken: list[BaseException] = []
        self.view = FleetView(ReferenceIndex(), beat_timeout_s=3.0, forget_s=30.0, workers_max=8)
        self.feed = a_feed(self.broker, self.view, self.clock, self.broken)

    def lose(self, worker: WorkerKey, answer: Answer, missing: int = 1) -> None:
        """The worker's stream missed its first messages; its relay answers so."""
        self.broker.answers[subjects.snapshot("f", worker)] = answer
        message = FactsMessage(VERSION, EPOCH, missing + 1, [], 0.0)
        self.feed.recover(self.view.on_stream(worker, encode(message), self.clock()))

    async def settled(self) -> None:
        await until(lambda: not self.feed._recoveries, "the recoveries to end")

    def stream(self, worker: WorkerKey = WORKER) -> tuple[StreamState, str]:
        stream = self.view.sources[worker].stream
        return stream.state, stream.reason


@pytest.fixture
async def ear(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ear]:
    monkeypatch.setattr(module, "_JITTER_S", 0.0)
    ear = Ear()
    yield ear
    await ear.feed.stop()
    assert ear.broken == []
    assert ear.feed._recovering_bytes == 0


def chunk(
    i: int, chunks: int, *, as_of: int = 2, epoch: Epoch = EPOCH, hashes: int = 8
) -> SnapshotChunk:
    facts = [Stored(pack_hashes([1000 * i + n for n in range(hashes)]), "device")]
    return SnapshotChunk(VERSION, epoch, as_of, i, chunks, facts)


# --- what it says ---


async def test_a_connection_that_is_lost_twice_within_a_second_has_a_hello_of_its_own() -> None:
    """What was said in the second outage, a fleet command, is asked for by no other message."""
    ear = Ear()
    for connected in (True, False, True):
        ear.feed._connection_changed(connected)
    for hellos in (1, 2, 2):
        await asyncio.sleep(0)
        assert ear.broker.published == ["kvroute.v1.f.hello"] * hellos
        ear.clock.now_s += HELLO_S
        ear.feed._say_hello(ear.clock.now_s)  # as each tick does
    await ear.feed.stop()
    assert ear.broken == []


async def test_a_router_too_slow_for_what_it_hears_asks_for_more_once_a_second_at_most() -> None:
    ear = Ear()
    for hellos in (1, 2, 3):
        for _ in range(100):  # as the broker tells of messages that it dropped
            ear.feed._connection_changed(False)
            ear.feed._connection_changed(True)
        await asyncio.sleep(0)
        assert ear.broker.published == ["kvroute.v1.f.hello"] * hellos
        ear.clock.now_s += HELLO_S
    await ear.feed.stop()
    assert ear.broken == []


# --- what it asks ---


async def test_a_snapshot_is_asked_for_chunk_by_chunk(ear: Ear) -> None:
    ear.lose(WORKER, lambda request: chunk(request.chunk, 3))
    await ear.settled()
    assert ear.stream()[0] is StreamState.LIVE
    assert ear.view.index.count(ear.view.sources[WORKER].slot) == 24
    assert [(one.chunk, one.as_of) for one in ear.broker.asked] == [(0, None), (1, 2), (2, 2)]


@pytest.mark.parametrize(
    "second",
    [
        chunk(1, 3, as_of=3),
        chunk(1, 3, epoch=Epoch(2, 0)),
        chunk(2, 3),
    ],
)
async def test_chunks_of_different_snapshots_make_none(ear: Ear, second: SnapshotChunk) -> None:
    ear.lose(WORKER, lambda request: second if request.chunk else chunk(0, 3))
    await ear.settled()
    assert ear.stream() == (StreamState.RECOVERING, "the relay's chunks are of different snapshots")
    assert ear.view.index.count(ear.view.sources[WORKER].slot) == 0


@pytest.mark.parametrize(
    ("answer", "reason", "dropped"),
    [
        (None, "no answer from the relay within 2 s", {}),
        (b"\xc1", "the relay's answer is unreadable", {"malformed": 1}),
        (bytes((1 << 20) + 1), "the relay's answer is unreadable", {"too_large": 1}),
    ],
)
async def test_a_useless_answer_is_a_failed_recovery(
    ear: Ear, answer: bytes | None, reason: str, dropped: dict[str, int]
) -> None:
    ear.lose(WORKER, lambda _request: answer)
    await ear.settled()
    assert ear.stream() == (StreamState.RECOVERING, reason)
    assert ear.view.recoveries == {("snapshot", "failed"): 1}
    assert +ear.view.dropped == dropped


async def test_a_snapshot_has_a_number_of_chunks(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNKS_MAX", 3)
    ear.lose(WORKER, lambda request: chunk(request.chunk, 3))
    await ear.settled()
    assert ear.stream()[0] is StreamState.LIVE
    other = WorkerKey("other", 0)
    ear.lose(other, lambda request: chunk(request.chunk, 4))
    await ear.settled()
    assert ear.stream(other) == (
        StreamState.RECOVERING,
        "the relay's snapshot has no end within 3 chunks",
    )
    assert len(ear.broker.asked) == 6


async def test_a_ring_has_a_number_of_parts(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNKS_MAX", 3)
    messages = {seq: encode(FactsMessage(VERSION, EPOCH, seq, [], 0.0)) for seq in range(9)}

    def answer(request: SnapshotRequest) -> SnapshotChunk:
        if request.from_seq is None:
            return chunk(0, 1, as_of=1, hashes=0)
        return SnapshotChunk(VERSION, EPOCH, 9, 0, 2, messages=[messages[request.from_seq]])

    ear.lose(WORKER, answer)
    await ear.settled()
    ear.feed.recover(ear.view.on_stream(WORKER, messages[8], 100.0))
    await ear.settled()
    assert [one.from_seq for one in ear.broker.asked] == [None, 3, 4, 5, None]
    assert ear.view.recoveries["ring", "failed"] == 1


async def test_a_recovery_has_a_time(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECOVERY_S", 0.02)
    ear.broker.released.clear()
    ear.lose(WORKER, lambda request: chunk(request.chunk, 3))
    await ear.settled()
    assert ear.stream() == (StreamState.RECOVERING, "no end after 0.02 s")


async def test_a_recovery_has_a_size(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(encode(chunk(0, 3)))
    monkeypatch.setattr(module, "RECOVERY_BYTES_MAX", 3 * size)
    ear.lose(WORKER, lambda request: chunk(request.chunk, 3))
    await ear.settled()
    assert ear.stream()[0] is StreamState.LIVE
    other = WorkerKey("other", 0)
    ear.lose(other, lambda request: chunk(request.chunk, 4))
    await ear.settled()
    assert ear.stream(other) == (StreamState.RECOVERING, "more than 0 MiB to recover")
    assert ear.view.dropped["recovery_too_large"] == 1
    assert ear.view.index.count(ear.view.sources[other].slot) == 0


async def test_all_recoveries_together_have_a_size_and_who_finds_no_room_comes_again(
    ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(encode(chunk(0, 3)))
    monkeypatch.setattr(module, "RECOVERIES_BYTES_MAX", 3 * size)
    others = [WorkerKey("a", 0), WorkerKey("b", 0)]
    for worker in others:
        ear.lose(worker, lambda request: chunk(request.chunk, 3))
    await ear.settled()
    states = {worker: ear.stream(worker) for worker in others}
    failed = [one for one in others if states[one][0] is StreamState.RECOVERING]
    [reason] = [states[one][1] for one in failed]
    assert reason.startswith("no room beside other recoveries: ")
    assert ear.view.dropped["no_room_to_recover"] == 1
    beat = Beat(VERSION, EPOCH, 2, 24, 0, True, 0.0)
    ear.feed.recover(ear.view.on_stream(failed[0], encode(beat), 100.0))
    await ear.settled()
    assert ear.stream(failed[0])[0] is StreamState.LIVE


# --- how much at once ---


class Applied:
    """Bytes of hashes that an index took, by turn of the event loop."""

    def __init__(self, view: FleetView, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        self._now = 0
        store = view.index.store

        def counted(slot: int, tier: Tier, hashes: HashArray) -> None:
            self._now += hashes.nbytes
            self.most = max(self.most, self._now)
            store(slot, tier, hashes)

        monkeypatch.setattr(view.index, "store", counted)

    async def watch(self) -> None:
        """Begins a turn, again and again, until cancelled."""
        while True:
            self._now = 0
            await asyncio.sleep(0)


@pytest.mark.parametrize("ring", [True, False])
async def test_a_recovery_of_any_size_takes_bounded_steps(
    ear: Ear, ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = SLICE_BYTES // 8
    rng = np.random.default_rng(1)

    def facts(seq: int) -> FactsMessage:
        hashes = pack_hashes(rng.integers(0, 1 << 64, blocks, np.uint64))
        return FactsMessage(VERSION, EPOCH, seq, [Stored(hashes, "device")], 0.0)

    messages = [encode(facts(seq)) for seq in range(1, 40)]

    def answer(request: SnapshotRequest) -> SnapshotChunk:
        if request.from_seq is not None:
            return SnapshotChunk(VERSION, EPOCH, 39, 0, 1, messages=messages[1:10])
        return chunk(request.chunk, 2, as_of=10, hashes=7 * blocks)

    applied = Applied(ear.view, monkeypatch)
    ear.broker.answers[subjects.snapshot("f", WORKER)] = answer
    ear.feed._tasks.spawn(ear.feed._serve(), "serving")
    watching = asyncio.create_task(applied.watch())
    subject = subjects.facts("f", WORKER).encode()
    for message in [*messages[:1] * ring, *messages[10:]]:
        ear.feed._came["facts"](subject, message)
    await until(
        lambda: WORKER in ear.view.sources and ear.view.sources[WORKER].stream.seq == 39,
        "the whole stream",
    )
    await until(lambda: not ear.view.backlogged, "all of it in the index")
    await ear.settled()
    held = 39 * blocks if ring else 1000 + 7 * blocks + 29 * blocks  # chunks overlap
    assert ear.view.index.count(ear.view.sources[WORKER].slot) == held
    # A slice of the backlog, of the intake and of a snapshot each: neither waits for the other.
    assert applied.most <= 3 * (SLICE_BYTES + SLICE_BYTES // 2)
    watching.cancel()


# --- what handling raises ---

_BUILT_IN = [
    one
    for one in vars(builtins).values()
    if isinstance(one, type) and issubclass(one, Exception) and not issubclass(one, Warning)
]
RAISED: list[BaseException] = [
    *(
        one("utf-8", b"\xff", 0, 1, "told")
        if one is UnicodeDecodeError
        else one("utf-8", "x", 0, 1, "told")
        if one is UnicodeEncodeError
        else one("x", 0, 1, "told")
        if one is UnicodeTranslateError
        else one("told", [ValueError()])
        if one in (ExceptionGroup, BaseExceptionGroup)
        else one("told")
        for one in _BUILT_IN
    ),
    msgspec.ValidationError("told"),
    asyncio.QueueFull(),
    asyncio.CancelledError(),
]


@pytest.mark.parametrize(
    "error",
    [one for one in RAISED if isinstance(one, Exception)],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_handling_a_message_raises_the_feed_goes_on(
    ear: Ear, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise error

    feed, view = ear.feed, ear.view
    beat = encode(Beat(VERSION, EPOCH, 0, 0, 0, True, 1.0))
    heartbeat = encode(Heartbeat(epoch=EPOCH, address="", engine="vllm", sent_at_s=1.0))
    with monkeypatch.context() as patched:
        patched.setattr(view, "on_stream", fail)
        patched.setattr(view, "on_heartbeat", fail)
        feed._came["facts"](b"kvroute.v1.f.facts.w.0", beat)
        feed._came["load"](b"kvroute.v1.f.load.w.0", heartbeat)
        feed.serve_slice()
    assert view.dropped["handling_failed"] == 2
    with monkeypatch.context() as patched:
        patched.setattr(view, "on_snapshot", fail)
        ear.lose(WORKER, lambda request: chunk(request.chunk, 1))
        await ear.settled()
    state, reason = ear.stream()
    assert state is StreamState.RECOVERING
    if not isinstance(error, TimeoutError):  # which is what a relay that is late raises
        assert reason == "answer unusable"
        assert view.dropped["handling_failed"] == 3
    later = Beat(VERSION, EPOCH, 2, 8, 0, True, 1.0)
    feed._came["facts"](b"kvroute.v1.f.facts.w.0", encode(later))
    feed._came["load"](b"kvroute.v1.f.load.w.0", heartbeat)
    feed.serve_slice()
    await ear.settled()
    assert ear.stream()[0] is StreamState.LIVE
    assert view.sources[WORKER].heartbeat is not None


async def test_whatever_applying_a_backlog_raises_the_feed_goes_on(
    ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, view = ear.feed, ear.view
    blocks = SLICE_BYTES // 8
    facts = [Stored(pack_hashes(range(i * blocks, (i + 1) * blocks)), "device") for i in range(3)]
    message = FactsMessage(VERSION, EPOCH, 1, list(facts), 1.0)
    feed._came["facts"](b"kvroute.v1.f.facts.w.0", encode(message))
    feed.serve_slice()
    assert list(view.backlogged) == [WORKER]
    with monkeypatch.context() as patched:
        patched.setattr(view.index, "store", lambda *_: 1 // 0)
        feed.serve_slice()
    assert view.dropped["handling_failed"] == 1
    for _ in range(4):
        feed.serve_slice()
    source = view.sources[WORKER]
    assert not view.backlogged
    assert view.index.count(source.slot) == 2 * blocks
    beat = Beat(VERSION, EPOCH, 1, 3 * blocks, 0, True, 1.0)
    feed._came["facts"](b"kvroute.v1.f.facts.w.0", encode(beat))
    feed.serve_slice()
    assert ear.stream() == (StreamState.RECOVERING, "digest differs")


async def test_whatever_applying_a_recovery_raises_the_feed_goes_on(
    ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, view = ear.feed, ear.view
    stored = [Stored(pack_hashes([i]), "device") for i in range(3)]
    ring = [encode(FactsMessage(VERSION, EPOCH, 1 + i, [one], 1.0)) for i, one in enumerate(stored)]

    def answer(request: SnapshotRequest) -> SnapshotChunk | None:
        if request.from_seq is None:
            return None
        return SnapshotChunk(VERSION, EPOCH, 3, 0, 1, messages=ring[1:])

    ear.broker.answers[subjects.snapshot("f", WORKER)] = answer
    view.on_stream(WORKER, ring[0], 100.0)
    with monkeypatch.context() as patched:
        patched.setattr(view.index, "store", lambda *_: 1 // 0)
        beat = Beat(VERSION, EPOCH, 3, 3, 0, True, 1.0)
        feed.recover(view.on_stream(WORKER, encode(beat), 100.0))
        await ear.settled()
    assert view.dropped["handling_failed"] == 1
    assert list(view.backlogged) == [WORKER], "the fact after it"
    feed.serve_slice()
    assert not view.backlogged
    assert view.index.count(view.sources[WORKER].slot) == 2


async def test_a_slice_has_a_bound_of_facts_however_small_they_are(ear: Ear) -> None:
    """Bytes are what a message costs before it is read; its facts are charged as they show."""
    view = ear.view
    subject = b"kvroute.v1.f.facts.w.0"
    seq = 0
    for facts in (1, 16, 64, 500, 513, 1500):
        for _ in range(max(3, 3000 // facts)):
            seq += 1
            message = encode(FactsMessage(VERSION, EPOCH, seq, [Cleared()] * facts, 1.0))
            ear.feed._came["facts"](subject, message)
    most = 0
    while ear.feed._intake or view.backlogged:
        before = view.applied
        ear.feed.serve_slice()
        most = max(most, view.applied - before)
    assert view.sources[WORKER].stream.seq == seq
    assert 500 <= most <= 2 * SLICE_FACTS


async def test_whatever_a_listener_raises_its_subscription_goes_on(tmp_path: Path) -> None:
    """Control, hello, inflight and report messages of others, on real NATS."""
    async with nats_server(tmp_path, "") as server, a_broker(server.url, "router") as broker:
        heard: list[bytes] = []
        connections: list[bool] = []

        async def listen(message: Msg) -> None:
            heard.append(message.data)
            if len(heard) <= len(RAISED):
                raise RAISED[len(heard) - 1]

        def fail(connected: bool) -> None:
            raise ValueError(connected)

        broker.on_connection(fail)
        broker.on_connection(connections.append)
        await broker.subscribe("control", listen)
        for i in range(len(RAISED) + 1):
            await broker.publish("control", b"%d" % i)
        await until(lambda: len(heard) == len(RAISED) + 1, "all to be heard")
        # StopIteration can't leave a coroutine: it becomes a RuntimeError.
        assert broker.counts["listener_failed"] == len(RAISED)
        broker._client.abort()
        await until(lambda: connections == [False, True], "another connection")
        await broker.publish("control", b"again")
        await until(lambda: heard[-1] == b"again", "the subscription on it")
        assert broker.counts["listener_failed"] == len(RAISED) + 2


# --- over real NATS, slower than what comes ---


class Teller:
    """The relay's side of one stream: it keeps what it says, and answers for it."""

    def __init__(self) -> None:
        self.outbox = Outbox(EPOCH, ring_bytes=1 << 16)
        self.held: list[HashArray] = []
        self.asked = 0
        self._rng = np.random.default_rng(1)

    @property
    def blocks(self) -> int:
        return sum(map(len, self.held))

    def store(self, blocks: int) -> bytes:
        """The next facts message."""
        hashes = self._rng.integers(0, 1 << 64, blocks, np.uint64)
        self.held.append(hashes)
        self.outbox.add([Placed(Tier.DEVICE, None, [PrefixHash(one) for one in hashes])], 1.0)
        (message,) = self.outbox.flush()
        return message

    def beat(self) -> bytes:
        digest = int(np.bitwise_xor.reduce(np.concatenate(self.held)))
        return self.outbox.beat(self.blocks, digest, True, unix_now())

    async def answer(self, broker: Broker, message: Msg) -> None:
        self.asked += 1
        request = msgspec.msgpack.decode(message.data, type=SnapshotRequest)
        as_of = self.outbox.seq
        if request.from_seq is None:  # a chunk is what was once a message
            facts = [Stored(pack_hashes(self.held[request.chunk]), "device")]
            chunk = SnapshotChunk(VERSION, EPOCH, as_of, request.chunk, len(self.held), facts)
        else:
            ring = self.outbox.replay(request.from_seq)
            chunk = SnapshotChunk(
                VERSION, EPOCH, as_of, 0, 1, messages=ring or [], expired=ring is None
            )
        await broker.publish(message.reply, encode(chunk))


@asynccontextmanager
async def told_by(
    server: NatsServer, teller: Teller
) -> AsyncIterator[tuple[Broker, FleetView, Broker]]:
    """A router's ear and a relay's broker on one server; the ear knows the stream already."""
    view = FleetView(NativeIndex(), beat_timeout_s=3.0, forget_s=30.0, workers_max=8)
    async with (
        hearing(server.url, view) as (ours, _),
        a_broker(server.url, "relay") as theirs,
    ):

        async def answer(message: Msg) -> None:
            await teller.answer(theirs, message)

        await theirs.subscribe(subjects.snapshot("f", WORKER), answer)
        await theirs.publish(subjects.facts("f", WORKER), teller.store(4))
        await theirs.publish(subjects.facts("f", WORKER), teller.beat())
        await until(lambda: in_step(view, teller), "a live stream")
        yield ours, view, theirs


def in_step(view: FleetView, teller: Teller) -> bool:
    """Whether the stream is live, and the index has all that the relay told."""
    source = view.sources.get(WORKER)
    return (
        source is not None
        and source.stream.state is StreamState.LIVE
        and source.stream.seq == teller.outbox.seq
        and view.index.count(source.slot) == teller.blocks
    )


async def test_messages_that_the_client_drops_are_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "QUEUE_COST_MAX", 8 * 1024)
    teller = Teller()
    async with (
        nats_server(tmp_path, "") as server,
        told_by(server, teller) as (ours, view, theirs),
    ):
        stream = view.sources[WORKER].stream
        for _ in range(300):
            await theirs.publish(subjects.facts("f", WORKER), teller.store(1))
        await until(lambda: view.dropped["publisher_queue_full"] > 0, "messages to be dropped")
        assert ours.counts["slow_consumer"] == 0, "which would be the loss of all workers"
        assert view.lost["w"] > 0
        assert stream.state is not StreamState.LIVE, "told at once, not with the next beat"
        await until(
            lambda: view.gaps > 0 or stream.seq + 1 < teller.outbox.seq, "a hole in the stream"
        )
        await theirs.publish(subjects.facts("f", WORKER), teller.beat())
        await until(lambda: in_step(view, teller), "the stream to be live and whole")
        assert teller.asked > 0


async def test_a_router_that_the_server_gives_up_on_comes_back_and_recovers(
    tmp_path: Path,
) -> None:
    """The server closes connections of clients that don't read."""
    config = 'max_pending: 1MB\nwrite_deadline: "200ms"\n'
    teller = Teller()
    async with (
        nats_server(tmp_path, config) as server,
        told_by(server, teller) as (ours, view, theirs),
    ):
        told: list[bool] = []
        ours.on_connection(told.append)
        messages = [teller.store(8000) for _ in range(300)]
        # Synchronous on purpose: the router, on the same loop, reads nothing meanwhile.
        publisher = Publisher(server.port)
        publisher.send(*(published(subjects.facts("f", WORKER), one) for one in messages))
        publisher.taken()
        publisher.close()
        await until(lambda: "Slow Consumer" in server.log(), "the server to give up on us")
        await until(lambda: told == [False, True], "another connection")
        await until(lambda: theirs.connected, "the relay's connection")
        beating = asyncio.create_task(beats(theirs, teller))
        await until(lambda: in_step(view, teller), "the stream to be live and whole")
        assert teller.asked > 0
        beating.cancel()


async def beats(theirs: Broker, teller: Teller) -> None:
    while True:
        await theirs.publish(subjects.facts("f", WORKER), teller.beat())
        await asyncio.sleep(0.2)
