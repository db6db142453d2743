"""A worker that falls silent, or beats again, has one line in the log."""

import random

from hypothesis import given
from hypothesis import strategies as st

from router.health.silence import NAMED_MAX, SilenceLog
from tests.events.feed.view_fleet import TIMEOUT_S, Fleet, key

STEPS = st.lists(st.sets(st.integers(0, 3)), max_size=12)


def test_a_worker_that_falls_silent_and_comes_back_is_named() -> None:
    fleet, log = Fleet(2), SilenceLog()
    fleet.view.tick(1.0)
    assert log.lines(fleet.view.sources.values()) == []
    fleet.beat(1, TIMEOUT_S)
    fleet.view.tick(TIMEOUT_S)
    line = f"worker {key(0)} is silent: no beat of a relay comes"
    assert log.lines(fleet.view.sources.values()) == [line]
    assert log.lines(fleet.view.sources.values()) == []
    fleet.beat(0, TIMEOUT_S + 0.5)
    fleet.view.tick(TIMEOUT_S + 0.5)
    assert log.lines(fleet.view.sources.values()) == [
        f"worker {key(0)} is there again: the relay beats"
    ]


def test_of_many_at_once_the_line_has_the_number() -> None:
    fleet, log = Fleet(NAMED_MAX + 1), SilenceLog()
    fleet.view.tick(TIMEOUT_S)
    (line,) = log.lines(fleet.view.sources.values())
    assert line.startswith(f"{NAMED_MAX + 1} workers are silent")


@given(STEPS, st.randoms())
def test_every_change_has_one_line_and_nothing_else_has(
    steps: list[set[int]], rng: random.Random
) -> None:
    fleet, log, now_s = Fleet(4), SilenceLog(), 0.0
    before: set[int] = set()
    for silent in steps:
        for number in {0, 1, 2, 3} - silent:
            fleet.beat(number, now_s + TIMEOUT_S - rng.random())
        now_s += TIMEOUT_S
        fleet.view.tick(now_s)
        said = " ".join(log.lines(fleet.view.sources.values()))
        now = {n for n in range(4) if n in silent and key(n) in fleet.view.sources}
        for number in range(4):
            if key(number) in fleet.view.sources:
                assert (f"{key(number)}" in said) is ((number in now) != (number in before))
        before = now
