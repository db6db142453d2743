"""Callers of a trace: tenants, priorities and TTFTs by a seed."""

from collections import Counter
from dataclasses import replace

import pytest

from simulator.traffic.callers import Callers, Priorities
from simulator.traffic.trace import Trace
from tests.simulator.worlds import request, trace


def trace_of(count: int, session_of: int | None = None) -> Trace:
    """Requests, so many of them in each session."""
    sessions = [session_of and f"s{number // session_of}" for number in range(count)]
    return trace(*(request(float(n), [n], session_id=name) for n, name in enumerate(sessions)))


def test_a_trace_keeps_its_own_callers_where_none_are_drawn() -> None:
    of = trace_of(3)
    assert Callers().of(of, 0) is of
    one = replace(of.requests[0], tenant="a", priority=3, ttft_slo_s=0.5)
    callers = Callers(ttft_slo_s=9.0, tpot_slo_s=0.04)
    (kept,) = callers.of(replace(of, requests=[one]), 0).requests
    assert (kept.tenant, kept.priority, kept.ttft_slo_s, kept.tpot_slo_s) == ("a", 3, 0.5, 0.04)


def test_tenants_have_sizes_by_zipf_and_the_same_seed_gives_the_same_ones() -> None:
    callers = Callers(tenants=3, skew=1.0)
    tenants = [one.tenant for one in callers.of(trace_of(4000), 7).requests]
    sizes = Counter(tenants)
    for number in (1, 2, 3):
        expected = 4000 * (1 / number) / (1 + 1 / 2 + 1 / 3)
        assert sizes[f"tenant-{number}"] == pytest.approx(expected, rel=0.1)
    assert [one.tenant for one in callers.of(trace_of(4000), 7).requests] == tenants
    assert [one.tenant for one in callers.of(trace_of(4000), 8).requests] != tenants


def test_turns_of_a_session_have_one_tenant_and_one_priority() -> None:
    callers = Callers(tenants=5, priorities=Priorities.parse("random:0,10:0.5"))
    requests = callers.of(trace_of(60, session_of=6), 0).requests
    of_sessions = {(one.session_id, one.tenant, one.priority) for one in requests}
    assert len(of_sessions) == 10
    assert len({priority for _, _, priority in of_sessions}) == 2


def test_priorities_come_by_chance_or_by_tenant() -> None:
    by_chance = Callers(priorities=Priorities.parse("random:-1,10,20:0.25,0.1"))
    counts = Counter(one.priority for one in by_chance.of(trace_of(4000), 0).requests)
    assert counts[-1] / 4000 == pytest.approx(0.65, abs=0.03)
    assert counts[10] / 4000 == pytest.approx(0.25, abs=0.03)
    assert counts[20] / 4000 == pytest.approx(0.1, abs=0.03)
    by_tenant = Callers(tenants=2, priorities=Priorities.parse("tenant:tenant-2=5"))
    assert {(one.tenant, one.priority) for one in by_tenant.of(trace_of(40), 0).requests} == {
        ("tenant-1", None),
        ("tenant-2", 5),
    }


def test_shares_that_leave_nothing_are_fitting() -> None:
    shares = Priorities.parse("random:0,1,2,3:0.56,0.33,0.11").shares
    assert shares == ((0, 0.0), (1, 0.56), (2, 0.33), (3, 0.11))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fast", "expected trace, random:LOW,HIGH:SHARE"),
        ("trace:1", "expected trace"),
        ("random:1,2", "could not convert string to float"),
        ("random:1,2,3:0.5", "a share for each priority but the first"),
        ("random:1,2:1.5", "shares are 0 to 1"),
        ("random:1,2:nan", "shares are 0 to 1"),
        ("random:1,2,3:1e308,1e308", "shares are 0 to 1"),
        ("random:1,2:1.000000001", "shares are 0 to 1"),
        ("tenant:a", "invalid literal for int"),
        ("tenant:a=99999999999", "priorities are"),
    ],
)
def test_a_form_that_is_none_is_told_with_those_that_are(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Priorities.parse(text)


@pytest.mark.parametrize("wrong", [{"tenants": -1}, {"tenants": 10_001}, {"skew": 11.0}])
def test_what_cannot_be_drawn_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="0 to 10"):
        Callers(**wrong)  # type: ignore[arg-type]
