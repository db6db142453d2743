"""One rank of a Dynamo worker: numbers, gaps, restarts, doubt."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from events.engines.dynamo import (
    HashesRemoved,
    HashesStored,
    LeftOut,
    Origin,
    RankCleared,
    What,
    WorkerEvent,
)
from events.feed.fleet_view import FleetView
from events.feed.stream import StreamState
from events.plane.facts import Beat, Epoch, SnapshotChunk, SnapshotRequest, decode_stream
from events.relay.dynamo.rank import DynamoRank
from indexer.hashing import extend_prefix
from indexer.identity import BlockHash, PrefixHash, Tier, WorkerKey
from indexer.reference import ReferenceIndex

KEY = WorkerKey("7", 0)
EPOCH = Epoch(5_000_000_000, 9)
DEVICE, HOST, DISK = Tier
CLEARED = RankCleared()


def stored(*names: int, parent: int | None = None, tier: Tier = DEVICE) -> HashesStored:
    """Blocks whose contents are 100 times their names."""
    return HashesStored(tier, parent, names, [BlockHash(100 * name) for name in names])


def removed(*names: int, tier: Tier = DEVICE) -> HashesRemoved:
    return HashesRemoved(tier, names)


def chain(*names: int) -> list[PrefixHash]:
    prefixes: list[PrefixHash] = []
    for name in names:
        before = prefixes[-1] if prefixes else None
        prefixes.append(extend_prefix(before, BlockHash(100 * name)))
    return prefixes


class Followed:
    """A rank, and a router that hears every message of it."""

    def __init__(self) -> None:
        self.rank = DynamoRank(EPOCH)
        self.view = FleetView(ReferenceIndex(), beat_timeout_s=3.0, forget_s=30.0, workers_max=4)
        self.now_s = 100.0
        self.sequence = 0
        self.hear(self.rank.beat(self.now_s))

    def hear(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            for pull in self.view.on_stream(KEY, message, self.now_s):
                page = self.page(SnapshotRequest())
                for number in range(1, page.chunks):
                    self.view.stage(pull.worker, page.facts)
                    request = SnapshotRequest(chunk=number, epoch=page.epoch, as_of=page.as_of)
                    page = self.page(request)
                again = self.view.on_snapshot(
                    pull.worker, page.epoch, page.as_of, page.facts, page.complete, self.now_s
                )
                assert again == []

    def page(self, request: SnapshotRequest) -> SnapshotChunk:
        """The rank's answer, after all slices of it."""
        while True:
            messages, answer = self.rank.answer(request, self.now_s)
            self.hear(messages)
            if isinstance(answer, SnapshotChunk):
                return answer
            request = answer

    def tell(self, event_id: int, what: What, publisher: int | None = 1) -> None:
        """The next message of a publisher, with one event."""
        self.now_s += 0.1
        self.sequence += 1
        sequence = None if publisher is None else self.sequence
        origin = Origin(publisher, sequence, hash((event_id, what.__class__, self.sequence)))
        self.hear(self.rank.on_event(WorkerEvent(7, 0, event_id, what), origin, self.now_s))

    def held(self) -> list[PrefixHash]:
        """What the router knows, in order of the hashes, after a beat that finds nothing wrong."""
        self.hear(self.rank.beat(self.now_s))
        (source,) = self.view.sources.values()
        assert source.stream.state is StreamState.LIVE
        assert source.stream.complete == self.rank.complete
        assert self.view.drifts == 0
        index = self.view.index
        assert index.digest(source.slot) == self.rank.ledger.digest()
        known = [one for _, prefixes in self.rank.ledger.placements() for one in prefixes]
        assert index.count(source.slot) == len(known)
        return sorted(known)

    def placements(self) -> set[tuple[Tier, PrefixHash]]:
        """The same, with the tiers."""
        self.held()
        ledger = self.rank.ledger
        return {(tier, one) for tier, prefixes in ledger.placements() for one in prefixes}


def test_events_in_order_are_told_and_a_first_number_is_complete() -> None:
    worker = Followed()
    worker.tell(0, stored(1, 2))
    worker.tell(1, stored(3, parent=2))
    assert worker.held() == sorted(chain(1, 2, 3))
    worker.tell(2, removed(3))
    assert worker.held() == sorted(chain(1, 2))
    assert worker.rank.complete
    assert worker.rank.counts == {"BlocksStored": 2, "BlocksRemoved": 1}
    assert repr(worker.rank) == (
        "<DynamoRank complete at 3, <DynamoLedger 2 engine blocks, 2 placements>>"
    )


