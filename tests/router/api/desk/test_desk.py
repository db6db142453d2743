"""What the desk counts and keeps, whatever fails."""

import random
from functools import partial
from itertools import count
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from kvroute.v1 import router_pb2
from router.api.desk.answers import Later, Waiting
from router.api.desk.counters import Metrics
from router.api.desk.desk import LONG_BYTES, Desk
from router.api.desk.stream_items import RouteItems, read_batch
from router.api.desk.tenant import Caller
from router.api.service.calls import Guard
from router.config.settings.queue_settings import QueueSettings, TenantSettings, TenantsSettings
from router.decide.decision.decision import Decision
from router.net.keys.identity import Allowance, Identity
from router.net.keys.usage import Usage
from router.observe.audit.sampling import Sampled, Watch
from router.request.refusal import Reason, Refusal
from tests.stage.fleet import Fleet
from tests.stage.served import NO_QUEUE, asked, batch_of, desk_of


class Stage:
    """A desk with one worker behind it."""

    def __init__(self, watch: Any = None, queue: QueueSettings = NO_QUEUE) -> None:
        self.fleet = Fleet(index=NativeIndex())
        self.fleet.add("w0", total_blocks=1_000_000)
        self.metrics = Metrics(CollectorRegistry())
        guard = Guard.of(1 << 20, self.metrics)
        self.desk = desk_of(self.fleet, self.metrics, guard.fault, watch=watch, queue=queue)

    def decide(self, items: RouteItems, *sent: router_pb2.RouteItem) -> list[str]:
        """What each item came to, the worker's id or the status's message."""
        content = router_pb2.RouteBatch(items=sent).SerializeToString()
        return [
            result.response.worker_id or result.status.message
            for message in items.decide(read_batch(content))
            if message is not None
            for result in router_pb2.RouteResults.FromString(message).results
        ]

    def faults(self) -> float:
        """kvroute_calls_refused_total for a fault, of all methods."""
        families = self.metrics.calls_refused.collect()
        samples = [one for family in families for one in family.samples]
        return sum(
            one.value
            for one in samples
            if one.name.endswith("_total") and one.labels["reason"] == "INTERNAL"
        )

    def counted(self) -> dict[str, float]:
        """Requests by outcome or reason, those above 0."""
        return {
            one.labels["reason"] or one.labels["outcome"]: one.value
            for family in self.metrics.registry.collect()
            for one in family.samples
            if one.name == "kvroute_requests_total" and one.value
        }


def answered_by(desk: Desk, request: router_pb2.RouteRequest, **about: Any) -> None:
    """The item of a stream, to its end."""
    answered = desk.item(request.SerializeToString(), **about)
    if not isinstance(answered, tuple | Later):
        list(answered)


