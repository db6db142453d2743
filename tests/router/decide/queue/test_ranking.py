"""Orders that look at more than the request, composites, and long queues."""

from collections import Counter

import pytest

from router.config.keys import ConfigError
from router.decide.queue_order.orders import LPM
from router.decide.queue_order.own_order import OwnFailure, OwnView
from router.decide.queue_order.sight import SERVICE_WINDOW_S, TENANTS_MAX, Service
from router.decide.queue_turns.pool_queue import RANK_EACH_S
from router.request.narrowing import Narrowing
from tests.router.decide.queue.test_trie import chain_of
from tests.router.decide.queue.waiting import (
    POOL,
    Workers,
    all_offered,
    drained,
    names,
    offered,
    queue_of,
    turns,
)

OWN = "tests.router.decide.queue.test_ranking:"


class TestLongestPrefix:
    def test_what_workers_with_room_hold_goes_first(self) -> None:
        workers = Workers()
        workers.overlaps = {"a": 0, "b": 512, "c": 2048, "d": 512}
        queue = queue_of(workers, order="lpm", aging=0.0)
        all_offered(queue, "abcd")
        assert drained(queue) == "c b d a"

    def test_ranks_again_when_the_room_changed(self) -> None:
        workers = Workers()
        workers.overlaps = {"a": 0, "b": 512}
        queue = queue_of(workers, order="lpm", aging=0.0)
        all_offered(queue, "ab")
        assert names(queue.candidates(POOL, 1, 0.0)) == "b a"
        workers.overlaps = {"a": 1024, "b": 512}
        assert names(queue.candidates(POOL, 1, 1.0)) == "b a", "nothing changed"
        assert names(queue.candidates(POOL, 2, 1.0)) == "a b"

    def test_ranks_so_often_at_most(self) -> None:
        workers = Workers()
        queue = queue_of(workers, order="lpm")
        for number in range(100):
            offered(queue, str(number))
        for version in range(100):
            next(queue.candidates(POOL, version, version * RANK_EACH_S))
        assert workers.looks == 100, "once in 100 times 100 us"

    def test_more_requests_than_it_ranks_go_by_arrival_from_exactly_one_more_on(self) -> None:
        workers = Workers()
        workers.overlaps = {"last": 512}
        queue = queue_of(workers, order="lpm", aging=0.0)
        first = offered(queue, "first")
        for number in range(LPM.length_max - 2):
            offered(queue, str(number))
        offered(queue, "last")
        assert next(queue.candidates(POOL, 1, 1.0)).request_id == "last", "as many as it ranks"
        more = offered(queue, "more")
        assert next(queue.candidates(POOL, 1, 2.0)) is first, "one more"
        queue.cancel(more, 2.0)
        assert next(queue.candidates(POOL, 1, 3.0)).request_id == "last", "and one fewer"

    def test_cold_prompts_wait_no_longer_than_the_bound(self) -> None:
        """range / aging: 4,000 tokens at 2,000 a second."""
        workers = Workers()
        queue = queue_of(workers, order="lpm", aging=2000.0)
        cold = offered(queue, "cold", 0.0)
        for step in range(1, 40):
            now_s = step * 0.1
            workers.overlaps[str(step)] = 4000
            offered(queue, str(step), now_s)
            first = next(queue.candidates(POOL, step, now_s))
            if first is cold:
                break
            queue.dispatched(first, 1, 4000, now_s)
            assert now_s <= 2.0
        assert not cold.waits or now_s == pytest.approx(2.0, abs=0.11)


class TestDepthFirst:
    def test_prompts_that_share_prefixes_go_together(self) -> None:
        queue = queue_of(order="dfs-weight")
        for number, prompt in enumerate(("XY", "AD", "AC", "AC", "AD", "AC")):
            offered(queue, f"{prompt}{number}", prefixes=chain_of(prompt), block_size=16)
        assert drained(queue) == "AC2 AC3 AC5 AD1 AD4 XY0"


