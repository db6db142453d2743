"""Turns between publishers: order, bounds, and who pays for a flood."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from events.feed import intake as module
from events.feed.intake import (
    BUDGET_COST,
    MESSAGE_COST,
    QUEUE_COST_MAX,
    SLICE_COST,
    TURN_COST,
    Intake,
)

Item = tuple[bytes, int]


def an_intake(*strangers: bytes) -> Intake[Item]:
    return Intake(lambda publisher: publisher not in strangers)


def fill(intake: Intake[Item], publisher: bytes, count: int, size: int = 1) -> None:
    for i in range(count):
        intake.put(publisher, (publisher, i), size)


def drained(intake: Intake[Item]) -> list[list[Item]]:
    slices = []
    while intake:
        slices.append(list(intake.take()))
    return slices


def test_a_publishers_messages_come_out_in_their_order() -> None:
    intake = an_intake(b"stranger")
    rng = random.Random(1)
    sent: dict[bytes, list[Item]] = {}
    taken: dict[bytes, list[Item]] = {}
    for i in range(5000):
        publisher = rng.choice([b"a", b"b", b"c", b"stranger"])
        intake.put(publisher, (publisher, i), rng.choice([1, 100, 30_000]))
        sent.setdefault(publisher, []).append((publisher, i))
        if not rng.randrange(50):
            for item in intake.take():
                taken.setdefault(item[0], []).append(item)
    for one in drained(intake):
        for item in one:
            taken.setdefault(item[0], []).append(item)
    assert taken == sent
    assert (len(intake), intake.cost) == (0, 0)
    assert not intake.dropped


@pytest.mark.parametrize("size", [1, 1000, 64 * 1024, 1 << 20])
def test_a_slice_costs_so_much_at_most_and_its_last_message(size: int) -> None:
    intake = an_intake(b"stranger")
    for publisher in (b"a", b"b", b"stranger"):
        fill(intake, publisher, min(4000, (8 << 20) // size), size)
    for one in drained(intake):
        cost = len(one) * (size + MESSAGE_COST)
        assert cost < SLICE_COST + 2 * (size + MESSAGE_COST)


@pytest.mark.parametrize("size", [1, 1000, 64 * 1024, 1 << 20])
def test_between_a_floods_messages_every_other_publisher_has_its_turn(size: int) -> None:
    intake = an_intake()
    honest = [b"honest-%d" % i for i in range(20)]
    fill(intake, b"flood", QUEUE_COST_MAX // (size + MESSAGE_COST), size)
    for publisher in honest:
        fill(intake, publisher, 5)
    slices = drained(intake)
    order = [publisher for one in slices for publisher, _ in one]
    last = max(i for i, publisher in enumerate(order) if publisher != b"flood")
    # All that is honest costs less than one turn of each.
    flood = order[:last].count(b"flood")
    assert flood * (size + MESSAGE_COST) <= TURN_COST + size + MESSAGE_COST
    assert sum(any(who != b"flood" for who, _ in one) for one in slices) <= 2


def test_who_was_served_a_large_message_waits_until_the_others_had_as_much() -> None:
    intake = an_intake()
    size = 1 << 20
    fill(intake, b"large", 10, size)
    fill(intake, b"small", 10_000, 100)
    order = [publisher for one in drained(intake) for publisher, _ in one]
    large = [i for i, publisher in enumerate(order) if publisher == b"large"]
    gaps = [b - a for a, b in pairwise(large) if b < 9_000]
    assert gaps
    assert min(gaps) * (100 + MESSAGE_COST) >= size / 2


def test_publishers_that_are_not_known_have_a_quarter_while_known_ones_wait() -> None:
    strangers = [b"stranger-%d" % i for i in range(500)]
    intake = an_intake(*strangers)
    for publisher in strangers:
        fill(intake, publisher, 20, 100)
    fill(intake, b"known", 2000, 100)
    taken = [Counter(who == b"known" for who, _ in intake.take()) for _ in range(3)]
    for one in taken:
        assert one[True] > 2 * one[False] > 0


def test_strangers_have_whole_slices_when_nobody_else_waits() -> None:
    intake = an_intake(b"a")
    fill(intake, b"a", 4000)
    assert len(list(intake.take())) * (1 + MESSAGE_COST) >= SLICE_COST


def test_a_publisher_that_is_held_has_no_turn_and_keeps_its_order() -> None:
    intake = an_intake()
    for publisher in (b"a", b"b"):
        fill(intake, publisher, 300)
    intake.held = {b"a"}
    taken = [item for _ in range(6) for item in intake.take()]
    assert taken == [(b"b", i) for i in range(300)]
    assert list(intake.take()) == []
    intake.held = ()
    assert [item for one in drained(intake) for item in one] == [(b"a", i) for i in range(300)]


def test_a_queue_has_a_bound_and_what_is_over_it_is_its_publishers_loss() -> None:
    intake = an_intake()
    size = 64 * 1024
    fits = QUEUE_COST_MAX // (size + MESSAGE_COST)
    fill(intake, b"honest", 3, size)
    fill(intake, b"flood", fits + 7, size)
    assert intake.dropped == {"publisher_queue_full": 7}
    assert intake.lossy
    assert intake.take_losses() == {b"flood": 7}
    assert not intake.lossy
    taken = Counter(publisher for one in drained(intake) for publisher, _ in one)
    assert taken == {b"flood": fits, b"honest": 3}


def test_a_message_larger_than_any_queue_is_taken_when_nothing_else_waits() -> None:
    intake = an_intake()
    fill(intake, b"a", 1, QUEUE_COST_MAX)
    assert len(list(intake.take())) == 1


def test_a_publisher_has_a_budget_a_second() -> None:
    intake = an_intake()
    admitted = sum(intake.admits(b"flood", 1, 100.0 + i / 1e6) for i in range(100_000))
    assert admitted == BUDGET_COST // (1 + MESSAGE_COST) + 1
    assert intake.admits(b"honest", 1, 100.5)
    assert intake.dropped == {"publisher_too_fast": 100_000 - admitted}
    assert intake.take_losses() == {b"flood": 100_000 - admitted}
    assert intake.admits(b"flood", 1, 101.0)


def test_publishers_with_a_budget_of_their_own_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PUBLISHERS_MAX", 4)
    monkeypatch.setattr(module, "BUDGET_COST", 10 * MESSAGE_COST)
    intake = an_intake()
    assert all(intake.admits(b"own-%d" % i, 1, 100.0) for i in range(4))
    admitted = sum(intake.admits(b"more-%d" % i, 1, 100.0) for i in range(1000))
    assert admitted == 10
    assert len(intake._spent) == 5
    assert intake.admits(b"own-1", 1, 100.0)


def test_all_queues_have_a_bound_and_the_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUES_COST_MAX", 1000 * (1 + MESSAGE_COST))
    intake = an_intake(b"stranger")
    fill(intake, b"honest", 10)
    fill(intake, b"flood", 700)
    fill(intake, b"stranger", 350)
    assert intake.dropped == {"queues_full": 700}
    assert intake.take_losses() == {b"flood": 700}
    taken = Counter(publisher for one in drained(intake) for publisher, _ in one)
    assert taken == {b"honest": 10, b"stranger": 350}
    assert intake.cost == 0
