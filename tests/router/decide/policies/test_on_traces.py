"""ttft held against others on traffic: slices of traces on simulated engines, in virtual time."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from simulator.engines.profile import load_profile
from simulator.schedulers.options import scheduler_config
from simulator.traffic.results import RunResult
from simulator.traffic.trace import Trace, TraceRequest
from simulator.traffic.trace_file import load_trace
from simulator.world import world
from simulator.world.options import RunOptions

WORKERS = 4
BLOCKS = 4096
"""Of 64 tokens, so that two workers hold a good part of a slice, and must choose."""


def run(policy: str, trace: Trace) -> RunResult:
    config = scheduler_config(
        "vllm", load_profile("mocker"), block_size=64, block_count=BLOCKS, joined_steps_max=10_000
    )
    options = RunOptions(policy=policy, workers=WORKERS, scheduler=config)
    return world.run(options, trace)


@cache
def slice_of(name: str, rate: float) -> Trace:
    return load_trace(name).spread().at_rate(rate)


def mean_ttft_s(policy: str, trace: Trace) -> float:
    found = run(policy, trace).ttft_s
    return float(np.nanmean(found))


def without_reuse(trace: Trace) -> Trace:
    """The same lengths and times; no two prompts have a block in common."""
    requests: list[TraceRequest] = []
    first = 0
    for request in trace.requests:
        ids = np.arange(first, first + len(request.hash_ids), dtype=np.uint64)
        first += len(ids)
        requests.append(replace(request, hash_ids=ids))
    return replace(trace, requests=tuple(requests))


@pytest.mark.parametrize(("name", "rate"), [("synthetic", 6), ("agentic", 1), ("conversation", 6)])
@pytest.mark.long
def test_the_first_token_comes_sooner_than_by_the_others(name: str, rate: float) -> None:
    trace = slice_of(name, rate)
    ours = mean_ttft_s("ttft", trace)
    assert ours < mean_ttft_s("dynamo-blocks", trace)
    assert ours < mean_ttft_s("least-loaded", trace)


@pytest.mark.long
def test_without_reuse_it_is_no_worse_than_the_least_loaded() -> None:
    trace = without_reuse(slice_of("conversation", 8))
    assert mean_ttft_s("ttft", trace) < mean_ttft_s("least-loaded", trace)


def test_a_system_prompt_that_all_share_pins_no_worker() -> None:
    # Every prompt begins with the same 4096 tokens, and nothing else is reused: whoever computed
    # them first must not get everything.
    trace = without_reuse(slice_of("conversation", 4))
    shared = np.arange(1 << 40, (1 << 40) + 8, dtype=np.uint64)
    requests = tuple(
        replace(
            one,
            prompt_tokens=one.prompt_tokens + 4096,
            hash_ids=np.concatenate([shared, one.hash_ids]),
        )
        for one in trace.requests
    )
    found = run("ttft", replace(trace, requests=requests))
    work = np.bincount(found.worker, found.prompt_tokens - found.cached_tokens, WORKERS)
    assert work.max() < 1.3 * work.mean()
    assert np.bincount(found.worker, minlength=WORKERS).max() < 1.5 * len(requests) / WORKERS
