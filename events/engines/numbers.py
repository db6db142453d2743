"""The table of numbers that engines report and the router's own rules don't use, a record each.

A page's reader puts a number into `LoadSample.numbers`; all other code handles whatever is in this
table: the heartbeat, the table of workers (a gauge is a column of it, NaN where an engine has
none), receipts, worker lists, the decision log, spans, and /metrics (a gauge as
`kvroute_worker_number{name}`, a counter as `kvroute_worker_NAME_total`).

*Own* numbers are the operator's: metrics of the engine's page that `engines.numbers` names
(docs/extend.md). They are passed on in the same way, without a record and without a column.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

OWN_MAX = 8
"""Own numbers of a worker: in settings, heartbeats, receipts and /metrics."""
OWN_VALUE_MAX = 1e18
"""Bound of an own number, above and below 0."""
_OWN_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")
_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,199}")
"""Name of a sample on a Prometheus page."""


@dataclass(frozen=True, slots=True)
class EngineNumber:
    """The record of a number that engines report for a rank."""

    name: str
    """Name in snake case, with the unit."""
    meaning: str
    """A sentence with unit and bound: the metric's help, and the console's."""
    is_counter: bool = False
    """Whether the number only grows from the engine's start on; False: a gauge, which policies
    read."""
    is_metric: bool = True
    """False: /metrics leaves the number out, as the engine's own page has it in a better form."""


NUMBERS = {
    number.name: number
    for number in (
        EngineNumber(
            "cache_hit_rate",
            "Share of prompt tokens that the engine had in its KV cache lately, 0 to 1, by its"
            " own count; SGLang and TensorRT-LLM.",
        ),
        EngineNumber(
            "waiting_prefill_tokens",
            "Prompt tokens of waiting requests that the engine has not in its KV cache; SGLang.",
        ),
        EngineNumber(
            "prefix_hit_tokens",
            "Prompt tokens that the engine had in its KV cache, by its own count since its start;"
            " vLLM.",
            is_counter=True,
        ),
        EngineNumber(
            "prefix_query_tokens",
            "Prompt tokens that the engine looked up in its KV cache, by its own count since its"
            " start; vLLM.",
            is_counter=True,
        ),
        EngineNumber(
            "first_tokens",
            "Requests whose first token is out, by the engine's own count since its start; vLLM.",
            is_counter=True,
            is_metric=False,
        ),
        EngineNumber(
            "first_token_seconds",
            "Seconds from requests' arrival at the engine to their first token, in sum since its"
            " start; vLLM.",
            is_counter=True,
            is_metric=False,
        ),
    )
}
GAUGES = tuple(number.name for number in NUMBERS.values() if not number.is_counter)
"""Names of the gauges, in the order of their columns in the table of workers."""


def in_table(numbers: Mapping[str, float]) -> dict[str, float]:
    """Numbers of a heartbeat that are in the table; a later relay may send others."""
    return {name: numbers[name] for name in NUMBERS if name in numbers}


def own_fault(own: Mapping[str, str]) -> str:
    """Why an operator's own numbers (name -> metric) can't be read; empty: they can."""
    for name, metric in own.items():
        if not _OWN_NAME.fullmatch(name):
            return f"{name!r} is no name: a letter a-z, then at most 47 characters a-z, 0-9 and _"
        if name in NUMBERS:
            return f"kvroute has a {name} of its own; choose another name"
        if not _METRIC.fullmatch(metric):
            return f"{name}: {metric!r} is no name of a metric, which is given without labels"
    return ""
