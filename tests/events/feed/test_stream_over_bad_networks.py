"""Real relays over a bad network: what a router's stream makes of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from events.feed.fleet_view import FleetView, Pull
from events.feed.stream import (
    StreamState,
)
from events.plane.facts import (
    Beat,
    Epoch,
    SnapshotChunk,
    SnapshotRequest,
    decode_stream,
)
from events.relay.rank import Publish, Rank
from indexer.identity import Tier, WorkerKey
from indexer.reference import ReferenceIndex

LIVE, RECOVERING, SUSPECT, SILENT = StreamState
OLD, NOW, NEXT = Epoch(1, 5), Epoch(2, 0), Epoch(3, 0)
TIMEOUT_S = 3.0


WORKER = WorkerKey("w", 0)


@dataclass(frozen=True)
class Answer:
    """A relay's answer under way, or why there is none."""

    pull: Pull
    deliver: Callable[[FleetView, float], list[Pull]]


class World:
    """An engine, its relay, a network that errs on command, and a router's view."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.index = ReferenceIndex()
        self.view = FleetView(self.index, beat_timeout_s=TIMEOUT_S, forget_s=1e9, workers_max=4)
        self.connected = True
        self.engine_seq = 0
        self.rank = self.new_rank()
        self.history: dict[tuple[Epoch, int], frozenset[tuple[Tier, int]]] = {}
        """What the relay held after each message, of each life."""
        self.faults: list[str] = []
        """What happens to the next messages; all goes well after the last of them."""
        self.delayed: list[bytes] = []
        self.answers: list[Answer] = []
        self.remember()

    def new_rank(self) -> Rank:
        epoch = Epoch(int(self.now_s * 1e9), 7)
        return Rank("vllm", epoch, has_replay=False, wanted_block_size=4)

    def held(self) -> frozenset[tuple[Tier, int]]:
        return frozenset(
            (tier, prefix) for tier, hashes in self.rank.ledger.placements() for prefix in hashes
        )

    def remember(self) -> None:
        outbox = self.rank.outbox
        assert not outbox._pending
        self.history[outbox.epoch, outbox.seq] = self.held()

    # What the engine and the relay do.

    def engine_says(self, *events: dict[str, Any]) -> None:
        payload = msgspec.msgpack.encode([1.0, list(events), 0])
        effects = self.rank.on_message(self.engine_seq, payload, self.now_s)
        self.engine_seq += 1
        effects.append(Publish(self.rank.flush()))
        self.remember()
        self.publish(effects)

    def engine_restarts(self) -> None:
        self.engine_seq = 0
        self.engine_says({"type": "AllBlocksCleared"})

    def relay_restarts(self) -> None:
        self.rank = self.new_rank()
        self.remember()

    def beat(self) -> None:
        self.publish([Publish(self.rank.beat(self.now_s))])

    # What the network does.

    def publish(self, effects: list[Any]) -> None:
        for effect in effects:
            assert isinstance(effect, Publish)
            for message in effect.messages:
                self.send(message)

    def send(self, message: bytes) -> None:
        fault = self.faults.pop() if self.faults else "none"
        if not self.connected or fault == "drop":
            return
        if fault == "delay":
            self.delayed.append(message)
            return
        for _ in range(2 if fault == "duplicate" else 1):
            self.deliver(message)
        late, self.delayed = self.delayed, []
        for one in late:
            self.deliver(one)

    def deliver(self, message: bytes) -> None:
        self.ask(self.view.on_stream(WORKER, message, self.now_s))
        decoded, _ = decode_stream(message)
        stream = self.view.sources[WORKER].stream
        if (
            isinstance(decoded, Beat)
            and (decoded.epoch, decoded.seq) == (stream.epoch, stream.seq)
            and stream.trusted
        ):
            assert self.index.digest(self.view.sources[WORKER].slot) == decoded.digest
        self.check()

    def connect(self, connected: bool) -> None:
        if connected is not self.connected:
            self.connected = connected
            self.view.on_connection(connected, self.now_s)

    # What recoveries do.

    def ask(self, pulls: list[Pull]) -> None:
        """The relay answers at once; the answer may take its time, and later ones overtake it."""
        for pull in pulls:
            self.answers.append(Answer(pull, self.answer_to(pull)))

    def answer_to(self, pull: Pull) -> Callable[[FleetView, float], list[Pull]]:
        if pull.from_seq is not None:
            chunk = self.question(SnapshotRequest(from_seq=pull.from_seq))
            if chunk.expired:
                return lambda view, now_s: view.on_pull_failed(pull, "ring too short", now_s)
            return lambda view, now_s: view.on_ring(WORKER, chunk.epoch, chunk.messages, now_s)
        chunks = [self.question(SnapshotRequest())]
        first = chunks[0]
        while len(chunks) < first.chunks:
            more = SnapshotRequest(chunk=len(chunks), epoch=first.epoch, as_of=first.as_of)
            chunks.append(self.question(more))
        stored = [fact for chunk in chunks for fact in chunk.facts]
        return lambda view, now_s: view.on_snapshot(
            WORKER, first.epoch, first.as_of, stored, first.complete, now_s
        )

    def question(self, request: SnapshotRequest) -> SnapshotChunk:
        messages, chunk = self.rank.answer(request, self.now_s)
        assert messages == []
        return chunk

    def answer(self, which: int, well: bool) -> None:
        if self.answers:
            one = self.answers.pop(which % len(self.answers))
            if well and self.connected:
                self.ask(one.deliver(self.view, self.now_s))
            else:
                self.ask(self.view.on_pull_failed(one.pull, "no answer", self.now_s))
            self.check()

    # What must be true.

    def check(self) -> None:
        """In step is in step: the index is what the relay held after just that message."""
        source = self.view.sources.get(WORKER)
        if source is None or source.stream.epoch is None or not source.stream._in_step:
            return
        assert self.indexed() == self.history[source.stream.epoch, source.stream.seq]
        assert source.stream._buffer == []

    def indexed(self) -> frozenset[tuple[Tier, int]]:
        held = self.index._held[self.view.sources[WORKER].slot]
        return frozenset((tier, one) for tier in Tier for one in held[tier])

    def quiet(self) -> None:
        """All goes well for a few beats."""
        self.faults.clear()
        self.connect(True)
        for _ in range(4):
            self.now_s += 1
            self.beat()
            while self.answers:
                self.answer(0, True)
            self.view.tick(self.now_s)


def store(first: int, count: int, medium: str = "GPU") -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(range(first, first + count)),
        "parent_block_hash": None,
        "token_ids": [token for i in range(first, first + count) for token in (i, 1, 2, 3)],
        "block_size": 4,
        "lora_id": None,
        "medium": medium,
    }


def remove(first: int, count: int, medium: str = "GPU") -> dict[str, Any]:
    hashes = list(range(first, first + count))
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


small = st.integers(0, 9)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), small, small),
        st.tuples(st.just("store"), small, small),
        st.tuples(st.just("remove"), small, small),
        st.tuples(st.just("beat"), small, small),
        st.tuples(st.just("beat"), small, small),
        st.tuples(st.just("answer"), small, small),
        st.tuples(st.just("answer"), small, small),
        st.tuples(
            st.sampled_from(["clear", "engine restarts", "relay restarts", "connection", "resync"]),
            small,
            small,
        ),
    ),
    max_size=60,
)
faults = st.lists(
    st.sampled_from(["none", "none", "none", "none", "drop", "duplicate", "delay"]), max_size=60
)


@settings(derandomize=True, deadline=None, max_examples=400, database=None)
@given(steps=steps, faults=faults)
def test_a_bad_network_never_makes_a_live_stream_wrong_and_quiet_makes_it_right(
    steps: list[tuple[str, int, int]], faults: list[str]
) -> None:
    world = World()
    world.beat()
    world.faults = faults[::-1]
    for what, a, b in steps:
        world.now_s += 0.1
        match what:
            case "store":
                world.engine_says(store(10 * a, b + 1, ["GPU", "CPU"][b % 2]))
            case "remove":
                world.engine_says(remove(10 * a, b + 1, ["GPU", "CPU"][b % 2]))
            case "beat":
                world.now_s += 0.9
                world.beat()
            case "answer":
                world.answer(a, b < 7)
            case "clear":
                world.engine_says({"type": "AllBlocksCleared"})
            case "engine restarts":
                world.engine_restarts()
            case "relay restarts":
                world.relay_restarts()
            case "connection":
                world.connect(not world.connected)
            case "resync":
                world.ask(world.view.resync("w", world.now_s))
        world.check()
    world.quiet()
    stream = world.view.sources[WORKER].stream
    assert (stream.state, stream.epoch) == (LIVE, world.rank.outbox.epoch)
    assert stream.complete == world.rank.complete
    assert world.indexed() == world.held()


@settings(derandomize=True, deadline=None, max_examples=100, database=None)
@given(lost=st.integers(1, 6), said=st.integers(6, 12), beats=st.integers(1, 3))
def test_a_lost_fact_ends_live_with_the_next_beat(lost: int, said: int, beats: int) -> None:
    world = World()
    world.beat()
    for seq in range(said):
        world.faults = ["drop"] if seq + 1 >= said - lost + 1 else []
        world.engine_says(store(10 * seq, 2))
    world.faults = []
    stream = world.view.sources[WORKER].stream
    assert stream.state is LIVE  # nobody can know yet
    world.now_s += 1
    world.beat()
    assert stream.state is RECOVERING
    for _ in range(beats):  # and as long as no answer comes, it stays so
        world.now_s += 1
        world.beat()
        assert stream.state is RECOVERING
    world.quiet()
    assert stream.state is LIVE
    assert world.indexed() == world.held()


def test_when_the_later_of_two_relays_is_gone_the_other_one_takes_over() -> None:
    index = ReferenceIndex()
    view = FleetView(index, beat_timeout_s=TIMEOUT_S, forget_s=30.0, workers_max=4)
    older = Rank("vllm", OLD, has_replay=False, wanted_block_size=4)
    payload = msgspec.msgpack.encode([1.0, [store(10, 3)], 0])
    older.on_message(0, payload, 0.0)

    def say(messages: list[bytes], now_s: float) -> None:
        for message in messages:
            for pull in view.on_stream(WORKER, message, now_s):
                _, chunk = older.answer(SnapshotRequest(), now_s)
                view.on_snapshot(
                    pull.worker, chunk.epoch, chunk.as_of, chunk.facts, chunk.complete, now_s
                )

    say(Rank("vllm", NOW, has_replay=False).beat(0.0), 0.0)
    for second in range(1, 40):
        view.tick(float(second))
        say(older.beat(second), second)
    assert index.count(view.sources[WORKER].slot) == 3
    assert view.sources[WORKER].stream.state is LIVE
