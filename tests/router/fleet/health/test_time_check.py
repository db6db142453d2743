"""Predicted times to the first token, and between tokens, compared with measured ones."""

import pytest
from prometheus_client import CollectorRegistry

from router.decide.core.progress import ProgressState
from router.fleet.health.time_check import RATIOS, TimeCheck
from router.fleet.reservations.load import WorkerLoad
from router.fleet.reservations.reservations import Ending
from router.fleet.token_times import MEASURED
from router.observe.metrics.families import export
from router.observe.metrics.of_fleet import fleet_metrics
from router.request.request import Role
from tests.stage.fleet import Fleet, prompt

IDLE_S = (500 + 1600 * (1 + 800 / 50_000)) / 1000
"""Of 1600 new tokens, at 1000 tokens a second (router/fleet/rates.py)."""


def ttft_fleet(**routing: object) -> Fleet:
    return Fleet("w0", **{"policy": "ttft", "prefill_rate": 1000.0, **routing})


def tell(fleet: Fleet, reservation_id: str, state: ProgressState, **about: object) -> None:
    fleet.report(reservation_id, state, **about)  # type: ignore[arg-type]


def route(fleet: Fleet, first: int = 0, **about: object) -> str:
    return fleet.route(prompt(1600, first), **about).reservation.id


@pytest.mark.parametrize("took", [2.0, 0.5, 1.0])
def test_a_measured_time_is_held_against_the_one_at_the_pick(took: float) -> None:
    fleet = ttft_fleet()
    picked = route(fleet)
    fleet.now_s += took * IDLE_S
    tell(fleet, picked, ProgressState.PREFILL_DONE)
    check = fleet.core.ttft_check
    assert check.ratios == pytest.approx(took, rel=1e-5)
    assert check.measured_s == pytest.approx(took * IDLE_S, rel=1e-5)
    assert (sum(check.counts), len(check)) == (1, 0)


def test_it_is_counted_once_however_often_it_is_told() -> None:
    fleet = ttft_fleet()
    picked = route(fleet)
    for state in (ProgressState.PREFILL_DONE, ProgressState.PREFILL_DONE, ProgressState.FINISHED):
        fleet.now_s += 1.0
        tell(fleet, picked, state)
    assert sum(fleet.core.ttft_check.counts) == 1


def test_what_nobody_times_says_nothing_and_stays_no_longer_than_its_reservation() -> None:
    fleet = ttft_fleet(lease_s=30.0)
    running, lost, expired, withdrawn = (
        fleet.route(prompt(160, 1000 * i)).reservation for i in range(4)
    )
    check = fleet.core.ttft_check
    assert len(check) == 4
    tell(fleet, running.id, ProgressState.RUNNING, output_tokens=3)
    tell(fleet, running.id, ProgressState.FINISHED)
    tell(fleet, lost.id, ProgressState.FAILED, failure=Ending.FAILED_WORKER)
    fleet.core.withdraw(withdrawn, fleet.now_s)
    fleet.turn(31.0)
    assert expired.ended is Ending.EXPIRED
    assert (len(check), sum(check.counts)) == (0, 0)


def test_policies_that_predict_nothing_are_not_measured() -> None:
    fleet = ttft_fleet()
    picked = route(fleet, policy="least-loaded")
    assert len(fleet.core.ttft_check) == 0
    tell(fleet, picked, ProgressState.PREFILL_DONE)
    assert sum(fleet.core.ttft_check.counts) == 0


def test_of_a_pair_the_one_that_computes_the_prompt_is_timed() -> None:
    fleet = Fleet(prefill_policy="ttft", prefill_rate=1000.0)
    fleet.add_pair()
    picked = route(fleet, role=Role.PAIR)
    fleet.now_s += IDLE_S
    tell(fleet, picked, ProgressState.PREFILL_DONE)
    assert fleet.core.ttft_check.ratios == pytest.approx(1.0, rel=1e-5)


