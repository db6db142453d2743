"""One engine rank as its relay follows it: its sequence, gaps, replays, restarts."""

import msgspec
import pytest

from events.plane.facts import (
    Beat,
    Cleared,
    Epoch,
    FactsMessage,
    SnapshotChunk,
    SnapshotRequest,
    decode_stream,
)
from events.relay.ledger import COPIES_MAX
from events.relay.rank import HELD_BYTES_MAX, HELD_MESSAGES_MAX, EngineState, Rank
from tests.events.relay.one_rank import (
    CLEARED,
    EPOCH,
    NOW_S,
    SAID_S,
    Engine,
    batch,
    epochs_of,
    facts_of,
    following,
    long,
    removed,
    started,
    stored,
)

STARTING, HEALING, CATCHING_UP, FOLLOWING = EngineState
# --- starts ---


def test_without_a_replay_socket_a_life_heard_from_0_is_complete() -> None:
    engine = Engine(has_replay=False)
    assert engine.start() == []
    engine.hear(0)
    engine.hear(1)
    assert (engine.rank.state, engine.held(), engine.complete()) == (FOLLOWING, 2, True)


def test_without_a_replay_socket_a_late_start_is_partial_until_the_engine_clears() -> None:
    engine = Engine(has_replay=False)
    engine.hear(7)
    assert (engine.held(), engine.complete()) == (1, False)
    engine.hear(8, CLEARED)
    assert (engine.held(), engine.complete()) == (0, True)


def test_with_a_replay_socket_live_messages_wait_for_its_answer() -> None:
    engine = Engine()
    assert engine.start() == [0]
    assert engine.rank.state is HEALING
    engine.hear(3)
    engine.hear(4)
    assert engine.held() == 0
    engine.replay(0, 1, 2, 3)
    assert (engine.held(), engine.rank.state, engine.complete()) == (5, FOLLOWING, True)


def test_an_engine_that_said_nothing_yet_is_complete() -> None:
    engine = started()
    engine.replay()
    assert engine.complete()
    engine.hear(0)
    assert (engine.held(), engine.complete()) == (1, True)


def test_a_replay_that_has_lost_the_beginning_is_partial() -> None:
    engine = started()
    engine.replay(5, 6)
    assert (engine.held(), engine.complete()) == (2, False)
    engine.hear(7)
    assert (engine.held(), engine.asked) == (3, [0])


def test_a_replay_that_was_cut_off_is_not_taken_for_all() -> None:
    engine = started()
    engine.replay(0, 1, ended=False)
    assert (engine.held(), engine.complete()) == (2, False)
    assert engine.rank.counts["replay_cut_off"] == 1


def test_a_replay_cut_off_before_what_waited_empties_the_ledger() -> None:
    engine = started()
    engine.hear(5)
    engine.replay(0, 1, ended=False)
    assert (engine.held(), engine.complete()) == (1, False)


def test_a_hole_in_a_replay_empties_the_ledger() -> None:
    engine = started()
    engine.replay(0, 1, 3, 4)
    assert (engine.held(), engine.complete()) == (2, False)


def test_a_gap_before_anything_was_heard_is_asked_for_from_the_start() -> None:
    engine = started()
    engine.replay(ended=False)  # a socket that doesn't answer
    assert engine.hear(4) == [0]
    engine.replay(0, 1, 2, 3, 4)
    assert (engine.held(), engine.complete()) == (5, True)


def test_a_replay_socket_that_never_answers_costs_completeness_and_no_more() -> None:
    engine = started()
    engine.replay(ended=False)
    engine.hear(4)
    engine.replay(ended=False)
    engine.hear(5)
    assert (engine.held(), engine.complete(), engine.rank.state) == (2, False, FOLLOWING)


# --- gaps ---


def test_a_gap_is_healed_from_the_last_message_we_have() -> None:
    engine = following(3)
    assert engine.hear(5) == [2]
    assert engine.rank.state is HEALING
    engine.hear(6)
    engine.replay(2, 3, 4, 5)
    assert (engine.held(), engine.complete(), engine.rank.engine_gaps) == (7, True, 1)
    assert not any(isinstance(fact, Cleared) for fact in facts_of(engine))


