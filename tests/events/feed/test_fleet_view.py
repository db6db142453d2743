"""The router's picture of its fleet: bounds, silence, forgetting."""

from functools import reduce
from operator import xor

import msgspec
import numpy as np
import pytest

from events.feed import fleet_view as module
from events.feed.fleet_view import FACT_BYTES, SLICE_BYTES, FleetView, Pull, Source, schedulable
from events.feed.stream import StreamState
from events.plane.facts import (
    FACTS_IN_MESSAGE_MAX,
    VERSION,
    Beat,
    Cleared,
    Epoch,
    Fact,
    FactsMessage,
    Heartbeat,
    Removed,
    Stored,
    encode,
    pack_hashes,
    unpack_hashes,
)
from indexer.identity import Tier, WorkerKey
from indexer.index import mix_digest
from indexer.kernel import NativeIndex
from indexer.reference import ReferenceIndex

OLD, NOW, NEXT = Epoch(1, 5), Epoch(2, 0), Epoch(3, 0)
TIMEOUT_S, FORGET_S, WORKERS_MAX = 3.0, 30.0, 12


class Fleet:
    """A view, and relays that hold the block of their own number."""

    def __init__(self, workers: int = 0) -> None:
        self.index = ReferenceIndex()
        self.view = FleetView(
            self.index, beat_timeout_s=TIMEOUT_S, forget_s=FORGET_S, workers_max=WORKERS_MAX
        )
        for number in range(workers):
            self.store(number, 0.0)
            self.beat(number, 0.0)
            self.heartbeat(number, 0.0)

    def store(self, number: int, now_s: float, *hashes: int, seq: int = 1) -> list[Pull]:
        fact = Stored(pack_hashes(hashes or (number,)), "device")
        return self.tell(number, FactsMessage(VERSION, NOW, seq, [fact], now_s), now_s)

    def beat(self, number: int, now_s: float, seq: int = 1) -> list[Pull]:
        digest = mix_digest(number, 0, 0) if seq else 0
        return self.tell(number, Beat(VERSION, NOW, seq, seq, digest, True, now_s), now_s)

    def tell(self, number: int, message: FactsMessage | Beat, now_s: float) -> list[Pull]:
        return self.view.on_stream(key(number), encode(message), now_s)

    def heartbeat(
        self,
        number: int,
        now_s: float,
        epoch: Epoch = NOW,
        healthy: bool = True,
        probed: bool = True,
        model: str = "",
    ) -> bool:
        message = Heartbeat(
            epoch=epoch,
            address=str(epoch),
            engine="vllm",
            model=model,
            healthy=healthy,
            probed=probed,
            sent_at_s=now_s,
        )
        return self.view.on_heartbeat(key(number), encode(message), now_s) is not None

    def state(self, number: int) -> StreamState:
        return self.view.sources[key(number)].stream.state

    def reasons(self) -> dict[str, str]:
        return {str(worker): schedulable(source) for worker, source in self.view.sources.items()}


def key(number: int) -> WorkerKey:
    return WorkerKey(f"w{number}", 0)


# --- what comes in ---


def test_facts_reach_the_index_by_tier_and_are_counted() -> None:
    fleet = Fleet()
    facts = [
        Stored(pack_hashes([1, 2, 3]), "device"),
        Stored(pack_hashes([1, 2]), "host"),
        Removed(pack_hashes([3]), "device"),
    ]
    assert fleet.tell(1, FactsMessage(VERSION, NOW, 1, facts, 0.0), 0.0) == []
    assert [fleet.index.count(0, tier) for tier in Tier] == [2, 2, 0]
    assert fleet.view.facts == {"stored": 2, "removed": 1}


def test_a_duplicate_is_counted_and_changes_nothing() -> None:
    fleet = Fleet()
    for _ in range(3):
        fleet.store(1, 0.0)
    assert fleet.view.dropped["duplicate"] == 2
    assert fleet.view.facts["stored"] == 1


def test_gaps_and_drifts_are_counted_over_the_fleet() -> None:
    fleet = Fleet(3)
    assert len(fleet.store(1, 1.0, 7, seq=3)) == 1
    assert len(fleet.beat(2, 1.0, seq=9)) == 1
    [pull] = fleet.tell(0, Beat(VERSION, NOW, 1, 1, 99, True, 1.0), 1.0)
    assert pull == Pull(key(0), "digest differs", None)
    assert (fleet.view.gaps, fleet.view.drifts) == (2, 1)


