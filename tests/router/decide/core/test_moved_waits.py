"""Waits that began in a router which is gone: when they count, and how much of them."""

from random import Random
from typing import Any

from events.feed.demand import Demand
from events.feed.replicas import TTL_S, Teller
from events.plane.facts import Epoch
from router.config.settings.queue_settings import QueueSettings
from router.decide.core.admission import BELIEVED_S, Admission
from router.decide.waiter import Waiter
from router.fleet.reservations.reservations import Reservation
from router.request.refusal import Reason, Refusal
from router.request.request import Request, Wait
from tests.stage.fleet import Fleet, prompt


class Job:
    """A request that no worker has room for."""

    request_id = owner = ""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def decide(self, waited_s: float, may_exceed: bool) -> Reservation:
        return self._fleet.route(prompt(64)).reservation

    def refuse(self, refusal: Refusal) -> None:
        self.refusal = refusal


class Stage:
    """A full worker, its router, and another replica in which requests wait."""

    def __init__(self, waiting: int) -> None:
        self.fleet = Fleet(replica="us")
        key = self.fleet.add("w0", total_slots=1, running=1)
        self.fleet.say(key, running=1)
        self.admission = Admission(self.fleet.core, QueueSettings(order="fcfs"), Random(0))
        self.teller = Teller("them", Epoch(1, 0))
        self.demand = [Demand("m", "both", 0, waiting)]
        self.hear(demand=self.demand)

    def hear(self, **said: Any) -> None:
        message = self.teller.message({}, self.fleet.now_s, **said)
        assert message is not None
        self.fleet.core.on_inflight(message, self.fleet.now_s)

    def come(self, waited_s: float = 0.0, **wait: Any) -> Waiter:
        job = Job(self.fleet)
        waiter = self.admission.route(
            Request("", prompt(64), "m"),
            Wait(waited_s=waited_s, **wait),
            self.fleet.now_s,
            100,
            lambda: job,
            lambda _: job.decide(0.0, True),
        )
        assert waiter is not None
        return waiter

    def pass_time(self, seconds: float) -> None:
        self.fleet.now_s += seconds
        self.fleet.core.tick(self.fleet.now_s)
        self.admission.dispatch(self.fleet.now_s)

    def waited(self, *waiters: Waiter) -> list[float]:
        return [round(self.fleet.now_s - waiter.arrived_s, 3) for waiter in waiters]


def test_a_wait_counts_once_its_router_has_fallen_silent() -> None:
    stage = Stage(waiting=2)
    here = stage.come()
    moved = [stage.come(5.0) for _ in range(3)]
    stage.pass_time(1.0)
    assert stage.waited(here, *moved) == [1, 1, 1, 1], "the other replica may be alive"
    stage.pass_time(TTL_S)
    age = 1.0 + TTL_S
    assert stage.waited(here, *moved) == [age, age + 5, age + 5, age + 5]
    assert stage.admission.moved_waits == {"claimed": 3, "believed": 3}
    order = [waiter for _, waiter in stage.admission.queue.waiters()]
    assert order == [*moved, here]


def test_a_router_that_stops_says_what_waited_there() -> None:
    stage = Stage(waiting=2)
    stage.hear(stopped=stage.demand)
    stage.hear(demand=stage.demand, stopped=stage.demand)
    stage.pass_time(0.1)
    moved = [stage.come(2.0) for _ in range(3)]
    stage.pass_time(0.1)
    assert stage.waited(*moved) == [2.1, 2.1, 2.1]


def test_a_wait_counts_up_to_the_longest_one_and_its_end_stays() -> None:
    stage = Stage(waiting=2)
    stage.hear(stopped=stage.demand)
    longest, own = stage.come(60.0), stage.come(60.0, timeout_s=4.0)
    ends = longest.expires_s, own.expires_s
    stage.pass_time(0.1)
    assert stage.waited(longest, own) == [10.1, 4.1]
    assert (longest.expires_s, own.expires_s) == ends


def test_a_request_that_comes_long_after_its_router_ended_is_not_believed() -> None:
    stage = Stage(waiting=2)
    stage.hear(stopped=stage.demand)
    stage.fleet.now_s += BELIEVED_S
    moved = stage.come(2.0)
    stage.pass_time(0.1)
    assert stage.waited(moved) == [0.1]


def test_a_router_that_stops_tells_what_waited_and_holds_no_room() -> None:
    stage = Stage(waiting=1)
    stage.come()
    stage.admission.close(Refusal(Reason.DRAINING, "stops"), stage.fleet.now_s)
    turns = stage.admission.fleet_turns
    assert [(one.model, one.waiting) for one in turns.stopped] == [("m", 1)]
    assert turns.demand(stage.fleet.now_s) == []
