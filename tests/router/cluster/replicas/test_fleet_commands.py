"""Fleet commands: each once, in any order, and told to replicas that start later."""

import random
from math import inf, nan

import pytest

from events.plane.facts import VERSION, Control
from indexer.identity import WorkerKey
from router.cluster.replicas.fleet_commands import _IDS_MAX, AHEAD_MAX_S, FleetCommands
from router.config.settings.fleet_settings import TOMBSTONE_MAX_S
from router.decide.core.core import DRAINED_MAX
from tests.stage.fleet import Fleet

W0 = WorkerKey("w0", 0)


def a_replica(name: str = "r") -> tuple[Fleet, FleetCommands]:
    """A replica that knows worker w0, and its commands."""
    fleet = Fleet(replica=name)
    fleet.add("w0")
    return fleet, FleetCommands(fleet.core, fleet.clock)


def replicas(count: int, *, ahead_s: float) -> tuple[list[Fleet], list[FleetCommands]]:
    """Several of them; the clock of the last one is ahead."""
    fleets, commands = zip(*(a_replica(f"r{i}") for i in range(count)), strict=True)
    fleets[-1].now_s += ahead_s
    return list(fleets), list(commands)


def test_a_command_is_applied_once() -> None:
    fleet, commands = a_replica()
    drain = Control(VERSION, "r1-1", "drain", "w0")
    assert commands.apply(drain) == 1
    fleet.core.undrain("w0")
    assert commands.apply(drain) == 0, "our own command, back over NATS"
    assert fleet.core.fleet.drained == {}


def test_commands_of_others_reach_us() -> None:
    fleet, commands = a_replica()
    assert commands.apply(Control(VERSION, "r2-1", "remove", "w0", 5.0)) == 1
    assert W0 not in fleet.view.sources


@pytest.mark.parametrize("seconds", [-1.0, nan, inf])
def test_a_tombstone_that_is_no_time_is_counted_and_ignored(seconds: float) -> None:
    fleet, commands = a_replica()
    assert commands.apply(Control(VERSION, "r2-1", "remove", "w0", seconds)) == 0
    assert W0 in fleet.view.sources
    assert fleet.view.dropped["malformed"] == 1


def test_a_command_of_a_newer_release_is_counted_and_ignored() -> None:
    fleet, commands = a_replica()
    assert commands.apply(Control(VERSION, "r2-1", "polish", "w0")) == 0
    assert fleet.view.dropped["unknown_kind"] == 1


def test_what_it_remembers_is_bounded() -> None:
    _, commands = a_replica()
    for i in range(_IDS_MAX + 10):
        commands.apply(Control(VERSION, f"r2-{i}", "undrain", "w0"))
    assert len(commands._ids) == _IDS_MAX


def command(number: int, action: str, at_s: float, tombstone_s: float = 0.0) -> Control:
    return Control(VERSION, f"r-{number}", action, "w0", tombstone_s, at_s)


def test_the_newest_command_of_a_worker_holds_in_whatever_order_they_come() -> None:
    given = [
        command(i, action, at_s=900.0 + i)
        for i, action in enumerate(["drain", "undrain", "drain", "undrain", "drain"])
    ]
    for seed in range(20):
        fleet, commands = a_replica()
        for each in random.Random(seed).sample(given * 2, 10):
            commands.apply(each)
        assert list(fleet.core.fleet.drained) == ["w0"], f"seed {seed}"


def test_a_replica_that_starts_later_is_told_what_is_in_force() -> None:
    old, new = Fleet(), Fleet()
    for fleet in (old, new):
        fleet.add("w0")
        fleet.add("w1")
    teller, listener = FleetCommands(old.core, old.clock), FleetCommands(new.core, new.clock)
    teller.apply(command(1, "drain", old.now_s))
    teller.apply(Control(VERSION, "r-2", "remove", "w1", 30.0, old.now_s))
    old.now_s = new.now_s = old.now_s + 10.0
    for each in teller.in_force():
        listener.apply(each)
    assert list(new.core.fleet.drained) == ["w0"]
    assert new.view.ranks("w1") == []
    old.now_s += 21.0
    assert [each.action for each in teller.in_force()] == ["drain"], "the tombstone has ended"


def test_a_tombstone_that_ended_before_it_came_removes_nobody() -> None:
    fleet, commands = a_replica()
    assert commands.apply(command(1, "remove", fleet.now_s - 31.0, tombstone_s=30.0)) == 0
    assert W0 in fleet.view.sources