class TestLeastAttainedService:
    def test_the_tenant_that_got_least_goes_first(self) -> None:
        queue = queue_of(order="las", aging=0.0)
        for name, tenant in (("a", "much"), ("b", "much"), ("c", "little"), ("d", "none")):
            offered(queue, name, tenant=tenant)
        queue._sight.service.add("much", 5000.0, 0.0)
        queue._sight.service.add("little", 50.0, 0.0)
        assert turns(queue) == "d c a b"

    def test_dispatches_count(self) -> None:
        queue = queue_of(order="las", aging=0.0)
        first = offered(queue, "a", tenant="blue")
        offered(queue, "b", tenant="blue")
        offered(queue, "c", tenant="red")
        queue.dispatched(first, 300, 0, 0.0)
        assert names(queue.candidates(POOL, 2, 1.0)) == "c b"

    def test_service_fades_and_is_remembered_of_so_many_tenants(self) -> None:
        service = Service()
        service.add("blue", 1000.0, 0.0)
        assert service.of("blue", SERVICE_WINDOW_S) == pytest.approx(368, abs=1)
        assert service.of("red", 0.0) == 0.0
        for number in range(TENANTS_MAX + 5):
            service.add(str(number), 1.0, 0.0)
        assert len(service) == TENANTS_MAX


class TestComposites:
    def test_the_next_order_decides_between_equals(self) -> None:
        queue = queue_of(order="priority+prefill-first+shortest-first+fcfs")
        offered(queue, "a", needs_prefill=False, priority=1)
        offered(queue, "b", new_tokens=9)
        offered(queue, "c", new_tokens=5)
        offered(queue, "d", new_tokens=9, arrived_s=-1.0)
        offered(queue, "e", priority=1, needs_prefill=True, new_tokens=99)
        assert drained(queue) == "e a c d b"

    def test_a_part_may_change_while_requests_wait(self) -> None:
        workers = Workers()
        workers.overlaps = {"a": 0, "b": 512, "c": 1024}
        queue = queue_of(workers, order="priority+lpm")
        offered(queue, "a", priority=2)
        offered(queue, "b", priority=1)
        offered(queue, "c", priority=1)
        assert drained(queue) == "a c b"

    def test_aging_is_of_its_first_part(self) -> None:
        queue = queue_of(order="priority+lof", aging=1.0)
        offered(queue, "a", 0.0)
        offered(queue, "b", 3.0, priority=2)
        assert turns(queue, 3.0) == "a b"

    @pytest.mark.parametrize("order", ["priority+lifo", "priority+", "+", ""])
    def test_an_unknown_part_is_refused_by_its_name(self, order: str) -> None:
        with pytest.raises(ConfigError, match=r"unknown order '(lifo)?' at `\$.queue.order`"):
            queue_of(order=order)


def longest_wait(request: OwnView) -> float:
    return request.waited_s if request.tenant != "slow" else -1.0


def by_label(request: OwnView) -> float:
    return float(request.labels["rank"])


def endless(request: OwnView) -> float:
    return float("nan")


class TestOwnFunction:
    def test_its_number_is_the_score(self) -> None:
        queue = queue_of(order=OWN + "longest_wait")
        offered(queue, "a", 0.0, tenant="slow")
        offered(queue, "b", 1.0)
        offered(queue, "c", 2.0)
        assert drained(queue, 5.0) == "b c a"

    def test_it_sees_the_load(self) -> None:
        workers = Workers()
        workers.busy = 0.75
        queue = queue_of(workers, order=OWN + "by_label")
        narrowing = Narrowing(required_labels=frozenset({("rank", "3")}))
        waiter = offered(queue, "a", narrowing=narrowing, priority=2)
        assert queue._sight.fleet.load(waiter) == 0.75
        assert drained(queue) == "a"

    @pytest.mark.parametrize(
        ("name", "failure"), [("by_label", OwnFailure.RAISED), ("endless", OwnFailure.NOT_A_NUMBER)]
    )
    def test_its_mistakes_are_counted_and_score_nothing(
        self, name: str, failure: OwnFailure
    ) -> None:
        queue = queue_of(order=OWN + name)
        offered(queue, "a")
        offered(queue, "b")
        assert drained(queue) == "a b"
        assert queue.own_failures == Counter({failure: 2})

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("no_such_module:f", "can't be imported: ModuleNotFoundError"),
            (OWN + "no_such_function", "has no function 'no_such_function'"),
        ],
    )
    def test_a_name_that_leads_nowhere_is_refused(self, name: str, text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            queue_of(order=name)
