"""Dynamo's half of dynamo_mocker.py: runs in an environment with ai-dynamo-runtime alone.

    dynamo_mocker_side.py TRACE SLICE

Replays a trace offline on Dynamo's mock engines, and prints JSON.
"""

import json
import os
import sys
import tempfile

os.environ["DYN_LOG"] = "error"  # by default a line for each pick

from dynamo._core import run_mocker_trace_replay
from dynamo.llm import KvRouterConfig

TRACE_BLOCK = 512
REPEATS = 5
"""Of the KV router, whose ties are broken at random."""


def replay(path, **options):  # type: ignore[no-untyped-def]
    return run_mocker_trace_replay([path], trace_block_size=TRACE_BLOCK, **options)


def fleet_runs(trace, workers, speedups):  # type: ignore[no-untyped-def]
    """Engines at their defaults, by router."""
    found = []
    for router, config, repeats in (
        ("round_robin", None, 1),
        ("kv_router", None, REPEATS),
        ("kv_router", {"prefill_load_scale": 4.0}, REPEATS),
    ):
        for speedup in speedups:
            for _ in range(repeats):
                result = replay(
                    trace,
                    num_workers=workers,
                    router_mode=router,
                    router_config=KvRouterConfig(**config) if config else None,
                    arrival_speedup_ratio=speedup,
                )
                row = {"router": router, "config": config or {}}
                row |= {"workers": workers, "speedup": speedup}
                found.append(row | numbers(result.summary))
    return found


def numbers(summary):  # type: ignore[no-untyped-def]
    return {
        "requests": summary["completed_requests"],
        # Dynamo's headline counts what a preempted request finds of its own, too.
        "token_hit_rate": round(summary["first_admission_prefix_cache_reused_ratio"], 5),
        "token_hit_rate_again": round(summary["prefix_cache_reused_ratio"], 5),
        "ttft_ms": spread(summary, "ttft_ms"),
        "itl_ms": spread(summary, "itl_ms"),  # of gaps; TPOT: of requests' mean gaps
        "tpot_ms": spread(summary, "tpot_ms"),
        "e2e_ms": spread(summary, "e2e_latency_ms"),
        "requests_per_s": round(summary["request_throughput_rps"], 4),
        "duration_s": round(summary["duration_ms"] / 1e3, 3),
    }


def spread(summary, name):  # type: ignore[no-untyped-def]
    kinds = {"mean": "mean", "p50": "median", "p90": "p90", "p99": "p99"}
    return {ours: round(summary[f"{theirs}_{name}"], 3) for ours, theirs in kinds.items()}


def engine_runs(trace):  # type: ignore[no-untyped-def]
    """One worker, so that nothing but its engine decides: every request's times."""
    found = []
    for engine in (
        {"speedup": 1.0},
        {"speedup": 6.0},
        {"speedup": 6.0, "num_gpu_blocks": 3072},
        {"speedup": 6.0, "max_num_seqs": 8, "max_num_batched_tokens": 2048},
    ):
        options = dict(engine)
        result = replay(
            trace,
            num_workers=1,
            arrival_speedup_ratio=options.pop("speedup"),
            extra_engine_args={"engine": options},
            capture_per_request=True,
        )
        found.append(engine | numbers(result.summary) | {"each": each(result.per_request)})
    return found


def probes():  # type: ignore[no-untyped-def]
    """Requests on an idle worker, whose times can be worked out by hand."""
    found = []
    for requests in (
        [(0, 1, 2)],
        [(0, 1000, 4)],
        [(0, 8192, 2)],
        [(0, 8193, 2)],
        [(0, 20_000, 3)],
        [(0, 100_000, 100)],
        [(0, 3000, 3), (0, 2000, 3)],
        [(0, 4096, 200), (400, 16_384, 2)],
    ):
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            first = 0
            for arrival_ms, inputs, outputs in requests:
                ids = list(range(first, first - (-inputs // TRACE_BLOCK)))
                first += len(ids)
                line = {"timestamp": arrival_ms, "input_length": inputs, "output_length": outputs}
                file.write(json.dumps(line | {"hash_ids": ids}) + "\n")
            file.flush()
            result = replay(file.name, num_workers=1, capture_per_request=True)
        found.append({"requests": requests, "each": each(result.per_request)})
    return found


def each(records):  # type: ignore[no-untyped-def]
    """A column a measure, in the order of arrival, then of length."""
    ordered = sorted(
        records, key=lambda one: (one["arrival_time_ms"], one["input_length"], one["output_length"])
    )
    return {
        "arrival_ms": [round(one["arrival_time_ms"], 3) for one in ordered],
        "input_tokens": [one["input_length"] for one in ordered],
        "output_tokens": [one["output_length"] for one in ordered],
        "cached_tokens": [one["admission_history"][0]["reused_input_tokens"] for one in ordered],
        "ttft_ms": [round(one["ttft_ms"], 3) for one in ordered],
        "e2e_ms": [round(one["e2e_latency_ms"], 3) for one in ordered],
    }


trace, its_slice = sys.argv[1:]
found = {
    "probes": probes(),
    "engine": engine_runs(its_slice),
    "slice": fleet_runs(its_slice, workers=4, speedups=[12.0]),
    "fleet": fleet_runs(trace, workers=8, speedups=[1.0, 3.0, 6.0]),
}
json.dump(found, sys.stdout)
