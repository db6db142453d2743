"""A control: where nothing can be reused, knowing caches must not cost anything."""

from dataclasses import replace

from tests.results.cases import Case, Results
from tests.results.fleets import RATES, Traces, fleet, nothing_shared
from tests.results.page import less, markdown_table, ms, percent

SECTION = "low reuse"
NAME = "conversation, nothing shared"
BLIND = "least-loaded"
POLICIES = (BLIND, "dynamo-unguarded", "dynamo-adaptive", "dynamo-blocks", "ttft")


def cases(traces: Traces) -> list[Case]:
    conversation = traces["conversation"]
    traffic = replace(conversation, trace=nothing_shared(conversation.trace, NAME))
    return [
        Case(SECTION, NAME, traffic, rate, fleet(policy)) for rate in RATES for policy in POLICIES
    ]


def page(traces: Traces, results: Results) -> str:
    rows = []
    for rate in RATES:
        blind = results[SECTION, NAME, BLIND, rate].numbers
        for policy in POLICIES:
            done = results[SECTION, NAME, policy, rate]
            numbers = done.numbers
            difference = "" if policy == BLIND else less(numbers.ttft_ms.mean, blind.ttft_ms.mean)
            rows.append(
                [
                    f"{rate:g}x",
                    policy,
                    ms(numbers.ttft_ms.mean),
                    difference,
                    ms(numbers.ttft_ms.p99),
                    ms(numbers.itl_ms.mean, 1),
                    ms(numbers.e2e_ms.mean),
                    percent(done.moved_share, 0),
                ]
            )
    head = ["rate", "policy", "TTFT mean", f"to {BLIND}", "p99", "ITL mean", "end to end", "moved"]
    return markdown_table(head, rows) + "\n"
