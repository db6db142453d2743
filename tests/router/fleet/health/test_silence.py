"""A worker that falls silent, or beats again, has one line in the log."""

from hypothesis import given
from hypothesis import strategies as st

from events.feed.fleet_view import Source
from events.feed.stream import Stream
from events.plane.facts import VERSION, Beat, Epoch
from indexer.identity import WorkerKey
from router.fleet.health.silence import NAMED_MAX, SilenceLog

TIMEOUT_S = 3.0
STEPS = st.lists(st.sets(st.integers(0, 3)), max_size=12)


def sources(count: int) -> list[Source]:
    """Workers that begin to beat at 0 s."""
    return [
        Source(WorkerKey(f"w{number}", 0), number, Stream(TIMEOUT_S, 0.0))
        for number in range(count)
    ]


def beat(source: Source, now_s: float) -> None:
    source.stream.on_beat(Beat(VERSION, Epoch(1, 0), 0, 0, 0, True, now_s), 0, 0, now_s)


def test_a_worker_that_falls_silent_and_comes_back_is_named() -> None:
    (first, second), log = sources(2), SilenceLog()
    assert log.lines([first, second]) == []
    beat(second, TIMEOUT_S)
    for source in (first, second):
        source.stream.on_tick(TIMEOUT_S)
    line = "worker w0/0 is silent: no beat of a relay comes"
    assert log.lines([first, second]) == [line]
    assert log.lines([first, second]) == []
    beat(first, TIMEOUT_S + 0.5)
    assert log.lines([first, second]) == ["worker w0/0 is there again: the relay beats"]


def test_of_many_at_once_the_line_has_the_number() -> None:
    fleet, log = sources(NAMED_MAX + 1), SilenceLog()
    for source in fleet:
        source.stream.on_tick(TIMEOUT_S)
    assert log.lines(fleet) == [f"{NAMED_MAX + 1} workers are silent: no beat of a relay comes"]
    assert log.lines([]) == [], "forgotten workers have a line elsewhere"


@given(STEPS)
def test_every_change_has_one_line_and_nothing_else_has(steps: list[set[int]]) -> None:
    fleet, log, now_s = sources(4), SilenceLog(), 0.0
    before: set[int] = set()
    for silent in steps:
        now_s += TIMEOUT_S
        for number, source in enumerate(fleet):
            if number not in silent:
                beat(source, now_s)
            source.stream.on_tick(now_s)
        said = log.lines(fleet)
        fell, came = silent - before, before - silent
        assert len(said) == bool(fell) + bool(came)
        for number in range(4):
            named = [line for line in said if f"w{number}/0" in line]
            assert [("silent" in line) for line in named] == [number in silent] * len(named)
            assert bool(named) is (number in fell | came)
        before = silent
