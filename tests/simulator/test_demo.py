"""The demo's heart, in virtual time: what it measures, and that cache-aware picks pay there."""

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from typing_extensions import override

from kvroute.v1 import Progress, ProgressState
from simulator.engines.scheduler import SchedulerConfig
from simulator.live.clock import VirtualClock
from simulator.live.demo import (
    Pick,
    RunResult,
    demo_engines,
    demo_trace,
    replay,
    table,
    to_json,
    verdict,
)
from simulator.live.engine import Engine, EngineConfig
from simulator.traffic.results import Distribution, OnProgress, RunProgress
from simulator.traffic.trace import TraceRequest
from tests.simulator.made_results import printed


class RoundRobin:
    """Each worker in turn; keeps what it was told."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self.engines = engines
        self.told: list[tuple[str, str, int, int]] = []
        self._picks = 0

    def choose(self, request: TraceRequest) -> str:
        return list(self.engines)[self._picks % len(self.engines)]

    async def pick(self, request: TraceRequest) -> Pick:
        worker_id = self.choose(request)
        self._picks += 1
        return Pick(worker_id, f"r{self._picks}", 0.001)

    async def report(self, progress: Progress) -> None:
        state = ProgressState.Name(progress.state).removeprefix("PROGRESS_STATE_")
        told = (state, progress.reservation_id, progress.output_tokens, progress.cached_tokens)
        self.told.append(told)


class AllKnowing(RoundRobin):
    """Weighs what each engine really holds against the requests it really has."""

    @override
    def choose(self, request: TraceRequest) -> str:
        token_ids = request.token_ids()
        tokens = len(token_ids)

        def cost(worker_id: str) -> tuple[float, str]:
            engine = self.engines[worker_id]
            load = engine.load()
            new_tokens = tokens - engine.cached_tokens(token_ids)
            return new_tokens / tokens + 0.2 * (load.running + load.waiting), worker_id

        return min(self.engines, key=cost)


async def run(
    routing: type[RoundRobin],
    trace: Sequence[TraceRequest],
    configs: Sequence[EngineConfig],
    on_progress: OnProgress | None = None,
) -> tuple[RunResult, RoundRobin]:
    clock = VirtualClock()
    engines = {config.engine_id: Engine(config, clock) for config in configs}
    picker = routing(engines)
    work = replay(routing.__name__, trace, engines, picker, clock=clock, on_progress=on_progress)
    return await clock.run(work), picker


SMALL = [EngineConfig(f"w{i}", SchedulerConfig(block_count=64, block_size=4)) for i in range(2)]


def request(arrival_s: float, text: int, tokens: int = 16) -> TraceRequest:
    hash_ids = np.arange(text, text - (-tokens // 512), dtype=np.uint64)
    return TraceRequest(arrival_s, tokens, 4, hash_ids)


async def test_hits_are_cached_blocks_over_full_prompt_blocks_and_reports_carry_them() -> None:
    trace = [request(0, 0), request(1, 100), request(2, 0), request(3, 200)]
    result, picker = await run(RoundRobin, trace, SMALL)
    # w0 serves prompts 0 and 0 again: 3 usable blocks of 4; nothing else repeats
    assert result.block_hit_rate == 3 / 16
    assert result.ceiling == 3 / 16
    assert (result.requests, result.failed) == (4, 0)
    assert picker.told[:2] == [("PREFILL_DONE", "r1", 0, 0), ("FINISHED", "r1", 4, 0)]
    assert ("FINISHED", "r3", 4, 12) in picker.told
    assert result.load_cv == pytest.approx(0, abs=0.05)
    assert result.decision_us.p50 == pytest.approx(1000)
    assert 5 < result.ttft_ms.p50 < 15


async def test_a_refused_request_is_failed_reported_and_not_the_end() -> None:
    trace = [request(0, 0), request(0.1, 0, tokens=1000), request(0.2, 0)]
    result, picker = await run(RoundRobin, trace, SMALL)
    assert (result.requests, result.failed) == (3, 1)
    assert "maximum length" in next(iter(result.failures))
    assert ("FAILED", "r2", 0, 0) in picker.told


async def test_a_router_that_refuses_makes_failed_requests() -> None:
    class Refusing(RoundRobin):
        @override
        async def pick(self, request: TraceRequest) -> Pick:
            raise ConnectionError("nobody there")

    result, _ = await run(Refusing, [request(0, 0)], SMALL)
    assert result.failures == {"ConnectionError: nobody there": 1}
    assert (result.failed, result.block_hit_rate, result.ttft_ms.p99) == (1, 0.0, 0.0)


async def test_a_request_whose_end_the_router_does_not_take_is_failed_and_nothing_else() -> None:
    class Forgetful(RoundRobin):
        @override
        async def report(self, progress: Progress) -> None:
            if progress.state == ProgressState.PROGRESS_STATE_FINISHED:
                raise RuntimeError("its lease is over")

    seen: list[RunProgress] = []
    result, _ = await run(Forgetful, [request(0, 0), request(1, 0)], SMALL, seen.append)
    assert (result.failed, result.block_hit_rate) == (2, 0.0)
    assert [(now.done, now.failed, now.in_flight) for now in seen] == [(1, 1, 0), (2, 2, 0)]


async def test_engines_of_different_block_sizes_are_refused() -> None:
    odd = EngineConfig("odd", SchedulerConfig(block_count=64, block_size=8))
    with pytest.raises(ValueError, match="one block size"):
        await run(RoundRobin, [], [*SMALL, odd])


async def test_cache_aware_picks_pay_on_the_trace_that_ships() -> None:
    trace, configs = demo_trace(), demo_engines()
    blind, _ = await run(RoundRobin, trace, configs)
    aware, _ = await run(AllKnowing, trace, configs)
    assert blind.failed == aware.failed == 0
    assert blind.block_hit_rate < 0.12
    assert aware.block_hit_rate > 0.8 * aware.ceiling
    assert aware.block_hit_rate <= aware.ceiling
    assert aware.ttft_ms.mean < 0.7 * blind.ttft_ms.mean


async def test_the_same_run_gives_the_same_numbers() -> None:
    trace = demo_trace()[:60]
    one, _ = await run(AllKnowing, trace, demo_engines())
    other, _ = await run(AllKnowing, trace, demo_engines())
    assert one == other


def result(policy: str, hit_rate: float, ttft_ms: float) -> RunResult:
    ttft = Distribution(ttft_ms, 2.0, 2.5, 3.0)
    decision = Distribution(200.0, 150.0, 500.0, 900.0)
    return RunResult(policy, 350, 0, hit_rate, 0.4, ttft, 0.1, decision, failures={})


RUNS = [result("round-robin", 0.1, 1000.0), result("dynamo-adaptive", 0.36, 600.0)]


def test_json_has_exactly_the_published_fields() -> None:
    assert json.loads(to_json(RUNS[1:])) == {
        "runs": [
            {
                "policy": "dynamo-adaptive",
                "requests": 350,
                "failed": 0,
                "block_hit_rate": 0.36,
                "ceiling": 0.4,
                "ttft_ms": {"mean": 600.0, "p50": 2.0, "p90": 2.5, "p99": 3.0},
                "load_cv": 0.1,
                "decision_us": {"mean": 200.0, "p50": 150.0, "p90": 500.0, "p99": 900.0},
                "failures": {},
            }
        ]
    }


def test_the_table_puts_the_runs_beside_the_best_possible() -> None:
    shown = printed(table(RUNS), width=80)
    for text in ("round-robin", "dynamo-adaptive", "best possible", "36.0%", "40.0%", "90%"):
        assert text in shown


def test_the_verdict_is_one_plain_sentence() -> None:
    assert verdict(RUNS) == (
        "dynamo-adaptive reused 36.0% of all prompt blocks, round-robin 10.0%, of 40.0% that can "
        "be reused at most; the first token came 40% sooner on average."
    )
    assert "67% later" in verdict([RUNS[1], RUNS[0]])
    assert verdict(RUNS[:1]) == ""


async def test_progress_comes_with_each_request() -> None:
    seen: list[RunProgress] = []
    await run(RoundRobin, [request(i, 100 * i) for i in range(20)], SMALL, seen.append)
    assert [now.done for now in seen] == list(range(1, 21))
    assert seen[-1] == RunProgress(20, 20, 0, 0, 0.0)
