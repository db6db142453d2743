"""The claims for Mooncake's scheduling, as a scenario of our own beside what they say.

Many clients ask without a pause; each prompt begins with one of a few long texts, some of which are
far more popular than others. *No caching* is the same traffic with nothing shared, by least-loaded;
the others are the policy conductor. In brackets what the description says, of a set-up that it
doesn't tell: these can be set side by side, and not compared.
"""

import random
from itertools import count, islice

import numpy as np

from simulator.study.comparison import Traffic
from simulator.traffic.trace import ID_TOKENS, Trace, TraceRequest
from tests.results.cases import Case, Results
from tests.results.fleets import Traces, fleet, nothing_shared
from tests.results.page import markdown_table, ms, percent

SECTION = "hot prefixes"
CLIENTS = 96
TURNS = 60
TEXTS = 64
TEXT_IDS = 16
"""8,192 tokens"""
OWN_TOKENS = 1_024
OUTPUT_TOKENS = 8
POPULARITY = 1.1
"""Zipf's exponent"""
ARMS = ("no caching", "cache-aware", "cache-aware, with copies")
SAID = {
    "no caching": ("0 %", "18.5", "150 ms", "100 /s"),
    "cache-aware": ("82 %", "12.3", "95 ms", "385 /s"),
    "cache-aware, with copies": ("87 %", "7.8", "88 ms", "450 /s"),
}
"""Hit rate, load variance, mean prefill latency, throughput: of an outsider's derivation from the
paper, whose set-up isn't told."""


def cases(traces: Traces) -> list[Case]:
    trace = _trace()
    shared = Traffic(trace=trace)
    alone = Traffic(trace=nothing_shared(trace, trace.name))
    return [
        Case(SECTION, ARMS[0], alone, 1.0, fleet("least-loaded")),
        Case(SECTION, ARMS[1], shared, 1.0, fleet("conductor")),
        Case(SECTION, ARMS[2], shared, 1.0, fleet("conductor", hot_prefixes=True)),
    ]


def page(traces: Traces, results: Results) -> str:
    rows = []
    for arm in ARMS:
        done = next(one for key, one in results.items() if key[:2] == (SECTION, arm))
        numbers = done.numbers
        run = done.result
        steady = run.in_flight[run.sampled_s >= run.seconds // 10]
        variance = float(steady.var(axis=1).mean())
        said = SAID[arm]
        rows.append(
            [
                arm,
                f"{percent(numbers.block_hit_rate, 0)} ({said[0]})",
                f"{variance:.1f} ({said[1]})",
                f"{ms(numbers.ttft_ms.mean)} ({said[2]})",
                f"{numbers.goodput_rps:.1f} /s ({said[3]})",
                f"{numbers.copies}",
            ]
        )
    head = ["", "hit rate", "variance of load", "mean time to first token", "throughput", "copies"]
    return markdown_table(head, rows) + "\n"


def _trace() -> Trace:
    rng = random.Random(1)
    weights = [1 / (i + 1) ** POPULARITY for i in range(TEXTS)]
    requests = []
    fresh = count(1 << 32)
    for turn in range(TURNS):
        for client in range(CLIENTS):
            (text,) = rng.choices(range(TEXTS), weights)
            ids = [text * TEXT_IDS + i for i in range(TEXT_IDS)]
            ids += islice(fresh, OWN_TOKENS // ID_TOKENS)
            requests.append(
                TraceRequest(
                    arrival_s=turn + client / CLIENTS,
                    prompt_tokens=ID_TOKENS * len(ids),
                    output_tokens=OUTPUT_TOKENS,
                    hash_ids=np.array(ids, np.uint64),
                    session_id=f"client-{client}",
                    turn=turn,
                    think_s=0.0 if turn else None,
                )
            )
    return Trace("hot prefixes", tuple(requests))
