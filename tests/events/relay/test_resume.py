"""A relay that starts again with the ledger that its last life saved: when it believes it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.plane.facts import Beat, FactsMessage, SnapshotRequest
from events.relay import rank as rank_module
from events.relay.rank import EngineState, Rank
from events.relay.saved_ledger import Source, pack, unpack
from indexer.identity import EngineHash, WorkerKey
from tests.events.relay.one_rank import (
    CLEARED,
    EPOCH,
    NOW_S,
    Engine,
    Life,
    Message,
    epochs_of,
    following,
    removed,
    started,
    stored,
)

SOURCE = Source(WorkerKey("w", 0), "vllm", 4)
STARTED_S = NOW_S - 50.0
"""When the engine's process started."""


def kept_by(engine: Engine) -> bytes:
    kept = engine.rank.kept(engine.now_s)
    assert kept is not None
    return pack(SOURCE, *kept)


def born(kept: bytes | None, has_replay: bool = True) -> Engine:
    """The next life of the relay, a second later, not started yet."""
    engine = Engine(has_replay)
    engine.now_s = NOW_S + 1.0
    if kept is not None:
        engine.rank.resume(*unpack(SOURCE, kept))
    return engine


def started_again(before: Engine, has_replay: bool = True) -> Engine:
    """The next life of the relay, started with what this one kept."""
    engine = born(kept_by(before), has_replay)
    engine.start()
    return engine


def tell_start(engine: Engine, started_s: float = STARTED_S) -> list[int]:
    return engine.perform(engine.rank.on_process_start(started_s, engine.now_s))


def resumed(engine: Engine) -> tuple[int, int]:
    """How often what was kept was believed, and dropped."""
    counts = engine.rank.counts
    return counts["saved_ledger_resumed"], counts["saved_ledger_dropped"]


# --- with a replay socket ---


def test_a_saved_ledger_is_believed_when_its_last_message_is_still_there() -> None:
    engine = born(kept_by(following(5)))
    assert engine.start() == [4]
    assert (engine.held(), engine.complete()) == (0, False)
    engine.replay(4, 5, 6)
    assert (engine.held(), engine.complete(), resumed(engine)) == (7, True, (1, 0))
    assert engine.hear(7, removed(0)) == []
    assert engine.held() == 6


def test_nothing_of_a_saved_ledger_is_told_before_it_is_believed() -> None:
    engine = started_again(following(5))
    engine.hear(6)
    _, chunk = engine.rank.answer(SnapshotRequest(), engine.now_s)
    assert (chunk.facts, chunk.complete) == ([], False)
    beats = [one for one in engine.told() if isinstance(one, Beat)]
    assert {(beat.seq, beat.blocks, beat.digest) for beat in beats} == {(0, 0, 0)}


def test_what_was_kept_begins_an_epoch_that_routers_have_to_ask_about() -> None:
    engine = started_again(following(5))
    engine.rank.beat(engine.now_s)
    before = len(engine.sent)
    engine.replay(4)
    first = engine.told()[before]
    assert isinstance(first, Beat)
    assert (first.seq, first.blocks) == (1, 5), "not a life heard from its first word on"
    assert epochs_of(engine) == [first.epoch]
    _, ring = engine.rank.answer(SnapshotRequest(from_seq=1), engine.now_s)
    assert ring.expired
    _, chunk = engine.rank.answer(SnapshotRequest(), engine.now_s)
    assert sum(len(fact.hashes) for fact in chunk.facts) == 8 * 5
    engine.hear(5)
    numbers = [one.seq for one in engine.told() if isinstance(one, FactsMessage)]
    assert numbers == [] or numbers == [2]


def test_live_messages_wait_for_the_proof_and_follow_it() -> None:
    engine = started_again(following(5))
    engine.hear(6)
    engine.hear(7)
    assert engine.replay(4, 5, 6) == []
    assert (engine.held(), engine.complete()) == (8, True)


def test_a_partial_map_stays_partial_until_the_engine_clears() -> None:
    before = started()
    before.replay(5, 6)  # the beginning was gone
    engine = started_again(before)
    engine.replay(6, 7)
    assert (engine.held(), engine.complete(), resumed(engine)) == (3, False, (1, 0))
    engine.hear(8, CLEARED)
    assert engine.complete()


OTHER = [(seq, stored(50 + seq, life=1)) for seq in range(9)]
"""What another life of the engine says."""


@pytest.mark.parametrize(
    "answer",
    [OTHER[4:], [], OTHER[5:]],
    ids=["other bytes", "no such message", "gone from the ring"],
)
def test_a_replay_that_does_not_bear_a_map_out_is_asked_for_from_the_start(
    answer: list[Message],
) -> None:
    engine = started_again(following(5))
    assert engine.begin_replay(*answer) == [0]
    assert (engine.held(), resumed(engine)) == (0, (0, 1))
    engine.replay(*OTHER)
    assert (engine.held(), engine.complete()) == (9, True)


