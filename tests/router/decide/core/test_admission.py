"""Requests that wait, through the desk: whose turn it is, and what their tenants are charged."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvroute.v1 import router_pb2
from router.api.desk.answers import Waiting
from router.api.desk.counters import Metrics
from router.config.settings.queue_settings import (
    BandSettings,
    QueueSettings,
    TenantSettings,
    TenantsSettings,
)
from router.decide.waiter import Fate
from router.fleet.reservations.reservations import Reservation
from router.request.refusal import Reason, Refusal
from tests.stage.fleet import Fleet
from tests.stage.served import asked, desk_of, raised


class Stage:
    """A desk with a queue, before a fleet without workers."""

    def __init__(self, **queue: Any) -> None:
        self.fleet = Fleet()
        metrics = Metrics(CollectorRegistry())
        settings = QueueSettings(**queue)
        self.desk = desk_of(self.fleet, metrics, raised, queue=settings)
        self.admission = self.desk.admission
        self.came = 0

    def come(self, tokens: int = 64, **about: Any) -> Reservation | Waiting:
        """A request, by default with a prompt of its own: its reservation, or its wait."""
        self.came += 1
        request = asked(tokens, **{"first": 10_000 * self.came} | about)
        answered = self.desk.route(request.SerializeToString())
        return answered if isinstance(answered, Waiting) else answered[1]

    def waits(self, tokens: int = 64, **about: Any) -> Waiting:
        waiting = self.come(tokens, **about)
        assert isinstance(waiting, Waiting)
        return waiting

    def runs(self, tokens: int = 64, **about: Any) -> Reservation:
        reservation = self.come(tokens, **about)
        assert isinstance(reservation, Reservation)
        return reservation

    def left_tokens(self, tenant: str) -> float:
        """What a tenant's bucket held after its last charge."""
        return self.admission.queue.tenants._buckets[tenant][0]

    def pass_time(self, seconds: float) -> None:
        """Time goes by; room may have come on any worker."""
        self.fleet.now_s += seconds
        self.fleet.core.tick(self.fleet.now_s)
        self.desk.dispatch()


def test_a_pool_without_room_does_not_take_the_turns_of_others() -> None:
    stage = Stage(timeout_s=60.0)
    stage.fleet.add("full", model="a", total_slots=1, running=1)
    stage.fleet.add("free", model="a")
    stage.fleet.add("b", model="b", total_slots=1)
    for _ in range(20):
        stage.waits(model="a", allowed_worker_ids=["full"])
    running = stage.runs(model="b")
    waiting = stage.waits(model="b")
    for _ in range(50):
        stage.pass_time(0.02)
    assert not stage.admission.in_vain.may_be(stage.fleet.now_s), (
        "requests for the full worker spent it"
    )
    stage.fleet.report(running, "finished")
    for _ in range(2):
        stage.pass_time(0.02)
    assert waiting.outcome is not None
    assert len(stage.admission) == 20


@pytest.mark.parametrize("waited", [False, True])
def test_a_pair_costs_what_its_prefill_worker_computes(waited: bool) -> None:
    stage = Stage(tenants=TenantsSettings(default=TenantSettings(tokens_per_s=100.0)))
    stage.fleet.add_pair(total_slots=1, running=int(waited))
    pair = {"phase": router_pb2.PHASE_PREFILL_DECODE, "tenant": "t"}
    first = stage.come(3200, **pair)
    for worker in stage.fleet.relays:
        stage.fleet.say(worker, running=0, total_slots=100)
    stage.desk.dispatch()
    assert isinstance(first, Waiting) == waited
    assert len(stage.fleet.core.reservations) == 1
    stage.waits(3200, **pair)
    stage.pass_time(1.0)
    assert len(stage.admission) == 1


RATE = TenantsSettings(default=TenantSettings(tokens_per_s=1000.0))


