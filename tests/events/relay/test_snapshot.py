"""What a relay answers to a router that missed something."""

import random

import pytest

from events.engines.events import BlocksCleared, BlocksRemoved, BlocksStored
from events.plane.facts import (
    TIERS,
    Epoch,
    SnapshotChunk,
    SnapshotRequest,
    decode,
    encode,
    unpack_hashes,
)
from events.relay import snapshot
from events.relay.ledger import Ledger
from events.relay.outbox import Outbox
from events.relay.snapshot import SnapshotServer
from indexer.identity import Tier

EPOCH = Epoch(1, 2)
NATS_MESSAGE_BYTES = 1024 * 1024
"""What a NATS server takes by default."""

CHUNK_HASHES = 100
"""In a chunk, where a test says so."""

MEDIUMS = ("GPU", "CPU", "STORAGE")
Event = BlocksStored | BlocksRemoved | BlocksCleared


def chain(first: int, count: int, medium: str = "GPU") -> BlocksStored:
    tokens = [token for i in range(first, first + count) for token in (i, 0, 0, 0)]
    return BlocksStored(tuple(range(first, first + count)), None, tokens, 4, medium=medium)


class Relay:
    """The relay's side of one stream, told of events directly."""

    def __init__(self) -> None:
        self.ledger = Ledger(4)
        self.outbox = Outbox(EPOCH)
        self.server = SnapshotServer(self.ledger, self.outbox)
        self.complete = True

    def tell(self, event: Event) -> list[bytes]:
        changes = self.ledger.apply(event)
        return self.outbox.add(changes, 1.0) + self.outbox.flush()

    def ask(self, request: SnapshotRequest, now_s: float = 1.0) -> SnapshotChunk:
        answer = encode(self.server.answer(request, self.complete, now_s))
        assert len(answer) < NATS_MESSAGE_BYTES
        chunk = decode(SnapshotChunk, answer)
        assert isinstance(chunk, SnapshotChunk)
        return chunk

    def snapshot(self, now_s: float = 1.0) -> list[SnapshotChunk]:
        """All chunks, asked for as a router does."""
        chunks = [self.ask(SnapshotRequest(), now_s)]
        while len(chunks) < chunks[0].chunks:
            chunks.append(self.next_of(chunks, now_s))
        return chunks

    def next_of(self, chunks: list[SnapshotChunk], now_s: float = 1.0) -> SnapshotChunk:
        first = chunks[0]
        return self.ask(SnapshotRequest(1, len(chunks), first.epoch, first.as_of), now_s)

    def held(self) -> dict[Tier, set[int]]:
        return {tier: set(hashes) for tier, hashes in self.ledger.placements()}


def told(chunks: list[SnapshotChunk]) -> dict[Tier, set[int]]:
    held: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    for chunk in chunks:
        for fact in chunk.facts:
            new = set(unpack_hashes(fact.hashes).tolist())
            assert not new & held[TIERS[fact.tier]]
            held[TIERS[fact.tier]] |= new
    return held


def test_a_snapshot_of_nothing_is_one_empty_chunk() -> None:
    [chunk] = Relay().snapshot()
    assert (chunk.chunks, chunk.as_of, chunk.epoch, chunk.facts) == (1, 0, EPOCH, [])
    assert chunk.complete
    assert not chunk.expired


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 8 * CHUNK_HASHES)