def test_a_replay_socket_that_does_not_answer_bears_nothing_out() -> None:
    engine = started_again(following(5))
    assert engine.replay(ended=False) == [0]
    engine.replay(ended=False)
    assert (engine.held(), engine.complete(), resumed(engine)) == (0, False, (0, 1))
    engine.hear(5)
    engine.replay(5)
    assert (engine.held(), engine.complete()) == (1, False)


def test_a_replay_cut_off_after_the_proof_leaves_a_gap_that_is_healed() -> None:
    engine = started_again(following(5))
    engine.replay(4, 5, ended=False)
    assert (engine.held(), engine.complete()) == (6, True)
    assert engine.hear(8) == [5]
    engine.replay(5, 6, 7, 8)
    assert (engine.held(), engine.complete()) == (9, True)


def test_an_engine_that_restarts_while_the_proof_is_under_way_ends_the_matter() -> None:
    engine = started_again(following(5))
    engine.hear(6)
    engine.hear(0, OTHER[0][1])
    assert (engine.held(), engine.complete(), resumed(engine)) == (1, True, (0, 1))
    assert engine.replay(4, 5, 6) == []
    assert engine.held() == 1


def test_what_waits_is_applied_in_parts_after_a_proof_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_module, "CATCH_UP_BYTES", 1)
    engine = started_again(following(5))
    engine.begin_replay(*range(4, 9))
    assert (engine.rank.state, engine.held()) == (EngineState.CATCHING_UP, 5)
    engine.perform(engine.rank.catch_up(engine.now_s))
    assert (engine.rank.state, engine.held()) == (EngineState.CATCHING_UP, 6)
    again = born(kept_by(engine))  # and may be kept between two messages
    again.start()
    again.replay(*range(5, 9))
    assert (resumed(again), again.held()) == ((1, 0), 9)


# --- without one ---


def test_without_a_replay_socket_the_same_process_and_the_very_next_message_are_proof() -> None:
    before = following(5, has_replay=False)
    tell_start(before)
    engine = born(kept_by(before), has_replay=False)
    assert engine.start() == []
    tell_start(engine)
    assert engine.held() == 0
    engine.hear(5)
    assert (engine.held(), engine.complete(), resumed(engine)) == (6, True, (1, 0))


@pytest.mark.parametrize(
    ("started_s", "seq"),
    [(None, 5), (STARTED_S + 1, 5), (STARTED_S - 1, 5), (STARTED_S, 6), (STARTED_S, 4)],
)
def test_without_a_replay_socket_anything_else_is_none(started_s: float | None, seq: int) -> None:
    before = following(5, has_replay=False)
    tell_start(before)
    engine = started_again(before, has_replay=False)
    if started_s is not None:
        tell_start(engine, started_s)
    engine.hear(seq)
    assert (engine.held(), engine.complete(), resumed(engine)) == (1, False, (0, 1))


def test_a_start_that_was_never_told_is_no_proof() -> None:
    engine = born(kept_by(following(5, has_replay=False)), has_replay=False)
    engine.hear(5)
    assert (engine.held(), resumed(engine)) == (1, (0, 1))


# --- the engine's process ---


@pytest.mark.parametrize("told", ["before", "after"])
def test_a_process_that_started_after_the_checkpoint_ends_the_matter_at_once(told: str) -> None:
    kept = kept_by(following(5))
    engine = born(None)
    if told == "before":
        tell_start(engine, NOW_S + 0.5)
    engine.rank.resume(*unpack(SOURCE, kept))
    asked = engine.start()
    if told == "after":
        assert asked == [4]
        asked = tell_start(engine, NOW_S + 0.5)
    assert (asked, resumed(engine)) == ([0], (0, 1))
    engine.replay(*OTHER[:5])
    assert (engine.held(), engine.complete()) == (5, True)


def test_the_same_process_told_again_is_no_news_whatever_its_clock() -> None:
    before = following(5)
    tell_start(before, NOW_S + 1000)  # another life, by a clock far ahead
    before.replay(0, 1, 2)
    engine = born(kept_by(before))
    assert engine.start() == [2]
    engine.replay(2)
    tell_start(engine, NOW_S + 1000)
    assert (engine.held(), engine.rank.engine_restarts, resumed(engine)) == (3, 0, (1, 0))


def test_a_process_that_starts_after_the_proof_is_another_life() -> None:
    before = following(5)
    tell_start(before)
    engine = started_again(before)
    engine.replay(4)
    tell_start(engine)
    assert engine.held() == 5
    engine.now_s += 60
    assert tell_start(engine, engine.now_s - 1) == [0]
    assert (engine.held(), engine.rank.engine_restarts) == (0, 1)


# --- what is kept ---


def test_a_relay_that_has_heard_nothing_keeps_nothing() -> None:
    engine = started()
    engine.hear(3)
    assert engine.rank.kept(NOW_S) is None
    again = born(kept_by(following(5)))
    again.start()
    assert again.rank.kept(NOW_S) is None, "not what the file says anyway"