def test_requests_of_one_id_that_wait_are_charged_once() -> None:
    stage = Stage(tenants=RATE)
    worker = stage.fleet.add("w0", total_slots=2, running=2)
    for _ in range(2):
        stage.waits(640, first=0, request_id="r", tenant="t")
    stage.fleet.say(worker, running=0)
    stage.desk.dispatch()
    assert len(stage.admission) == 0
    assert stage.left_tokens("t") == 1000 - 640
    assert len(stage.admission._charged) == 1


def test_the_answer_of_a_request_that_ended_is_not_charged_again() -> None:
    stage = Stage(tenants=RATE)
    stage.fleet.add("w0")
    running = stage.runs(640, first=0, request_id="r", tenant="t")
    stage.fleet.report(running, "finished")
    assert stage.runs(640, first=0, request_id="r", tenant="t") is running
    assert stage.left_tokens("t") == 1000 - 640
    assert not stage.admission._charged


def test_what_goes_at_the_end_of_its_wait_counts_as_what_goes_before_it() -> None:
    tenants = TenantsSettings(default=TenantSettings(in_flight_max=1, tokens_per_s=1000.0))
    stage = Stage(tenants=tenants, timeout_s=1.0)
    worker = stage.fleet.add("w0", total_slots=None, running=2, waiting=2, used_blocks=10)
    for _ in range(3):  # samples that agree: it runs two at once
        stage.pass_time(0.1)
        stage.fleet.say(worker)
    waiting = [stage.waits(640, tenant="t") for _ in range(5)]
    stage.pass_time(1.0)
    refused = [one.outcome for one in waiting if isinstance(one.outcome, Refusal)]
    assert [refusal.reason for refusal in refused] == [Reason.TENANT_QUOTA] * 4
    assert len(stage.fleet.core.reservations) == len(stage.admission._charged) == 1
    assert stage.left_tokens("t") == 1000 - 640
    counts = stage.admission.queue.counts
    assert (counts[Fate.DISPATCHED], counts[Fate.EXPIRED]) == (1, 4)
    assert [sum(waits.counts) for waits in stage.admission.waits.values()] == [1]


def test_a_fault_in_a_last_decision_ends_that_request_and_no_other() -> None:
    stage = Stage(timeout_s=1.0)
    worker = stage.fleet.add("w0", total_slots=None, running=2, waiting=2, used_blocks=10)
    for _ in range(3):  # samples that agree: it runs two at once
        stage.pass_time(0.1)
        stage.fleet.say(worker)
    first, second = stage.waits(), stage.waits()

    def fails() -> None:
        raise ValueError("of the caller")

    first.on_done = fails
    with pytest.raises(ValueError, match="of the caller"):
        stage.pass_time(1.0)
    stage.pass_time(0.0)
    assert isinstance(second.outcome, tuple)
    assert len(stage.admission) == 0


def test_a_quota_refuses_no_request_that_has_its_answer() -> None:
    tenants = TenantsSettings(default=TenantSettings(in_flight_max=1))
    stage = Stage(tenants=tenants, timeout_s=1.0)
    stage.fleet.add("w0")
    running = stage.runs(tenant="t")
    twins = [stage.waits(first=0, request_id="r", tenant="t") for _ in range(2)]
    stage.fleet.report(running, "finished")
    stage.pass_time(0.5)
    assert [waiting.outcome is None for waiting in twins] == [False, True]
    stage.pass_time(0.5)
    assert [waiting.take()[2] for waiting in twins] == [False, True]


def test_the_end_of_a_wait_gives_no_room_that_is_kept_for_higher_bands() -> None:
    bands = (BandSettings("low", 0, share_percent=50), BandSettings("high", 10))
    stage = Stage(bands=bands, bands_aging=0.0, timeout_s=1.0)
    stage.fleet.add("w0", total_slots=2)
    stage.runs()
    waiting = stage.waits()
    stage.pass_time(1.0)
    with pytest.raises(Refusal) as refused:
        waiting.take()
    assert refused.value.reason is Reason.QUEUE_TIMEOUT
    stage.runs(priority=10)