def test_number_1_begins_a_life_only_as_its_publishers_first_message() -> None:
    for sequence, complete in ((0, True), (1, False), (None, False)):
        rank = DynamoRank(EPOCH)
        origin = Origin(None if sequence is None else 3, sequence, 1)
        rank.on_event(WorkerEvent(7, 0, 1, stored(1)), origin, 100.0)
        assert rank.complete is complete


def test_a_late_listener_is_partial_until_the_worker_clears() -> None:
    worker = Followed()
    worker.tell(40, stored(1))
    worker.tell(41, stored(5, parent=4))
    assert not worker.rank.complete
    assert worker.held() == chain(1)
    assert worker.rank.counts["unknown_parent"] == 1
    worker.tell(42, CLEARED)
    assert worker.held() == []
    assert worker.rank.complete


def test_a_hole_empties_the_ledger_and_what_follows_is_partial() -> None:
    worker = Followed()
    worker.tell(0, stored(1, 2))
    worker.tell(2, stored(3))
    assert worker.held() == chain(3)
    assert not worker.rank.complete
    worker.tell(3, stored(4, parent=2))
    assert worker.held() == chain(3), "the parent may have gone in the hole"
    assert (worker.rank.engine_gaps, worker.rank.engine_restarts) == (1, 0)
    assert worker.rank.outbox.epoch == EPOCH


def test_a_number_that_goes_back_is_another_life() -> None:
    worker = Followed()
    worker.tell(0, stored(1))
    worker.tell(1, stored(2))
    worker.tell(0, stored(3))
    assert worker.held() == chain(3)
    assert worker.rank.complete, "from its first number on"
    assert worker.rank.engine_restarts == 1
    assert worker.rank.outbox.epoch > EPOCH
    worker.tell(1, stored(4))
    worker.tell(0, stored(5), publisher=None)
    assert worker.held() == chain(5)
    assert worker.rank.engine_restarts == 2


def test_another_publisher_is_another_life_even_with_the_next_number() -> None:
    for sequence in (0, 1, 100):
        worker = Followed()
        for number in range(5):
            worker.tell(number, stored(number + 1))
        worker.sequence = sequence
        worker.tell(5, stored(9), publisher=2)
        assert worker.held() == chain(9)
        assert (worker.rank.engine_restarts, worker.rank.engine_gaps) == (1, 0)
        assert not worker.rank.complete


def test_two_publishers_in_turns_are_counted() -> None:
    worker = Followed()
    for turn in range(4):
        worker.tell(turn, stored(1), publisher=turn % 2)
    assert worker.rank.counts["two_publishers"] == 2


def test_the_last_message_again_changes_nothing() -> None:
    worker = Followed()
    worker.tell(0, stored(1))
    origin = Origin(1, 2, 44)
    events = [WorkerEvent(7, 0, 1, stored(2)), WorkerEvent(7, 0, 2, removed(1))]
    for event in events * 2:
        worker.hear(worker.rank.on_event(event, origin, worker.now_s))
    assert worker.held() == [extend_prefix(None, BlockHash(200))]
    assert worker.rank.counts["duplicate"] == 2
    assert worker.rank.engine_restarts == 0
    again = Origin(9, 2, 44)
    worker.hear(worker.rank.on_event(events[0], again, worker.now_s))
    assert worker.rank.engine_restarts == 1, "another publisher's is no duplicate"


def test_an_unreadable_store_costs_completeness_and_a_removal_everything() -> None:
    worker = Followed()
    worker.tell(0, stored(1))
    worker.tell(1, LeftOut("shared"))
    worker.tell(2, LeftOut("unknown_kind"))
    assert worker.rank.complete
    worker.tell(3, LeftOut("malformed", stores_lost=True))
    assert worker.held() == chain(1)
    assert not worker.rank.complete
    worker.tell(4, LeftOut("malformed", stores_lost=True, removals_lost=True))
    assert worker.held() == []
    worker.tell(5, stored(2))
    assert worker.held() == chain(2)
    assert worker.rank.engine_gaps == 0


def test_after_a_loss_nothing_is_told_as_held_until_the_next_number_proves_it() -> None:
    worker = Followed()
    worker.tell(0, stored(1, 2, 3))
    worker.tell(1, stored(1, tier=HOST))
    worker.hear(worker.rank.doubt(worker.now_s))
    assert worker.held() == []
    assert not worker.rank.complete
    assert "in doubt" in repr(worker.rank)
    worker.hear(worker.rank.doubt(worker.now_s))
    worker.tell(2, stored(4, parent=3))
    assert worker.held() == sorted([*chain(1, 2, 3, 4), *chain(1)])
    assert worker.rank.complete, "nothing was missed"


def test_a_loss_before_the_first_event_is_none() -> None:
    worker = Followed()
    assert worker.rank.doubt(worker.now_s) == []
    worker.tell(0, stored(1))
    assert worker.rank.complete


