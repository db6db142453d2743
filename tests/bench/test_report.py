"""The report of `make bench`: ratios, order, and what is said when there is no other router."""

from pathlib import Path

import pytest

from tests.bench import dynamo_service, environments
from tests.bench.__main__ import FIRST, in_order
from tests.bench.dynamo_service import BESIDE, Load, compared, told
from tests.bench.environments import Missing, python_of
from tests.bench.timing import beside, row

LOADS = {
    "tokens": Load(rps=4000, p50_us=3000, cpu_us=400, service_cores=1.9, wrk_cores=0.1),
    "hashes": Load(rps=19000, p50_us=800, cpu_us=90, service_cores=1.7, wrk_cores=0.3),
    "tokens, long": Load(rps=540, p50_us=29000, cpu_us=3500, service_cores=1.9, wrk_cores=0.1),
    "hashes, long": Load(rps=3100, p50_us=5000, cpu_us=600, service_cores=1.8, wrk_cores=0.2),
    "tokens, one at a time": Load(
        rps=2000, p50_us=480, cpu_us=450, service_cores=0.9, wrk_cores=0.1
    ),
    "hashes, one at a time": Load(
        rps=5000, p50_us=190, cpu_us=110, service_cores=0.6, wrk_cores=0.2
    ),
}
LOADS |= {f"{form}, most": load for form, load in LOADS.items()}


def test_a_ratio_says_how_many_times_better_than_the_other_router_we_are() -> None:
    assert beside(row("x", 50, "us", "less"), 100)["ratio"] == 2
    assert beside(row("x", 50, "blocks/s", "more"), 100)["ratio"] == 0.5
    assert beside(row("x", 50, "us", "less"), None)["ratio"] is None


def test_named_rows_come_first_and_the_others_as_they_came() -> None:
    rows = [row(name, 1, "us", "less") for name in ("b", FIRST[3], "a", FIRST[0])]
    assert [one["name"] for one in in_order(rows)] == [FIRST[0], FIRST[3], "b", "a"]


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(AssertionError):
        in_order([row("a", 1, "us", "less"), row("a", 2, "us", "less")])


def test_the_other_routers_number_stands_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo_service, "measure", lambda: LOADS)
    rows = [row(name, 200, "us", "less") for name in BESIDE] + [row("other", 1, "us", "less")]
    found = {one["name"]: one for one in compared(rows)}
    assert found["cpu_tokens_stream_us"]["other"] == 400
    assert found["cpu_tokens_stream_us"]["ratio"] == 2
    assert found["route_unary_8192_p50_us"]["other"] == 480
    assert found["client_hashes_rps"]["other"] == 19000
    assert found["other"]["other"] is None


def test_without_another_router_the_rows_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> dict[str, Load]:
        raise Missing("wrk is not installed")

    monkeypatch.setattr(dynamo_service, "measure", missing)
    (found,) = compared([row("client_hashes_rps", 5000, "picks/s", "more")])
    assert found["other"] is None
    assert found["note"] == "no other router: wrk is not installed"


def test_nothing_is_measured_for_rows_without_another_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(dynamo_service, "measure")
    rows = [row("other", 1, "us", "less")]
    assert compared(rows) == rows


def test_wrk_is_named_when_it_may_be_the_limit() -> None:
    assert "limit" not in told(LOADS["hashes"])
    assert "limit" in told(Load(1, 1, 1, service_cores=0.5, wrk_cores=0.97))


def test_an_environment_that_cannot_be_made_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environments, "BUILD", tmp_path)
    monkeypatch.setattr(environments.sys, "executable", "/bin/false")
    with pytest.raises(Missing):
        python_of("nothing", "no-such-package")
