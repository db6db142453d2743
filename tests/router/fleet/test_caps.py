"""Bounds on what a worker has of one phase: no room there while they are reached."""

from typing import Any

from router.config.settings.health_settings import CapacitySettings
from router.decide.decision.nobody_fits import NobodyFits
from tests.stage.fleet import Fleet, prompt


def fleet(**bounds: Any) -> Fleet:
    made = Fleet(capacity=CapacitySettings(**bounds))
    made.add("w0")
    return made


def takes(stage: Fleet) -> bool:
    """Whether another prompt of 100 tokens gets a worker; it does not stay."""
    try:
        pick = stage.route(prompt(100, 10_000))
    except NobodyFits:
        return False
    stage.core.withdraw(pick.reservation, stage.now_s)
    return True


def test_prompt_tokens_to_compute_are_bounded_exactly() -> None:
    stage = fleet(prefill_tokens_max=100)
    stage.route(prompt(99))
    assert takes(stage)
    held = stage.route(prompt(1, 5_000)).reservation
    assert not takes(stage)
    stage.report(held, "prefill_done")
    assert takes(stage)


def test_a_prompt_beyond_the_bound_goes_to_an_idle_worker() -> None:
    assert takes(fleet(prefill_tokens_max=10))


def test_requests_in_prefill_are_bounded() -> None:
    stage = fleet(prefill_requests_max=2)
    held = [stage.route(prompt(50, 1000 * i)).reservation for i in range(2)]
    assert not takes(stage)
    stage.report(held[0], "prefill_done")
    assert takes(stage)


def test_requests_in_decode_are_bounded() -> None:
    stage = fleet(decode_requests_max=1)
    held = stage.route(prompt(50)).reservation
    assert takes(stage)
    stage.report(held, "prefill_done")
    assert not takes(stage)
    stage.report(held, "finished")
    assert takes(stage)


def test_bounds_change_while_the_router_runs() -> None:
    stage = fleet()
    stage.route(prompt(200))
    assert takes(stage)
    capacity = CapacitySettings(prefill_tokens_max=100)
    stage.core.reconfigure(stage.core.routing.__class__(capacity=capacity))
    assert not takes(stage)
