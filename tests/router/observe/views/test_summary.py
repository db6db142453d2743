"""A router's numbers beside its tiles: those of metrics and lists, of all replicas."""

import random

from events.feed.demand import Demand
from events.feed.replicas import TTL_S, Teller
from events.plane.facts import Epoch
from router.config.settings.queue_settings import QueueSettings
from router.config.settings.routing_settings import GuardSettings
from router.decide.core.admission import Admission
from router.decide.core.pool import Pool
from router.decide.core.tally import PickTally
from router.decide.queue.views import OTHER
from router.decide.waiter import Waiter
from router.observe.audit.observers import Watchers
from router.observe.audit.shadow_policy import Shadow
from router.observe.views.decisions import Decisions
from router.observe.views.summary import TENANTS_MAX, Subject, Summary, summary_of
from router.request.request import Role
from tests.stage.fleet import Fleet, prompt


def of(
    fleet: Fleet, admission: Admission | None = None, *, shadow: Shadow | None = None
) -> Summary:
    watchers = Watchers("here", random.Random(1), print)
    watchers.shadow = shadow
    subject = Subject(
        core=fleet.core,
        admission=Admission(fleet.core, QueueSettings(), random.Random(1))
        if admission is None
        else admission,
        watchers=watchers,
        tally=PickTally(),
        refused=lambda: {"NO_WORKER": 2},
        connected=lambda: True,
        about={},
    )
    decisions = Decisions(lambda: fleet.core.policies.get("ttft"))
    return summary_of(subject, decisions, fleet.now_s)


def test_other_routers_are_there_by_their_messages_until_they_are_silent() -> None:
    fleet, other = Fleet(), Fleet(replica="there")
    key = fleet.add("a")
    other.add("a")
    for tokens in (160, 320):
        other.route(prompt(tokens))
    demand = [Demand("m", "both", 10, 3), Demand("m", "both", 50, 4)]
    teller = Teller("there", Epoch(1, 0))
    message = teller.message(other.core.fleet.loads, other.now_s, demand=demand)
    assert message is not None
    fleet.core.on_inflight(message, fleet.now_s)
    (replica,) = of(fleet).replicas
    assert (replica.replica, replica.requests, replica.waiting) == ("there", 2, 7)
    assert replica.prefill_tokens == other.core.fleet.load_of(key).prefill_tokens
    assert sum(band.elsewhere for band in of(fleet).queue.bands) == 7
    fleet.now_s += 1.0
    assert of(fleet).replicas[0].age_s == 1.0
    fleet.core.fleet.replicas.tick(fleet.now_s + TTL_S + 1)
    assert of(fleet).replicas == []


def test_an_idle_router_has_zeros_and_no_shadow() -> None:
    fleet = Fleet()
    fleet.add("a")
    summary = of(fleet)
    assert summary.queue.waiting == summary.reservations == summary.guarded == 0
    assert summary.shadow is None
    assert summary.otherwise.decisions == 0
    assert summary.refused == {"NO_WORKER": 2}
    assert summary.policy == fleet.core.routing.policy


def test_the_shadows_counts_are_those_of_its_metrics() -> None:
    fleet = Fleet()
    for i in range(3):
        fleet.add(f"w{i}")
    shadow = Shadow(fleet.core.policies["ttft"], GuardSettings())
    for tokens in (64, 640, 1600):
        fleet.core.route(fleet.request(prompt(tokens)), fleet.now_s, watch=shadow.watch)
    shown = of(fleet, shadow=shadow).shadow
    assert shown is not None
    assert shown.policy == "ttft"
    assert sum(shown.agreement.values()) == 3
    assert (shown.ttft_gain_s, shown.ttft_loss_s) == (shadow.ttft_s.gain, shadow.ttft_s.loss)


def test_the_longest_wait_is_that_of_the_last_reload() -> None:
    fleet = Fleet()
    admission = Admission(fleet.core, QueueSettings(timeout_s=7.0), random.Random(1))
    assert of(fleet, admission).queue.timeout_s == 7.0
    admission.configure(QueueSettings(timeout_s=3.0), fleet.now_s)
    assert of(fleet, admission).queue.timeout_s == 3.0


def test_waiting_requests_are_summed_by_band_and_tenant_within_a_bound() -> None:
    fleet = Fleet()
    fleet.add("a")
    admission = Admission(fleet.core, QueueSettings(), random.Random(1))
    for i in range(TENANTS_MAX + 5):
        waiter = Waiter(f"r{i}", fleet.now_s, tenant=f"tenant-{i:02}")
        admission.queue.offer(Pool("m", Role.BOTH), waiter, fleet.now_s)
    queue = of(fleet, admission).queue
    assert queue.waiting == TENANTS_MAX + 5
    assert sum(band.count for band in queue.bands) == queue.waiting
    assert len(queue.tenants) == TENANTS_MAX + 1
    assert queue.tenants[-1] == (OTHER, 5)