def test_commands_in_force_are_bounded() -> None:
    fleet, commands = a_replica()
    for i in range(DRAINED_MAX + 5):
        commands.apply(Control(VERSION, f"r-{i}", "undrain", f"w{i}", 0.0, fleet.now_s))
    assert len(commands.in_force()) == DRAINED_MAX


@pytest.mark.parametrize("ahead_s", [1.0, 3600.0, AHEAD_MAX_S - 1.0, -3600.0])
def test_clocks_that_differ_void_no_command(ahead_s: float) -> None:
    fleets, (one, other, ahead) = replicas(3, ahead_s=ahead_s)
    given = []
    for i, commands in enumerate([ahead, one, ahead, other, one]):
        action = "undrain" if i % 2 else "drain"
        given.append(commands.give(action, "w0"))
        for each in (one, other, ahead):
            assert each.apply(given[-1]) == 1
        assert not commands.overtaken(given[-1])
    assert [list(fleet.core.fleet.drained) for fleet in fleets] == [["w0"]] * 3
    for seed in range(20):
        late, listener = a_replica()
        for command in random.Random(seed).sample(given * 2, 10):
            listener.apply(command)
        assert list(late.core.fleet.drained) == ["w0"], f"seed {seed}"


def test_a_time_beyond_a_day_ahead_counts_as_the_time_of_its_coming() -> None:
    fleet, commands = a_replica()
    far = Control(VERSION, "r9-1", "drain", "w0", 0.0, 1e11)
    assert commands.apply(far) == 1
    assert commands.counts["far_ahead"] == 1
    fleet.now_s += 1.0
    others = Control(VERSION, "r8-1", "undrain", "w0", 0.0, fleet.now_s)
    assert commands.apply(others) == 1, "of an old release, with a right clock"
    assert fleet.core.fleet.drained == {}


def test_a_command_after_one_from_the_bound_is_newer_too() -> None:
    fleets, (commands, ahead) = replicas(2, ahead_s=AHEAD_MAX_S)
    drain = ahead.give("drain", "w0")
    for each in (commands, ahead):
        assert each.apply(drain) == 1
    undrain = commands.give("undrain", "w0")
    for each in (commands, ahead):
        assert each.apply(undrain) == 1
        assert not each.overtaken(undrain)
    assert [list(fleet.core.fleet.drained) for fleet in fleets] == [[], []]


def test_a_command_that_comes_too_late_is_counted_as_overtaken() -> None:
    fleet, commands = a_replica()
    old, new = commands.give("drain", "w0"), None
    new = Control(VERSION, "r2-1", "undrain", "w0", 0.0, fleet.now_s + 1)
    commands.apply(new)
    assert commands.apply(old) == 0
    assert commands.overtaken(old)
    assert commands.counts["overtaken"] == 1
    assert not commands.overtaken(new)


def test_a_drain_outlives_a_removal_in_whatever_order_they_come() -> None:
    for order in ([0, 1], [1, 0]):
        fleet, commands = a_replica()
        start_s = fleet.now_s
        both = [command(1, "drain", start_s - 2), command(2, "remove", start_s - 1, 30.0)]
        for i in order:
            commands.apply(both[i])
        assert list(fleet.core.fleet.drained) == ["w0"]
        assert fleet.view.ranks("w0") == []
        assert [one.action for one in commands.in_force()] == ["drain", "remove"]


def test_a_removal_of_another_is_clipped_to_a_day() -> None:
    fleet, commands = a_replica()
    commands.apply(command(1, "remove", fleet.now_s, tombstone_s=1e300))
    assert commands.removed("w0")
    fleet.now_s += TOMBSTONE_MAX_S
    fleet.view.tick(fleet.now_s)
    assert not commands.removed("w0")
    fleet.add("w0")
    assert len(fleet.view.ranks("w0")) == 1


def test_a_removal_dated_ahead_is_told_on_with_what_is_left_of_it() -> None:
    fleets, (teller, listener) = replicas(2, ahead_s=0.0)
    teller.apply(command(1, "remove", fleets[0].now_s + 3600.0, tombstone_s=60.0))
    for fleet in fleets:
        fleet.now_s += 50.0
    (told,) = teller.in_force()
    listener.apply(told)
    assert listener.removed("w0")
    for fleet in fleets:
        fleet.now_s += 10.0
    assert not listener.removed("w0")
    assert teller.in_force() == []
