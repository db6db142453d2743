"""Held against Dynamo's own simulator: the same requests, fleet, engine and stamps.

Its round robin and its KV router were recorded (tests/bench/dynamo_mocker.py). Ours play the trace
as it is stamped, in bursts of three seconds, since Dynamo does; engines tell no capacity, their
events no delay, and picks predict nothing. So these numbers are not those of the tables above.
"""

import json
from dataclasses import replace
from statistics import median
from typing import Any

from simulator.study.comparison import Traffic
from tests.bench.dynamo_mocker import RECORD
from tests.results.cases import Case, Results
from tests.results.fleets import RATES, Traces, fleet
from tests.results.page import less, markdown_table, ms, percent

SECTION = "dynamo"
NAME = "conversation, as stamped"
ARMS = {"round_robin": "round-robin", "kv_router": "dynamo-blocks"}
"""Dynamo's routers -> our policies"""
OURS = "ttft"


def cases(traces: Traces) -> list[Case]:
    traffic = Traffic(trace=traces["conversation"].trace, tick_s=0.0)
    return [
        Case(
            SECTION,
            NAME,
            traffic,
            rate,
            replace(fleet(policy, tells_capacity=False, event_delay_s=0.0), predicted_ttl_s=0.0),
        )
        for rate in RATES
        for policy in (*ARMS.values(), OURS)
    ]


def page(traces: Traces, results: Results) -> str:
    if not traces.whole:
        return "Dynamo was measured with the whole trace; this page was made with a slice.\n"
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = []
    for rate in RATES:
        for mode, policy in ARMS.items():
            theirs = [
                one
                for one in recorded["fleet"]
                if (one["router"], one["speedup"], one["config"]) == (mode, rate, {})
            ]
            ttft = _median(theirs, "ttft_ms", "mean")
            rows.append(
                [
                    f"{rate:g}x",
                    f"Dynamo, {mode}",
                    percent(median(one["token_hit_rate"] for one in theirs)),
                    ms(ttft),
                    "",
                    ms(_median(theirs, "ttft_ms", "p99")),
                    ms(_median(theirs, "e2e_ms", "mean")),
                ]
            )
            rows.append(_ours(results, policy, rate, ttft))
        rows.append(_ours(results, OURS, rate, ttft))
    head = ["rate", "whose", "tokens reused", "TTFT mean", "to Dynamo's", "p99", "end to end"]
    told = f"Dynamo is `{recorded['dynamo']}`; `{OURS}` is beside its KV router.\n\n"
    return told + markdown_table(head, rows) + "\n"


def _ours(results: Results, policy: str, rate: float, theirs_ms: float) -> list[str]:
    numbers = results[SECTION, NAME, policy, rate].numbers
    return [
        f"{rate:g}x",
        f"ours, {policy}",
        percent(numbers.token_hit_rate),
        ms(numbers.ttft_ms.mean),
        less(numbers.ttft_ms.mean, theirs_ms),
        ms(numbers.ttft_ms.p99),
        ms(numbers.e2e_ms.mean),
    ]


def _median(recorded: list[dict[str, Any]], number: str, part: str) -> float:
    return median(one[number][part] for one in recorded)
