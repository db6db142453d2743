"""One worker's stream: order, gaps, epochs, trust."""

from itertools import pairwise

import pytest

from events.feed.stream import (
    BUFFER_BYTES_MAX,
    BUFFER_MESSAGES_MAX,
    PAUSE_MAX_S,
    RECOVERIES_FREE,
    STEADY_S,
    Adopt,
    Apply,
    Effect,
    Forget,
    Recover,
    Stream,
    StreamState,
)
from events.plane.facts import (
    VERSION,
    Beat,
    Cleared,
    Epoch,
    FactsMessage,
    Removed,
    Stored,
    pack_hashes,
    unpack_hashes,
)

LIVE, RECOVERING, SUSPECT, SILENT = StreamState
OLD, NOW, NEXT = Epoch(1, 5), Epoch(2, 0), Epoch(3, 0)
TIMEOUT_S = 3.0


def facts(seq: int, *hashes: int, epoch: Epoch = NOW) -> FactsMessage:
    """A message that stores these blocks; its own number when none are named."""
    stored = Stored(pack_hashes(hashes or (seq,)), "device")
    return FactsMessage(VERSION, epoch, seq, [stored], 0.0)


class Listener:
    """A stream, and the set that its effects make."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.stream = Stream(TIMEOUT_S, self.now_s)
        self.held: set[int] = set()
        self.staged: set[int] = set()

    @property
    def state(self) -> StreamState:
        return self.stream.state

    def perform(self, effects: list[Effect]) -> list[Recover]:
        asked = []
        for effect in effects:
            match effect:
                case Forget():
                    self.held.clear()
                case Adopt():
                    self.held = set(self.staged)
                case Recover():
                    asked.append(effect)
                case Apply(facts):
                    for fact in facts:
                        match fact:
                            case Stored():
                                self.held |= set(unpack_hashes(fact.hashes).tolist())
                            case Removed():
                                self.held -= set(unpack_hashes(fact.hashes).tolist())
                            case Cleared():
                                self.held.clear()
        return asked

    def hear(self, *messages: FactsMessage) -> list[Recover]:
        return [
            one
            for message in messages
            for one in self.perform(self.stream.on_facts(message, 100, self.now_s))
        ]

    def beat(
        self,
        seq: int,
        *hashes: int,
        epoch: Epoch = NOW,
        complete: bool = True,
        after_s: float = 1.0,
    ) -> list[Recover]:
        """A beat of a relay that holds these blocks: 1 to seq when none are named."""
        self.now_s += after_s
        theirs = set(hashes or range(1, seq + 1))
        beat = Beat(VERSION, epoch, seq, len(theirs), xor(theirs), complete, 0.0)
        return self.perform(self.stream.on_beat(beat, len(self.held), xor(self.held), self.now_s))

    def ring(self, *messages: FactsMessage, epoch: Epoch = NOW) -> list[Recover]:
        return self.perform(self.stream.on_ring(epoch, list(messages), self.now_s))

    def snapshot(
        self, as_of: int, *hashes: int, epoch: Epoch = NOW, complete: bool = True
    ) -> list[Recover]:
        self.staged = set(hashes or range(1, as_of + 1))
        return self.perform(self.stream.on_snapshot(epoch, as_of, complete, self.now_s))

    def fail(self, from_ring: bool) -> list[Recover]:
        return self.perform(self.stream.on_recovery_failed("no answer", from_ring, self.now_s))


def xor(hashes: set[int]) -> int:
    total = 0
    for one in hashes:
        total ^= one
    return total


@pytest.fixture
def fresh() -> Listener:
    return Listener()


@pytest.fixture
def live() -> Listener:
    """In step at 3, confirmed by a beat."""
    listener = Listener()
    assert listener.hear(facts(1), facts(2), facts(3)) == []
    assert listener.beat(3) == []
    assert listener.state is LIVE
    return listener


# --- beginnings ---


def test_a_stream_that_nobody_heard_yet_is_recovering(fresh: Listener) -> None:
    assert (fresh.state, fresh.stream.trusted, fresh.stream.complete) == (RECOVERING, False, False)


def test_a_life_heard_from_its_first_word_needs_no_question(fresh: Listener) -> None:
    assert fresh.hear(facts(1), facts(2)) == []
    assert fresh.state is LIVE
    assert fresh.held == {1, 2}


def test_only_a_relay_can_say_that_its_stream_is_complete(fresh: Listener) -> None:
    fresh.hear(facts(1))
    assert not fresh.stream.complete
    fresh.beat(1, complete=False)
    assert not fresh.stream.complete
    fresh.beat(1)
    assert fresh.stream.complete


def test_an_idle_engine_is_known_from_its_beat(fresh: Listener) -> None:
    assert fresh.beat(0) == []
    assert (fresh.state, fresh.stream.complete) == (LIVE, True)
    assert fresh.hear(facts(1)) == []


def test_a_late_listener_asks_for_a_snapshot_once(fresh: Listener) -> None:
    assert [one.from_seq for one in fresh.hear(facts(5), facts(6))] == [None]
    assert fresh.beat(6) == []
    assert fresh.state is RECOVERING
    assert fresh.held == set()


def test_a_beat_tells_a_late_listener_to_ask(fresh: Listener) -> None:
    assert [one.from_seq for one in fresh.beat(9)] == [None]


def test_the_live_tail_is_spliced_after_the_snapshot(fresh: Listener) -> None:
    fresh.hear(facts(5), facts(6), facts(7))
    assert fresh.snapshot(5) == []
    assert (fresh.state, fresh.stream.seq, fresh.held) == (LIVE, 7, set(range(1, 8)))
    assert fresh.hear(facts(8)) == []


def test_what_waited_and_is_in_the_snapshot_is_not_applied_again(fresh: Listener) -> None:
    fresh.hear(facts(5, 50), facts(6, 60))
    assert fresh.snapshot(7, 70) == []
    assert (fresh.state, fresh.stream.seq, fresh.held) == (LIVE, 7, {70})


def test_a_snapshot_of_a_partial_stream_is_partial(fresh: Listener) -> None:
    fresh.hear(facts(5))
    fresh.snapshot(5, complete=False)
    assert (fresh.state, fresh.stream.complete) == (LIVE, False)


def test_a_tail_with_a_hole_is_spliced_up_to_it_and_the_ring_asked(fresh: Listener) -> None:
    fresh.hear(facts(5), facts(6), facts(8))
    assert [one.from_seq for one in fresh.snapshot(4)] == [7]
    assert (fresh.state, fresh.held) == (RECOVERING, set(range(1, 7)))
    assert fresh.ring(facts(7)) == []
    assert (fresh.state, fresh.held) == (LIVE, set(range(1, 9)))


def test_a_first_word_that_comes_late_heals_the_stream(fresh: Listener) -> None:
    assert len(fresh.hear(facts(2), facts(3))) == 1
    assert fresh.hear(facts(1)) == []
    assert (fresh.state, fresh.stream.seq, fresh.held) == (LIVE, 3, {1, 2, 3})
    assert fresh.snapshot(2) == []  # the answer comes after the stream healed itself
    assert fresh.held == {1, 2, 3}


def test_an_old_beat_hides_no_hole_in_what_waits(fresh: Listener) -> None:
    fresh.hear(facts(2))
    assert [one.from_seq for one in fresh.beat(0)] == [1]
    assert fresh.state is RECOVERING


# --- order ---


def test_a_duplicate_changes_nothing(live: Listener) -> None:
    assert live.hear(facts(3, 77), facts(1, 78)) == []
    assert (live.stream.duplicates, live.held) == (2, {1, 2, 3})
    assert live.beat(3) == []


def test_a_gap_is_reported_before_anything_after_it(live: Listener) -> None:
    [asked] = live.hear(facts(5))
    assert asked == Recover("gap: 3 then 5", 4)
    assert (live.state, live.stream.gaps, live.held) == (RECOVERING, 1, {1, 2, 3})
    assert live.hear(facts(6)) == []
    assert live.ring(facts(4), facts(5)) == []
    assert (live.state, live.held) == (LIVE, {1, 2, 3, 4, 5, 6})


def test_a_beat_shows_a_lost_tail(live: Listener) -> None:
    [asked] = live.beat(5)
    assert asked == Recover("last messages lost: 3 of 5 came", 4)
    assert live.state is RECOVERING
    live.ring(facts(4), facts(5))
    assert live.beat(5) == []
    assert live.state is LIVE


def test_a_beat_that_is_late_says_nothing_about_what_came_after_it(live: Listener) -> None:
    assert live.beat(2) == []
    assert live.state is LIVE


def test_a_beat_shows_a_silent_drift_that_only_a_snapshot_mends(live: Listener) -> None:
    [asked] = live.beat(3, 1, 2, 9)
    assert asked == Recover("digest differs", None)
    assert (live.state, live.stream.drifts) == (RECOVERING, 1)
    live.snapshot(3, 1, 2, 9)
    assert (live.state, live.held) == (LIVE, {1, 2, 9})


def test_a_count_that_differs_is_a_drift_too(live: Listener) -> None:
    assert len(live.beat(3, 1, 2, 3, 8, 9, 8 ^ 9)) == 1


def test_a_ring_brings_nothing_to_an_index_that_drifted(live: Listener) -> None:
    live.beat(3, 1, 2, 9)
    assert live.ring(facts(4)) == []
    assert (live.state, live.held) == (RECOVERING, {1, 2, 3})
    assert [one.from_seq for one in live.beat(4)] == [None]


# --- recoveries ---


def test_a_ring_too_short_makes_way_for_a_snapshot(live: Listener) -> None:
    live.hear(facts(9))
    assert [one.from_seq for one in live.fail(from_ring=True)] == [None]
    live.snapshot(9)
    assert (live.state, live.held) == (LIVE, set(range(1, 10)))


def test_a_snapshot_that_failed_is_asked_for_again_with_a_beat(live: Listener) -> None:
    live.hear(facts(9))
    live.fail(from_ring=True)
    assert live.fail(from_ring=False) == []
    assert live.state is RECOVERING
    assert [one.from_seq for one in live.beat(9)] == [None]


def drifting(live: Listener, seconds: int, *, failing: bool = False) -> list[float]:
    """Times at which a stream whose every beat differs is recovered: its relay beats each second
    and its snapshots are never what it beats."""
    asked_s = []
    for i in range(seconds):
        if live.beat(3, 1000 + i, 1):
            asked_s.append(live.now_s)
            if failing:
                live.fail(from_ring=False)
            else:
                live.snapshot(3, 1, 2, 3)
    return asked_s


@pytest.mark.parametrize("failing", [False, True])
def test_a_stream_that_never_stays_right_is_recovered_ever_more_seldom(
    live: Listener, failing: bool
) -> None:
    asked_s = drifting(live, 120, failing=failing)
    pauses_s = [b - a for a, b in pairwise(asked_s)]
    assert pauses_s[: RECOVERIES_FREE + 1] == [1.0] * (RECOVERIES_FREE + 1), "with each beat"
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[-1] == PAUSE_MAX_S
    assert live.stream.pauses == len(asked_s) - RECOVERIES_FREE
    assert live.stream.in_vain(live.now_s) == len(asked_s)
    assert live.stream.in_vain(live.now_s + STEADY_S) == 0
    assert live.state is RECOVERING, "never live on what its beats deny"


def test_a_new_life_at_each_beat_is_recovered_no_faster(live: Listener) -> None:
    asked = [live.beat(5, epoch=Epoch(10 + i, 0)) for i in range(60)]
    assert sum(map(len, asked)) < 15


def test_a_stream_that_was_steady_is_recovered_at_once(live: Listener) -> None:
    drifting(live, 60)
    live.now_s += PAUSE_MAX_S
    assert len(live.beat(3, 7, 8)) == 1
    live.snapshot(3, 7, 8)
    assert live.state is LIVE
    live.now_s += STEADY_S
    live.beat(3, 7, 8)
    assert live.state is LIVE
    assert drifting(live, 4) == [live.now_s - 3, live.now_s - 2, live.now_s - 1, live.now_s]


def test_a_resync_that_an_operator_wants_does_not_wait(live: Listener) -> None:
    drifting(live, 60)
    for _ in range(3):
        assert len(live.perform(live.stream.resync(live.now_s))) == 1


def test_what_heals_during_a_pause_needs_no_recovery(live: Listener) -> None:
    drifting(live, 60)
    live.beat(3, 7, 8, after_s=PAUSE_MAX_S)
    live.snapshot(3)
    assert live.beat(3, 7, 8) == [], "in a pause"
    assert live.state is RECOVERING
    assert live.hear(facts(1, 9, epoch=NEXT)) == []
    assert (live.state, live.held) == (LIVE, {9})


def test_a_failure_after_the_stream_healed_itself_changes_nothing(fresh: Listener) -> None:
    fresh.hear(facts(2))
    fresh.hear(facts(1))
    assert fresh.fail(from_ring=False) == fresh.fail(from_ring=True) == []
    assert fresh.state is LIVE


@pytest.mark.parametrize(
    "answer",
    [
        [],
        [facts(5), facts(6)],
        [facts(4), facts(6)],
        [facts(2), facts(3)],
        [facts(4), facts(5, epoch=NEXT)],
    ],
)
def test_a_ring_that_does_not_close_the_gap_is_not_asked_again(
    live: Listener, answer: list[FactsMessage]
) -> None:
    live.hear(facts(6))
    assert [one.from_seq for one in live.ring(*answer)] == [None]
    assert live.state is RECOVERING
    live.snapshot(6)
    assert (live.state, live.held) == (LIVE, set(range(1, 7)))


@pytest.mark.parametrize("epoch", [OLD, NEXT])
def test_a_ring_of_another_life_is_no_answer(live: Listener, epoch: Epoch) -> None:
    live.hear(facts(5))
    assert live.ring(facts(4, epoch=epoch), epoch=epoch) == []
    assert live.held == {1, 2, 3}
    assert len(live.beat(5)) == 1


def test_a_snapshot_of_a_lower_epoch_is_no_answer(live: Listener) -> None:
    live.stream.resync(live.now_s)
    assert live.snapshot(9, epoch=OLD) == []
    assert live.held == {1, 2, 3}
    assert len(live.beat(3)) == 1


def test_a_snapshot_older_than_the_index_is_no_answer(live: Listener) -> None:
    live.stream.resync(live.now_s)
    assert live.snapshot(2) == []
    assert (live.state, live.held) == (RECOVERING, {1, 2, 3})
    assert len(live.beat(3)) == 1
    live.snapshot(3)
    assert live.state is LIVE


def test_a_snapshot_may_be_the_first_word_of_a_new_life(live: Listener) -> None:
    live.hear(facts(6))
    live.fail(from_ring=True)
    assert live.snapshot(2, 8, 9, epoch=NEXT) == []
    assert (live.stream.epoch, live.state, live.held) == (NEXT, LIVE, {8, 9})
    live.hear(facts(7))
    assert (live.stream.lower_epochs, live.held) == (1, {8, 9})


def test_a_resync_asks_for_a_snapshot_whatever_the_state(live: Listener) -> None:
    [asked] = live.perform(live.stream.resync(live.now_s))
    assert asked == Recover("resync asked for", None)
    assert live.state is RECOVERING


def test_what_waits_is_bounded_in_messages(fresh: Listener) -> None:
    for seq in range(2, BUFFER_MESSAGES_MAX + 10):
        fresh.hear(facts(seq))
    assert fresh.stream.buffer_overflows == 1
    assert len(fresh.stream._buffer) < 10
    [asked] = fresh.snapshot(50)  # older than what was thrown away
    assert asked.from_seq == 51
    fresh.fail(from_ring=True)
    fresh.snapshot(BUFFER_MESSAGES_MAX + 9)
    assert fresh.state is LIVE


def test_a_stream_that_let_go_of_what_waited_is_not_live_on_an_older_snapshot(
    fresh: Listener,
) -> None:
    fresh.hear(facts(2), facts(3))
    fresh.stream.let_go()
    [asked] = fresh.snapshot(1)
    assert asked == Recover("no space for waiting messages", 2)
    assert fresh.state is RECOVERING
    assert fresh.ring(facts(2), facts(3)) == []
    assert fresh.state is LIVE


def test_what_a_stream_let_go_of_in_an_earlier_life_is_forgotten(fresh: Listener) -> None:
    fresh.hear(facts(2), facts(3))
    fresh.stream.let_go()
    assert fresh.snapshot(1, epoch=NEXT) == []
    assert fresh.state is LIVE


def test_what_waits_is_bounded_in_bytes(fresh: Listener) -> None:
    for seq in range(2, 40):
        fresh.stream.on_facts(facts(seq), BUFFER_BYTES_MAX // 20, fresh.now_s)
        assert fresh.stream.waiting_bytes <= BUFFER_BYTES_MAX
    assert fresh.stream.buffer_overflows == 1


def test_nothing_waits_in_a_stream_that_is_in_step(live: Listener) -> None:
    live.hear(facts(5), facts(6))
    live.ring(facts(4), facts(5), facts(6))
    assert (live.stream._buffer, live.stream.waiting_bytes) == ([], 0)


# --- epochs ---


def test_a_higher_epoch_forgets_all_and_starts_over(live: Listener) -> None:
    assert live.hear(facts(1, 50, epoch=NEXT)) == []
    assert (live.held, live.stream.seq, live.state) == ({50}, 1, LIVE)


def test_a_beat_of_a_higher_epoch_is_no_drift(live: Listener) -> None:
    assert live.beat(0, epoch=NEXT) == []
    assert (live.held, live.state, live.stream.drifts) == (set(), LIVE, 0)


def test_a_higher_epoch_heard_late_is_asked_for(live: Listener) -> None:
    assert [one.from_seq for one in live.hear(facts(4, epoch=NEXT))] == [None]
    assert (live.held, live.state) == (set(), RECOVERING)


def test_a_higher_epoch_asks_anew_while_an_answer_for_the_old_one_is_awaited(
    live: Listener,
) -> None:
    assert len(live.hear(facts(6))) == 1
    assert [one.from_seq for one in live.hear(facts(4, epoch=NEXT))] == [None]


def test_what_waited_of_a_lower_epoch_is_gone_with_it(live: Listener) -> None:
    live.hear(facts(5))
    live.hear(facts(1, 50, epoch=NEXT), facts(2, 51, epoch=NEXT))
    assert live.held == {50, 51}
    assert live.hear(facts(3, 52, epoch=NEXT), facts(4, 53, epoch=NEXT)) == []
    assert live.held == {50, 51, 52, 53}


def test_what_a_lower_epoch_says_changes_nothing(live: Listener) -> None:
    before = live.stream.last_beat_s
    assert live.hear(facts(4, epoch=OLD)) == live.beat(9, epoch=OLD) == []
    assert (live.held, live.state, live.stream.seq) == ({1, 2, 3}, LIVE, 3)
    assert live.stream.lower_epochs == 2
    assert live.stream.last_beat_s == before


def test_a_lower_epoch_that_beats_on_takes_over_when_the_higher_one_is_silent(
    live: Listener,
) -> None:
    live.beat(3, epoch=OLD, after_s=2.9)
    assert (live.stream.epoch, live.held) == (NOW, {1, 2, 3})
    live.hear(facts(1, epoch=OLD))  # a straggler, for all one can tell
    live.now_s += 0.1
    live.hear(facts(2, epoch=OLD))
    assert (live.stream.epoch, live.held) == (NOW, {1, 2, 3})
    assert [one.from_seq for one in live.beat(3, epoch=OLD, after_s=0.0)] == [None]
    assert (live.stream.epoch, live.state, live.held) == (OLD, RECOVERING, set())
    live.snapshot(3, 7, 8, epoch=OLD)
    assert (live.state, live.held) == (LIVE, {7, 8})
    live.beat(0, epoch=NOW)
    assert (live.stream.epoch, live.held) == (NOW, set())


def test_two_relays_that_alternate_are_an_alarm_that_ends(live: Listener) -> None:
    for _ in range(2):
        live.beat(3, epoch=OLD, after_s=0.5)
        live.beat(3, after_s=0.5)
    assert not live.stream.two_relays(live.now_s)
    live.beat(3, epoch=OLD)
    assert live.stream.two_relays(live.now_s)
    assert live.state is LIVE
    assert not live.stream.two_relays(live.now_s + 11)
    live.beat(3, epoch=OLD, after_s=60)
    assert not live.stream.two_relays(live.now_s)


# --- silence and our own connection ---


def test_a_stream_is_live_for_two_beats_after_a_loss_even_if_its_beats_are_lost_too(
    live: Listener,
) -> None:
    live.stream.on_tick(live.now_s + 1.9)
    assert live.state is LIVE
    live.stream.on_tick(live.now_s + 2.0)
    assert (live.state, live.stream.reason) == (SUSPECT, "no beat for 2 s")
    live.now_s += 2.1
    live.hear(facts(4))  # nothing that a beat would not have to confirm
    assert live.state is SUSPECT
    live.beat(4, after_s=0.1)
    assert live.state is LIVE


def test_a_stream_without_a_beat_falls_silent_and_comes_back_with_one(live: Listener) -> None:
    live.stream.on_tick(live.now_s + 2.9)
    assert live.state is SUSPECT
    live.stream.on_tick(live.now_s + 3.0)
    assert (live.state, live.stream.reason) == (SILENT, "no beat for 3 s")
    assert live.stream.silent_for_s(live.now_s + 3.0) == 3.0
    assert live.beat(3, after_s=20.0) == []
    assert live.state is LIVE


def test_a_stream_that_recovers_keeps_its_reason_while_time_goes_by(live: Listener) -> None:
    live.hear(facts(5))
    live.stream.on_tick(live.now_s + 0.25)
    assert (live.state, live.stream.reason) == (RECOVERING, "gap: 3 then 5")


def test_facts_without_a_beat_are_applied_and_not_trusted(live: Listener) -> None:
    live.now_s += 5
    live.hear(facts(4))
    assert (live.state, live.held) == (SILENT, {1, 2, 3, 4})


def test_without_our_connection_nobody_can_tell(live: Listener) -> None:
    live.stream.on_connection(False, live.now_s)
    assert live.state is SUSPECT
    live.stream.on_tick(live.now_s + 100)
    assert live.state is SUSPECT
    assert live.stream.silent_for_s(live.now_s + 100) == 0.0


def test_a_connection_that_came_back_is_suspect_until_a_beat(live: Listener) -> None:
    live.stream.on_connection(False, live.now_s)
    live.now_s += 60
    live.stream.on_connection(True, live.now_s)
    live.hear(facts(4))
    assert live.state is SUSPECT
    assert live.beat(4) == []
    assert live.state is LIVE


def test_what_was_lost_with_the_connection_shows_in_the_next_beat(live: Listener) -> None:
    live.stream.on_connection(False, live.now_s)
    live.stream.on_connection(True, live.now_s)
    assert [one.from_seq for one in live.beat(6)] == [4]
    assert live.state is RECOVERING


def test_timers_start_again_on_reconnect(live: Listener) -> None:
    live.stream.on_connection(False, live.now_s)
    live.now_s += 60
    live.stream.on_connection(True, live.now_s)
    live.stream.on_tick(live.now_s + 2.9)
    assert live.state is SUSPECT
    live.stream.on_tick(live.now_s + 3.0)
    assert live.state is SILENT


def test_the_lag_is_from_the_relays_reading_to_our_applying(live: Listener) -> None:
    live.now_s = 205.0
    live.hear(FactsMessage(VERSION, NOW, 4, [Cleared()], 203.5))
    assert live.stream.lag_s == 1.5
    live.hear(FactsMessage(VERSION, NOW, 5, [Cleared()], 300.0))
    assert live.stream.lag_s == 0.0
