"""Tenants' shares of the turns."""

import pytest

from router.config.queue_settings import TenantSettings, TenantsSettings
from router.queue.tenants import Tenants
from router.queue.waiter import Waiter
from tests.router.queue.waiting import POOL, drained, names, offered, queue_of, turns


def fair(**named: TenantSettings) -> TenantsSettings:
    return TenantsSettings(fair=True, named=named)


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
        for name in ("a", "b", "c"):
            offered(queue, name, tenant="blue", new_tokens=1000)
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
        attempts = []
        for waiter in queue.candidates(POOL, 1, 0.0):
            attempts.append(waiter)
            queue.passed(waiter, 1)
        assert names(attempts) == "blue0 blue1 blue2 red0 red1"

    def test_a_request_is_its_tenants_where_tenants_share(self) -> None:
        tenants = Tenants(fair())
        assert tenants.flow(Waiter("a", 0.0, tenant="blue")) == "blue"
        assert Tenants(TenantsSettings()).flow(Waiter("a", 0.0, tenant="blue")) == ""
