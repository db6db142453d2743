"""The router's queue in virtual time: whose turn it is, what callers ask for, and its laws."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from router.config.settings.queue_settings import (
    BandSettings,
    QueueSettings,
    TenantSettings,
    TenantsSettings,
)
from router.decide.waiter import Fate
from simulator.traffic.callers import Callers, Priorities
from simulator.traffic.results import Outcome, RunResult, Slo, aggregate
from simulator.traffic.trace import Trace
from simulator.world.laws import LawBroken
from simulator.world.options import Failure, RouterRestart, RunOptions
from simulator.world.virtual_router import VirtualRouter
from simulator.world.world import World
from tests.simulator.worlds import FOUR_SLOTS, checked, crowd


def played(of: Trace, **options: Any) -> tuple[World, RunResult]:
    return checked(of, **({"workers": 1, "scheduler": FOUR_SLOTS} | options))


def test_more_requests_than_slots_wait_and_every_law_of_the_queue_is_looked_at() -> None:
    world, result = played(crowd(40), workers=2)
    numbers = aggregate(result)
    assert (numbers.served, numbers.shed, result.order) == (40, 0, "priority")
    assert 20 < numbers.queued < 40
    assert numbers.wait_ms.p99 > 500
    assert (result.wait_s <= result.queue_s).all()
    assert world.laws is not None
    for law in ("queue", "work", "slots"):
        assert world.laws.checks[law] > 0, law


@pytest.mark.parametrize("order", ["fcfs", "priority", "lof", "shortest-first", "wspt", "random"])
def test_the_laws_hold_with_bands_tenants_failures_and_replicas(order: str) -> None:
    queue = QueueSettings(
        order=order,
        max_waiting=12,
        timeout_s=1.0,
        bands=(BandSettings("low", 0), BandSettings("high", 10, weight=3.0)),
        tenants=TenantsSettings(fair=True),
    )
    callers = Callers(tenants=3, priorities=Priorities.parse("random:0,10,30:0.4,0.1"))
    world, result = played(
        callers.of(crowd(120, 0.02), 0),
        workers=3,
        replicas=2,
        queue=queue,
        failures=(Failure(3.0, 0, 2.0),),
        router_restarts=(RouterRestart(4.0),),
    )
    numbers = aggregate(result)
    assert numbers.served + numbers.shed + numbers.failed == 120
    assert numbers.queue_timeouts > 0
    assert world.fleet.routers[1].admission.queue.counts[Fate.DISPATCHED] > 0


def test_the_higher_priority_waits_less() -> None:
    trace = Callers(priorities=Priorities.parse("random:0,10:0.2")).of(crowd(60), 0)
    high = np.array([request.priority == 10 for request in trace.requests])
    _, ranked = played(trace)
    _, plain = played(trace, queue=QueueSettings(order="fcfs"))
    assert ranked.wait_s[high].mean() < ranked.wait_s[~high].mean() / 3
    assert plain.wait_s[high].mean() > ranked.wait_s[high].mean() * 2


def test_no_queue_refuses_at_once_and_a_full_one_displaces_the_lowest() -> None:
    _, none = played(crowd(20), queue=QueueSettings(max_waiting=0), patience_s=0.0)
    assert (none.waits == 0).all()
    assert aggregate(none).shed > 0
    few = QueueSettings(max_waiting=2)
    trace = crowd(20)
    rising = replace(
        trace, requests=[replace(one, priority=11 * i) for i, one in enumerate(trace.requests)]
    )
    _, full = played(rising, queue=few, patience_s=0.0)
    numbers = aggregate(full)
    assert numbers.queue_full == numbers.shed == full.counters["displaced"] > 0


def test_a_request_is_good_within_its_own_ttft_and_deadline_and_is_not_sent_after_it() -> None:
    trace = crowd(20)
    requests = list(trace.requests)
    requests[18] = replace(requests[18], deadline_s=0.5)
    requests[19] = replace(requests[19], ttft_slo_s=0.5)
    _, result = played(replace(trace, requests=requests))
    assert result.outcome[18] == Outcome.SHED
    assert result.e2e_s[18] != result.e2e_s[18]  # it has no end but that of its caller's patience
    assert result.outcome[19] == Outcome.SERVED
    assert aggregate(result).goodput_share == 18 / 20
    assert aggregate(result, slo=Slo(ttft_s=1e-3)).goodput_share == 0.0


def test_edf_takes_the_request_that_is_due_first() -> None:
    trace = crowd(12, 0.001)
    requests = [
        replace(request, ttft_slo_s=9.0 - 0.1 * number)
        for number, request in enumerate(trace.requests)
    ]
    _, result = played(replace(trace, requests=requests), queue=QueueSettings(order="edf"))
    picked_s = (result.arrival_s + result.wait_s)[result.waits > 0]
    assert len(picked_s) == 8
    assert (np.diff(picked_s) <= 0).all()


def test_memory_pressure_voids_less_of_a_priority() -> None:
    """Engines without priorities whose blocks hold eight of sixteen answers."""
    short = replace(FOUR_SLOTS, block_count=200, max_num_seqs=16)
    crowded = crowd(80, 0.2)
    long = replace(crowded, requests=[replace(one, output_tokens=600) for one in crowded.requests])
    trace = Callers(priorities=Priorities.parse("random:0,10:0.2")).of(long, 0)
    high = np.array([request.priority == 10 for request in trace.requests])
    waiting = {"workers": 2, "scheduler": short, "queue": QueueSettings(timeout_s=60.0)}
    _, ours = played(trace, **waiting)
    _, theirs = played(trace, **waiting, tells_capacity=False)  # all wait in the engines
    assert (ours.outcome == Outcome.SERVED).all()
    assert ours.ttft_s[high].mean() < theirs.ttft_s[high].mean() / 2
    assert ours.preemptions.sum() < 0.6 * theirs.preemptions.sum()


@pytest.mark.parametrize("rule", ["quota", "share"])
def test_a_request_that_a_rule_holds_breaks_no_law(rule: str) -> None:
    tenants = TenantsSettings(default=TenantSettings(in_flight_max=1))
    bands = (BandSettings("low", 0, share_percent=50), BandSettings("high", 10))
    queue = QueueSettings(tenants=tenants) if rule == "quota" else QueueSettings(bands=bands)
    _, result = played(crowd(8, 0.01, tenant="a"), queue=queue)
    assert (result.outcome == Outcome.SERVED).all()
    assert result.in_flight.max() <= (1 if rule == "quota" else 2)
    assert aggregate(result).queued >= 6


def test_a_router_that_leaves_a_request_waiting_breaks_the_law_of_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(VirtualRouter, "dispatch", lambda self: None)
    with pytest.raises(LawBroken, match=r"work: .* which has room for it"):
        played(crowd(10))


def test_requests_that_are_lost_in_a_queue_break_its_law() -> None:
    world = World(RunOptions(workers=1, scheduler=FOUR_SLOTS, check=True), crowd(4))
    world.fleet.routers[0].admission.queue.counts[Fate.ARRIVED] += 1
    with pytest.raises(LawBroken, match=r"queue: .* 1 arrived"):
        world.run()


def test_an_order_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown order 'fifo'"):
        World(RunOptions(queue=QueueSettings(order="fifo")), crowd(1))
