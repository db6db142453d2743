"""The watch over the machine's cores."""

import pytest

from tests.chaos.machine import BEAT_S, STALL_S, stalls, watched
from tests.chaos.records import Trouble


def test_beats_that_come_late_by_a_stall_are_noted_and_others_are_not() -> None:
    beats_s = [BEAT_S, BEAT_S + STALL_S / 2, BEAT_S + 3.0, BEAT_S, 7.0]
    now_s = 100.0
    left = iter(beats_s)

    def beat() -> bool:
        nonlocal now_s
        now_s += next(left)
        return now_s < 100.0 + sum(beats_s) - 1e-6

    fourth_s = 100.0 + sum(beats_s[:2])
    assert stalls(beat, lambda: now_s) == [
        (pytest.approx(fourth_s + BEAT_S), pytest.approx(fourth_s + BEAT_S + 3.0)),
        (pytest.approx(100.0 + sum(beats_s[:4]) + BEAT_S), pytest.approx(100.0 + sum(beats_s))),
    ]


async def test_a_watch_ends_with_its_processes_and_what_they_noted() -> None:
    troubles: list[Trouble] = []
    async with watched(troubles):
        pass
    assert all(one.from_s < one.to_s for one in troubles)
