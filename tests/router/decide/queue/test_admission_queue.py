"""Bounds, ends and turns of waiting requests."""

import pytest

from router.config.keys import ConfigError
from router.config.settings.queue_settings import BandSettings, TenantSettings, TenantsSettings
from router.decide.queue.admission_queue import IDLE_POOLS_MAX, AdmissionQueue, QueueFull
from router.decide.queue_limits.bounds import Bound
from router.decide.queue_turns.round import LOOKS_MAX
from router.decide.waiter import Fate, Waiter
from router.request.narrowing import Narrowing
from router.request.refusal import Reason
from tests.router.decide.queue.waiting import (
    POOL,
    all_offered,
    check_counts,
    drained,
    expired,
    names,
    offered,
    queue_of,
    tried_in_vain,
    turns,
)

MIB = 1 << 20
FEW = Narrowing("adapter")


@pytest.fixture
def queue() -> AdmissionQueue:
    return queue_of()


class TestTurns:
    def test_equal_requests_go_in_the_order_of_arrival(self, queue: AdmissionQueue) -> None:
        all_offered(queue, "abc")
        assert drained(queue) == "a b c"

    def test_a_request_that_waited_elsewhere_before_goes_by_its_arrival_there(self) -> None:
        queue = queue_of(order="fcfs")
        offered(queue, "a", 100.0)
        offered(queue, "b", 100.0, arrived_s=98.0)
        assert drained(queue, 100.0) == "b a"

    def test_looking_at_the_turns_changes_nothing(self, queue: AdmissionQueue) -> None:
        all_offered(queue, "abc")
        assert turns(queue) == turns(queue) == "a b c"
        assert queue.waiting(POOL) == 3

    def test_a_request_that_has_no_room_is_no_candidate_again_at_the_same_version(self) -> None:
        queue = queue_of()
        first, _ = offered(queue, "a"), offered(queue, "b")
        queue.passed(first, 1)
        assert names(queue.candidates(POOL, 1, 0.0)) == "b"
        assert names(queue.candidates(POOL, 2, 0.0)) == "a b"

    @pytest.mark.parametrize("look_past", [0, 3])
    def test_so_many_requests_without_room_are_looked_past(self, look_past: int) -> None:
        queue = queue_of(look_past=look_past)
        all_offered(queue, "abcdefgh")
        attempts = tried_in_vain(queue)
        assert len(attempts) == look_past + 1
        assert names(queue.candidates(POOL, 1, 0.0)) == "", "not even in a second round"

    def test_requests_for_few_workers_do_not_hold_the_others(self) -> None:
        queue = queue_of(look_past=1)
        all_offered(queue, "abcd", narrowing=FEW)
        offered(queue, "e")
        for waiter in queue.candidates(POOL, 1, 0.0):
            if waiter.narrowing:
                queue.passed(waiter, 1)
            else:
                queue.dispatched(waiter, 1, 0, 0.0)
        assert queue.find("e") == ()

    def test_a_round_fails_so_often_at_most_whatever_narrowings_there_are(self) -> None:
        queue = queue_of(look_past=1)
        for number in range(20):
            offered(queue, str(number), narrowing=Narrowing(str(number)))
        attempts = tried_in_vain(queue)
        assert len(attempts) == 8

    def test_a_round_skips_so_many_requests_at_most(self) -> None:
        queue = queue_of(look_past=0)
        for number in range(LOOKS_MAX):
            offered(queue, str(number), narrowing=FEW)
        offered(queue, "plain")
        queue.passed(next(queue.candidates(POOL, 1, 0.0)), 1)
        assert names(queue.candidates(POOL, 1, 0.0)) == ""
        (waiter,) = queue.find("5")
        queue.cancel(waiter, 0.0)
        assert names(queue.candidates(POOL, 1, 0.0)) == "plain"

    def test_others_may_leave_while_a_round_goes_on(self, queue: AdmissionQueue) -> None:
        waiters = all_offered(queue, "abcdef")
        seen = []
        for waiter in queue.candidates(POOL, 1, 0.0):
            seen.append(waiter)
            if waiter.request_id == "c":
                for gone in (waiters[0], waiters[2], waiters[3]):
                    queue.cancel(gone, 0.0)
        assert names(seen) == "a b c e f"

    def test_pools_have_turns_of_their_own(self, queue: AdmissionQueue) -> None:
        offered(queue, "a", model="one")
        offered(queue, "b", model="two")
        assert queue.pools() == ["one", "two"]
        assert turns(queue, pool="two") == "b"
        assert turns(queue, pool="three") == ""
        assert (queue.waiting("one"), queue.waiting("three"), len(queue)) == (1, 0, 2)

    def test_an_unknown_order_is_refused_by_its_name(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown order 'lifo' at `\$\.queue\.order`"):
            queue_of(order="lifo")


class TestBounds:
    def test_one_request_more_than_may_wait_is_refused(self) -> None:
        queue = queue_of(max_waiting=2)
        offered(queue, "a")
        offered(queue, "b")
        with pytest.raises(QueueFull) as caught:
            offered(queue, "c")
        assert caught.value.reason is Reason.QUEUE_FULL
        assert caught.value.metadata == {"key": "queue.max_waiting"}
        assert "2 requests may wait" in caught.value.message
        assert len(queue) == 2
        assert queue.refusals == {Bound.WAITING: 1}
        check_counts(queue)

    def test_no_request_waits_where_none_may(self) -> None:
        with pytest.raises(QueueFull):
            offered(queue_of(max_waiting=0), "a")

    def test_bytes_are_bounded_to_the_last_one(self) -> None:
        queue = queue_of(max_mib=1)
        offered(queue, "a", size_bytes=MIB - 1)
        offered(queue, "b", size_bytes=1)
        with pytest.raises(QueueFull, match="1 MiB"):
            offered(queue, "c", size_bytes=1)
        assert queue.size_bytes == MIB

    def test_a_tenant_has_bounds_of_its_own(self) -> None:
        queue = queue_of(max_waiting=4, max_mib=4, tenant_share=0.25)
        offered(queue, "a", tenant="blue")
        with pytest.raises(QueueFull, match="1 requests of a tenant, of 1 MiB") as refused:
            offered(queue, "b", tenant="blue")
        assert refused.value.metadata == {"key": "queue.tenant_share"}
        offered(queue, "c", tenant="red", size_bytes=MIB)
        with pytest.raises(QueueFull, match="tenant_share"):
            offered(queue, "d", tenant="green", size_bytes=MIB + 1)
        assert queue.refusals == {Bound.TENANT: 2}

    def test_a_tenant_may_have_one_request_whatever_its_share(self) -> None:
        queue = queue_of(max_waiting=4, tenant_share=0.01)
        offered(queue, "a", tenant="blue")
        assert len(queue) == 1

    def test_a_tenant_that_nothing_waits_for_is_forgotten(self) -> None:
        queue = queue_of(max_waiting=4, tenant_share=0.25)
        for number in range(100):
            offered(queue, "a", tenant=str(number))
            drained(queue)
        assert not queue._bounds._tenants

    def test_pools_that_nothing_waits_for_are_kept_to_a_bound(self, queue: AdmissionQueue) -> None:
        for number in range(IDLE_POOLS_MAX + 9):
            offered(queue, "a", model=str(number))
            drained(queue, pool=str(number))
        assert len(queue._pools) <= IDLE_POOLS_MAX + 1

    def test_a_request_waits_once(self, queue: AdmissionQueue) -> None:
        waiter = offered(queue, "a")
        with pytest.raises(ValueError, match="waits already"):
            queue.offer(POOL, waiter, 0.0)
        assert queue.counts[Fate.ARRIVED] == 1

    def test_requests_of_one_id_wait_each_by_itself(self, queue: AdmissionQueue) -> None:
        first, second = offered(queue, "a"), offered(queue, "a")
        assert queue.find("a") == (first, second)
        queue.cancel(first, 0.0)
        assert queue.find("a") == (second,)
        assert drained(queue) == "a"
        assert queue.find("a") == ()

    def test_requests_without_an_id_wait_as_well(self, queue: AdmissionQueue) -> None:
        offered(queue, "")
        offered(queue, "")
        assert len(queue) == 2
        assert queue.find("") == ()


def displaced_by(queue: AdmissionQueue, newcomer: Waiter) -> str:
    displaced = queue.offer(POOL, newcomer, newcomer.arrived_s)
    return "" if displaced is None else displaced.request_id


class TestDisplacement:
    @pytest.mark.parametrize(("priority", "takes"), [(15, False), (16, True)])
    def test_a_newcomer_takes_a_place_from_the_threshold_on(
        self, priority: int, takes: bool
    ) -> None:
        queue = queue_of(max_waiting=2)
        offered(queue, "a", priority=5)
        offered(queue, "b", priority=7)
        newcomer = Waiter("c", 0.0, priority=priority)
        if not takes:
            with pytest.raises(QueueFull):
                queue.offer(POOL, newcomer, 0.0)
            assert turns(queue) == "b a"
        else:
            displaced = queue.offer(POOL, newcomer, 0.0)
            assert displaced is not None
            assert displaced.request_id == "a"
            assert not displaced.waits
            assert turns(queue) == "c b"
            assert queue.displacement(0.0).reason is Reason.QUEUE_FULL
        check_counts(queue)

    def test_of_equal_ones_the_last_that_arrived_is_displaced(self) -> None:
        queue = queue_of(max_waiting=2)
        offered(queue, "a", 0.0)
        offered(queue, "b", 1.0)
        assert displaced_by(queue, Waiter("c", 2.0, priority=20)) == "b"

    def test_after_a_reload_the_last_that_arrived_is_displaced_whatever_the_order(self) -> None:
        queue = queue_of(max_waiting=2, order="shortest-first")
        offered(queue, "long", new_tokens=1000)
        offered(queue, "short", new_tokens=10)
        queue.configure(queue.settings, 0.0)
        assert displaced_by(queue, Waiter("c", 0.0, priority=20)) == "short"

    def test_another_priority_makes_no_request_later_than_those_that_came_after_it(self) -> None:
        queue = queue_of(max_waiting=3)
        first, *_ = all_offered(queue, "abc")
        queue.reprioritize(first, 1, 0.0)
        queue.reprioritize(first, 0, 0.0)
        assert displaced_by(queue, Waiter("d", 0.0, priority=20)) == "c"
        assert displaced_by(queue, Waiter("e", 0.0, priority=20)) == "b"

    def test_none_is_displaced_that_would_not_make_room(self) -> None:
        queue = queue_of(max_mib=1)
        offered(queue, "a", size_bytes=MIB // 2)
        offered(queue, "b", size_bytes=MIB // 2)
        with pytest.raises(QueueFull):
            offered(queue, "c", priority=20, size_bytes=MIB)
        assert len(queue) == 2

    def test_a_tenant_at_its_own_bound_displaces_only_its_own(self) -> None:
        queue = queue_of(max_waiting=4, tenant_share=0.25)
        offered(queue, "a", tenant="blue", priority=-50)
        offered(queue, "b", tenant="red")
        assert displaced_by(queue, Waiter("c", 0.0, tenant="red", priority=20)) == "b"

    def test_the_priority_that_counts_is_the_latest(self) -> None:
        queue = queue_of(max_waiting=2)
        first = offered(queue, "a")
        offered(queue, "b", priority=5)
        queue.reprioritize(first, 9, 0.0)
        assert displaced_by(queue, Waiter("c", 0.0, priority=16)) == "b"


class TestEnds:
    def test_waits_end_in_the_order_of_their_ends_in_slices(self, queue: AdmissionQueue) -> None:
        for name, expires_s in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("d", 4.0)):
            offered(queue, name, expires_s=expires_s)
        assert names(expired(queue, 3.0, 2)) == "b c"
        assert names(expired(queue, 3.0, 2)) == "a"
        assert names(expired(queue, 3.0, 2)) == ""
        assert queue.counts[Fate.EXPIRED] == 3
        check_counts(queue)

    def test_a_request_whose_wait_is_over_is_no_candidate(self, queue: AdmissionQueue) -> None:
        offered(queue, "a", expires_s=1.0)
        offered(queue, "b", expires_s=1.1)
        assert turns(queue, 1.0) == "b"

    def test_a_cancelled_request_leaves_at_once(self, queue: AdmissionQueue) -> None:
        waiter = offered(queue, "a", expires_s=1.0)
        assert queue.cancel(waiter, 0.5)
        assert not queue.cancel(waiter, 0.5)
        assert (len(queue), expired(queue, 1.0), queue.find("a")) == (0, [], ())
        check_counts(queue)

    def test_a_request_that_left_is_not_dispatched(self, queue: AdmissionQueue) -> None:
        waiter = offered(queue, "a")
        queue.cancel(waiter, 0.0)
        with pytest.raises(ValueError, match="does not wait"):
            queue.dispatched(waiter, 1, 0, 0.0)
        assert not queue.reprioritize(waiter, 3, 0.0)

    def test_the_caller_of_an_expired_request_hears_how_long_it_waited(self) -> None:
        queue = queue_of()
        offered(queue, "a", 5.0, expires_s=7.0)
        (waiter,) = expired(queue, 7.25)
        refusal = queue.timeout(waiter, 7.25)
        assert refusal.reason is Reason.QUEUE_TIMEOUT
        assert "waited 2.250 s" in refusal.message

    def test_another_priority_is_another_place(self) -> None:
        queue = queue_of(order="priority")
        offered(queue, "a")
        waiter = offered(queue, "b")
        assert queue.reprioritize(waiter, 1, 0.0)
        assert turns(queue) == "b a"

    def test_another_order_ranks_those_that_wait(self) -> None:
        queue = queue_of(order="fcfs")
        offered(queue, "a", tenant="blue")
        offered(queue, "b", priority=9, tenant="red")
        assert turns(queue) == "a b"
        queue.configure(queue_of(order="priority", max_waiting=1).settings, 0.0)
        assert turns(queue) == "b a", "and those beyond a new bound stay"
        with pytest.raises(QueueFull):
            offered(queue, "c")
        queue.configure(queue_of(max_waiting=4, tenant_share=0.25).settings, 0.0)
        with pytest.raises(QueueFull):
            offered(queue, "c", tenant="blue")

    def test_another_priority_of_a_tenant_counts_for_those_that_wait(self) -> None:
        bands = (BandSettings("low", 0, share_percent=50), BandSettings("high", 10))
        queue = queue_of(bands=bands, bands_strict=True)
        offered(queue, "a")
        waiter = offered(queue, "b", tenant="gold")
        gold = TenantsSettings(named={"gold": TenantSettings(priority=10)})
        queue.configure(queue_of(bands=bands, bands_strict=True, tenants=gold).settings, 0.0)
        assert queue.share_of(waiter, 0.0) == 1.0
        assert drained(queue) == "b a"
        assert queue.size_bytes == len(queue) == 0


class TestRetry:
    def refused(self, queue: object, now_s: float) -> float:
        with pytest.raises(QueueFull) as caught:
            offered(queue, "late", now_s)  # type: ignore[arg-type]
        assert caught.value.retry_after_s is not None
        return caught.value.retry_after_s

    def test_refused_callers_come_back_at_the_pace_at_which_requests_go(self) -> None:
        queue = queue_of(max_waiting=1, order="fcfs")
        for number in range(100):  # one each 0.2 s
            waiter = offered(queue, "a", number * 0.2)
            queue.dispatched(waiter, 1, 0, number * 0.2 + 0.2)
        offered(queue, "b", 20.0)
        waits = [self.refused(queue, 20.0) for _ in range(3)]
        assert waits == pytest.approx([0.2, 0.4, 0.6], rel=0.05)
        assert self.refused(queue, 30.0) > 1.0, "since nothing went for ten seconds"

    def test_the_time_to_come_back_is_bounded(self) -> None:
        queue = queue_of(max_waiting=1)
        waiter = offered(queue, "a", 0.0)
        queue.dispatched(waiter, 1, 0, 100.0)
        offered(queue, "b", 100.0)
        assert [self.refused(queue, 100.0) for _ in range(4)][-1] == 10.0
        fast = queue_of(max_waiting=1)
        for number in range(1000):
            fast.dispatched(offered(fast, "a", number * 1e-4), 1, 0, number * 1e-4 + 1e-4)
        offered(fast, "b", 0.1)
        assert self.refused(fast, 0.1) == 0.05

    def test_before_any_went_it_is_a_second(self) -> None:
        queue = queue_of(max_waiting=0)
        assert self.refused(queue, 0.0) == 1.0

    def test_the_expected_wait_is_that_of_the_last(self, queue: AdmissionQueue) -> None:
        assert queue.band_waits_s(0.0)["all"] == 0.0
        waiters = [offered(queue, str(number), 0.0) for number in range(60)]
        assert queue.band_waits_s(0.0)["all"] is None
        for number in range(50):
            queue.dispatched(waiters[number], 1, 0, number * 0.1 + 0.1)
        assert queue.band_waits_s(5.0)["all"] == pytest.approx(1.1, rel=0.05)