def test_what_was_lost_with_the_connection_is_healed_before_the_next_message_shows_it() -> None:
    engine = following(3)
    assert engine.perform(engine.rank.on_reconnected()) == [2]
    assert engine.rank.state is HEALING
    engine.replay(2, 3, 4)
    assert (engine.held(), engine.complete(), engine.rank.engine_gaps) == (5, True, 0)


def test_another_connection_after_which_nothing_is_missing_changes_nothing() -> None:
    engine = following(3)
    engine.perform(engine.rank.on_reconnected())
    engine.replay(2)
    assert (engine.held(), engine.complete(), engine.rank.state) == (3, True, FOLLOWING)
    assert engine.hear(3) == []


def test_the_connection_to_an_engine_that_was_not_there_is_a_start() -> None:
    engine = started()
    engine.replay(ended=False)
    assert not engine.complete()
    assert engine.perform(engine.rank.on_reconnected()) == [0]
    engine.replay(0, 1)
    assert (engine.held(), engine.complete()) == (2, True)


def test_a_connection_changes_nothing_while_a_replay_is_awaited_or_without_its_socket() -> None:
    engine = started()
    assert engine.rank.on_reconnected() == []
    assert following(3, has_replay=False).rank.on_reconnected() == []


def test_a_gap_without_a_replay_socket_empties_the_ledger() -> None:
    engine = following(3, has_replay=False)
    assert engine.hear(5) == []
    assert (engine.held(), engine.complete(), engine.rank.engine_gaps) == (1, False, 1)
    assert isinstance(facts_of(engine)[-2], Cleared)


@pytest.mark.parametrize(
    ("answer", "held"),
    [([], 1), ([4, 5], 2), ([3, 4, 5], 3), ([2, 3], 1), ([2, 3, 5], 1)],
)
def test_a_gap_that_stays_empties_the_ledger(answer: list[int], held: int) -> None:
    engine = following(3)
    engine.hear(5)
    engine.replay(*answer)
    assert (engine.held(), engine.complete(), engine.rank.state) == (held, False, FOLLOWING)
    assert engine.hear(6) == []
    assert engine.held() == held + 1


def test_what_was_applied_is_not_applied_again() -> None:
    engine = following(3)
    engine.hear(5)
    engine.replay(2, 3, 4, 5)
    engine.hear(6, removed(2))
    engine.hear(7, removed(3))
    assert engine.held() == 4
    assert engine.rank.counts["BlocksStored"] == 6


def test_what_waits_is_bounded_in_messages() -> None:
    engine = started()
    payload = batch()
    for seq in range(HELD_MESSAGES_MAX + 5):
        engine.hear(seq, payload)
    assert engine.rank.counts["held_overflow"] == 5
    engine.replay((0, payload))
    assert not engine.complete()
    assert engine.rank._next_seq == HELD_MESSAGES_MAX + 5


