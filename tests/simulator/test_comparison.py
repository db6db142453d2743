"""What is played for a comparison, and what counts of it."""

from typing import Any

import numpy as np
import pytest

from simulator.study.comparison import Traffic, compare, reuse_by_request
from simulator.study.progress import Watcher
from simulator.traffic.results import OnProgress, RunProgress, RunResult, Slo
from simulator.traffic.trace import Trace
from simulator.traffic.trace_file import load_trace
from simulator.world import world
from simulator.world.options import RunOptions
from tests.simulator.made_results import run_of
from tests.simulator.worlds import request, trace


def trace_of(*arrivals_s: float) -> Trace:
    return trace(*(request(at_s, [i % 2, 10 + i % 2]) for i, at_s in enumerate(arrivals_s)))


class FakeWorld:
    """Serves everything at once, cached from the third request on; keeps what it was asked."""

    def __init__(self) -> None:
        self.played: list[tuple[str, int, list[float]]] = []

    def play(self, options: RunOptions, trace: Trace, on_progress: OnProgress | None) -> RunResult:
        arrivals_s = [request.arrival_s for request in trace.requests]
        self.played.append((options.policy, options.seed, arrivals_s))
        count = len(arrivals_s)
        if on_progress is not None:
            on_progress(RunProgress(count, count, 0, 0, 0.0))
        cached = np.array([0, 0] + [15] * count)[:count]
        return run_of(
            count,
            options.policy,
            options.queue.order,
            block_size=64,
            arrival_s=np.array(arrivals_s, float),
            prompt_tokens=np.full(count, 1024),
            cached_tokens=64 * cached,
        )


FLEETS = [RunOptions(policy="round-robin"), RunOptions(policy="least-loaded")]


def test_every_policy_plays_the_same_traffic_at_every_rate_and_seed() -> None:
    fake = FakeWorld()
    comparisons = compare(
        Traffic(trace=trace_of(0, 1, 2, 3)),
        FLEETS,
        fake.play,
        Watcher(),
        rates=(1.0, 2.0),
        seeds=(7, 8),
        slo=Slo(),
    )
    assert fake.played == [
        (policy, seed, [second / rate for second in range(4)])
        for rate in (1.0, 2.0)
        for policy in ("round-robin", "least-loaded")
        for seed in (7, 8)
    ]
    assert [one.rate for one in comparisons] == [1.0, 2.0]
    for one in comparisons:
        assert [run.label for run in one.runs] == ["round-robin", "least-loaded"]
        assert [len(run.by_seed) for run in one.runs] == [2, 2]
        # of 4 x 16 blocks the last two prompts find 15 usable ones each
        assert one.ceiling.blocks == one.runs[0].numbers.block_hit_rate == 30 / 64
        assert one.pooled == one.ceiling  # the caches hold all


def test_the_same_requests_count_at_every_rate() -> None:
    traffic = Traffic(trace=trace_of(0, 10, 20, 30, 40), from_s=5, until_s=35, warm_up_s=10)
    comparisons = compare(
        traffic, FLEETS, FakeWorld().play, Watcher(), rates=(1.0, 5.0), seeds=(0,), slo=Slo()
    )
    for one in comparisons:
        # 5, 15, 25 seconds after the window's beginning; the first is the warm-up's
        assert one.runs[0].numbers.requests == 2
        assert one.ceiling.blocks == 15 / 32


def test_nothing_left_to_play_is_refused() -> None:
    for traffic in (Traffic(trace=trace_of()), Traffic(trace=trace_of(1), from_s=2)):
        with pytest.raises(ValueError, match="no request of the trace is left"):
            compare(traffic, FLEETS, FakeWorld().play, Watcher(), rates=(1,), seeds=(0,), slo=Slo())


def test_what_can_be_reused_is_told_by_the_order_in_which_requests_came() -> None:
    of = trace_of(0, 1, 2, 3)
    run = FakeWorld().play(FLEETS[0], of, None)
    for arrival_s, infinite, pooled in (
        ([0, 1, 2, 3], [0, 0, 15, 15], [0, 0, 0, 0]),
        ([3, 1, 0, 2], [15, 0, 0, 15], [0, 0, 0, 15]),
    ):
        run.arrival_s[:] = arrival_s
        roomy = reuse_by_request(of, run, 32)
        assert roomy.infinite.tolist() == roomy.pooled.tolist() == infinite
        assert reuse_by_request(of, run, 16).pooled.tolist() == pooled


def test_processes_that_share_the_work_find_the_same() -> None:
    traffic = Traffic(trace=load_trace("conversation"), until_s=30)
    arguments: dict[str, Any] = {"rates": (1.0,), "seeds": (1, 2), "slo": Slo()}
    one = compare(traffic, FLEETS, world.run, Watcher(), **arguments)
    two = compare(traffic, FLEETS, world.run, Watcher(), jobs=2, **arguments)
    digests = [[run.first.digest for run in runs[0].runs] for runs in (one, two)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 2
