"""Times, lengths and objectives of answers, by model and role."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvroute.v1 import router_pb2
from router.api.desk.answers import Waiting
from router.api.desk.counters import Metrics
from router.config.settings.queue_settings import QueueSettings
from router.decide.core.progress import Pick, ProgressState
from router.fleet.answers import OTHER_POOL, POOLS_MAX, TTFT_S, PoolAnswers
from router.fleet.histogram import Histogram
from router.observe.metrics.families import export
from router.observe.metrics.of_fleet import fleet_metrics
from router.request.request import Objective, Role
from tests.stage.fleet import Fleet, prompt
from tests.stage.served import asked, desk_of, raised

BOTH = ("m", "both")


def answered(
    fleet: Fleet, first_s: float = 0.2, tpot_s: float = 0.02, tokens: int = 101, **about: Any
) -> Pick:
    """A request whose steps are all reported."""
    pick = fleet.route(prompt(8192), **about)
    fleet.now_s += first_s
    tell(fleet, pick, ProgressState.PREFILL_DONE)
    fleet.now_s += (tokens - 1) * tpot_s
    tell(fleet, pick, ProgressState.FINISHED, output_tokens=tokens)
    return pick


def tell(fleet: Fleet, pick: Pick, state: ProgressState, **about: Any) -> None:
    fleet.report(pick.reservation, state, **about)


def pools(fleet: Fleet) -> dict[tuple[str, str], PoolAnswers]:
    """Those that have an answer."""
    known = fleet.core.fleet.answers.by_pool
    return {name: pool for name, pool in known.items() if pool != PoolAnswers()}


def test_values_fall_into_buckets_bounds_included() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.add(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 7.5)


def test_an_answer_counts_its_times_and_its_length() -> None:
    fleet = Fleet("w0")
    answered(fleet)
    pool = pools(fleet)[BOTH]
    assert pool.ttft_s.total == pytest.approx(0.2)
    assert pool.tpot_s.total == pytest.approx(0.02)
    assert pool.tokens.total == 101
    assert [sum(one.counts) for one in (pool.ttft_s, pool.tpot_s, pool.tokens)] == [1, 1, 1]
    assert (pool.ttft_objectives, pool.tpot_objectives) == ([0, 0], [0, 0])


def test_a_pairs_first_token_is_its_prefill_workers_and_the_rest_its_decode_workers() -> None:
    fleet = Fleet()
    fleet.add("p0", role="prefill")
    fleet.add("d0", role="decode")
    wanted = Objective(1.0, fleet.now_s + 1.0, 0.05, sheddable=False)
    assert answered(fleet, role=Role.PAIR, objective=wanted).reservation.prefill is not None
    prefill, decode = (pools(fleet)["m", role] for role in ("prefill", "decode"))
    assert (sum(prefill.ttft_s.counts), sum(decode.ttft_s.counts)) == (1, 0)
    assert (sum(prefill.tpot_s.counts), sum(decode.tpot_s.counts)) == (0, 1)
    assert (prefill.ttft_objectives, prefill.tpot_objectives) == ([0, 1], [0, 0])
    assert (decode.ttft_objectives, decode.tpot_objectives) == ([0, 0], [0, 1])


@pytest.mark.parametrize(("first_s", "tpot_s"), [(0.5, 0.02), (0.6, 0.02), (0.5, 0.06)])
def test_objectives_are_kept_or_missed_each_by_itself(first_s: float, tpot_s: float) -> None:
    fleet = Fleet("w0")
    wanted = Objective(0.5, fleet.now_s + 0.5, 0.05, sheddable=False)
    answered(fleet, first_s, tpot_s, objective=wanted)
    pool = pools(fleet)[BOTH]
    assert pool.ttft_objectives == [first_s > 0.5, first_s <= 0.5]
    assert pool.tpot_objectives == [tpot_s > 0.05, tpot_s <= 0.05]


def test_steps_that_are_not_reported_say_nothing() -> None:
    fleet = Fleet("w0")
    wanted = Objective(0.5, fleet.now_s + 0.5, 0.05, sheddable=False)
    silent, failed = (fleet.route(prompt(64), objective=wanted) for _ in range(2))
    fleet.now_s += 9.0
    tell(fleet, failed, ProgressState.FAILED)
    tell(fleet, silent, ProgressState.FINISHED)
    assert pools(fleet) == {}
    for _ in range(2):  # a step that is reported twice counts once
        tell(fleet, answered(fleet), ProgressState.FINISHED, output_tokens=101)
    assert sum(pools(fleet)[BOTH].tokens.counts) == 2


def test_a_wait_in_the_queue_is_part_of_the_time_to_the_first_token() -> None:
    fleet = Fleet()
    fleet.add("w0", total_slots=1)
    desk = desk_of(fleet, Metrics(CollectorRegistry()), raised, queue=QueueSettings())
    earlier = fleet.route(prompt(64))
    waiting = desk.route(asked(ttft_slo_ms=1000).SerializeToString())
    assert isinstance(waiting, Waiting)
    fleet.now_s += 3.0
    tell(fleet, earlier, ProgressState.FINISHED)
    desk.dispatch()
    assert isinstance(waiting.outcome, tuple)
    content, reservation, _ = waiting.outcome
    assert router_pb2.RouteResponse.FromString(content).queue_ms == 3000
    fleet.now_s += 0.5
    fleet.report(reservation, "prefill_done")
    pool = pools(fleet)[BOTH]
    assert pool.ttft_s.total == pytest.approx(3.5)
    assert pool.ttft_objectives == [1, 0]


def test_pools_beyond_the_bound_count_together() -> None:
    fleet = Fleet()
    for number in range(POOLS_MAX + 2):
        fleet.add(f"w{number}", model=f"m{number}")
        answered(fleet, model=f"m{number}")
    assert len(pools(fleet)) == POOLS_MAX + 1
    assert sum(pools(fleet)[OTHER_POOL].ttft_s.counts) == 2


def test_a_scrape_has_the_answers_of_each_model_and_role() -> None:
    fleet = Fleet("w0")
    answered(fleet, objective=Objective(9.0, fleet.now_s + 9.0, 0.001, sheddable=False))
    registry = CollectorRegistry()
    export(registry, fleet_metrics, fleet.core, fleet.clock)
    pool = {"model": "m", "role": "both"}

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvroute_{name}", pool | labels)

    assert value("time_to_first_token_seconds_sum") == pytest.approx(0.2)
    below = [value("time_to_first_token_seconds_bucket", le=str(bound)) for bound in TTFT_S]
    assert below == [float(bound >= 0.2) for bound in TTFT_S]
    assert value("time_per_output_token_seconds_sum") == pytest.approx(0.02)
    assert value("output_tokens_sum") == 101
    assert value("output_tokens_bucket", le="+Inf") == 1
    results = {
        (objective, result): value("objectives_total", objective=objective, result=result)
        for objective in ("ttft", "tpot")
        for result in ("kept", "missed")
    }
    assert results == {
        ("ttft", "kept"): 1,
        ("ttft", "missed"): 0,
        ("tpot", "kept"): 0,
        ("tpot", "missed"): 1,
    }
