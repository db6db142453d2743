"""Our vLLM scheduler at Dynamo's prices, held against Dynamo's own simulator.

data/dynamo_mocker.json tells what NVIDIA Dynamo's offline replay made of the same requests
(tests/bench/dynamo_mocker.py recorded it). On one worker nothing is routed, and every request is
compared. Fleets are compared as a whole: a slice here, the trace in tests/bench/dynamo_fleet.py.
"""

import json
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexer.hashing import prefix_hashes
from simulator.engines.content import ChainContent
from simulator.engines.profile import load_profile
from simulator.engines.scheduler import SchedulerConfig, Submission
from simulator.schedulers.options import scheduler_config
from simulator.schedulers.vllm.scheduler import VllmScheduler
from simulator.traffic.trace import TraceRequest
from simulator.traffic.trace_file import load_trace
from tests.bench.dynamo_fleet import rows

RECORD: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "dynamo_mocker.json").read_text(encoding="utf-8")
)

LIMITS = ("speedup", "num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens")
"""What the recorded engines differ in."""


@dataclass(slots=True)
class Times:
    """What became of each request, in the trace's order; ms."""

    ttft_ms: np.ndarray
    e2e_ms: np.ndarray
    cached_tokens: np.ndarray


def mocker_config(limits: dict[str, int]) -> SchedulerConfig:
    """Dynamo's engine, with limits by Dynamo's names."""
    profile = load_profile("mocker")
    options = {"max_num_seqs": "max_num_seqs", "max_num_batched_tokens": "step_tokens_max"}
    return scheduler_config(
        "vllm",
        profile,
        block_size=profile.engine.block_size,
        block_count=limits.get("num_gpu_blocks"),
        joined_steps_max=10_000,
        options={ours: str(limits[name]) for name, ours in options.items() if name in limits},
    )


def play(requests: Rows[TraceRequest], speedup: float, config: SchedulerConfig) -> Times:
    """All requests on one engine. Who comes during a step is there for the next one."""
    scheduler = VllmScheduler(config)
    arrivals = [request.arrival_s / speedup for request in requests]
    times = Times(*(np.zeros(len(requests)) for _ in range(3)))
    now_s, come = 0.0, 0
    while True:
        step = scheduler.step or scheduler.begin_step(now_s)
        if come < len(requests) and (step is None or arrivals[come] < step.end_s):
            now_s = arrivals[come]
            scheduler.cut_step(now_s)
            while come < len(requests) and arrivals[come] == now_s:
                scheduler.add(submission(come, requests[come], config), now_s)
                come += 1
            continue
        if step is None:
            return times
        now_s = step.end_s
        for output in scheduler.end_step(now_s).outputs:
            sequence = output.sequence
            i = int(sequence.request_id)
            if output.finished and sequence.first_token_s is not None:
                times.ttft_ms[i] = (sequence.first_token_s - arrivals[i]) * 1e3
                times.e2e_ms[i] = (now_s - arrivals[i]) * 1e3
                times.cached_tokens[i] = sequence.cached_tokens


def submission(i: int, request: TraceRequest, config: SchedulerConfig) -> Submission:
    chain = prefix_hashes(request.block_hashes(config.block_size)).tolist()
    return Submission(
        request_id=str(i),
        content=ChainContent(chain, str(i)),
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
    )


def recorded(each: dict[str, list[float]], requests: Rows[TraceRequest]) -> Times:
    """Dynamo's columns, from order of arrival and length to the trace's order."""
    order = sorted(
        range(len(requests)),
        key=lambda i: (
            requests[i].arrival_s,
            requests[i].prompt_tokens,
            requests[i].output_tokens,
        ),
    )
    assert [requests[i].prompt_tokens for i in order] == each["input_tokens"]
    columns = []
    for name in ("ttft_ms", "e2e_ms", "cached_tokens"):
        column = np.zeros(len(requests))
        column[order] = each[name]
        columns.append(column)
    return Times(*columns)


@pytest.mark.parametrize("probe", RECORD["probes"], ids=lambda probe: str(probe["requests"]))
def test_requests_on_an_idle_engine_take_as_long(probe: dict[str, Any]) -> None:
    first = np.cumsum([0, *(inputs for _, inputs, _ in probe["requests"])])
    requests = [
        TraceRequest(at_ms / 1e3, inputs, outputs, np.arange(start, start + inputs, dtype="u8"))
        for (at_ms, inputs, outputs), start in zip(probe["requests"], first, strict=False)
    ]
    ours, theirs = play(requests, 1.0, mocker_config({})), recorded(probe["each"], requests)
    assert ours.ttft_ms == pytest.approx(theirs.ttft_ms, abs=0.01)
    assert ours.e2e_ms == pytest.approx(theirs.e2e_ms, rel=1e-4)


@pytest.mark.parametrize(
    "run",
    RECORD["engine"],
    ids=lambda run: "-".join(f"{key}={run[key]}" for key in run if key in LIMITS),
)
def test_a_busy_engine_serves_every_request_as_dynamo_does(run: dict[str, Any]) -> None:
    requests = load_trace("conversation").requests
    ours = play(requests, run["speedup"], mocker_config(run))
    theirs = recorded(run["each"], requests)
    assert ours.cached_tokens.tolist() == theirs.cached_tokens.tolist()
    assert ours.ttft_ms.mean() == pytest.approx(theirs.ttft_ms.mean(), rel=0.005)
    assert ours.e2e_ms.mean() == pytest.approx(theirs.e2e_ms.mean(), rel=0.005)
    # One request later or earlier by a step now and then: who came just before or after its end.
    assert np.abs(ours.ttft_ms - theirs.ttft_ms).max() < 200


def test_a_fleet_served_in_turn_takes_as_long() -> None:
    theirs = [one for one in RECORD["slice"] if one["router"] == "round_robin"]
    for row in rows(load_trace("conversation"), theirs):
        assert row.ours == pytest.approx(row.theirs, rel=0.02), row


def test_a_fleet_routed_by_blocks_takes_as_long() -> None:
    """With prefill weighed fourfold. At the weights' defaults many of these 350 picks are near
    ties, which small differences turn: the blocks of answers, that our engines report and Dynamo
    doesn't count, and when the first of several requests with one stamp starts."""
    theirs = [one for one in RECORD["slice"] if one["config"]]
    for row in rows(load_trace("conversation"), theirs):
        assert row.ours == pytest.approx(row.theirs, rel=0.05), row
