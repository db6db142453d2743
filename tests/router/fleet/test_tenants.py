"""Numbers by tenant: cached tokens and first tokens, within a bound."""

from router.fleet.tenants import OTHER, TENANTS_MAX, TenantNumbers, Tenants
from router.request.request import Role
from tests.stage.fleet import Fleet, prompt


def test_picks_and_first_tokens_count_for_their_tenant_alone() -> None:
    fleet = Fleet()
    key = fleet.add("w0")
    fleet.cache(key, prompt(64), 32)
    pick = fleet.route(prompt(64), tenant="a")
    fleet.route(prompt(64))
    fleet.now_s += 0.25
    for _ in range(2):  # a first token comes once
        fleet.report(pick.reservation, "prefill_done")
    assert fleet.core.fleet.tenants.by_name == {"a": TenantNumbers(64, 32, 1, 0.25)}


def test_a_pair_counts_what_the_prefill_worker_had() -> None:
    fleet = Fleet()
    prefill = fleet.add("p0", role="prefill")
    fleet.add("d0", role="decode")
    fleet.cache(prefill, prompt(8192), 1024)
    pick = fleet.route(prompt(8192), tenant="a", role=Role.PAIR)
    assert pick.reservation.prefill is not None
    assert fleet.core.fleet.tenants.by_name["a"].overlap_tokens == 1024


def test_tenants_beyond_the_bound_count_together() -> None:
    tenants = Tenants()
    for number in range(TENANTS_MAX + 2):
        tenants.on_pick(f"t{number}", 10, 1)
        tenants.on_first(f"t{number}", 0.5)
    assert len(tenants.by_name) == TENANTS_MAX + 1
    assert tenants.by_name[OTHER] == TenantNumbers(20, 2, 2, 1.0)
    assert tenants.by_name["t0"] == TenantNumbers(10, 1, 1, 0.5)
