"""Copies of hot prefixes in virtual time: decided by the router, carried out by the world."""

from dataclasses import replace

import pytest

from simulator.engines.cost_model import KvTransfer, LinearCost
from simulator.engines.profile import load_profile
from simulator.engines.scheduler import SchedulerConfig
from simulator.schedulers.options import scheduler_config
from simulator.traffic.results import RunResult, aggregate
from simulator.traffic.trace import Trace
from simulator.world.options import Failure, RunOptions
from simulator.world.world import run
from tests.simulator.worlds import request, trace

WORKERS = 4
TEXTS = 3
TEXT_IDS = 8
"""4,096 tokens"""
REQUESTS = 400

ENGINE = SchedulerConfig(
    block_count=4096,
    block_size=64,
    joined_steps_max=10_000,
    cost=LinearCost(0.005, 0.0, 0.0, 2e-4, 0.0, kv=load_profile("llama-8b-h100").cost_model().kv),
)
"""A request with a text in the cache takes 0.1 s: as many as come for one text keep it busy."""


def texts(requests: int = REQUESTS, rate: float = 30.0) -> Trace:
    """Requests for a few texts, each with an end of its own."""
    return trace(
        *(
            request(i / rate, [100 * (i % TEXTS) + j for j in range(TEXT_IDS)] + [10_000 + i])
            for i in range(requests)
        )
    )


def play(**about: object) -> RunResult:
    # By the formula alone: under the guard the load spreads without copies.
    unguarded = {
        "policy": "dynamo-unguarded",
        "workers": WORKERS,
        "scheduler": ENGINE,
        "check": True,
    }
    options: dict[str, object] = {**unguarded, **about}
    return run(RunOptions(**options), texts())  # type: ignore[arg-type]


def test_copies_spread_a_load_that_hangs_on_a_few_texts() -> None:
    without, copied = play(), play(hot_prefixes=True)
    alone, shared = aggregate(without), aggregate(copied)
    assert alone.copies == 0
    assert 0 < shared.copies == copied.counters["copies"] <= TEXTS * WORKERS
    assert copied.counters["copies_used"] > 0
    assert shared.served == alone.served == REQUESTS
    assert shared.ttft_ms.mean < 0.5 * alone.ttft_ms.mean
    assert shared.goodput_rps > alone.goodput_rps


def test_one_seed_is_one_run_with_copies_too() -> None:
    first, second = play(hot_prefixes=True), play(hot_prefixes=True)
    assert first.digest == second.digest
    assert first.counters == second.counters


@pytest.mark.parametrize(
    ("engine", "shape"),
    [
        ("vllm", {}),
        ("sglang", {}),
        ("chitu", {}),
        ("chitu-dp", {"workers": 2, "ranks": 2}),
    ],
)
def test_every_engine_that_fetches_kv_cache_takes_copies(
    engine: str, shape: dict[str, int]
) -> None:
    config = scheduler_config(
        engine,
        load_profile("mocker"),
        block_size=ENGINE.block_size,
        block_count=ENGINE.block_count,
        joined_steps_max=ENGINE.joined_steps_max,
        ranks=shape.get("ranks", 1),
        options=None,
    )
    scheduler = replace(config, cost=ENGINE.cost)
    result = play(hot_prefixes=True, engine=engine, scheduler=scheduler, **shape)
    assert result.counters["copies"] > 0


def test_copies_live_with_engines_that_die_and_several_routers() -> None:
    failures = tuple(Failure(2.0 + i, i, 3.0) for i in range(WORKERS))
    result = play(hot_prefixes=True, failures=failures, replicas=2, event_loss=0.05)
    numbers = aggregate(result)
    assert numbers.served + numbers.failed == REQUESTS
    assert numbers.copies > 0


def test_engines_that_move_no_kv_cache_make_no_copies() -> None:
    bare = replace(ENGINE, cost=LinearCost(0.01, 0.0, 0.0, 1e-4, 0.0))
    with pytest.raises(ValueError, match="no size of a token's KV cache"):
        RunOptions(hot_prefixes=True, scheduler=bare)
    no_links = replace(ENGINE, cost=replace(bare.cost, kv=KvTransfer(1)))
    with pytest.raises(ValueError, match="no link between engines of the same host"):
        RunOptions(hot_prefixes=True, scheduler=no_links)


def test_copies_have_no_token_ids_for_the_engines_own_bytes() -> None:
    with pytest.raises(ValueError, match="no token ids"):
        RunOptions(hot_prefixes=True, events="engine")
