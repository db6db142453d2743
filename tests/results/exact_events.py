"""The same fleet with exact events, and with workers that publish none.

Of a worker without events a router knows its own picks, for `routing.approximate_ttl_s` to twice
that: nothing of what other replicas sent there, of what was evicted, of other tiers, or of what it
knew before its own restart. (What workers tell of their load it knows either way.)
"""

from collections.abc import Mapping
from typing import Any

from simulator.world.options import RouterRestart
from tests.results.cases import Case, Results
from tests.results.fleets import Traces, fleet
from tests.results.page import less, markdown_table, ms, percent

SECTION = "exact events"
POLICY = "dynamo-adaptive"
RATE = 1.0
SMALL = 4096
"""Blocks of a worker under pressure: a quarter of the others'."""
HOST = 32_768
RESTART_EVERY_S = 300.0

CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    "one router, caches with room": {},
    "four routers": {"replicas": 4},
    "eviction pressure": {"blocks": SMALL},
    "tiers: small device, large host cache": {
        "blocks": SMALL,
        "engine_options": {"host_block_count": str(HOST)},
    },
    "the router restarts every 5 minutes": {
        "router_restarts": tuple(RouterRestart(RESTART_EVERY_S * (i + 1)) for i in range(11))
    },
}
FORMS = {"exact": "facts", "approximate": "none"}


def cases(traces: Traces) -> list[Case]:
    return [
        Case(
            SECTION,
            f"{condition}, {form}",
            traces["conversation"],
            RATE,
            fleet(POLICY, events=events, **about),
        )
        for condition, about in CONDITIONS.items()
        for form, events in FORMS.items()
    ]


def page(traces: Traces, results: Results) -> str:
    rows = []
    for condition in CONDITIONS:
        exact = results[SECTION, f"{condition}, exact", POLICY, RATE].numbers
        for form in FORMS:
            done = results[SECTION, f"{condition}, {form}", POLICY, RATE]
            numbers = done.numbers
            rows.append(
                [
                    condition,
                    form,
                    percent(numbers.block_hit_rate),
                    ms(numbers.ttft_ms.mean),
                    "" if form == "exact" else less(numbers.ttft_ms.mean, exact.ttft_ms.mean),
                    ms(numbers.ttft_ms.p99),
                    percent(done.overrated_share),
                ]
            )
    head = [
        "condition", "events", "blocks found", "TTFT mean", "to exact", "p99",
        "expected and not there / found",
    ]  # fmt: skip
    told = f"Conversation trace at {RATE:g}x, policy `{POLICY}`.\n\n"
    return told + markdown_table(head, rows) + "\n"
