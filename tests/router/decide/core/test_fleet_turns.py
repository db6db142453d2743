"""Requests of one router while others wait in another replica: which are held, what is sent."""

from random import Random
from typing import Any

import pytest

from events.feed.demand import DEMANDS_MAX, Demand
from events.feed.replicas import TTL_S, Teller
from events.plane.facts import Epoch
from router.config.settings.queue_settings import BandSettings, QueueSettings, TenantsSettings
from router.decide.core.admission import Admission
from router.decide.core.fleet_turns import POOLS_MAX
from router.decide.queue.views import rows
from router.decide.queue_turns.pool_share import HOLD_S
from router.decide.waiter import Waiter
from router.fleet.reservations.reservations import Reservation
from router.request.refusal import Refusal
from router.request.request import Request, Wait
from tests.stage.fleet import Fleet, prompt

BANDS = (BandSettings("batch", 0), BandSettings("chat", 10, weight=4.0))
HIGH = Demand("m", "both", 10, 1)


class Job:
    """A request, which asks the core."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.request_id = self.owner = ""
        self._fleet = fleet
        self._number = number

    def decide(self, waited_s: float, may_exceed: bool) -> Reservation:
        return self._fleet.route(prompt(64, first=1000 * self._number)).reservation

    def refuse(self, refusal: Refusal) -> None:
        raise refusal


class Stage:
    """A worker with two slots, which others fill, and a router with bands."""

    def __init__(self, **queue: Any) -> None:
        self.fleet = Fleet(replica="us")
        self.worker = self.fleet.add("w0", total_slots=2, running=2)
        settings = QueueSettings(
            **{"bands": BANDS, "bands_strict": True, "order": "fcfs", "timeout_s": 60.0} | queue
        )
        self.admission = Admission(self.fleet.core, settings, Random(0))
        self.teller = Teller("them", Epoch(1, 0))
        self.came = 0

    def hear(self, *demand: Demand) -> None:
        message = self.teller.message({}, self.fleet.now_s, demand=demand)
        assert message is not None
        self.fleet.core.on_inflight(message, self.fleet.now_s)
        self.admission.dispatch(self.fleet.now_s)

    def come(self, priority: int = 0, model: str = "m", **about: Any) -> Waiter | None:
        self.came += 1
        job = Job(self.fleet, self.came)
        waiter = self.admission.route(
            Request("", prompt(64, first=1000 * self.came), model, **about),
            Wait(priority=priority),
            self.fleet.now_s,
            100,
            lambda: job,
            lambda _: job.decide(0.0, True),
        )
        self.admission.dispatch(self.fleet.now_s)
        return waiter

    def waits(self) -> Waiter:
        """A request of low priority that waits."""
        waiter = self.come()
        assert waiter is not None
        return waiter

    def running(self, count: int) -> None:
        """The engine says how many requests run there, ours not among them."""
        self.fleet.say(self.worker, running=count)
        self.admission.dispatch(self.fleet.now_s)

    def pass_time(self, seconds: float) -> None:
        self.fleet.now_s += seconds
        self.admission.dispatch(self.fleet.now_s)

    def held_by(self) -> list[str]:
        held = self.admission.fleet_turns.holds
        return [row.held_by for row in rows(self.admission.queue, self.fleet.now_s, 9, held=held)]


def test_a_place_is_left_to_a_replicas_higher_band_until_it_waits_no_longer() -> None:
    stage = Stage()
    low = stage.waits()
    stage.hear(HIGH)
    assert stage.held_by() == ["room"]
    stage.running(1)
    assert low.waits
    assert stage.held_by() == ["replicas"]
    stage.hear()
    assert not low.waits
    assert not stage.admission.fleet_turns.is_contended


def test_a_newcomer_takes_no_place_of_a_replicas_request_either() -> None:
    stage = Stage()
    stage.running(1)
    assert not stage.admission.fleet_turns.is_contended
    stage.hear(HIGH)
    assert stage.admission.fleet_turns.is_contended
    low = stage.waits()
    assert low.waits, "the one place is the other replica's"
    stage.running(0)
    assert not low.waits, "the second is not"


def test_a_request_that_may_not_wait_takes_the_place_at_once() -> None:
    stage = Stage(max_waiting=0)
    stage.running(1)
    stage.hear(HIGH)
    assert stage.come() is None


def test_room_that_a_replica_leaves_is_taken_after_a_while() -> None:
    stage = Stage()
    low = stage.waits()
    stage.hear(HIGH)
    stage.running(1)
    stage.pass_time(0.5 * HOLD_S)
    assert low.waits
    stage.pass_time(0.6 * HOLD_S)
    assert not low.waits
    assert stage.admission.fleet_turns.rests == 1


def test_a_full_fleet_is_no_room_that_a_replica_leaves() -> None:
    stage = Stage()
    stage.come()
    stage.hear(HIGH)
    stage.pass_time(2 * HOLD_S)
    assert stage.admission.fleet_turns.rests == 0


def test_a_silent_replica_holds_nothing() -> None:
    stage = Stage()
    stage.come()
    stage.hear(HIGH)
    stage.fleet.now_s += TTL_S + 1
    stage.fleet.core.tick(stage.fleet.now_s)
    assert not stage.admission.fleet_turns.is_contended


def test_demand_for_another_pool_holds_nothing() -> None:
    stage = Stage()
    low = stage.waits()
    stage.hear(HIGH._replace(model="n"), HIGH._replace(role="prefill"), HIGH._replace(role="odd"))
    stage.running(1)
    assert not low.waits


def test_replicas_are_told_what_waits_by_band_with_the_largest_tenants() -> None:
    stage = Stage(tenants=TenantsSettings(fair=True))
    for number in range(20):
        stage.come(tenant=f"t{number // 2 if number < 4 else number}")
    stage.come(priority=10)
    stage.fleet.now_s += 2.0
    batch, chat = stage.admission.fleet_turns.demand(stage.fleet.now_s)
    assert batch[:5] == ("m", "both", 0, 20, 2.0)
    assert [count for _, count in batch.tenants] == [2, 2] + [1] * 14
    assert chat[:4] == ("m", "both", 10, 1)
    assert chat.tenants == ()


def test_turns_that_were_taken_are_told_and_counted_against_the_router() -> None:
    stage = Stage(bands_strict=False)
    for _ in range(4):
        stage.come()
    stage.hear(Demand("m", "both", 0, 3))
    stage.running(1)
    (mine,) = stage.admission.fleet_turns.demand(stage.fleet.now_s)
    assert (mine.waiting, mine.went) == (3, 1)
    assert mine.credit == pytest.approx(4 / 7 - 1)


def test_pools_of_replicas_are_bounded() -> None:
    stage = Stage()
    for replica in range(POOLS_MAX // DEMANDS_MAX + 2):
        demand = [Demand(f"{replica}-{i}", "both", 0, 1) for i in range(DEMANDS_MAX)]
        message = Teller(f"p{replica}", Epoch(1, 0)).message({}, stage.fleet.now_s, demand=demand)
        assert message is not None
        stage.fleet.core.on_inflight(message, stage.fleet.now_s)
    assert stage.admission.fleet_turns.is_contended
    assert len(stage.admission.fleet_turns._shares) == POOLS_MAX


def test_other_bands_by_a_reload_begin_from_nothing() -> None:
    stage = Stage()
    low = stage.waits()
    stage.hear(HIGH)
    stage.running(1)
    assert low.waits
    stage.admission.configure(QueueSettings(order="fcfs"), stage.fleet.now_s)
    assert stage.admission.fleet_turns.is_contended
    assert [depth.count for depth in stage.admission.fleet_turns.elsewhere()] == [1]
