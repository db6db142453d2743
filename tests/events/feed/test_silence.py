"""Heartbeats, silence, forgetting and removal of workers in the fleet view."""

import pytest

from events.feed.stream import StreamState
from events.plane.facts import VERSION, Beat, Heartbeat, encode
from indexer.identity import WorkerKey
from tests.events.feed.view_fleet import FORGET_S, NEXT, NOW, OLD, Fleet, key

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


def test_a_sleeping_engine_has_a_reason_of_its_own_and_is_no_last_resort() -> None:
    fleet = Fleet(5)
    fleet.heartbeat(1, 1.0, healthy=False, asleep=True)
    assert fleet.reasons()["w1/0"] == "engine asleep"
    assert not fleet.view.last_resort(fleet.view.sources[key(1)])
    fleet.heartbeat(1, 2.0)
    assert fleet.reasons()["w1/0"] == ""


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


def test_a_single_worker_falls_silent_on_its_own() -> None:
    fleet = Fleet(1)
    fleet.view.tick(3.0)
    assert not fleet.view.mass_silence
    assert len(fleet.view.tick(30.0)) == 1


def test_two_workers_whose_relays_ended_with_one_process_are_a_last_resort() -> None:
    fleet = Fleet(2)
    fleet.view.tick(3.0)
    assert fleet.view.mass_silence
    assert all(map(fleet.view.last_resort, fleet.view.sources.values()))
    assert fleet.view.tick(30.0) == []


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