def test_bytes_that_are_no_message_are_counted_and_make_no_worker() -> None:
    fleet = Fleet()
    assert fleet.view.on_stream(key(1), b"\xc1", 0.0) == []
    assert fleet.view.on_heartbeat(key(1), b"\xc1", 0.0) is None
    assert fleet.view.on_stream(key(1), msgspec.msgpack.encode({"kind": "x"}), 0.0) == []
    assert fleet.view.dropped == {"malformed": 2, "unknown_kind": 1}
    assert fleet.view.sources == {}


def test_answers_for_a_worker_that_is_gone_change_nothing() -> None:
    fleet = Fleet()
    facts = [Stored(pack_hashes([1]), "device")]
    assert fleet.view.on_ring(key(1), NOW, [], 0.0) == []
    assert fleet.view.on_snapshot(key(1), NOW, 1, facts, True, 0.0) == []
    assert fleet.view.on_pull_failed(Pull(key(1), "gap", None), "no answer", 0.0) == []
    assert fleet.view.resync("w1", 0.0) == []
    assert fleet.view.sources == {}
    assert fleet.index.stats()[:2] == (0, 0)


def test_a_ring_that_cannot_be_read_makes_way_for_a_snapshot() -> None:
    fleet = Fleet(1)
    good = FactsMessage(VERSION, NOW, 2, [Stored(pack_hashes([8]), "device")], 0.0)
    [asked] = fleet.beat(0, 1.0, seq=3)
    assert asked.from_seq == 2
    [again] = fleet.view.on_ring(key(0), NOW, [encode(good), b"\xc1"], 1.0)
    assert again.from_seq is None
    assert fleet.state(0) is StreamState.RECOVERING
    assert fleet.view.recoveries == {("ring", "failed"): 1}
    facts = [Stored(pack_hashes([0, 8, 9]), "device")]
    assert fleet.view.on_snapshot(key(0), NOW, 3, facts, True, 1.0) == []
    assert fleet.state(0) is StreamState.LIVE
    assert fleet.view.recoveries["snapshot", "ok"] == 1


def test_a_failed_ring_is_counted_and_a_snapshot_asked_for() -> None:
    fleet = Fleet(1)
    [asked] = fleet.beat(0, 1.0, seq=3)
    [again] = fleet.view.on_pull_failed(asked, "no answer", 1.0)
    assert (again.from_seq, again.reason) == (None, "no answer")
    assert fleet.view.on_pull_failed(again, "no answer", 1.0) == []
    assert fleet.view.recoveries == {("ring", "failed"): 1, ("snapshot", "failed"): 1}


def test_a_resync_asks_for_every_rank_of_the_worker() -> None:
    fleet = Fleet(1)
    fleet.view.on_stream(WorkerKey("w0", 1), encode(Beat(1, NOW, 0, 0, 0, True, 0.0)), 0.0)
    pulls = fleet.view.resync("w0", 1.0)
    assert {pull.worker.dp_rank for pull in pulls} == {0, 1}
    assert all(pull.from_seq is None for pull in pulls)


def test_a_resync_may_be_of_one_rank() -> None:
    fleet = Fleet(1)
    fleet.view.on_stream(WorkerKey("w0", 1), encode(Beat(1, NOW, 0, 0, 0, True, 0.0)), 0.0)
    pulls = fleet.view.resync("w0", 1.0, dp_rank=1)
    assert [pull.worker.dp_rank for pull in pulls] == [1]
    assert fleet.state(0) is StreamState.LIVE


@pytest.mark.parametrize("gone", [Removed(pack_hashes([0]), "device"), Cleared()])
def test_a_source_tells_when_blocks_last_went(gone: Removed | Cleared) -> None:
    fleet = Fleet(1)
    source = fleet.view.sources[key(0)]
    fleet.store(0, 1.0, 8, seq=2)
    assert source.gone_at_s == 0.0
    fleet.tell(0, FactsMessage(VERSION, NOW, 3, [gone], 2.0), 2.5)
    assert source.gone_at_s == 2.5


# --- bounds ---


def test_workers_are_bounded_and_those_there_are_still_heard() -> None:
    fleet = Fleet(WORKERS_MAX)
    assert fleet.store(99, 0.0) == []
    assert not fleet.heartbeat(98, 0.0)
    assert fleet.view.dropped["too_many_workers"] == 2
    assert len(fleet.view.sources) == WORKERS_MAX
    fleet.store(3, 0.0, 77, seq=2)
    assert fleet.index.count(fleet.view.sources[key(3)].slot) == 2