def test_more_than_a_message_is_taken_back_whole() -> None:
    worker = Followed()
    names = range(1, 20_001)
    worker.tell(0, stored(*names))
    worker.hear(worker.rank.doubt(worker.now_s))
    worker.tell(1, removed(20_000))
    assert len(worker.held()) == 19_999


def test_the_event_that_takes_a_ledger_back_announces_none_of_it() -> None:
    """Its announcement would be one step of the event loop, as long as the ledger is large."""
    rank = DynamoRank(EPOCH)
    rank.on_event(WorkerEvent(7, 0, 0, stored(*range(1, 20_001))), Origin(1, 0, 1), 100.0)
    rank.doubt(100.0)
    (message,) = rank.on_event(WorkerEvent(7, 0, 1, stored(1)), Origin(1, 1, 2), 101.0)
    beat, _ = decode_stream(message)
    assert isinstance(beat, Beat)
    assert (beat.seq, beat.blocks, beat.complete) == (1, 20_000, True)
    assert beat.epoch > EPOCH
    assert rank.flush() == []


def test_an_empty_ledger_is_taken_back_in_the_same_epoch() -> None:
    worker = Followed()
    worker.tell(0, stored(1))
    worker.tell(1, removed(1))
    worker.hear(worker.rank.doubt(worker.now_s))
    worker.tell(2, stored(2))
    assert worker.held() == chain(2)
    assert worker.rank.complete
    assert worker.rank.outbox.epoch == EPOCH


def test_what_was_taken_back_after_the_fullest_number_goes_on() -> None:
    worker = Followed()
    worker.tell((1 << 64) - 1, stored(1))
    worker.tell(0, stored(2))
    assert worker.held() == chain(2)
    assert worker.rank.engine_restarts == 1


STEPS = st.lists(
    st.one_of(
        st.builds(
            stored,
            st.integers(1, 6),
            parent=st.none() | st.integers(1, 6),
            tier=st.sampled_from([DEVICE, HOST]),
        ),
        st.builds(removed, st.integers(1, 6), tier=st.sampled_from([DEVICE, HOST])),
        st.just(CLEARED),
        st.sampled_from(["lose", "doubt", "lose and doubt", "restart"]),
    ),
    max_size=30,
)


@given(STEPS)
def test_what_a_router_knows_is_never_more_than_the_worker_holds(
    steps: list[What | str],
) -> None:
    """The worker's names as a set, with events lost on the way; after each event that came, the
    router's index is a subset, and the whole of it while the rank calls itself complete."""
    worker = Followed()
    names: dict[tuple[Tier, int], PrefixHash] = {}
    number, publisher, lost = 0, 1, False
    for step in steps:
        if isinstance(step, str):
            if step == "restart":
                names, number, publisher = {}, 0, publisher + 1
            if "doubt" in step:
                worker.hear(worker.rank.doubt(worker.now_s))
                assert worker.held() == []
            lost = lost or "lose" in step
            continue
        match step:
            case HashesStored(tier, parent, (name,)):
                before = None
                if parent is not None:
                    known = [names[one, parent] for one in Tier if (one, parent) in names]
                    before = known[0] if known else None
                prefix = extend_prefix(before, BlockHash(100 * name))
                another = any(names.get((one, name), prefix) != prefix for one in Tier)
                if (parent is not None and before is None) or another:
                    continue  # no engine says so
                names[tier, name] = prefix
            case HashesRemoved(tier, (name,)):
                names.pop((tier, name), None)
            case _:
                names = {}
        number += 1
        if lost:
            lost = False
            continue
        worker.tell(number - 1, step, publisher)
        told = worker.placements()
        truth = {(tier, prefix) for (tier, _), prefix in names.items()}
        assert told <= truth
        if worker.rank.complete:
            assert told == truth


def test_beats_and_answers_speak_of_the_state_after_all_that_is_gathered() -> None:
    rank = DynamoRank(EPOCH)
    rank.on_event(WorkerEvent(7, 0, 0, stored(1)), Origin(1, 0, 1), 100.0)
    messages, chunk = rank.answer(SnapshotRequest(), 100.0)
    assert isinstance(chunk, SnapshotChunk)
    assert len(messages) == 1
    assert (chunk.as_of, chunk.complete, len(chunk.facts)) == (1, True, 1)
    rank.on_event(WorkerEvent(7, 0, 1, stored(2)), Origin(1, 1, 2), 100.0)
    facts, beat = rank.beat(100.0)
    decoded, _ = decode_stream(beat)
    assert isinstance(decoded, Beat)
    assert (decoded.seq, decoded.blocks, decoded.complete) == (2, 2, True)
    assert facts
    assert rank.flush() == []
