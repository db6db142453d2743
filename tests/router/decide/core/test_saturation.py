"""How full pools are, by hand."""

import pytest

from router.decide.core.pool import Pool
from router.decide.core.saturation import PoolLoad, pool_loads
from router.request.request import Role
from tests.stage.fleet import Fleet


def loads(fleet: Fleet, **waiting: int) -> dict[tuple[str, str], PoolLoad]:
    """waiting: of model m, by role."""
    counts = {Pool("m", Role(role)): count for role, count in waiting.items()}
    return pool_loads(fleet.core.fleet, counts)


def test_active_and_waiting_requests_are_held_against_slots(fleet: Fleet) -> None:
    fleet.add("w0", total_slots=4, running=3, waiting=1)
    fleet.add("w1", total_slots=6, running=1)
    load = loads(fleet, both=5)["m", "both"]
    assert (load.active, load.waiting, load.slots) == (5, 5, 10)


def test_a_worker_without_slots_has_the_mean_of_its_pool(fleet: Fleet) -> None:
    fleet.add("w0", total_slots=4)
    fleet.add("w1", total_slots=8)
    fleet.add("w2", total_slots=None, running=9)
    load = loads(fleet)["m", "both"]
    assert (load.active, load.slots) == (9, 18)


def test_a_pool_without_any_slots_has_no_saturation(fleet: Fleet) -> None:
    fleet.add("w0", total_slots=None, running=9)
    load = loads(fleet, both=1)["m", "both"]
    assert (load.active, load.waiting, load.slots) == (9, 1, None)


def test_estimated_slots_count(fleet: Fleet) -> None:
    key = fleet.add("w0", total_slots=None, running=2, waiting=2, used_blocks=10)
    for _ in range(3):  # samples that agree: it runs two at once
        fleet.now_s += 0.1
        fleet.say(key)
    assert loads(fleet)["m", "both"].slots == 2


def test_workers_that_get_no_requests_are_left_out(fleet: Fleet) -> None:
    fleet.add("w0", total_slots=4)
    fleet.add("w1", total_slots=4)
    fleet.core.drain("w1")
    assert loads(fleet)["m", "both"].slots == 4
    fleet.core.drain("w0")
    assert loads(fleet, both=3) == {}


@pytest.mark.parametrize(
    ("roles", "request_role", "counted"),
    [
        (("prefill", "decode"), "pair", {"prefill": 1, "decode": 1}),
        (("both",), "pair", {"both": 1}),
        (("prefill", "both"), "pair", {"prefill": 1, "both": 1}),
        (("prefill", "both"), "decode", {"prefill": 0, "both": 1}),
        (("decode", "both"), "decode", {"decode": 1, "both": 0}),
        (("decode", "both"), "both", {"decode": 0, "both": 1}),
    ],
)
def test_a_waiting_request_counts_for_the_workers_that_it_wants(
    roles: tuple[str, ...], request_role: str, counted: dict[str, int], fleet: Fleet
) -> None:
    for role in roles:
        fleet.add(role, role=role)
    found = loads(fleet, **{request_role: 1})
    assert {role: load.waiting for (_, role), load in found.items()} == counted


def test_each_model_is_a_pool_by_its_first_name() -> None:
    fleet = Fleet("w0")
    fleet.add("v0", model="n", model_aliases=("alias",))
    pool = Pool(fleet.core.fleet.base_model("alias"), Role.BOTH)
    found = pool_loads(fleet.core.fleet, {pool: 2, Pool("unheard", Role.BOTH): 1})
    assert {pool: load.waiting for pool, load in found.items()} == {
        ("m", "both"): 0,
        ("n", "both"): 2,
    }
