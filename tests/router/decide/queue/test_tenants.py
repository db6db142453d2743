"""Tenants' shares of the turns, and quotas."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.config.settings.queue_settings import TenantSettings, TenantsSettings
from router.decide.queue.views import rows
from router.decide.queue_limits.tenants import TENANTS_MAX, Tenants
from tests.router.decide.queue.waiting import (
    POOL,
    all_offered,
    drained,
    names,
    offered,
    queue_of,
    tried_in_vain,
    turns,
)


def fair(**named: TenantSettings) -> TenantsSettings:
    return TenantsSettings(fair=True, named=named)


CHARGES = st.lists(
    st.tuples(st.floats(0, 3), st.floats(0, 5000), st.floats(0, 5000)), min_size=1, max_size=12
)


@given(CHARGES)
def test_what_engines_counted_takes_the_place_of_what_was_charged(
    requests: list[tuple[float, float, float]],
) -> None:
    """Over a time T at most `tokens_per_s * (T + 1)` and one request of what engines counted."""
    rate, now_s, counted, largest = 1000.0, 0.0, 0.0, 0.0
    tenants = Tenants(TenantsSettings(default=TenantSettings(tokens_per_s=rate)))
    for pause_s, charged, cost in requests:
        now_s += pause_s
        if tenants.held_by("t", now_s) is not None:
            continue
        tenants.took("t", charged, now_s)
        tenants.corrected("t", cost - charged, now_s)
        counted, largest = counted + cost, max(largest, cost)
        assert counted <= rate * (now_s + 1) + largest + 1e-6
    other = Tenants(TenantsSettings(default=TenantSettings(tokens_per_s=rate)))
    other.corrected("nobody", -1e9, 0.0)
    assert not other._buckets


class TestShares:
    def test_tenants_take_turns_however_many_requests_each_has(self) -> None:
        queue = queue_of(tenants=fair())
        for number in range(20):
            offered(queue, f"many{number}", tenant="many", new_tokens=100)
        for number in range(3):
            offered(queue, f"few{number}", tenant="few", new_tokens=100)
        order = [name.rstrip("0123456789") for name in drained(queue).split()]
        assert order[:6].count("few") == 3

    def test_weights_divide_uncached_tokens(self) -> None:
        queue = queue_of(tenants=fair(blue=TenantSettings(weight=3.0)))
        for number in range(40):
            offered(queue, f"blue {number}", tenant="blue", new_tokens=50)
            offered(queue, f"red {number}", tenant="red", prompt_tokens=900, new_tokens=100)
        got = {"blue": 0, "red": 0}
        for waiter in queue.candidates(POOL, 1, 0.0):
            queue.dispatched(waiter, waiter.new_tokens, 800, 0.0)
            got[waiter.tenant] += waiter.new_tokens
            if sum(got.values()) >= 2000:
                break
        assert got["blue"] == pytest.approx(3 * got["red"], abs=3 * 100 + 50)

    def test_cached_tokens_have_their_price(self) -> None:
        tenants = Tenants(TenantsSettings(cached_price=0.25))
        assert tenants.cost(100, 400) == 200.0
        assert Tenants(TenantsSettings()).cost(0, 4000) == 1.0, "no request is free"

    def test_within_a_tenant_the_order_decides(self) -> None:
        queue = queue_of(tenants=fair())
        offered(queue, "a", tenant="blue")
        offered(queue, "b", tenant="blue", priority=3)
        assert turns(queue) == "b a"

    def test_without_shares_the_order_alone_decides(self) -> None:
        queue = queue_of()
        all_offered(queue, ("a", "b", "c"), tenant="blue", new_tokens=1000)
        offered(queue, "d", tenant="red")
        assert drained(queue) == "a b c d"

    def test_a_tenant_adds_points_to_its_requests(self) -> None:
        queue = queue_of(tenants=TenantsSettings(named={"gold": TenantSettings(priority=5)}))
        offered(queue, "a", priority=4)
        waiter = offered(queue, "b", tenant="gold")
        assert turns(queue) == "b a"
        queue.reprioritize(waiter, -2, 0.0)
        assert turns(queue) == "a b"

    def test_lines_share_the_requests_that_are_looked_past(self) -> None:
        queue = queue_of(tenants=fair(), look_past=4)
        for tenant in ("blue", "red"):
            for number in range(9):
                offered(queue, f"{tenant}{number}", tenant=tenant)
        attempts = tried_in_vain(queue)
        assert names(attempts) == "blue0 blue1 blue2 red0 red1"


class TestQuotas:
    def test_so_many_requests_of_a_tenant_run_at_once(self) -> None:
        limits = TenantsSettings(named={"blue": TenantSettings(in_flight_max=2)})
        queue = queue_of(tenants=limits)
        queue.tenants.took("blue", 1.0, 0.0)  # one that did not wait
        all_offered(queue, ("a", "b"), tenant="blue")
        offered(queue, "c", tenant="red")
        assert drained(queue) == "a c"
        assert [row.held_by for row in rows(queue, 0.0, 9)] == ["in_flight_max"]
        queue.tenants.ended("blue")
        assert drained(queue) == "b"

    def test_requests_from_before_a_reload_count_against_a_new_quota(self) -> None:
        tenants = Tenants(TenantsSettings(named={"red": TenantSettings(in_flight_max=9)}))
        for _ in range(4):
            tenants.took("blue", 1.0, 0.0)
        tenants.configure(TenantsSettings(named={"blue": TenantSettings(in_flight_max=2)}))
        for _ in range(3):
            assert tenants.held_by("blue", 0.0) == "in_flight_max"
            tenants.ended("blue")
        assert tenants.held_by("blue", 0.0) is None

    def test_a_held_tenant_does_not_hold_others_that_share(self) -> None:
        queue = queue_of(tenants=fair(blue=TenantSettings(in_flight_max=1)))
        all_offered(queue, ("a", "b"), tenant="blue")
        all_offered(queue, ("c", "d"), tenant="red")
        assert drained(queue) == "a c d"

    def test_tokens_a_second_are_a_bucket(self) -> None:
        limits = TenantsSettings(default=TenantSettings(tokens_per_s=100.0))
        queue = queue_of(tenants=limits)
        all_offered(queue, ("a", "b", "c"), tenant="blue", prompt_tokens=60, new_tokens=60)
        assert drained(queue, 0.0) == "a b", "100 tokens are in the bucket, and 20 are owed"
        assert drained(queue, 0.1999) == ""
        assert [row.held_by for row in rows(queue, 0.1, 9)] == ["tokens_per_s"]
        assert drained(queue, 0.21) == "c"

    @settings(max_examples=40)
    @given(steps=st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 300)), max_size=40))
    def test_over_any_time_a_tenant_gets_its_rate_and_one_largest_request(
        self, steps: list[tuple[float, int]]
    ) -> None:
        tenants = Tenants(TenantsSettings(default=TenantSettings(tokens_per_s=100.0)))
        now_s, taken = 0.0, [(0.0, 0.0)]
        for wait_s, cost in steps:
            now_s += wait_s
            if tenants.held_by("blue", now_s) is None:
                tenants.took("blue", cost, now_s)
                taken.append((now_s, cost))
        for i, (start_s, _) in enumerate(taken):
            for j in range(i, len(taken)):
                got = sum(cost for _, cost in taken[i : j + 1])
                assert got <= 100.0 * (taken[j][0] - start_s + 1.0) + 300 + 1e-6

    def test_nothing_is_kept_of_tenants_beyond_bounds(self) -> None:
        tenants = Tenants(
            TenantsSettings(default=TenantSettings(tokens_per_s=1.0, in_flight_max=1))
        )
        for number in range(TENANTS_MAX + 9):
            tenants.took(str(number), 5.0, 0.0)
        assert len(tenants._buckets) == TENANTS_MAX
        for number in range(TENANTS_MAX + 9):
            tenants.ended(str(number))
        assert not tenants._in_flight
        tenants.ended("never seen")
        assert not tenants._in_flight

    def test_tenants_share_where_the_settings_say_so(self) -> None:
        tenants = Tenants(fair())
        assert tenants.share
        assert not Tenants(TenantsSettings()).share