def test_a_long_snapshot_comes_in_chunks_that_fit_a_message() -> None:
    relay = Relay()
    relay.tell(chain(1, 2 * snapshot.CHUNK_BYTES // 8 + 100))
    relay.tell(chain(1, 10, "CPU"))
    chunks = relay.snapshot()
    assert len(chunks) == 4
    assert told(chunks) == relay.held()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("seed", range(5))
def test_a_snapshot_is_of_one_moment_whatever_comes_and_goes_between_its_chunks(seed: int) -> None:
    rng = random.Random(seed)
    relay = Relay()
    for first in range(0, 1200, 40):
        relay.tell(chain(first, 40, rng.choice(MEDIUMS)))
    frozen, asked_at = relay.held(), relay.outbox.seq
    chunks = [relay.ask(SnapshotRequest())]
    while len(chunks) < chunks[0].chunks:
        relay.tell(chain(rng.randrange(2000), rng.randrange(1, 30), rng.choice(MEDIUMS)))
        some = tuple(rng.randrange(2000) for _ in range(20))
        relay.tell(BlocksRemoved(some, medium=rng.choice(MEDIUMS)))
        chunks.append(relay.next_of(chunks))
    assert told(chunks) == frozen != relay.held()
    assert {chunk.as_of for chunk in chunks} == {asked_at}
    assert told(relay.snapshot()) == relay.held()
    assert len(chunks) == sum(-(-len(held) // CHUNK_HASHES) for held in frozen.values())


def test_two_askers_at_one_number_share_a_snapshot() -> None:
    relay = Relay()
    relay.tell(chain(1, 5))
    first, second = relay.snapshot(), relay.snapshot()
    assert first == second
    assert len(relay.server._frozen) == 1


def test_a_snapshot_is_no_more_complete_than_its_ledger_is_now() -> None:
    relay = Relay()
    assert relay.ask(SnapshotRequest()).complete
    relay.complete = False
    assert not relay.ask(SnapshotRequest()).complete


@pytest.mark.usefixtures("small_chunks")
def test_a_snapshot_expires_with_time() -> None:
    relay = Relay()
    relay.tell(chain(1, CHUNK_HASHES + 10))
    chunks = [relay.ask(SnapshotRequest(), 100.0)]
    assert not relay.next_of(chunks, 129.0).expired
    gone = relay.next_of(chunks, 131.0)
    assert gone.expired
    assert gone.facts == gone.messages == []
    assert relay.server._frozen == {}


@pytest.mark.usefixtures("small_chunks")
def test_a_snapshot_is_kept_for_its_whole_time_from_each_routers_first_request() -> None:
    relay = Relay()
    relay.tell(chain(1, CHUNK_HASHES + 10))
    relay.ask(SnapshotRequest(), 100.0)
    chunks = [relay.ask(SnapshotRequest(), 129.9)]
    assert len(relay.server._frozen) == 1
    assert not relay.next_of(chunks, 159.8).expired
    assert relay.next_of(chunks, 159.9).expired


@pytest.mark.usefixtures("small_chunks")
def test_a_snapshot_that_nobody_asks_for_any_more_is_dropped_in_time() -> None:
    relay = Relay()
    relay.tell(chain(1, CHUNK_HASHES + 10))
    relay.ask(SnapshotRequest(), 100.0)
    relay.server.expire(129.0)
    assert len(relay.server._frozen) == 1
    relay.server.expire(131.0)
    assert relay.server._frozen == {}


def begun_at_different_messages(relay: Relay, count: int) -> list[list[SnapshotChunk]]:
    """The first chunks of so many routers' snapshots, each at a number of its own."""
    firsts = []
    for i in range(count):
        relay.tell(chain(1 + i * 100_000, CHUNK_HASHES + 10))
        firsts.append([relay.ask(SnapshotRequest())])
    return firsts


@pytest.mark.usefixtures("small_chunks")
def test_many_routers_get_the_whole_of_their_snapshots_on_a_busy_stream() -> None:
    relay = Relay()
    firsts = begun_at_different_messages(relay, 64)
    assert not any(relay.next_of(chunks).expired for chunks in firsts)
    relay.tell(chain(99_000_000, 1))
    relay.ask(SnapshotRequest())
    assert [relay.next_of(chunks).expired for chunks in firsts] == [True] + [False] * 63


@pytest.mark.usefixtures("small_chunks")
def test_frozen_snapshots_have_a_bound_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = CHUNK_HASHES + 10
    monkeypatch.setattr(snapshot, "_FROZEN_BYTES_MAX", 8 * blocks * (3 + 4 + 5))
    firsts = begun_at_different_messages(relay := Relay(), 5)
    assert [relay.next_of(chunks).expired for chunks in firsts] == [True, True] + [False] * 3
    monkeypatch.setattr(snapshot, "_FROZEN_BYTES_MAX", 1)
    relay.tell(chain(99_000_000, 1))
    newest = [relay.ask(SnapshotRequest())]
    assert not relay.next_of(newest).expired
    assert len(relay.server._frozen) == 1


@pytest.mark.parametrize("request_", [SnapshotRequest(1, 1, EPOCH, 99), SnapshotRequest(as_of=5)])
def test_a_snapshot_that_never_was_has_expired(request_: SnapshotRequest) -> None:
    assert Relay().ask(request_).expired


@pytest.mark.parametrize("epoch", [Epoch(0, 0), Epoch(9, 9)])
def test_a_question_to_another_life_has_expired(epoch: Epoch) -> None:
    relay = Relay()
    relay.tell(chain(1, 3))
    assert relay.ask(SnapshotRequest(epoch=epoch, as_of=1)).expired
    assert relay.ask(SnapshotRequest(epoch=epoch, from_seq=1)).expired


def test_another_life_has_none_of_the_old_snapshots() -> None:
    relay = Relay()
    relay.tell(chain(1, 3))
    relay.ask(SnapshotRequest())
    relay.ledger = Ledger(4)
    relay.outbox.start_over(Epoch(2, 0))
    relay.server.start_over(relay.ledger)
    relay.tell(chain(7, 2))  # number 1 again
    chunks = relay.snapshot()
    assert told(chunks) == relay.held()
    assert chunks[0].epoch == Epoch(2, 0)


def test_a_chunk_beyond_the_last_holds_nothing() -> None:
    relay = Relay()
    relay.tell(chain(1, 3))
    relay.ask(SnapshotRequest())
    assert relay.ask(SnapshotRequest(chunk=7, epoch=EPOCH, as_of=1)).facts == []


def test_the_ring_answers_with_messages_as_they_were_sent() -> None:
    relay = Relay()
    sent = [message for i in range(5) for message in relay.tell(chain(10 * i, 2))]
    chunk = relay.ask(SnapshotRequest(from_seq=3))
    assert chunk.messages == sent[2:]
    assert (chunk.as_of, chunk.chunks, chunk.expired) == (5, 1, False)
    assert relay.ask(SnapshotRequest(from_seq=6)).messages == []


def test_a_ring_that_lost_the_beginning_has_expired() -> None:
    relay = Relay()
    relay.tell(chain(1, 2))
    assert relay.ask(SnapshotRequest(from_seq=0)).expired
    assert relay.ask(SnapshotRequest(from_seq=9)).expired


def test_a_long_ring_comes_in_parts_that_fit_a_message() -> None:
    relay = Relay()
    sent: list[bytes] = []
    for i in range(30):
        sent += relay.tell(chain(1 + i * 10_000, 7_000))
    got: list[bytes] = []
    parts = 0
    while True:
        chunk = relay.ask(SnapshotRequest(from_seq=1 + len(got)))
        got += chunk.messages
        parts += 1
        if chunk.chunks < 2:
            break
    assert parts > 2
    assert got == sent