def big(seq: int, blocks: int, first: int) -> FactsMessage:
    hashes = np.arange(first, first + blocks, dtype=np.uint64)
    return FactsMessage(VERSION, NOW, seq, [Stored(pack_hashes(hashes), "device")], 0.0)


def spliced(fleet: Fleet, messages: int, blocks: int) -> list[FactsMessage]:
    """What waits behind a hole, as much as may."""
    told = [big(seq, blocks, seq * blocks) for seq in range(2, messages + 2)]
    fleet.tell(0, big(1, 1, 0), 0.0)
    for message in told[1:]:
        fleet.tell(0, message, 0.0)
    fleet.view.on_ring(key(0), NOW, told[:1], 0.0)
    return told


def test_what_a_recovery_brings_is_applied_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[int] = []
    store = FleetView._store

    def counted(self: FleetView, slot: int, fact: Stored) -> None:
        applied[-1] += len(fact.hashes)
        store(self, slot, fact)

    monkeypatch.setattr(FleetView, "_store", counted)
    fleet = Fleet()
    applied.append(0)
    blocks = SLICE_BYTES // 8
    for worker in range(2):
        fleet.tell(worker, big(1, 1, 0), 0.0)
    told = spliced(fleet, 12, blocks)
    slot = fleet.view.sources[key(0)].slot
    assert fleet.index.count(slot) <= 2 * blocks, "no more than a slice at once"
    while fleet.view.backlogged:
        applied.append(0)
        fleet.view.work(0.0)
    assert max(applied[1:]) <= SLICE_BYTES + SLICE_BYTES // 2
    assert fleet.index.count(slot) == len(told) * blocks + 1
    assert fleet.view.sources[key(0)].stream.state is StreamState.LIVE


def test_workers_with_a_backlog_have_turns_and_what_comes_next_finds_it_applied() -> None:
    fleet, blocks = Fleet(), SLICE_BYTES // 8
    views = fleet.view
    spliced(fleet, 12, blocks)
    other = WorkerKey("w1", 0)
    for message in [big(1, 1, 0), *(big(seq, blocks, seq * blocks) for seq in range(3, 9))]:
        views.on_stream(other, encode(message), 0.0)
    views.on_ring(other, NOW, [big(2, blocks, 2 * blocks)], 0.0)
    assert list(views.backlogged) == [key(0), other]
    views.work(0.0)
    assert list(views.backlogged) == [other, key(0)]
    digest = views.index.digest(views.sources[other].slot)
    beat = Beat(VERSION, NOW, 8, 7 * blocks + 1, digest, True, 0.0)
    views.on_stream(other, encode(beat), 0.0)
    assert list(views.backlogged) == [key(0)]
    assert fleet.index.count(views.sources[other].slot) == 7 * blocks + 1


