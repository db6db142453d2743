"""The router's picture of its fleet: messages, bounds, predictions, snapshots."""

from functools import reduce
from operator import xor

import msgspec
import numpy as np
import pytest

from events.feed import fleet_view as module
from events.feed.fleet_view import FACT_BYTES, SLICE_BYTES, FleetView, Pull, Source
from events.feed.stream import CONNECTION_DOWN, StreamState
from events.plane.facts import (
    FACTS_IN_MESSAGE_MAX,
    VERSION,
    Beat,
    Cleared,
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
from tests.events.feed.view_fleet import NEXT, NOW, WORKERS_MAX, Fleet, key

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


# --- what is only predicted, or forgotten ---


def test_an_engine_without_events_that_falls_asleep_holds_nothing_that_was_predicted() -> None:
    fleet = Fleet()
    fleet.beat(0, 0.0, seq=0)
    fleet.heartbeat(0, 0.0)
    source = fleet.view.sources[key(0)]
    fleet.view.predict(source, np.arange(50, 60, dtype=np.uint64), 1.0)
    fleet.heartbeat(0, 2.0)
    assert fleet.index.predicted(source.slot) == 10
    fleet.heartbeat(0, 3.0, healthy=False, asleep=True)
    assert fleet.index.predicted(source.slot) == 0
    fleet.view.predict(source, np.arange(50, 60, dtype=np.uint64), 4.0)
    fleet.heartbeat(0, 5.0)
    assert fleet.index.predicted(source.slot) == 10
    for now_s in range(6, 600):
        fleet.beat(0, float(now_s), seq=0)
        fleet.view.tick(float(now_s))
    assert fleet.index.predicted(source.slot) == 0


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


def test_the_reason_of_every_stream_says_that_our_connection_is_down() -> None:
    fleet = Fleet(2)
    fleet.view.on_connection(connected=False, now_s=1.0)
    assert {source.stream.reason for source in fleet.view.sources.values()} == {CONNECTION_DOWN}
