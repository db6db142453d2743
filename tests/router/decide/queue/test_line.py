"""Requests in the order of their keys."""

import pytest

from router.decide.queue_turns.line import Line
from router.decide.waiter import Waiter
from tests.router.decide.queue.waiting import names


def waiter(name: str, key: float, seq: int) -> Waiter:
    return Waiter(name, 0.0, key=key, seq=seq)


def test_requests_stand_by_key_then_by_number() -> None:
    line = Line()
    waiters = [waiter("a", 2.0, 1), waiter("b", 1.0, 2), waiter("c", 2.0, 0)]
    for one in waiters:
        line.add(one)
    assert names(entry[3] for entry in line.entries) == "b c a"
    assert [line.place(one) for one in waiters] == [2, 0, 1]
    line.remove(waiters[2])
    assert names(entry[3] for entry in line.entries) == "b a"


def test_a_request_that_is_not_there_is_not_removed() -> None:
    line = Line()
    line.add(waiter("a", 1.0, 1))
    with pytest.raises(LookupError):
        line.remove(waiter("a", 1.0, 1))
    with pytest.raises(LookupError):
        line.remove(waiter("b", 2.0, 2))
    assert len(line) == 1


def test_the_place_behind_an_entry_is_known_after_others_left() -> None:
    line = Line()
    waiters = [waiter(name, number, number) for number, name in enumerate("abcd")]
    for one in waiters:
        line.add(one)
    entry = line.entries[2]
    assert line.after(2, entry) == 3
    line.remove(waiters[0])
    assert line.after(2, entry) == 2, "it stands one further in front"
    line.remove(waiters[2])
    assert line.after(2, entry) == 1, "and where it stood is the next one"