@pytest.mark.parametrize(
    "facts",
    [
        [Cleared()] * FACTS_IN_MESSAGE_MAX,
        [Stored(pack_hashes([i]), "device") for i in range(FACTS_IN_MESSAGE_MAX)],
        [Stored(pack_hashes(range(30_000)), "device")],
    ],
    ids=["clears", "small", "large"],
)
def test_a_message_of_much_work_is_applied_in_slices(
    facts: list[Stored | Cleared], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet()
    work: list[int] = []
    apply = fleet.view._apply

    def noted(source: Source, fact: Fact, now_s: float) -> None:
        work.append(FACT_BYTES + (0 if isinstance(fact, Cleared) else len(fact.hashes)))
        apply(source, fact, now_s)

    monkeypatch.setattr(fleet.view, "_apply", noted)
    fleet.tell(1, FactsMessage(VERSION, NOW, 1, facts, 0.0), 0.0)
    slices = []
    while fleet.view.backlogged:
        slices.append(sum(work))
        work.clear()
        fleet.view.work(0.0)
    slices.append(sum(work))
    assert len(slices) >= 3
    assert max(slices) <= SLICE_BYTES + FACT_BYTES + 8
    assert fleet.view.applied >= len(facts)
    stored = {one for fact in facts if isinstance(fact, Stored) for one in unpack(fact)}
    assert fleet.index.told(fleet.view.sources[key(1)].slot) == len(stored)


def unpack(fact: Stored) -> list[int]:
    hashes: list[int] = unpack_hashes(fact.hashes).tolist()
    return hashes


def test_a_backlog_goes_with_its_life_and_with_its_worker() -> None:
    fleet, blocks = Fleet(), SLICE_BYTES // 8
    spliced(fleet, 12, blocks)
    fleet.view.remove("w0", 1.0)
    assert not fleet.view.backlogged
    fleet.view.work(2.0)
    fleet.view.on_stream(key(0), b"", 2.0)
    spliced(fleet, 12, blocks)
    fact = Stored(pack_hashes([5]), "device")
    fleet.tell(0, FactsMessage(VERSION, NEXT, 1, [fact], 2.0), 2.0)
    assert fleet.index.count(fleet.view.sources[key(0)].slot) == 1
    assert not fleet.view.backlogged


def test_ranks_of_one_worker_id_are_bounded_so_that_others_have_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RANKS_MAX", WORKERS_MAX - 2)
    fleet = Fleet(workers=1)
    beat = encode(Beat(VERSION, NOW, 0, 0, 0, True, 1.0))
    heartbeat = encode(Heartbeat(epoch=NOW, address="", engine="vllm", sent_at_s=1.0))
    for rank in range(3 * WORKERS_MAX):
        fleet.view.on_stream(WorkerKey("greedy", rank), beat, 1.0)
        fleet.view.on_heartbeat(WorkerKey("greedy", rank), heartbeat, 1.0)
    assert len(fleet.view.ranks("greedy")) == WORKERS_MAX - 2
    assert fleet.view.dropped["too_many_ranks"] == 2 * (2 * WORKERS_MAX + 2)
    assert fleet.heartbeat(1, 1.0), "another worker has a place"
    assert fleet.heartbeat(0, 1.0)
    assert not fleet.heartbeat(2, 1.0)
    assert fleet.view.dropped["too_many_workers"] == 1
    fleet.view.remove("greedy", 2.0)
    assert fleet.view.ranks("greedy") == []
    assert not fleet.view.knows("greedy")
    assert fleet.heartbeat(2, 3.0)


def test_messages_dropped_unread_make_their_workers_streams_suspect_and_no_others() -> None:
    fleet = Fleet(workers=2)
    fleet.view.on_lost("w0", 7, 0.5)
    fleet.view.on_lost("stranger", 7, 0.5)
    assert (fleet.state(0), fleet.state(1)) == (StreamState.SUSPECT, StreamState.LIVE)
    assert fleet.view.lost == {"w0": 7}
    fleet.beat(0, 1.0)
    assert fleet.state(0) is StreamState.LIVE, "nothing was missing"
    fleet.view.remove("w0", 2.0)
    assert fleet.view.lost == {}


def test_a_forgotten_worker_makes_room() -> None:
    fleet = Fleet(WORKERS_MAX)
    fleet.view.remove("w3", 10.0)
    fleet.store(99, 0.0)
    assert key(99) in fleet.view.sources
    assert fleet.view.sources[key(99)].slot == 3


def test_what_waits_for_recoveries_is_bounded_over_all_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(4)
    message = FactsMessage(VERSION, NOW, 3, [Stored(pack_hashes(range(50)), "host")], 0.0)
    size = len(encode(message))
    monkeypatch.setattr(module, "WAITING_BYTES_MAX", 3 * size)
    for number in range(3):
        assert len(fleet.tell(number, message, 0.0)) == 1
    assert fleet.view.waiting_bytes == 3 * size
    assert fleet.view.dropped["no_room_to_wait"] == 0
    # The fourth stream has no room: it lets go, and the snapshot that comes then is not enough.
    assert len(fleet.tell(3, message, 0.0)) == 1
    assert fleet.view.waiting_bytes == 3 * size
    assert fleet.view.dropped["no_room_to_wait"] == 1
    assert fleet.view.sources[key(3)].stream.waiting_bytes == 0
    snapshot = [Stored(pack_hashes([3, 4]), "device")]
    [again] = fleet.view.on_snapshot(key(3), NOW, 2, snapshot, True, 0.0)
    assert again.from_seq == 3
    assert fleet.state(3) is StreamState.RECOVERING
    assert fleet.view.on_ring(key(3), NOW, [encode(message)], 0.0) == []
    assert fleet.state(3) is StreamState.LIVE
    # Room comes back with a recovery, and with a worker that is forgotten.
    assert fleet.view.on_snapshot(key(0), NOW, 2, snapshot, True, 0.0) == []
    assert fleet.view.waiting_bytes == 2 * size
    fleet.view.remove("w1", 10.0)
    assert fleet.view.waiting_bytes == size
    assert fleet.view.on_snapshot(key(2), NOW, 2, snapshot, True, 0.0) == []
    assert fleet.view.waiting_bytes == 0


def test_tombstones_are_bounded_and_the_one_that_ends_first_goes() -> None:
    fleet = Fleet()
    for number in range(WORKERS_MAX + 1):
        fleet.view.remove(f"w{number}", 10.0 + number)
    assert fleet.view.dropped["too_many_tombstones"] == 1
    fleet.store(0, 0.0)
    fleet.store(1, 0.0)
    assert list(fleet.view.sources) == [key(0)]
    assert fleet.view.dropped["tombstone"] == 1


# --- heartbeats ---


def test_a_heartbeat_of_a_lower_epoch_is_dropped() -> None:
    fleet = Fleet(1)
    assert not fleet.heartbeat(0, 1.0, epoch=OLD)
    assert fleet.view.dropped["lower_epoch"] == 1
    assert fleet.heartbeat(0, 1.0, epoch=NEXT)
    assert not fleet.heartbeat(0, 1.0, epoch=NOW)
    source = fleet.view.sources[key(0)]
    assert source.heartbeat is not None
    assert source.heartbeat.address == str(NEXT)


def test_a_heartbeat_lower_than_the_stream_is_dropped_even_as_the_first() -> None:
    fleet = Fleet()
    fleet.store(1, 0.0)
    assert not fleet.heartbeat(1, 0.0, epoch=OLD)
    assert fleet.view.sources[key(1)].heartbeat is None


def test_a_lower_epoch_that_took_over_is_heard_with_its_heartbeats_too() -> None:
    fleet = Fleet(1)
    assert fleet.heartbeat(0, 0.0, epoch=NOW)
    fleet.view.tick(3.0)
    assert not fleet.heartbeat(0, 3.0, epoch=OLD)
    fleet.tell(0, Beat(VERSION, OLD, 0, 0, 0, True, 3.0), 3.0)
    assert fleet.heartbeat(0, 4.0, epoch=OLD)
    assert fleet.state(0) is StreamState.LIVE


def test_a_heartbeat_tells_how_clocks_differ() -> None:
    fleet = Fleet()
    message = Heartbeat(epoch=NOW, address="a", engine="vllm", sent_at_s=97.0)
    source = fleet.view.on_heartbeat(key(1), encode(message), 100.0)
    assert source is not None
    assert (source.clock_skew_s, source.heartbeat_at_s) == (3.0, 100.0)


def test_a_worker_gets_requests_once_it_beats_with_a_healthy_engine() -> None:
    fleet = Fleet()
    fleet.beat(1, 0.0, seq=0)
    assert fleet.reasons() == {"w1/0": "no heartbeat yet"}
    fleet.heartbeat(1, 0.0)
    assert fleet.reasons() == {"w1/0": ""}
    fleet.heartbeat(1, 1.0, healthy=False)
    assert fleet.reasons() == {"w1/0": "engine not answering"}


# --- silence ---


def test_a_silent_worker_is_unschedulable_then_forgotten_without_a_trace() -> None:
    fleet = Fleet(6)
    for second in range(1, 31):
        for number in range(1, 6):
            fleet.beat(number, second)
        forgotten = fleet.view.tick(second)
        assert forgotten == ([key(0)] if second == 30 else [])
        assert not fleet.view.mass_silence
        if 3 <= second < 30:
            assert fleet.reasons()["w0/0"] == "silent"
            assert not fleet.view.last_resort(fleet.view.sources[key(0)])
    assert key(0) not in fleet.view.sources
    assert fleet.index.stats()[:2] == (5, 5)
    assert fleet.view.forgotten == {"silent": 1}


def test_a_worker_that_comes_back_starts_from_nothing() -> None:
    fleet = Fleet(1)
    fleet.view.tick(31.0)
    assert fleet.view.sources == {}
    fleet.beat(0, 40.0)
    assert fleet.state(0) is StreamState.RECOVERING
    assert fleet.index.stats()[:2] == (0, 0)


def test_when_most_fall_silent_together_nobody_is_removed() -> None:
    fleet = Fleet(6)
    for second in range(1, 200):
        assert fleet.view.tick(second) == []
        assert fleet.view.mass_silence == (second >= 3)
    assert set(fleet.reasons().values()) == {"silent"}
    assert all(map(fleet.view.last_resort, fleet.view.sources.values()))
    assert not any(source.stream.trusted for source in fleet.view.sources.values())


@pytest.mark.parametrize("odd_s", [-20.0, 20.0])
def test_one_that_died_before_or_clung_on_for_longer_does_not_hide_mass_silence(
    odd_s: float,
) -> None:
    fleet = Fleet()
    for number in range(6):
        at_s = 100.0 + (odd_s if number == 0 else 0.1 * number)
        fleet.store(number, at_s)
        fleet.beat(number, at_s)
        fleet.heartbeat(number, at_s)
    assert fleet.view.tick(124.0) == []
    assert fleet.view.mass_silence
    assert fleet.view.tick(140.0) == []
    assert len(fleet.view.sources) == 6


def test_silence_of_most_of_a_models_workers_makes_these_a_last_resort() -> None:
    fleet = Fleet()
    for second in range(5):
        for number in range(12):
            if number < 8 or second == 0:
                fleet.beat(number, second, seq=0)
                fleet.heartbeat(number, second, model="large" if number < 8 else "small")
        fleet.view.tick(second)
    assert not fleet.view.mass_silence
    assert fleet.view.silent_models == {"small"}
    last = [source.key for source in fleet.view.sources.values() if fleet.view.last_resort(source)]
    assert last == [key(number) for number in range(8, 12)]
    for number in range(8):
        fleet.beat(number, FORGET_S, seq=0)
    assert len(fleet.view.tick(FORGET_S)) == 4, "patience is for most of the fleet"


def test_an_engine_that_was_not_probed_yet_is_not_called_silent() -> None:
    fleet = Fleet(1)
    fleet.heartbeat(0, 1.0, healthy=False, probed=False)
    assert fleet.reasons() == {"w0/0": "engine not probed yet"}
    fleet.heartbeat(0, 2.0, healthy=False)
    assert fleet.reasons() == {"w0/0": "engine not answering"}


def test_a_worker_that_beats_without_a_readable_heartbeat_is_a_last_resort() -> None:
    fleet = Fleet(2)
    for second in (1, 2, 3):
        for number in range(2):
            fleet.beat(number, second)
        fleet.heartbeat(0, second)
        assert fleet.view.on_heartbeat(key(1), b"\xc1", second) is None
        fleet.view.tick(second)
        assert fleet.reasons()["w1/0"] == ("no readable heartbeat" if second == 3 else "")
    assert key(1) in fleet.view.take_changed()
    assert fleet.view.last_resort(fleet.view.sources[key(1)])
    assert not fleet.view.last_resort(fleet.view.sources[key(0)])
    fleet.heartbeat(1, 3.5)
    fleet.view.tick(3.5)
    assert set(fleet.reasons().values()) == {""}


def test_a_relay_that_starts_again_has_no_unreadable_heartbeats() -> None:
    fleet = Fleet(2)
    for second in range(1, 11):
        fleet.beat(0, second)
        fleet.heartbeat(0, second)
        fleet.view.tick(second)
        assert fleet.reasons()["w1/0"] == ("silent" if second >= 3 else "")
        assert not fleet.view.sources[key(1)].heartbeat_overdue
    fleet.beat(1, 10.5)  # its first heartbeat got lost
    fleet.view.tick(10.5)
    assert fleet.reasons()["w1/0"] == ""
    assert not fleet.view.sources[key(1)].heartbeat_overdue
    for second in (11.5, 12.5, 13.5):
        fleet.beat(1, second)
        fleet.view.tick(second)
    assert fleet.view.sources[key(1)].heartbeat_overdue


def test_while_our_connection_is_down_no_heartbeat_is_overdue() -> None:
    fleet = Fleet(1)
    fleet.view.on_connection(False, 1.0)
    fleet.view.tick(100.0)
    fleet.view.on_connection(True, 100.0)
    fleet.view.tick(102.0)
    assert set(fleet.reasons().values()) == {""}


def test_half_of_the_fleet_is_not_most_of_it() -> None:
    fleet = Fleet(6)
    for second in range(1, 31):
        for number in range(3):
            fleet.beat(number, second)
        fleet.view.tick(second)
        assert not fleet.view.mass_silence
    assert len(fleet.view.sources) == 3


def test_few_workers_fall_silent_on_their_own() -> None:
    fleet = Fleet(3)
    fleet.view.tick(3.0)
    assert not fleet.view.mass_silence
    assert len(fleet.view.tick(30.0)) == 3


def test_workers_that_die_one_after_another_are_no_mass_silence() -> None:
    fleet = Fleet(6)
    forgotten = []
    for second in range(1, 100):
        for number in range(6):
            if second < 10 * number:
                fleet.beat(number, second)
        forgotten += fleet.view.tick(second)
        assert not fleet.view.mass_silence
    assert forgotten == [key(number) for number in range(6)]


def test_mass_silence_ends_when_they_beat_again() -> None:
    fleet = Fleet(6)
    fleet.view.tick(10.0)
    assert fleet.view.mass_silence
    for number in range(4):
        fleet.beat(number, 11.0)
        fleet.heartbeat(number, 11.0)
    fleet.view.tick(11.0)
    assert not fleet.view.mass_silence
    assert list(fleet.reasons().values()) == [""] * 4 + ["silent"] * 2
    assert not any(map(fleet.view.last_resort, fleet.view.sources.values()))
    assert [fleet.state(number) is StreamState.LIVE for number in range(6)] == [True] * 4 + [
        False
    ] * 2


def test_even_mass_silence_has_an_end() -> None:
    fleet = Fleet(6)
    assert fleet.view.tick(10 * FORGET_S - 1) == []
    assert len(fleet.view.tick(10 * FORGET_S)) == 6
    assert fleet.index.stats()[:2] == (0, 0)


def test_while_our_connection_is_down_nobody_is_silent_and_nobody_forgotten() -> None:
    fleet = Fleet(6)
    fleet.view.on_connection(False, 1.0)
    assert fleet.view.tick(10_000.0) == []
    assert {fleet.state(number) for number in range(6)} == {StreamState.SUSPECT}
    assert set(fleet.reasons().values()) == {""}
    fleet.view.on_connection(True, 10_000.0)
    assert fleet.view.tick(10_002.0) == []
    fleet.beat(0, 10_002.0)
    assert fleet.state(0) is StreamState.LIVE


# --- removed by command ---


def test_a_removed_worker_stays_away_until_its_tombstone_ends() -> None:
    fleet = Fleet(2)
    assert fleet.view.remove("w0", 10.0) == [key(0)]
    assert fleet.view.forgotten == {"removed": 1}
    assert fleet.index.stats()[:2] == (1, 1)
    assert fleet.beat(0, 9.9) == []
    assert not fleet.heartbeat(0, 9.9)
    assert fleet.view.dropped["tombstone"] == 2
    assert fleet.heartbeat(0, 10.0)
    assert key(0) in fleet.view.sources


def test_removing_a_worker_removes_all_its_ranks_and_no_other() -> None:
    fleet = Fleet(2)
    fleet.view.on_stream(WorkerKey("w0", 1), encode(Beat(1, NOW, 0, 0, 0, True, 0.0)), 0.0)
    removed = fleet.view.remove("w0", 10.0)
    assert set(removed) == {key(0), WorkerKey("w0", 1)}
    assert list(fleet.view.sources) == [key(1)]


def test_a_worker_that_was_never_heard_of_can_be_kept_away() -> None:
    fleet = Fleet()
    assert fleet.view.remove("w7", 10.0) == []
    fleet.beat(7, 1.0)
    assert fleet.view.sources == {}


def test_tombstones_end_with_time() -> None:
    fleet = Fleet()
    for number in range(100):
        fleet.view.remove(f"w{number}", 10.0)
    fleet.view.tick(10.0)
    assert fleet.view._tombstones == {}


def test_a_slot_that_is_used_again_has_nothing_of_the_one_before() -> None:
    fleet = Fleet(2)
    slot = fleet.view.sources[key(0)].slot
    fleet.view.remove("w0", 1.0)
    fleet.beat(9, 0.0, seq=0)
    assert fleet.view.sources[key(9)].slot == slot
    assert (fleet.index.count(slot), fleet.index.digest(slot)) == (0, 0)


# --- what is only predicted, or forgotten ---


def test_predictions_are_no_part_of_what_a_beat_is_compared_with() -> None:
    fleet = Fleet(1)
    source = fleet.view.sources[key(0)]
    fleet.view.predict(source, np.arange(50, 60, dtype=np.uint64), 1.0)
    assert fleet.index.predicted(source.slot) == 10
    assert fleet.beat(0, 1.0) == []
    assert fleet.state(0) is StreamState.LIVE


@pytest.mark.parametrize(("complete", "lives_s"), [(True, 5.0), (False, 120.0)])
def test_predictions_live_longer_where_events_do_not_tell_all(
    complete: bool, lives_s: float
) -> None:
    fleet = Fleet(1)
    source = fleet.view.sources[key(0)]
    fleet.tell(0, Beat(VERSION, NOW, 1, 1, mix_digest(0, 0, 0), complete, 0.0), 0.0)
    fleet.view.predict(source, np.arange(50, 60, dtype=np.uint64), 0.0)
    gone_at_s = None
    for tenth in range(3000):
        now_s = tenth / 10
        if tenth % 10 == 0:
            fleet.tell(0, Beat(VERSION, NOW, 1, 1, mix_digest(0, 0, 0), complete, now_s), now_s)
        fleet.view.tick(now_s)
        if gone_at_s is None and not fleet.index.predicted(source.slot):
            gone_at_s = now_s
    assert gone_at_s is not None
    assert lives_s <= gone_at_s <= 2 * lives_s + 0.2


def test_a_worker_without_events_is_approximate_and_one_with_events_only_until_the_first() -> None:
    fleet = Fleet()
    fleet.heartbeat(1, 0.0)
    fleet.beat(1, 0.0, seq=0)
    source = fleet.view.sources[key(1)]
    assert source.approximate
    fleet.store(1, 0.0)
    assert not source.approximate
    message = Heartbeat(
        epoch=NOW, address="x", engine="vllm", healthy=True, sent_at_s=0.0, events=False
    )
    fleet.view.on_heartbeat(key(1), encode(message), 0.0)
    assert source.approximate


def test_a_reset_ends_predictions() -> None:
    fleet = Fleet(1)
    source = fleet.view.sources[key(0)]
    fleet.view.predict(source, np.arange(50, 60, dtype=np.uint64), 1.0)
    fleet.tell(0, FactsMessage(VERSION, NOW, 2, [Cleared(None)], 1.0), 1.0)
    assert fleet.index.predicted(source.slot) == 0


def test_a_stream_that_lost_blocks_for_want_of_room_is_partial_and_not_read_anew() -> None:
    index = NativeIndex(share_max=10)
    view = FleetView(index, beat_timeout_s=3.0, forget_s=30.0, workers_max=4)
    hashes = list(range(1, 31))
    digest = mix_digest(reduce(xor, hashes), 0, 0)
    fact = Stored(pack_hashes(hashes), "device")
    view.on_stream(key(0), encode(FactsMessage(VERSION, NOW, 1, [fact], 0.0)), 0.0)
    assert view.on_stream(key(0), encode(Beat(VERSION, NOW, 1, 30, digest, True, 0.0)), 0.0) == []
    source = view.sources[key(0)]
    assert source.stream.state is StreamState.LIVE
    assert index.count(source.slot) == 10
    assert not view.complete(source)
    fact_of_all = Removed(pack_hashes(hashes), "device")
    view.on_stream(key(0), encode(FactsMessage(VERSION, NOW, 2, [fact_of_all], 0.0)), 0.0)
    assert view.on_stream(key(0), encode(Beat(VERSION, NOW, 2, 0, 0, True, 0.0)), 0.0) == []
    assert view.complete(source)


# --- snapshots that come in pieces ---


def test_what_is_staged_of_a_snapshot_counts_only_once_it_is_whole() -> None:
    fleet = Fleet(1)
    [pull] = fleet.beat(0, 1.0, seq=5)
    assert pull.from_seq == 2
    [pull] = fleet.view.on_pull_failed(pull, "ring too short", 1.0)
    source = fleet.view.sources[key(0)]
    before = source.slot
    fleet.view.stage(key(0), [Stored(pack_hashes([10, 11]), "device")])
    fleet.view.stage(key(0), [Stored(pack_hashes([12]), "host")])
    assert fleet.index.count(source.slot) == 1
    last = [Stored(pack_hashes([13]), "device")]
    assert fleet.view.on_snapshot(key(0), NOW, 5, last, True, 1.0) == []
    assert source.slot != before
    assert [fleet.index.count(source.slot, tier) for tier in Tier] == [3, 1, 0]
    assert fleet.index.stats().placements == 4
    assert key(0) in fleet.view.take_changed()


def test_a_snapshot_that_comes_to_nothing_leaves_nothing() -> None:
    fleet = Fleet(2)
    for number in range(2):
        fleet.view.stage(key(number), [Stored(pack_hashes([100, 101]), "device")])
    fleet.view.unstage(key(0))
    fleet.view.unstage(key(0))
    fleet.view.remove("w1", 99.0)
    fleet.view.stage(key(7), [Stored(pack_hashes([7]), "device")])
    assert fleet.index.stats().placements == 1
    assert fleet.index.open_slot() < 4


def test_a_stream_that_healed_by_itself_does_not_adopt_a_late_snapshot() -> None:
    fleet = Fleet(1)
    source = fleet.view.sources[key(0)]
    slot = source.slot
    late = [Stored(pack_hashes([55]), "device")]
    assert fleet.view.on_snapshot(key(0), NOW, 1, late, True, 1.0) == []
    assert (source.slot, fleet.index.count(slot)) == (slot, 1)
    assert fleet.index.stats().placements == 1
