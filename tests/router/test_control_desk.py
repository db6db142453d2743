"""Fleet commands: each once, in any order, and told to replicas that start later."""

import random
from math import inf, nan

import pytest

from events.facts import VERSION, Control
from router.control_desk import _IDS_MAX, ControlDesk
from router.core import DRAINED_MAX
from tests.router.fleet import Fleet


def test_a_command_is_applied_once() -> None:
    fleet = Fleet()
    fleet.add("w0")
    desk = ControlDesk(fleet.core, fleet.clock)
    drain = Control(VERSION, "r1-1", "drain", "w0")
    assert desk.apply(drain) == 1
    fleet.core.undrain("w0")
    assert desk.apply(drain) == 0, "our own command, back over NATS"
    assert fleet.core.drained == {}


def test_commands_of_others_reach_us() -> None:
    fleet = Fleet()
    key = fleet.add("w0")
    desk = ControlDesk(fleet.core, fleet.clock)
    assert desk.apply(Control(VERSION, "r2-1", "remove", "w0", 5.0)) == 1
    assert key not in fleet.view.sources


@pytest.mark.parametrize("seconds", [-1.0, nan, inf])
def test_a_tombstone_that_is_no_time_is_counted_and_ignored(seconds: float) -> None:
    fleet = Fleet()
    key = fleet.add("w0")
    desk = ControlDesk(fleet.core, fleet.clock)
    assert desk.apply(Control(VERSION, "r2-1", "remove", "w0", seconds)) == 0
    assert key in fleet.view.sources
    assert fleet.view.dropped["malformed"] == 1


def test_a_command_of_a_newer_release_is_counted_and_ignored() -> None:
    fleet = Fleet()
    desk = ControlDesk(fleet.core, fleet.clock)
    assert desk.apply(Control(VERSION, "r2-1", "polish", "w0")) == 0
    assert fleet.view.dropped["unknown_kind"] == 1


def test_what_it_remembers_is_bounded() -> None:
    fleet = Fleet()
    desk = ControlDesk(fleet.core, fleet.clock)
    for i in range(_IDS_MAX + 10):
        desk.apply(Control(VERSION, f"r2-{i}", "undrain", "w0"))
    assert len(desk._ids) == _IDS_MAX


def command(number: int, action: str, at_s: float, tombstone_s: float = 0.0) -> Control:
    return Control(VERSION, f"r-{number}", action, "w0", tombstone_s, at_s)


def test_the_newest_command_of_a_worker_holds_in_whatever_order_they_come() -> None:
    commands = [
        command(i, action, at_s=900.0 + i)
        for i, action in enumerate(["drain", "undrain", "drain", "undrain", "drain"])
    ]
    for seed in range(20):
        fleet = Fleet()
        fleet.add("w0")
        desk = ControlDesk(fleet.core, fleet.clock)
        for each in random.Random(seed).sample(commands * 2, 10):
            desk.apply(each)
        assert list(fleet.core.drained) == ["w0"], f"seed {seed}"


def test_a_replica_that_starts_later_is_told_what_is_in_force() -> None:
    old, new = Fleet(), Fleet()
    for fleet in (old, new):
        fleet.add("w0")
        fleet.add("w1")
    teller, listener = ControlDesk(old.core, old.clock), ControlDesk(new.core, new.clock)
    teller.apply(command(1, "drain", old.now_s))
    teller.apply(Control(VERSION, "r-2", "remove", "w1", 30.0, old.now_s))
    old.now_s = new.now_s = old.now_s + 10.0
    for each in teller.in_force():
        listener.apply(each)
    assert list(new.core.drained) == ["w0"]
    assert new.view.ranks("w1") == []
    old.now_s += 21.0
    assert [each.action for each in teller.in_force()] == ["drain"], "the tombstone has ended"


def test_a_tombstone_that_ended_before_it_came_removes_nobody() -> None:
    fleet = Fleet()
    key = fleet.add("w0")
    desk = ControlDesk(fleet.core, fleet.clock)
    assert desk.apply(command(1, "remove", fleet.now_s - 31.0, tombstone_s=30.0)) == 0
    assert key in fleet.view.sources


def test_commands_in_force_are_bounded() -> None:
    fleet = Fleet()
    desk = ControlDesk(fleet.core, fleet.clock)
    for i in range(DRAINED_MAX + 5):
        desk.apply(Control(VERSION, f"r-{i}", "undrain", f"w{i}", 0.0, fleet.now_s))
    assert len(desk.in_force()) == DRAINED_MAX