def test_ratios_fall_into_their_buckets_bounds_included() -> None:
    check = TimeCheck()
    for i, bound in enumerate(RATIOS):
        check.on_pick(str(i), 2.0)
        check.on_done(str(i), 2.0 * bound)
    check.on_pick("late", 1.0)
    check.on_done("late", 11.0)
    assert check.counts == [1] * (len(RATIOS) + 1)


def answered(fleet: Fleet, tokens: int, tpot_s: float) -> None:
    picked = route(fleet)
    tell(fleet, picked, ProgressState.PREFILL_DONE)
    fleet.now_s += (tokens - 1) * tpot_s
    tell(fleet, picked, ProgressState.FINISHED, output_tokens=tokens)


def test_the_time_between_tokens_is_compared_with_the_one_at_the_pick() -> None:
    fleet = ttft_fleet()
    for _ in range(MEASURED):
        answered(fleet, 101, 0.02)
    check = fleet.core.tpot_check
    assert (sum(check.counts), len(check)) == (0, 0)  # nothing was predicted so far
    fleet.turn(2.0)
    answered(fleet, 101, 0.02)
    assert check.ratios == pytest.approx(1.0, rel=0.02)
    answered(fleet, 101, 0.04)
    assert check.ratios == pytest.approx(3.0, rel=0.02)
    answered(fleet, 3, 0.02)  # which is no mean
    assert (sum(check.counts), len(check)) == (2, 0)
    registry = CollectorRegistry()
    export(registry, fleet_metrics, fleet.core, fleet.clock)
    for number, wanted in (("sum", check.ratios), ("count", 2)):
        name = f"kvroute_prediction_ratio_{number}"
        assert registry.get_sample_value(name, {"of": "tpot"}) == wanted


@pytest.mark.parametrize("cached", [{}, {"cached_tokens": 0}], ids=str)
def test_the_blocks_of_an_answers_prompt_count_whatever_its_engine_reports(
    cached: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = ttft_fleet()
    blocks = []

    def on_finished(_id: str, _load: WorkerLoad, _tokens: int, of_prompt: int, _s: float) -> None:
        blocks.append(of_prompt)

    monkeypatch.setattr(fleet.core.fleet.token_times, "on_finished", on_finished)
    picked = route(fleet)
    tell(fleet, picked, ProgressState.PREFILL_DONE)
    tell(fleet, picked, ProgressState.FINISHED, output_tokens=101, **cached)
    assert blocks == [1600 / 16]


def test_an_answer_that_fails_is_not_compared() -> None:
    fleet = ttft_fleet()
    for _ in range(MEASURED):
        answered(fleet, 101, 0.02)
    fleet.turn(2.0)
    picked = route(fleet)
    tell(fleet, picked, ProgressState.PREFILL_DONE)
    fleet.now_s += 2.0
    tell(fleet, picked, ProgressState.FAILED, output_tokens=101, failure=Ending.FAILED_WORKER)
    assert (len(fleet.core.tpot_check), sum(fleet.core.tpot_check.counts)) == (0, 0)
    assert len(fleet.core.fleet.token_times) == 0


def test_metrics_tell_them() -> None:
    fleet = ttft_fleet()
    for first in (0, 5000):
        picked = route(fleet, first)
        fleet.now_s += 2 * IDLE_S
        tell(fleet, picked, ProgressState.PREFILL_DONE)
    registry = CollectorRegistry()
    export(registry, fleet_metrics, fleet.core, fleet.clock)

    def value(number: str, **labels: str) -> float:
        name = f"kvroute_prediction_ratio_{number}"
        told = registry.get_sample_value(name, {"of": "ttft", **labels})
        assert told is not None
        return told

    assert value("count") == value("bucket", le="+Inf") == 2
    assert value("bucket", le="1.33") == 0
    assert value("sum") == fleet.core.ttft_check.ratios
