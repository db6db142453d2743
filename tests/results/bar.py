"""The guarded policies beside the best of the policies that one could have instead.

Traffic on which a default could lose (tests/bar/cases.py), 64-token blocks, prices of
`llama-8b-h100`: medians over seeds that are the same for all policies. *Moved* is the share of the
picks that the guard moved. *Half*: the numbers of the guard were chosen on one half of the cases,
the other was held out.
"""

import json
from collections.abc import Mapping
from contextlib import suppress

from router.config.settings.routing_settings import GuardSettings
from tests.bar.__main__ import KEPT
from tests.bar.cases import CASES, TUNING
from tests.bar.judge import GUARDED, Judged, breaches, judged
from tests.results.cases import Case, Results
from tests.results.fleets import Traces
from tests.results.page import markdown_table, ms, percent

SEEDS = 5


def cases(traces: Traces) -> list[Case]:
    """None: `make bar` plays its own."""
    return []


def page(traces: Traces, results: Results) -> str:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    settings = GuardSettings()
    guard = f"{settings.request_tokens:g}/{settings.margin:g}"
    played = {}
    for name in CASES:
        with suppress(KeyError):  # not played
            played[name] = judged(name, SEEDS, guard, kept)
    missing = [name for name in CASES if name not in played]
    parts = [f"`request_tokens` {settings.request_tokens:g}, `margin` {settings.margin:g}.\n"]
    if played:
        parts += [_table(played), "", _losses(played)]
    if missing:
        parts.append(f"\nNot played with this guard (`make bar`): {'; '.join(missing)}.")
    return "\n".join(parts) + "\n"


def _table(played: Mapping[str, Judged]) -> str:
    rows = []
    for case, (numbers, best) in played.items():
        row = [case, "tuning" if case in TUNING else "held out", best, ms(numbers[best].ttft_ms)]
        for policy in GUARDED:
            ours = numbers[policy]
            ratio = ours.ttft_ms / numbers[best].ttft_ms
            row += [ms(ours.ttft_ms), f"{ratio:.2f}", percent(ours.moved, 0)]
        rows.append([*row, ms(numbers["dynamo-unguarded"].ttft_ms)])
    head = ["case", "half", "best", "TTFT mean"]
    for policy in GUARDED:
        head += [f"`{policy}`", "to the best", "moved"]
    return markdown_table([*head, "`dynamo-unguarded`"], rows)


def _losses(played: Mapping[str, Judged]) -> str:
    """Bounds that are broken, a line each."""
    lines = [f"- {case}: {text}" for case, one in played.items() for text in breaches(case, *one)]
    return (
        "\n".join(["Bounds of the bar that are broken:", "", *lines])
        if lines
        else ("No bound of the bar is broken.")
    )
