"""Any sequence of offers, turns, ends and changes, beside a list that is sorted each time."""

from random import Random

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.config.settings.queue_settings import BandSettings, QueueSettings, TenantsSettings
from router.decide.queue.admission_queue import AdmissionQueue, QueueFull
from router.decide.queue_order.orders import ORDERS
from router.decide.waiter import Waiter
from router.request.narrowing import Narrowing
from tests.router.decide.queue.waiting import Workers, check_counts, expired

MIB = 1 << 20
POOLS = ("one", "two")
TENANTS = ("", "blue", "red")
BANDS = tuple(BandSettings(name=str(points), from_priority=points) for points in (-5, 0, 5))
SETTINGS = QueueSettings(max_waiting=8, max_mib=4, tenant_share=0.75)


class Laws(RuleBasedStateMachine):
    """The queue, and the plain list of those that should wait in it."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = AdmissionQueue(SETTINGS, Random(1), Workers(), look_past=2)
        self.now_s = 0.0
        self.settings = SETTINGS
        self.waiting: list[Waiter] = []
        self.version = 0
        self.number = 0

    @rule(
        pool=st.sampled_from(POOLS),
        tenant=st.sampled_from(TENANTS),
        priority=st.integers(-15, 15),
        size_bytes=st.sampled_from((0, MIB // 2, MIB, 4 * MIB + 1)),
        wait_s=st.sampled_from((0.5, 2.0, 20.0)),
        narrowing=st.sampled_from((None, Narrowing("adapter"))),
    )
    def offer(
        self,
        pool: str,
        tenant: str,
        priority: int,
        size_bytes: int,
        wait_s: float,
        narrowing: Narrowing | None,
    ) -> None:
        self.number += 1
        waiter = Waiter(
            f"r{self.number}",
            self.now_s,
            self.now_s + wait_s,
            tenant=tenant,
            priority=priority,
            size_bytes=size_bytes,
            narrowing=narrowing,
            model=pool,
        )
        try:
            displaced = self.queue.offer(pool, waiter, self.now_s)
        except QueueFull:
            others = [one for one in self.waiting if one.tenant == tenant]
            assert (
                len(self.waiting) == 8
                or len(others) == 6
                or sum(one.size_bytes for one in self.waiting) + size_bytes > 4 * MIB
                or sum(one.size_bytes for one in others) + size_bytes > 3 * MIB
            )
            return
        if displaced is not None:
            assert priority - displaced.priority > 10
            self.waiting.remove(displaced)
            assert not any(
                (one.tenant, one.priority) == (tenant, displaced.priority)
                and one.seq > displaced.seq
                for one in self.waiting
            ), "of equals the last that came"
        self.waiting.append(waiter)

    @rule(pool=st.sampled_from(POOLS), room=st.lists(st.booleans(), max_size=8), new=st.booleans())
    def dispatch(self, pool: str, room: list[bool], new: bool) -> None:
        self.version += new
        left = list(room)
        fair = self.settings.tenants.fair
        lines: dict[tuple[int, str], list[Waiter]] = {}
        seen: set[Waiter] = set()
        gone = []
        for waiter in self.queue.candidates(pool, self.version, self.now_s):
            if not lines:  # requests may have come into other bands
                for one in sorted(self.waiting, key=lambda one: (one.key, one.seq)):
                    if one.pool == pool:
                        line = (one.level, one.tenant if fair else "")
                        lines.setdefault(line, []).append(one)
            assert waiter.expires_s > self.now_s
            assert waiter not in seen
            seen.add(waiter)
            line = lines[waiter.level, waiter.tenant if fair else ""]
            assert waiter in line, "none comes before one of its line that had its turn"
            del line[: line.index(waiter) + 1]
            if left and left.pop(0):
                self.queue.dispatched(waiter, 10, 0, self.now_s)
                gone.append(waiter)
            else:
                self.queue.passed(waiter, self.version)
        self.waiting = [one for one in self.waiting if one not in gone]

    @rule(seconds=st.floats(0, 2), most=st.integers(0, 3))
    def expire(self, seconds: float, most: int) -> None:
        self.now_s += seconds
        over = sorted(one.expires_s for one in self.waiting if one.expires_s <= self.now_s)
        gone = expired(self.queue, self.now_s, most)
        assert [one.expires_s for one in gone] == over[:most]
        self.waiting = [one for one in self.waiting if one not in gone]

    @rule(data=st.data(), priority=st.integers(-15, 15))
    def change(self, data: st.DataObject, priority: int) -> None:
        if self.waiting:
            waiter = data.draw(st.sampled_from(self.waiting))
            assert self.queue.reprioritize(waiter, priority, self.now_s)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.waiting:
            waiter = data.draw(st.sampled_from(self.waiting))
            assert self.queue.cancel(waiter, self.now_s)
            self.waiting.remove(waiter)

    @rule(
        order=st.sampled_from((*ORDERS, "priority+lpm+fcfs")),
        bands=st.sampled_from(((), BANDS)),
        strict=st.booleans(),
        fair=st.booleans(),
    )
    def configure(
        self, order: str, bands: tuple[BandSettings, ...], strict: bool, fair: bool
    ) -> None:
        changes = {"order": order, "bands": bands, "bands_strict": strict}
        changes["tenants"] = TenantsSettings(fair=fair)
        self.settings = msgspec.structs.replace(SETTINGS, **changes)
        self.queue.configure(self.settings, self.now_s)

    @invariant()
    def each_request_has_one_end(self) -> None:
        check_counts(self.queue)

    @invariant()
    def those_that_should_wait_do(self) -> None:
        queue = self.queue
        assert len(queue) == len(self.waiting) <= 8
        assert queue.size_bytes == sum(one.size_bytes for one in self.waiting) <= 4 * MIB
        for pool in POOLS:
            assert queue.waiting(pool) == sum(one.pool == pool for one in self.waiting)
        assert set(queue.pools()) == {one.pool for one in self.waiting}
        assert all(queue.find(one.request_id) == (one,) for one in self.waiting)

    @invariant()
    def no_tenant_has_more_than_its_bound(self) -> None:
        for tenant in TENANTS:
            of_tenant = [one for one in self.waiting if one.tenant == tenant]
            assert len(of_tenant) <= 6
            assert sum(one.size_bytes for one in of_tenant) <= 3 * MIB


TestLaws = Laws.TestCase
TestLaws.settings = settings(max_examples=40, stateful_step_count=30)
