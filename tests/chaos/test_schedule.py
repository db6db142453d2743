"""Laws of the plan of faults."""

import random
from collections import Counter

import pytest

from tests.chaos.records import Cause
from tests.chaos.schedule import WEIGHTS, Fault, Sizes, plan

SIZES = Sizes()
SECONDS = 480.0


def a_plan(seed: int, seconds: float = SECONDS, sizes: Sizes = SIZES) -> list[Fault]:
    return plan(random.Random(seed), seconds, 3.0, sizes)


@pytest.mark.parametrize("seed", range(20))
def test_every_fault_ends_in_time_and_leaves_enough_workers_alone(seed: int) -> None:
    faults = a_plan(seed)
    for one in faults:
        assert 0.0 <= one.at_s <= one.at_s + one.for_s <= SECONDS + 1e-9
    for moment in {one.at_s for one in faults} | {one.at_s + one.for_s for one in faults}:
        troubled = [
            worker
            for one in faults
            if one.at_s <= moment <= one.at_s + one.for_s
            for worker in one.workers
        ]
        assert len(troubled) == len(set(troubled)), "one fault a worker"
        assert SIZES.workers - len(troubled) >= SIZES.well


@pytest.mark.parametrize("seed", range(20))
def test_one_router_at_most_is_stopped_and_none_while_a_worker_is_drained(seed: int) -> None:
    alone = [one for one in a_plan(seed) if one.cause in {Cause.ROUTER_STOP, Cause.DRAIN}]
    ends = [one.at_s + one.for_s for one in alone]
    assert all(end < later.at_s for end, later in zip(ends, alone[1:], strict=False))
    assert {len(one.routers) for one in alone if one.cause is Cause.ROUTER_STOP} == {1}


@pytest.mark.parametrize("seed", range(20))
def test_ten_minutes_have_every_cause_and_five_of_eight_workers_at_once(seed: int) -> None:
    faults = a_plan(seed)
    assert {one.cause for one in faults} == set(WEIGHTS)
    assert Counter(len(one.workers) for one in faults)[5] >= 4


def test_the_same_seed_has_the_same_plan() -> None:
    assert a_plan(3) == a_plan(3) != a_plan(4)


def test_no_wire_breaks_where_none_is_a_proxy() -> None:
    wires = {Cause.WIRE_CUT, Cause.WIRE_SLOW, Cause.WIRE_CORRUPT}
    assert not {one.cause for one in a_plan(1, sizes=Sizes(wired=0))} & wires
    wired = {worker for one in a_plan(1) if one.cause in wires for worker in one.workers}
    assert wired <= {0, 1, 2}
