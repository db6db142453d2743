"""Each number of an engine reaches its readers: rows, receipts, worker lists, tiles, metrics, spans
and the decision log."""

from math import isnan

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from events.engines.numbers import GAUGES, NUMBERS
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from kvroute.v1 import router_pb2
from router.api.desk.answers import Waiting
from router.api.desk.counters import Metrics
from router.api.desk.worker_codec import write_worker
from router.api.service.calls import Guard
from router.observe.audit.logged_decision import candidates, capture, decode, encode
from router.observe.metrics.of_workers import worker_metrics
from router.observe.tracing.receipts import attributes_of
from router.observe.views.tiles import tile_of
from tests.stage.fleet import Fleet, prompt
from tests.stage.served import asked, desk_of

SAID = {name: 0.25 + place for place, name in enumerate(NUMBERS)}
UNKNOWN = {"of_a_later_release": 7.0}
OWN = {"chip_celsius": -3.5, "tokens_per_s": 250.0}


@pytest.fixture
def fleet() -> Fleet:
    """A worker whose engine has every number, and one whose engine has none."""
    fleet = Fleet(index=NativeIndex())
    fleet.add("says", numbers=SAID | UNKNOWN, own_numbers=OWN)
    fleet.add("quiet", running=90)
    return fleet


@pytest.mark.parametrize("name", GAUGES)
def test_a_gauge_is_a_column_and_not_a_number_where_the_engine_has_none(
    fleet: Fleet, name: str
) -> None:
    rows = fleet.decide(prompt(100)).rows
    said, quiet = rows.column(name).tolist()
    assert said == SAID[name]
    assert isnan(quiet)
    assert getattr(rows, name).tolist()[0] == SAID[name]
    fleet.say(WorkerKey("says", 0), numbers={})
    rows = fleet.decide(prompt(100)).rows
    assert isnan(rows.column(name).tolist()[0])


def test_a_receipt_and_a_span_have_the_gauges_of_the_picked_worker(fleet: Fleet) -> None:
    metrics = Metrics(CollectorRegistry())
    desk = desk_of(fleet, metrics, Guard.of(1 << 20, metrics).fault)
    answered = desk.route(asked(100).SerializeToString())
    assert not isinstance(answered, Waiting)
    answer = router_pb2.RouteResponse.FromString(answered[0])
    assert answer.worker_id == "says"
    gauges = {name: SAID[name] for name in GAUGES}
    assert dict(answer.receipt.picked.numbers) == gauges | OWN
    assert dict(answer.receipt.runner_up.numbers) == {}
    attributes = attributes_of(answer)
    for name, number in (gauges | OWN).items():
        assert attributes[f"kvroute.number.{name}"] == number


def test_the_worker_list_and_the_tile_have_all_of_them_by_name(fleet: Fleet) -> None:
    says, quiet = fleet.view.sources.values()
    assert dict(write_worker(says, fleet.core, fleet.now_s).numbers) == SAID | OWN
    assert dict(write_worker(quiet, fleet.core, fleet.now_s).numbers) == {}
    assert tile_of(says, fleet.core, fleet.now_s).numbers == SAID | OWN


@pytest.mark.parametrize("name", OWN)
def test_an_own_number_is_a_column_and_not_a_number_where_the_engine_has_none(
    fleet: Fleet, name: str
) -> None:
    rows = fleet.decide(prompt(100)).rows
    said, quiet = rows.own_number(name).tolist()
    assert said == OWN[name]
    assert isnan(quiet)
    fleet.say(WorkerKey("says", 0), own_numbers={})
    rows = fleet.decide(prompt(100)).rows
    assert np.isnan(rows.own_number(name)).all()
    assert np.isnan(rows.own_number("nobody_has_it")).all()


def metrics_of(fleet: Fleet) -> dict[tuple[str, str], float]:
    families = {family.name: family for family in worker_metrics(fleet.core)}
    samples = families["kvroute_worker_number"].samples
    return {(each.labels["worker"], each.labels["name"]): each.value for each in samples}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_counter_has_a_metric_of_its_own(fleet: Fleet, name: str) -> None:
    families = {family.name: family for family in worker_metrics(fleet.core)}
    number = NUMBERS[name]
    if not number.is_counter or not number.is_metric:
        assert f"kvroute_worker_{name}" not in families
        return
    family = families[f"kvroute_worker_{name}"]
    assert (family.type, family.documentation) == ("counter", number.meaning)
    assert [(each.labels["worker"], each.value) for each in family.samples] == [
        ("says", SAID[name])
    ]


def test_gauges_are_one_metric_and_vanish_with_number_and_worker(fleet: Fleet) -> None:
    key, said = WorkerKey("says", 0), {name: SAID[name] for name in GAUGES} | OWN
    assert metrics_of(fleet) == {("says", name): number for name, number in said.items()}
    fleet.say(key, numbers={}, own_numbers={"tokens_per_s": 0.0})
    assert metrics_of(fleet) == {("says", "tokens_per_s"): 0.0}
    fleet.turn(10.0, silent=[key])  # stale: shown as last said until the worker is forgotten
    assert metrics_of(fleet) == {("says", "tokens_per_s"): 0.0}
    fleet.turn(40.0, silent=[key])
    assert metrics_of(fleet) == {}


def test_a_number_of_kvroutes_wins_over_an_own_one_of_its_name() -> None:
    """As a foreign relay may send it; our settings refuse such a name."""
    fleet = Fleet()
    fleet.add("w", numbers={"cache_hit_rate": 0.5}, own_numbers={"cache_hit_rate": 7.0})
    (source,) = fleet.view.sources.values()
    assert dict(write_worker(source, fleet.core, fleet.now_s).numbers) == {"cache_hit_rate": 0.5}


def test_the_decision_log_keeps_the_gauges(fleet: Fleet) -> None:
    decision = fleet.decide(prompt(100))
    line = decode(encode(capture(decision, "here", hashes=False)))
    again = candidates(line)
    for name in GAUGES:
        assert again.column(name).tobytes() == decision.rows.column(name).tobytes()
    for name in (*OWN, "nobody_has_it"):
        assert again.own_number(name).tobytes() == decision.rows.own_number(name).tobytes()


def test_the_log_leaves_a_gauge_out_that_no_engine_has() -> None:
    fleet = Fleet("quiet")
    decision = fleet.decide(prompt(100))
    line = capture(decision, "here", hashes=False)
    assert not set(GAUGES) & set(line.columns)
    assert not line.own_numbers
    assert all(isnan(candidates(line).column(name).item(0)) for name in GAUGES)