def test_what_waits_is_bounded_in_bytes() -> None:
    engine = started()
    payload = bytes(HELD_BYTES_MAX // 8)
    for seq in range(12):
        engine.hear(seq, payload)
    assert engine.rank.counts["held_overflow"] == 4
    assert engine.rank._held_bytes <= HELD_BYTES_MAX


# --- other lives ---


def test_a_sequence_that_goes_back_to_0_is_another_life() -> None:
    engine = following(3)
    assert engine.hear(0, stored(50, life=1)) == []
    assert (engine.held(), engine.complete(), engine.rank.engine_restarts) == (1, True, 1)
    first, second = epochs_of(engine)
    assert first < second
    assert second.start_ns == int(NOW_S * 1e9)


def test_a_new_life_says_so_at_once() -> None:
    engine = following(3)
    sent = len(engine.sent)
    engine.hear(0, stored(50, life=1))
    beat, _ = decode_stream(engine.sent[sent])
    assert isinstance(beat, Beat)
    assert (beat.seq, beat.blocks, beat.digest) == (0, 0, 0)


def test_a_sequence_that_goes_back_past_0_is_healed_from_the_start() -> None:
    engine = following(5)
    assert engine.hear(2, stored(52, life=1)) == [0]
    assert engine.held() == 0
    engine.replay(*((seq, stored(50 + seq, life=1)) for seq in range(3)))
    assert (engine.held(), engine.complete(), engine.rank.engine_restarts) == (3, True, 1)


def test_a_sequence_that_goes_back_past_0_without_a_replay_socket_is_partial() -> None:
    engine = following(5, has_replay=False)
    engine.hear(2, stored(52, life=1))
    assert (engine.held(), engine.complete()) == (1, False)


def test_a_replay_with_other_bytes_at_our_number_is_of_another_life() -> None:
    engine = following(3)
    assert engine.hear(5, stored(55, life=1)) == [2]
    life = [(seq, stored(50 + seq, life=1)) for seq in range(6)]
    assert engine.replay(*life[2:]) == [0]
    engine.hear(6, stored(56, life=1))
    engine.replay(*life)
    assert (engine.held(), engine.complete(), engine.rank.engine_restarts) == (7, True, 1)
    assert len(epochs_of(engine)) == 2


def test_an_engine_that_restarts_while_we_heal_is_another_life() -> None:
    engine = following(3)
    engine.hear(5)
    assert engine.hear(0, stored(50, life=1)) == []
    assert (engine.held(), engine.complete(), engine.rank.engine_restarts) == (1, True, 1)
    assert engine.replay(2, 3, 4, 5) == []  # what the last life's socket still said
    engine.hear(1, stored(51, life=1))
    assert engine.held() == 2


def test_an_engine_that_restarts_while_we_start_is_healed_from_the_start() -> None:
    engine = started()
    engine.hear(7)
    assert engine.hear(3, stored(53, life=1)) == [0]
    engine.replay(*((seq, stored(50 + seq, life=1)) for seq in range(4)))
    assert (engine.held(), engine.complete()) == (4, True)


def test_a_first_live_message_from_before_ours_while_we_heal_is_another_life() -> None:
    engine = following(5)
    engine.rank.state = HEALING  # a replay is under way, and nothing has come since
    assert engine.hear(1, stored(51, life=1)) == [0]
    engine.replay((0, stored(50, life=1)), (1, stored(51, life=1)))
    assert (engine.held(), engine.complete()) == (2, True)


def test_each_life_has_a_later_epoch_even_within_one_instant() -> None:
    engine = following(1)
    for life in range(1, 5):
        engine.hear(0, stored(50, life))
        engine.hear(1, stored(51, life))
    assert len(epochs_of(engine)) == 5
    assert epochs_of(engine) == sorted(epochs_of(engine))


def test_numbers_count_from_1_in_each_life() -> None:
    engine = following(2)
    engine.sent += engine.rank.flush()
    engine.hear(0, stored(50, life=1))
    numbers = [(one.epoch, one.seq) for one in engine.told() if isinstance(one, FactsMessage)]
    assert [seq for _, seq in numbers] == [1, 1]


# --- a replay that overtakes the publisher ---


def test_live_messages_that_a_replay_overtook_are_no_restart() -> None:
    engine = started()
    engine.replay(0, 1, 2)
    assert engine.hear(1) == engine.hear(2) == []
    assert (engine.held(), engine.rank.engine_restarts) == (3, 0)
    engine.hear(3)
    assert engine.complete()


def test_live_messages_that_a_healing_replay_overtook_are_no_restart() -> None:
    engine = following(3)
    engine.hear(5)
    engine.replay(2, 3, 4, 5, 6, 7)
    engine.hear(6)
    engine.hear(7)
    engine.hear(8)
    assert (engine.held(), engine.rank.engine_restarts, engine.complete()) == (9, 0, True)


def test_another_life_is_no_message_that_was_overtaken() -> None:
    engine = started()
    engine.replay(0, 1, 2)
    engine.hear(0, stored(50, life=1))
    assert (engine.held(), engine.rank.engine_restarts) == (1, 1)


def test_once_the_publisher_has_caught_up_nothing_is_overtaken() -> None:
    engine = started()
    engine.replay(0, 1, 2)
    engine.hear(3)
    engine.hear(2)
    assert engine.rank.engine_restarts == 1


# --- the engine's process ---


def test_a_process_older_than_its_first_message_is_the_one_we_follow() -> None:
    engine = following(3)
    assert engine.perform(engine.rank.on_process_start(NOW_S - 50, NOW_S)) == []
    assert engine.held() == 3


def test_a_process_that_starts_later_is_another_life() -> None:
    engine = following(3)
    engine.now_s = NOW_S + 60
    asked = engine.perform(engine.rank.on_process_start(NOW_S + 50, engine.now_s))
    assert asked == [0]
    assert (engine.held(), engine.rank.engine_restarts) == (0, 1)
    engine.replay((0, stored(50, life=1)))
    assert (engine.held(), engine.complete()) == (1, True)


def test_a_process_that_starts_later_without_a_replay_socket_starts_over() -> None:
    engine = following(3, has_replay=False)
    engine.now_s = NOW_S + 60
    engine.perform(engine.rank.on_process_start(NOW_S + 50, engine.now_s))
    assert engine.rank.state is STARTING
    engine.hear(0, stored(50, life=1))
    assert (engine.held(), engine.complete(), engine.rank.engine_restarts) == (1, True, 1)


def test_a_process_that_starts_before_it_says_anything_is_no_news() -> None:
    engine = Engine(has_replay=False)
    assert engine.perform(engine.rank.on_process_start(NOW_S, NOW_S)) == []
    engine.now_s += 1
    engine.hear(0)
    assert engine.perform(engine.rank.on_process_start(NOW_S, NOW_S)) == []
    assert (engine.held(), engine.complete(), engine.rank.engine_restarts) == (1, True, 0)


def test_a_process_that_starts_again_before_it_says_anything_is_another_life() -> None:
    engine = Engine(has_replay=False)  # so is one that publishes no events at all
    assert engine.perform(engine.rank.on_process_start(NOW_S, NOW_S)) == []
    engine.now_s += 60
    engine.perform(engine.rank.on_process_start(NOW_S + 50, engine.now_s))
    assert engine.rank.engine_restarts == 1
    assert epochs_of(engine) == [Epoch(int(engine.now_s * 1e9), EPOCH.nonce)]


def test_an_engine_whose_clock_is_ahead_has_one_life() -> None:
    engine = following(3)
    for _ in range(10):
        engine.now_s += 0.5
        engine.perform(engine.rank.on_process_start(NOW_S + 1000, engine.now_s))
        if engine.rank.state is HEALING:
            engine.replay(0, 1, 2)
    assert engine.rank.engine_restarts == 1
    assert engine.held() == 3


def test_what_waited_of_a_process_that_is_gone_is_not_mixed_with_the_next() -> None:
    engine = started()
    engine.hear(0)
    engine.hear(1)
    engine.now_s = NOW_S + 60
    assert engine.perform(engine.rank.on_process_start(NOW_S + 50, engine.now_s)) == [0]
    engine.replay((0, stored(50, life=1)), ended=False)
    assert engine.held() == 1


def test_a_restart_seen_in_the_sequence_is_not_counted_again_by_its_process() -> None:
    engine = following(3)
    engine.now_s = NOW_S + 60
    engine.hear(0, stored(50, life=1))
    engine.perform(engine.rank.on_process_start(NOW_S + 50, engine.now_s))
    assert (engine.held(), engine.rank.engine_restarts) == (1, 1)


# --- what a dead process still says ---


def said_at(time_s: float, block: int) -> bytes:
    """As stored(block), made at that time."""
    _, events, rank = msgspec.msgpack.decode(stored(block))
    return msgspec.msgpack.encode([time_s, events, rank])


def test_what_the_last_life_said_does_not_go_on_where_the_replay_of_the_next_one_ends() -> None:
    engine = following(3)
    engine.now_s = NOW_S + 60
    assert engine.perform(engine.rank.on_process_start(NOW_S + 50, engine.now_s)) == [0]
    engine.hear(3, said_at(SAID_S, 3))  # was on its way
    engine.hear(4, said_at(SAID_S, 4))
    engine.begin_replay((2, said_at(SAID_S + 60, 52)))  # all that its ring has
    engine.catch_up()
    assert (engine.held(), engine.rank.counts["of_last_life"]) == (1, 2)
    assert engine.hear(3, said_at(SAID_S + 61, 53)) == []
    assert (engine.held(), engine.rank.state) == (2, FOLLOWING)


def test_what_the_last_life_said_may_come_while_the_next_ones_replay_is_applied() -> None:
    engine = started()
    first, second = long(0), said_at(SAID_S + 60, 1)
    engine.begin_replay((0, first), (1, second))
    assert engine.rank.state is CATCHING_UP
    engine.hear(7, said_at(SAID_S - 60, 7))
    assert engine.catch_up() == []
    assert (engine.held(), engine.complete(), engine.rank.counts["of_last_life"]) == (2, True, 1)


def test_what_a_clock_that_was_set_back_made_us_leave_out_is_healed() -> None:
    engine = started()
    engine.hear(2, said_at(SAID_S - 60, 2))
    engine.replay(0, 1)
    assert (engine.held(), engine.complete()) == (2, True)
    assert engine.hear(3, said_at(SAID_S - 59, 3)) == [1]
    engine.replay(1, (2, said_at(SAID_S - 60, 2)), (3, said_at(SAID_S - 59, 3)))
    assert (engine.held(), engine.complete()) == (4, True)
    assert engine.hear(4, said_at(SAID_S - 58, 4)) == []
    assert engine.held() == 5


# --- what cannot be read ---


def test_a_store_that_cannot_be_read_makes_the_stream_partial() -> None:
    engine = following(3)
    engine.hear(3, batch({"type": "BlockStored", "block_hashes": "x"}))
    assert (engine.held(), engine.complete()) == (3, False)
    assert engine.rank.counts["malformed"] == 1


@pytest.mark.parametrize("payload", [b"", b"\xc1", batch({"type": "BlockRemoved"}), batch(7)])
def test_a_removal_that_may_be_lost_empties_the_ledger(payload: bytes) -> None:
    engine = following(3)
    engine.hear(3, payload)
    assert (engine.held(), engine.complete()) == (0, False)
    engine.hear(4)
    assert engine.held() == 1


def test_an_event_of_an_unknown_kind_is_counted_and_the_others_apply() -> None:
    engine = following(1)
    engine.hear(1, batch({"type": "BlockDreamt"}))
    assert (engine.rank.counts["unknown"], engine.held(), engine.complete()) == (1, 1, True)


def test_more_copies_than_are_counted_make_the_stream_partial_when_they_seem_gone() -> None:
    engine = Engine(has_replay=False)
    for seq in range(COPIES_MAX + 1):
        engine.rank.on_message(seq, stored(1), NOW_S)
    for seq in range(COPIES_MAX + 1, 2 * COPIES_MAX + 1):
        assert engine.rank.complete
        engine.rank.on_message(seq, removed(1), NOW_S)
    assert not engine.rank.complete
    engine.rank.on_message(2 * COPIES_MAX + 1, CLEARED, NOW_S)
    assert engine.rank.complete


def test_an_engine_that_clears_is_complete_again() -> None:
    engine = following(3, has_replay=False)
    engine.hear(9)
    assert not engine.complete()
    engine.hear(10, CLEARED)
    assert engine.complete()


# --- answers ---


def test_an_answer_speaks_of_the_state_after_the_last_message() -> None:
    engine = following(3)
    engine.hear(3)
    sent = len(engine.sent)
    messages, chunk = engine.rank.answer(SnapshotRequest(), NOW_S)
    assert isinstance(chunk, SnapshotChunk)
    engine.sent += messages
    last, _ = decode_stream(engine.sent[-1])
    assert isinstance(last, FactsMessage)
    assert len(engine.sent) == sent + 1
    assert (chunk.as_of, chunk.epoch) == (last.seq, last.epoch)
    assert sum(len(fact.hashes) for fact in chunk.facts) == 8 * engine.held()


def test_an_unknown_engine_is_our_own_mistake() -> None:
    with pytest.raises(KeyError):
        Rank("abacus", EPOCH, has_replay=False)
