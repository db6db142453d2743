"""Two more claims, as scenarios of our own beside what they say, of set-ups that they don't tell.

*Balancing cuts the 99th percentile by 35 %* (of Mooncake's scheduling): the conversation trace at
6x, by a policy that takes the longest cached prefix and looks at nothing else, and by `conductor`,
which weighs the load against it; then by two that look at no cache.

*Reuse saves 90 % of the time to the first token* (of Dynamo's router): an idle engine gets each
of 40 texts twice. What is left is the engine's step, and the last, unfilled block.
"""

from itertools import count, islice

import numpy as np

from simulator.study.comparison import Traffic
from simulator.traffic.trace import Trace, TraceRequest
from tests.results.cases import Case, Results
from tests.results.fleets import Traces, fleet
from tests.results.page import less, markdown_table, ms, percent

SECTION = "claims"
LONGEST = "tests.router.decide.policies.own_policies:longest_overlap"
PAIRS = ((LONGEST, "conductor"), ("round-robin", "least-loaded"))
"""A policy that balances nothing, beside one that does."""
TRACE, RATE = "conversation", 6.0
LENGTHS = {500: ("50 ms", "5 ms"), 2_000: ("200 ms", "20 ms"), 8_000: ("800 ms", "80 ms")}
"""Tokens of a prompt, and the claimed time without and with reuse."""
TEXTS = 40
APART_S = 5.0
ID_TOKENS = 4


def cases(traces: Traces) -> list[Case]:
    balanced = [
        Case(SECTION, TRACE, traces[TRACE], RATE, fleet(policy))
        for pair in PAIRS
        for policy in pair
    ]
    asked_twice = [
        Case(SECTION, str(tokens), Traffic(trace=_twice(tokens)), 1.0, fleet("ttft", workers=1))
        for tokens in LENGTHS
    ]
    return balanced + asked_twice


def page(traces: Traces, results: Results) -> str:
    balanced = []
    for pair in PAIRS:
        blind, balances = (
            results[SECTION, TRACE, policy, RATE].numbers.ttft_ms.p99 for policy in pair
        )
        names = [policy.rpartition(":")[2] for policy in pair]
        balanced.append([*names, ms(blind), ms(balances), f"{less(balances, blind)} (-35 %)"])
    saved = []
    for tokens, (claimed, claimed_reused) in LENGTHS.items():
        run = results[SECTION, str(tokens), "ttft", 1.0].result
        first, again = (1e3 * float(np.mean(run.ttft_s[half::2])) for half in (0, 1))
        saved.append(
            [
                f"{tokens:,}",
                f"{ms(first)} ({claimed})",
                f"{ms(again)} ({claimed_reused})",
                f"{percent(1 - again / first, 0)} (90 %)",
            ]
        )
    head = ["without balancing", "with it", "TTFT p99 without", "with", "change"]
    return "\n".join(
        [
            markdown_table(head, balanced) + "\n",
            markdown_table(["prompt tokens", "TTFT, first time", "again", "saved"], saved),
            "",
        ]
    )


def _twice(tokens: int) -> Trace:
    """Texts that come once, and once again before the next one."""
    fresh = count()
    requests = []
    for text in range(TEXTS):
        ids = np.array(list(islice(fresh, -(-tokens // ID_TOKENS))), np.uint64)
        requests += [
            TraceRequest(
                arrival_s=APART_S * (2 * text + turn),
                prompt_tokens=tokens,
                output_tokens=8,
                hash_ids=ids,
                id_tokens=ID_TOKENS,
            )
            for turn in range(2)
        ]
    return Trace(f"texts of {tokens:,} tokens, twice", tuple(requests))
