"""Fleet commands: each once, in any order, and told to replicas that start later."""

import random
from math import inf, nan

import pytest

from events.plane.facts import VERSION, Control
from router.cluster.replicas.fleet_commands import _IDS_MAX, AHEAD_MAX_S, FleetCommands
from router.config.settings.fleet_settings import TOMBSTONE_MAX_S
from router.decide.core.core import DRAINED_MAX
from tests.stage.fleet import Fleet


def test_a_command_is_applied_once() -> None:
    fleet = Fleet()
    fleet.add("w0")
    commands = FleetCommands(fleet.core, fleet.clock)
    drain = Control(VERSION, "r1-1", "drain", "w0")
    assert commands.apply(drain) == 1
    fleet.core.undrain("w0")
    assert commands.apply(drain) == 0, "our own command, back over NATS"
    assert fleet.core.fleet.drained == {}


def test_commands_of_others_reach_us() -> None:
    fleet = Fleet()
    key = fleet.add("w0")
    commands = FleetCommands(fleet.core, fleet.clock)
    assert commands.apply(Control(VERSION, "r2-1", "remove", "w0", 5.0)) == 1
    assert key not in fleet.view.sources


@pytest.mark.parametrize("seconds", [-1.0, nan, inf])
def test_a_tombstone_that_is_no_time_is_counted_and_ignored(seconds: float) -> None:
    fleet = Fleet()
    key = fleet.add("w0")
    commands = FleetCommands(fleet.core, fleet.clock)
    assert commands.apply(Control(VERSION, "r2-1", "remove", "w0", seconds)) == 0
    assert key in fleet.view.sources
    assert fleet.view.dropped["malformed"] == 1


def test_a_command_of_a_newer_release_is_counted_and_ignored() -> None:
    fleet = Fleet()
    commands = FleetCommands(fleet.core, fleet.clock)
    assert commands.apply(Control(VERSION, "r2-1", "polish", "w0")) == 0
    assert fleet.view.dropped["unknown_kind"] == 1


def test_what_it_remembers_is_bounded() -> None:
    fleet = Fleet()
    commands = FleetCommands(fleet.core, fleet.clock)
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
        fleet = Fleet()
        fleet.add("w0")
        commands = FleetCommands(fleet.core, fleet.clock)
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
    fleet = Fleet()
    key = fleet.add("w0")
    commands = FleetCommands(fleet.core, fleet.clock)
    assert commands.apply(command(1, "remove", fleet.now_s - 31.0, tombstone_s=30.0)) == 0
    assert key in fleet.view.sources


def test_commands_in_force_are_bounded() -> None:
    fleet = Fleet()
    commands = FleetCommands(fleet.core, fleet.clock)
    for i in range(DRAINED_MAX + 5):
        commands.apply(Control(VERSION, f"r-{i}", "undrain", f"w{i}", 0.0, fleet.now_s))
    assert len(commands.in_force()) == DRAINED_MAX


def all_commands(count: int, *, ahead_s: float = 0.0) -> tuple[list[Fleet], list[FleetCommands]]:
    """Replicas that know worker w0; the clock of the last one is ahead."""
    fleets = [Fleet(replica=f"r{i}") for i in range(count)]
    for fleet in fleets:
        fleet.add("w0")
    fleets[-1].now_s += ahead_s
    return fleets, [FleetCommands(fleet.core, fleet.clock) for fleet in fleets]


@pytest.mark.parametrize("ahead_s", [1.0, 3600.0, AHEAD_MAX_S - 1.0, -3600.0])
def test_clocks_that_differ_void_no_command(ahead_s: float) -> None:
    fleets, (one, other, ahead) = all_commands(3, ahead_s=ahead_s)
    given = []
    for i, commands in enumerate([ahead, one, ahead, other, one]):
        action = "undrain" if i % 2 else "drain"
        given.append(commands.give(action, "w0"))
        for each in (one, other, ahead):
            assert each.apply(given[-1]) == 1
        assert not commands.overtaken(given[-1])
    assert [list(fleet.core.fleet.drained) for fleet in fleets] == [["w0"]] * 3
    for seed in range(20):
        late = Fleet()
        late.add("w0")
        listener = FleetCommands(late.core, late.clock)
        for command in random.Random(seed).sample(given * 2, 10):
            listener.apply(command)
        assert list(late.core.fleet.drained) == ["w0"], f"seed {seed}"


def test_a_time_beyond_a_day_ahead_counts_as_the_time_of_its_coming() -> None:
    fleets, (commands,) = all_commands(1)
    far = Control(VERSION, "r9-1", "drain", "w0", 0.0, 1e11)
    assert commands.apply(far) == 1
    assert commands.counts["far_ahead"] == 1
    fleets[0].now_s += 1.0
    others = Control(VERSION, "r8-1", "undrain", "w0", 0.0, fleets[0].now_s)
    assert commands.apply(others) == 1, "of an old release, with a right clock"
    assert fleets[0].core.fleet.drained == {}


def test_a_command_after_one_from_the_bound_is_newer_too() -> None:
    fleets, (commands, ahead) = all_commands(2, ahead_s=AHEAD_MAX_S)
    drain = ahead.give("drain", "w0")
    for each in (commands, ahead):
        assert each.apply(drain) == 1
    undrain = commands.give("undrain", "w0")
    for each in (commands, ahead):
        assert each.apply(undrain) == 1
        assert not each.overtaken(undrain)
    assert [list(fleet.core.fleet.drained) for fleet in fleets] == [[], []]


def test_a_command_that_comes_too_late_is_counted_as_overtaken() -> None:
    fleets, (commands,) = all_commands(1)
    old, new = commands.give("drain", "w0"), None
    new = Control(VERSION, "r2-1", "undrain", "w0", 0.0, fleets[0].now_s + 1)
    commands.apply(new)
    assert commands.apply(old) == 0
    assert commands.overtaken(old)
    assert commands.counts["overtaken"] == 1
    assert not commands.overtaken(new)


def test_a_drain_outlives_a_removal_in_whatever_order_they_come() -> None:
    for order in ([0, 1], [1, 0]):
        fleets, (commands,) = all_commands(1)
        start_s = fleets[0].now_s
        both = [command(1, "drain", start_s - 2), command(2, "remove", start_s - 1, 30.0)]
        for i in order:
            commands.apply(both[i])
        assert list(fleets[0].core.fleet.drained) == ["w0"]
        assert fleets[0].view.ranks("w0") == []
        assert [one.action for one in commands.in_force()] == ["drain", "remove"]


def test_a_removal_of_another_is_clipped_to_a_day() -> None:
    fleets, (commands,) = all_commands(1)
    commands.apply(command(1, "remove", fleets[0].now_s, tombstone_s=1e300))
    assert commands.removed("w0")
    fleets[0].now_s += TOMBSTONE_MAX_S
    fleets[0].view.tick(fleets[0].now_s)
    assert not commands.removed("w0")
    fleets[0].add("w0")
    assert len(fleets[0].view.ranks("w0")) == 1


def test_a_removal_dated_ahead_is_told_on_with_what_is_left_of_it() -> None:
    fleets, (teller, listener) = all_commands(2)
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
