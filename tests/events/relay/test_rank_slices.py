"""Long replays of an engine rank, applied part by part."""

import pytest

from events.plane.facts import Beat
from events.relay.rank import CATCH_UP_BYTES, HELD_MESSAGES_MAX, MESSAGE_BYTES, EngineState
from tests.events.relay.one_rank import (
    NOW_S,
    Engine,
    batch,
    chain,
    following,
    long,
    removed,
    started,
    stored,
)

STARTING, HEALING, CATCHING_UP, FOLLOWING = EngineState


def catching_up(count: int) -> Engine:
    """An engine whose replay has come: so many messages, the first of which is applied."""
    engine = started()
    engine.begin_replay((0, long(0)), *range(1, count))
    assert (engine.rank.state, engine.held()) == (CATCHING_UP, 1)
    return engine


def test_a_part_is_bounded_and_takes_a_message_at_least() -> None:
    engine = started()
    engine.begin_replay(*((seq, long(seq)) for seq in range(4)))
    for held in range(1, 5):
        assert (engine.held(), engine.rank.state) == (held, CATCHING_UP)
        engine.perform(engine.rank.catch_up(NOW_S))
    assert (engine.rank.state, engine.complete()) == (FOLLOWING, True)
    assert engine.rank.catch_up(NOW_S) == []


def test_a_part_of_empty_messages_is_bounded_too() -> None:
    engine = started()
    most = CATCH_UP_BYTES // MESSAGE_BYTES
    engine.begin_replay(*((seq, b"") for seq in range(4 * most)))
    assert engine.rank._next_seq == most


def test_live_messages_wait_behind_a_replay_and_are_applied_in_order() -> None:
    engine = catching_up(3)
    assert engine.hear(3) == engine.hear(4, removed(3)) == []
    assert engine.held() == 1
    engine.catch_up()
    assert (engine.held(), engine.rank.state, engine.complete()) == (3, FOLLOWING, True)
    assert engine.hear(5) == []
    assert engine.held() == 4


def test_a_beat_between_two_parts_tells_what_is_applied() -> None:
    engine = catching_up(3)
    beat = engine.told()[-1]
    assert isinstance(beat, Beat)
    assert (beat.blocks, beat.digest) == (1, engine.rank.ledger.digest())


def test_a_gap_in_what_came_while_we_caught_up_is_healed() -> None:
    engine = catching_up(3)
    engine.hear(3)
    engine.hear(6)
    engine.hear(7)
    assert engine.catch_up() == [3]
    assert (engine.held(), engine.rank.state, engine.rank.engine_gaps) == (4, HEALING, 1)
    engine.replay(3, 4, 5, 6)
    assert (engine.held(), engine.complete()) == (8, True)


def test_what_a_replay_overtook_may_come_while_it_is_applied() -> None:
    engine = catching_up(3)
    engine.hear(1)
    engine.hear(2)
    engine.hear(3)
    engine.catch_up()
    assert (engine.held(), engine.rank.engine_restarts, engine.complete()) == (4, 0, True)


def test_an_engine_that_restarts_while_we_catch_up_is_another_life() -> None:
    engine = catching_up(3)
    engine.hear(3)
    assert engine.hear(0, stored(50, life=1)) == []
    assert (engine.held(), engine.rank.state, engine.complete()) == (1, FOLLOWING, True)
    assert engine.rank.engine_restarts == 1
    assert engine.rank.catch_up(NOW_S) == []
    engine.hear(1, stored(51, life=1))
    assert (engine.held(), engine.rank.engine_restarts) == (2, 1)


@pytest.mark.parametrize("waited", [0, 3])
def test_another_life_shows_by_a_number_that_a_replay_brought_too(waited: int) -> None:
    engine = started()
    for seq in range(3, 3 + waited):
        engine.hear(seq)
    engine.begin_replay((0, long(0)), *range(1, 8))
    assert engine.hear(6, stored(56, life=1)) == [0]
    assert (engine.held(), engine.rank.state, engine.rank.engine_restarts) == (0, HEALING, 1)
    engine.replay(*((seq, stored(50 + seq, life=1)) for seq in range(7)))
    assert (engine.held(), engine.complete()) == (7, True)


def test_a_process_that_starts_while_we_catch_up_ends_it() -> None:
    engine = catching_up(3)
    engine.now_s = NOW_S + 60
    assert engine.perform(engine.rank.on_process_start(NOW_S + 50, engine.now_s)) == [0]
    assert (engine.held(), engine.rank.state) == (0, HEALING)
    engine.replay((0, stored(50, life=1)))
    assert (engine.held(), engine.complete()) == (1, True)


def test_what_waits_while_we_catch_up_is_bounded_and_what_is_lost_is_healed() -> None:
    engine = catching_up(3)
    for seq in range(3, HELD_MESSAGES_MAX + 5):
        engine.hear(seq, batch())
    assert engine.rank.counts["held_overflow"] == 2
    assert engine.catch_up() == [2]
    engine.replay(*((seq, stored(2) if seq == 2 else batch()) for seq in range(2, 6)))
    assert (engine.held(), engine.complete()) == (3, True)
    assert engine.rank._next_seq == HELD_MESSAGES_MAX + 5


def test_a_long_live_message_is_applied_whole() -> None:
    engine = following(0)
    engine.hear(0, chain(10_000))
    assert (engine.held(), engine.rank.state, engine.complete()) == (10_000, FOLLOWING, True)
    assert engine.hear(1, stored(0)) == []
    assert (engine.held(), engine.rank.counts["BlocksStored"]) == (10_001, 2)


def test_a_connection_lost_while_a_replay_is_applied_is_healed_after_it() -> None:
    engine = catching_up(3)
    assert engine.perform(engine.rank.on_reconnected()) == []
    assert engine.catch_up() == [2]
    assert engine.rank.state is HEALING
