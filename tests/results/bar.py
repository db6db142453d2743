"""The guarded policies beside the best of the policies that one could have instead.

Traffic on which a default could lose (tests/bar/cases.py), 64-token blocks, prices of
`llama-8b-h100`: medians over seeds that are the same for all policies. *Moved* is the share of the
picks that the guard moved. *Half*: the numbers of the guard were chosen on one half of the cases,
the other was held out.
"""

import json
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from router.config import GuardSettings
from tests.bar.__main__ import GUARDED, KEPT, MOST, OTHERS
from tests.bar.cases import CASES, TUNING
from tests.results.cases import Case, Results
from tests.results.fleets import Traces
from tests.results.page import markdown_table, ms, percent

SEEDS = 5
DEFAULT, OURS = GUARDED
OVER_DEFAULT = 1.05
"""The most that `ttft` may take, of the default's mean TTFT."""
STICKY = "session-sticky"
FITTING = "all fit"
"""End of the names of cases of sessions whose blocks all fit."""


class Numbers(NamedTuple):
    """Of a run, in the order in which `make bar` keeps them."""

    ttft_ms: float
    p99_ms: float
    hit: float
    moved: float


def cases(traces: Traces) -> list[Case]:
    """None: `make bar` plays its own."""
    return []


def page(traces: Traces, results: Results) -> str:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    settings = GuardSettings()
    guard = f"{settings.request_tokens:g}/{settings.margin:g}"
    played = {name: numbers for name in CASES if (numbers := _of_case(name, guard, kept))}
    missing = [name for name in CASES if name not in played]
    parts = [f"`request_tokens` {settings.request_tokens:g}, `margin` {settings.margin:g}.\n"]
    if played:
        parts += [_table(played), "", _losses(played)]
    if missing:
        parts.append(f"\nNot played with this guard (`make bar`): {'; '.join(missing)}.")
    return "\n".join(parts) + "\n"


def _of_case(case: str, guard: str, kept: Mapping[str, list[float]]) -> dict[str, Numbers] | None:
    """Medians by policy; None unless all runs of the case are kept."""
    found = {}
    for policy in (*OTHERS, *GUARDED):
        about = guard if policy in GUARDED else ""
        keys = [f"{case}|{policy}|{seed}|{about}" for seed in range(SEEDS)]
        if any(key not in kept for key in keys):
            return None
        columns = zip(*(Numbers(*kept[key]) for key in keys), strict=True)
        found[policy] = Numbers(*(median(column) for column in columns))
    return found


def _best(numbers: Mapping[str, Numbers]) -> str:
    return min(OTHERS, key=lambda policy: numbers[policy].ttft_ms)


def _table(played: Mapping[str, Mapping[str, Numbers]]) -> str:
    rows = []
    for case, numbers in played.items():
        best = _best(numbers)
        row = [case, "tuning" if case in TUNING else "held out", best, ms(numbers[best].ttft_ms)]
        for policy in GUARDED:
            ours = numbers[policy]
            ratio = ours.ttft_ms / numbers[best].ttft_ms
            row += [ms(ours.ttft_ms), f"{ratio:.2f}", percent(ours.moved, 0)]
        rows.append([*row, ms(numbers["dynamo-unguarded"].ttft_ms)])
    head = ["case", "half", "best of the others", "TTFT mean"]
    for policy in GUARDED:
        head += [f"`{policy}`", "to the best", "moved"]
    return markdown_table([*head, "`dynamo-unguarded`"], rows)


def _losses(played: Mapping[str, Mapping[str, Numbers]]) -> str:
    """Cases over the bar, a line each."""
    lines = []
    for case, numbers in played.items():
        best, default = numbers[_best(numbers)].ttft_ms, numbers[DEFAULT].ttft_ms
        for policy in GUARDED:
            ratio = numbers[policy].ttft_ms / best
            if ratio > MOST:
                lines.append(f"- {case}: `{policy}` takes {ratio:.2f} times the best")
            p99_ms, sticky_ms = numbers[policy].p99_ms, numbers[STICKY].p99_ms
            if case.endswith(FITTING) and p99_ms > sticky_ms:
                told = f"{ms(p99_ms)}, that of `{STICKY}` {ms(sticky_ms)}"
                lines.append(f"- {case}: the 99th percentile of `{policy}` is {told}")
        ratio = numbers[OURS].ttft_ms / default
        if ratio > OVER_DEFAULT:
            lines.append(f"- {case}: `{OURS}` takes {ratio:.2f} times `{DEFAULT}`")
    told = (
        f"What still loses: over {MOST:.2f} of the best of the others' mean, `{OURS}` over"
        f" {OVER_DEFAULT:.2f} of `{DEFAULT}`, or, of sessions whose blocks all fit, over the 99th"
        f" percentile of `{STICKY}` (`make bar` looks at their hits, too):"
    )
    return f"{told}\n\n" + "\n".join(lines) if lines else f"{told} none."
