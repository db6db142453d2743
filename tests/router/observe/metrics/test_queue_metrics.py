"""Metrics of requests that wait, on a queue with some."""

import random
from collections.abc import Hashable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from events.feed.demand import Demand
from events.feed.replicas import TTL_S, Teller
from events.plane.facts import Epoch
from router.config.settings.queue_settings import BandSettings, QueueSettings
from router.decide.core.admission import Admission
from router.decide.core.pool import Pool
from router.decide.queue.admission_queue import TENANTS_SHOWN
from router.decide.waiter import Waiter
from router.observe.metrics.families import export
from router.observe.metrics.of_queue import queue_metrics
from router.request.request import Role
from tests.stage.fleet import Fleet

BANDS = (
    BandSettings(name="low", from_priority=0, weight=1),
    BandSettings(name="high", from_priority=10, weight=3),
)
POOL = Pool("m", Role.BOTH)


class Stage:
    """A fleet of one worker with two slots, its queue and their metrics."""

    def __init__(self, **queue: Any) -> None:
        self.fleet = Fleet()
        self.fleet.add("w0", total_slots=2, running=1)
        settings = QueueSettings(**{"bands": BANDS, "bands_aging": 0.0} | queue)
        self.admission = Admission(self.fleet.core, settings, random.Random(0))
        self.registry = CollectorRegistry()
        core = self.fleet.core
        export(self.registry, queue_metrics, self.admission, core.fleet, self.fleet.clock)

    def offer(self, name: str, *, pool: Hashable = POOL, **about: Any) -> Waiter:
        waiter = Waiter(name, self.fleet.now_s, **about)
        self.admission.queue.offer(pool, waiter, self.fleet.now_s)
        return waiter

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"kvroute_{name}", labels)


def test_bands_have_their_depth_and_their_oldest_wait() -> None:
    stage = Stage()
    stage.offer("a")
    stage.fleet.now_s += 2
    stage.offer("b")
    stage.fleet.now_s += 1
    assert stage.value("queue_depth", band="low", where="here") == 2
    assert stage.value("queue_age_seconds", band="low", kind="oldest") == 3
    assert stage.value("queue_depth", band="high", where="here") == 0
    assert stage.value("queue_age_seconds", band="high", kind="oldest") == 0
    assert stage.value("queue_age_seconds", band="", kind="timeout") == 10


def test_attempts_in_vain_are_counted() -> None:
    stage = Stage()
    assert stage.value("queue_vain_attempts_total") == 0
    stage.admission.in_vain.add(rows=3)
    assert stage.value("queue_vain_attempts_total") == 1


def test_what_waits_in_replicas_is_shown_by_our_bands_until_they_are_silent() -> None:
    stage = Stage()
    demand = [Demand("m", "both", 10, 3), Demand("n", "prefill", 50, 4), Demand("m", "both", -5, 1)]
    message = Teller("them", Epoch(1, 0)).message({}, stage.fleet.now_s, demand=demand)
    assert message is not None
    stage.fleet.core.on_inflight(message, stage.fleet.now_s)
    assert stage.value("queue_depth", band="high", where="elsewhere") == 7
    assert stage.value("queue_depth", band="low", where="elsewhere") == 1
    assert stage.value("queue_of_replicas_total", event="claim_rested") == 0
    stage.fleet.core.fleet.replicas.tick(stage.fleet.now_s + TTL_S + 1)
    assert stage.value("queue_depth", band="high", where="elsewhere") == 0


@pytest.mark.parametrize(
    ("strict", "low_s", "high_s"),
    # One request a second: low ones have a quarter of the turns, unless the high ones go first.
    [(False, 4.0, 2 / 0.75), (True, 4.0, 2.0)],
)
def test_the_predicted_wait_is_by_the_pace_and_by_band(
    strict: bool, low_s: float, high_s: float
) -> None:
    stage = Stage(bands_strict=strict)
    assert stage.value("queue_age_seconds", band="low", kind="predicted") == 0
    gone = [stage.offer(str(number)) for number in range(20)]
    stage.offer("low")
    stage.offer("low too")
    stage.offer("high", priority=10)
    assert stage.value("queue_age_seconds", band="low", kind="predicted") is None
    for waiter in gone:
        stage.fleet.now_s += 1
        stage.admission.queue.dispatched(waiter, 1, 0, stage.fleet.now_s)
    pace_s = 1 / stage.admission.queue._pools[POOL].rate.per_s(stage.fleet.now_s)
    assert pace_s == pytest.approx(1.0, rel=0.15)
    low = stage.value("queue_age_seconds", band="low", kind="predicted")
    high = stage.value("queue_age_seconds", band="high", kind="predicted")
    assert low == pytest.approx(low_s * pace_s)
    assert high == pytest.approx(high_s * pace_s)


def test_tenants_that_waited_most_recently_have_a_name_and_the_rest_are_one() -> None:
    stage = Stage()
    waiting = [stage.offer(str(number), tenant=f"t{number}") for number in range(TENANTS_SHOWN + 2)]
    depths = {
        sample.labels["tenant"]: sample.value
        for family in stage.registry.collect()
        if family.name == "kvroute_queue_tenant_depth"
        for sample in family.samples
    }
    assert len(depths) == TENANTS_SHOWN + 1
    assert depths["other"] == 2
    assert {"t0", "t1"}.isdisjoint(depths)
    assert set(depths.values()) == {1, 2}
    for waiter in waiting:
        stage.admission.queue.cancel(waiter, stage.fleet.now_s)
    assert stage.value("queue_tenant_depth", tenant="t5") == 0
    stage.offer("back", tenant="t0")
    assert stage.value("queue_tenant_depth", tenant="t0") == 1
    assert stage.value("queue_tenant_depth", tenant="t2") is None
    stage.offer("named so", tenant="other")
    assert stage.value("queue_tenant_depth", tenant="other") == 1


def test_a_pools_requests_count_what_waits() -> None:
    stage = Stage()
    labels = {"model": "m", "role": "both"}
    for name in "abc":
        stage.offer(name)
    assert stage.value("pool_requests", **labels, state="active") == 1
    assert stage.value("pool_requests", **labels, state="waiting") == 3
    assert stage.value("pool_slots", **labels) == 2
    stage.fleet.add("v0", model="n", total_slots=None)
    assert stage.value("pool_slots", model="n", role="both") is None
    assert stage.value("pool_requests", model="n", role="both", state="active") == 0