@pytest.mark.parametrize("tokens", [40, LONG_BYTES // 4])
def test_a_call_past_its_deadline_is_counted_as_refused(tokens: int) -> None:
    stage = Stage()
    with pytest.raises(Refusal, match="deadline") as refused:
        answered_by(stage.desk, asked(tokens), left_s=0.0)
    assert refused.value.reason is Reason.DEADLINE_EXCEEDED
    assert stage.counted() == {"DEADLINE_EXCEEDED": 1}
    assert stage.fleet.loads() == {}


def test_a_long_request_whose_caller_leaves_between_its_steps_is_counted() -> None:
    stage = Stage()
    steps = stage.desk.steps(asked(LONG_BYTES // 4).SerializeToString())
    next(steps)
    steps.close()
    assert stage.counted() == {"cancelled": 1}
    assert stage.fleet.loads() == {}


@pytest.mark.parametrize("tokens", [40, LONG_BYTES // 4])
def test_a_request_that_another_router_serves_is_decided_and_reserves_nothing(tokens: int) -> None:
    seen: list[Decision] = []
    stage = Stage(watch=Watch([Sampled(seen.append, 1.0)], random.Random(1), print))
    before = stage.fleet.core.fleet.view.index.predicted(0)
    for _ in range(2):  # the first one left no trace for the second one
        outcome = stage.desk.route(asked(tokens, observed=True).SerializeToString())
        assert isinstance(outcome, tuple)
        response = router_pb2.RouteResponse.FromString(outcome[0])
        assert (response.worker_id, response.overlap_tokens.usable) == ("w0", 0)
    assert len(seen) == 2
    assert stage.counted() == {"picked": 2}
    assert stage.fleet.core.fleet.observed.picks == 2
    assert stage.fleet.loads() == {}
    assert len(stage.fleet.core.reservations) == 0
    assert stage.fleet.core.fleet.view.index.predicted(0) == before


def test_a_request_that_another_router_serves_takes_no_room_and_so_finds_no_worker_full() -> None:
    stage = Stage()
    stage.fleet.say(WorkerKey("w0", 0), running=100)
    assert isinstance(stage.desk.route(asked(40, observed=True).SerializeToString()), tuple)
    with pytest.raises(Refusal) as refused:
        stage.desk.route(asked(40).SerializeToString())
    assert refused.value.reason is Reason.ALL_WORKERS_FULL


def test_a_request_that_another_router_serves_is_tried_once_and_changes_no_request_of_its_id() -> (
    None
):
    stage = Stage()
    answered = stage.desk.route(asked(40, request_id="x", tenant="t").SerializeToString())
    assert isinstance(answered, tuple)
    lease_ends_s = answered[1].lease_ends_s
    stage.fleet.now_s += 5.0
    copy = asked(80, request_id="x", tenant="t", observed=True)
    assert isinstance(stage.desk.route(copy.SerializeToString()), tuple)
    assert (answered[1].lease_ends_s, answered[1].shared) == (lease_ends_s, False)
    assert stage.fleet.core.fleet.tenants.by_name["t"].prompt_tokens == 40 + 80
    stage.fleet.core.remove("w0", 60.0, stage.fleet.now_s)
    with pytest.raises(Refusal) as refused:
        stage.desk.route(asked(40, observed=True).SerializeToString())
    assert refused.value.retry_after_s is None


def test_every_item_of_a_stream_is_counted() -> None:
    stage = Stage()
    desk, seconds = stage.desk, count()
    items = RouteItems(desk.item, desk.cancel, clock=lambda: next(seconds))
    answers = stage.decide(
        items,
        router_pb2.RouteItem(index=1),
        router_pb2.RouteItem(index=2, request=asked(40), timeout_ms=1),
        router_pb2.RouteItem(index=3, request=asked(40)),
    )
    assert len(answers) == 3
    assert answers[2] == "w0"
    assert stage.counted() == {"INVALID_FIELD": 1, "DEADLINE_EXCEEDED": 1, "picked": 1}


def test_what_fails_about_hot_prefixes_takes_no_answer_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()
    core = stage.fleet.core
    stage.fleet.copy_prefixes(enabled=True)

    def fails(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    stage.fleet.hot.on_pick = fails  # type: ignore[method-assign]
    answer, reservation, _ = stage.desk.route(asked(40).SerializeToString())  # type: ignore[misc]
    assert router_pb2.RouteResponse.FromString(answer).reservation_id == reservation.id
    items = RouteItems(stage.desk.item, stage.desk.cancel, stage.desk.leave)
    sent = [router_pb2.RouteItem(index=i, request=asked(40)) for i in range(3)]
    assert stage.decide(items, *sent) == ["w0"] * 3
    assert stage.counted() == {"picked": 4}
    assert "INTERNAL" not in caplog.text
    assert "HotPrefixes missed a pick; the request has its answer" in caplog.text
    assert len(core.reservations) == 4
    stage.decide(items, *(router_pb2.RouteItem(index=i, cancel=True) for i in range(3)))
    assert len(core.reservations) == 1
    assert stage.faults() == 4


def test_an_observer_that_fails_ends_no_stream() -> None:
    class Broken:
        def take(self) -> None:
            raise RuntimeError("a fault of ours")

    stage = Stage(Broken())
    sent = router_pb2.RouteItem(index=1, request=asked(40))
    items = RouteItems(stage.desk.item, stage.desk.cancel, stage.desk.leave)
    (told,) = stage.decide(items, sent)
    assert "the router failed on this request" in told
    assert stage.counted() == {"INTERNAL": 1}
    assert stage.faults() > 0


QUOTA = QueueSettings(tenants=TenantsSettings(named={"paid": TenantSettings(in_flight_max=1)}))
"""Tenant `paid` has one request in flight; further ones wait."""


@pytest.mark.parametrize("port", ["route", "long", "stream"])
@pytest.mark.parametrize(
    ("verified", "field", "waits"),
    [("", "paid", True), ("paid", "free", True), ("free", "paid", False), ("", "free", False)],
)
def test_a_verified_tenant_replaces_that_of_the_field(
    port: str, verified: str, field: str, waits: bool
) -> None:
    desk = Stage(queue=QUOTA).desk
    desk.route(asked(tenant="paid").SerializeToString())
    request = asked(LONG_BYTES // 4 if port == "long" else 100, tenant=field)
    caller = Caller(tenant=verified)
    if port == "stream":
        items = RouteItems(partial(desk.item, caller=caller), desk.cancel, desk.leave)
        list(items.decide(read_batch(batch_of(request).SerializeToString())))
    else:
        answered_by(desk, request, caller=caller)  # or in the queue
    assert len(desk.admission) == waits
    waiting = [waiter.tenant for _, waiter in desk.admission.queue.waiters()]
    assert waiting == ["paid"] * waits


def test_requests_that_wait_count_as_reservations_of_their_key_until_their_wait_ends() -> None:
    desk = (stage := Stage(queue=QUOTA)).desk
    usage = Usage(Identity("a", limits=Allowance(reservations=3)), stage.fleet.clock)
    caller = Caller("paid", usage)
    first = desk.route(asked().SerializeToString(), caller=caller)
    assert isinstance(first, tuple)
    waiting = [desk.route(asked().SerializeToString(), caller=caller) for _ in range(2)]
    with pytest.raises(Refusal, match="reservations"):
        desk.route(asked().SerializeToString(), caller=caller)
    for later in waiting:
        assert isinstance(later, Waiting)
    desk.leave(waiting[1])  # type: ignore[arg-type]
    assert usage.waiting == 1
    desk.cancel(first[1])
    desk.dispatch()
    assert usage.waiting == 0
    assert len(usage._open) == 2, "the first one's end is seen when there is need"
    last = desk.route(asked().SerializeToString(), caller=caller)
    assert (usage.waiting, isinstance(last, Waiting)) == (1, True)
    desk.close()
    assert usage.waiting == 0


def test_a_request_that_waits_keeps_the_tenant_of_its_caller() -> None:
    desk = Stage(queue=QUOTA).desk
    first = desk.route(asked().SerializeToString(), caller=Caller("paid"))
    assert isinstance(first, tuple)
    waiting = desk.route(asked(first=100).SerializeToString(), caller=Caller("paid"))
    assert isinstance(waiting, Waiting)
    desk.cancel(first[1])
    desk.dispatch()
    assert waiting.take()[1].worker.worker_id == "w0"
    assert isinstance(
        desk.route(asked(first=200).SerializeToString(), caller=Caller("paid")), Waiting
    )