def test_a_position_changes_with_what_is_worth_keeping() -> None:
    engine = following(3)
    positions = [engine.rank.position]
    engine.sent += engine.rank.beat(NOW_S)
    assert engine.rank.position == positions[0]
    engine.hear(3)
    positions.append(engine.rank.position)
    tell_start(engine)
    positions.append(engine.rank.position)
    engine.hear(0, OTHER[0][1])
    positions.append(engine.rank.position)
    assert len(set(positions)) == 4


def test_what_goes_wrong_in_a_resumed_ledger_is_counted_with_the_rest() -> None:
    engine = started_again(following(5))
    engine.replay(4, (5, removed(77)))
    assert engine.rank.counts["unknown_removal"] == 1


# --- against a relay that never died ---

SAY = st.tuples(st.booleans(), st.integers(0, 7))
WORDS = st.lists(SAY, max_size=12)
MISSED = st.just([]) | WORDS


class Wire:
    """An engine, what it said, and relays that hear it without loss while they are up."""

    def __init__(self, ring_batches: int) -> None:
        self.life = Life(0)
        self.started_s = STARTED_S
        self.now_s = NOW_S
        self.ears: list[Engine] = []
        self._ring_batches = ring_batches

    def say(self, words: list[tuple[bool, int]]) -> None:
        for remove, block in words:
            message = self.life.say(remove, block)
            for ear in self.ears:
                ear.hear(*message)

    def restart(self, told: bool) -> None:
        self.now_s += 1.0
        self.life = Life(self.life.number + 1)
        self.started_s = self.now_s
        for ear in self.ears:
            ear.now_s = self.now_s
            if told:
                tell_start(ear, self.started_s)

    def connect(self, ear: Engine, told: bool) -> None:
        """A relay comes up: it subscribes, and then asks what it needs."""
        ear.now_s = self.now_s = self.now_s + 1.0
        if told:
            tell_start(ear, self.started_s)
        ear.start()
        self.ears.append(ear)

    def replay(self) -> None:
        """All that is asked for is answered."""
        oldest = len(self.life.messages) - self._ring_batches
        for ear in self.ears:
            while ear.rank.state is EngineState.HEALING:
                ear.replay(*self.life.messages[max(ear.asked[-1], oldest, 0) :])


def names_of(rank: Rank) -> set[EngineHash]:
    names: set[EngineHash] = {name for name in range(10) if name in rank.ledger}
    assert len(names) == len(rank.ledger)
    return names


@settings(derandomize=True, deadline=None, max_examples=600, database=None)
@given(
    late=st.booleans(),
    words=st.tuples(WORDS, WORDS, MISSED, MISSED, WORDS, WORDS),
    restart=st.sampled_from(["never", "never", "before", "after", "down", "up"]),
    ring_batches=st.sampled_from([10_000, 10_000, 10, 3, 0]),
    has_replay=st.booleans(),
    told=st.booleans(),
)
@pytest.mark.long
def test_a_relay_that_was_killed_ends_like_one_that_never_died_or_like_one_that_knew_nothing(
    late: bool,
    words: tuple[list[tuple[bool, int]], ...],
    restart: str,
    ring_batches: int,
    has_replay: bool,
    told: bool,
) -> None:
    early, kept_words, lost_words, down_words, waiting_words, last_words = words
    wire = Wire(ring_batches)
    wire.say(early if late else [])  # a relay that comes late begins partial
    immortal, killed = Engine(has_replay), Engine(has_replay)
    wire.connect(immortal, told)
    wire.connect(killed, told)
    wire.replay()
    if restart == "before":
        wire.restart(told)
    wire.say(kept_words)
    wire.replay()
    kept = killed.rank.kept(wire.now_s)
    data = None if kept is None else pack(SOURCE, *kept)
    if restart == "after":
        wire.restart(told)
    wire.say(lost_words)
    wire.ears.remove(killed)
    if restart == "down":
        wire.restart(told)
    wire.say(down_words)
    risen, newborn = born(data, has_replay), born(None, has_replay)
    wire.connect(risen, told)
    wire.connect(newborn, told)
    wire.say(waiting_words)
    wire.replay()
    if restart == "up":
        wire.restart(told)
    wire.say(last_words)
    wire.say([(False, 9)])
    wire.replay()

    truth = wire.life.held[-1]
    for ear in wire.ears:
        assert names_of(ear.rank) <= truth
        assert not ear.complete() or names_of(ear.rank) == truth
    outcome = names_of(risen.rank), risen.complete()
    believed, _ = resumed(risen)
    if believed:
        told_before = [one for one in risen.told() if one.epoch == EPOCH]
        assert all(isinstance(one, Beat) and not one.blocks for one in told_before)
        assert outcome == (names_of(immortal.rank), immortal.complete())
    else:
        assert outcome == (names_of(newborn.rank), newborn.complete())
    if kept is not None and restart in ("never", "before"):
        missed = len(lost_words) + len(down_words)
        if has_replay:
            reaches = ring_batches > missed + len(waiting_words)
            assert bool(believed) == reaches
        elif told:
            assert bool(believed) == (missed == 0)
