"""power-of-two: chances worked out by hand, and counted."""

from collections import Counter

import pytest

from tests.router.decide.policies.scored import score
from tests.stage.fleet import Fleet, prompt


def chances(*slots: float) -> list[float]:
    found = score("power-of-two", 10, *({"running": one} for one in slots)).chances
    assert found is not None
    return found.tolist()


def test_of_three_the_idlest_wins_two_pairs_of_three() -> None:
    assert chances(5, 1, 3) == pytest.approx([0, 2 / 3, 1 / 3])


def test_of_a_pair_as_busy_each_wins_half() -> None:
    assert chances(2, 2) == [0.5, 0.5]
    # pairs: (0, 1) halved, (0, 2) and (1, 2) won by the first two
    assert chances(2, 2, 7) == pytest.approx([0.5, 0.5, 0])
    assert chances(4, 4, 4, 4) == [0.25] * 4


def test_one_worker_is_picked_always() -> None:
    assert chances(9) == [1]


def test_those_that_cannot_be_picked_are_not_among_the_pairs() -> None:
    told = score("power-of-two", 10, {"excluded": "no"}, {"running": 1}, {"running": 2}).chances
    assert told is not None
    assert told.tolist() == [0, 1, 0]
    none = score("power-of-two", 10, {"excluded": "no"}).chances
    assert none is not None
    assert none.tolist() == [0]


def test_picks_come_as_often_as_two_draws_would_have_it() -> None:
    fleet = Fleet(policy="power-of-two")
    for i in range(4):
        fleet.say(fleet.add(f"w{i}"), running=i)
    picks: Counter[str] = Counter()
    for _ in range(600):
        decision = fleet.decide(prompt(8))
        picks[decision.rows.workers[decision.order[0]].worker_id] += 1
    assert picks["w0"] == pytest.approx(300, abs=62)  # five standard deviations
    assert picks["w1"] == pytest.approx(200, abs=58)
    assert picks["w2"] == pytest.approx(100, abs=46)
    assert picks["w3"] == 0


def test_its_load_is_nearer_to_even_than_that_of_random_picks() -> None:
    def most(policy: str) -> int:
        fleet = Fleet(policy=policy)
        for i in range(16):
            fleet.add(f"w{i}")
        return max(Counter(fleet.picked(prompt(8)) for _ in range(320)).values())

    assert most("power-of-two") <= 23 < most("simulator.world.yardsticks:random")
