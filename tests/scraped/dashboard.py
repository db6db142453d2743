"""The reference's metrics and the dashboard's queries, held against a Prometheus."""

import json
import re
from pathlib import Path

from tests.scraped.prometheus import Prometheus
from tests.scraped.release import CHART

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference-metrics.md"
METRICS = frozenset(
    re.findall(r"^- `(kvroute_\w+)", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE)
)
AFTER_ERRORS = frozenset(
    {
        "kvroute_key_limit_refusals_total",
        "kvroute_worker_warnings",
    }
)
"""Metrics whose labels name what went wrong, so that they are not there before."""
NOT_MADE = frozenset(
    {
        "kvroute_worker_messages_lost_total",
        'name="cache_hit_rate"',
        'name="waiting_prefill_tokens"',
    }
)
"""The first needs a publisher with more than 16 MiB in a second, which a busy machine may not
carry; the others are numbers that vLLM, which the stage's engines are, does not report."""
STEP_S = 3.0
_FILLED = {"$__rate_interval": "12s", "$job": ".+", "$fleet": ".*", "$worker": ".*"}


def present_metrics(scraped: set[str]) -> set[str]:
    """Metrics of the reference that were scraped."""
    return {one for one in METRICS if {one, f"{one}_bucket", f"{one}_sum"} & scraped}


def missing_metrics(scraped: set[str], *, after_errors: bool = False) -> list[str]:
    """Metrics of the reference that were not scraped; after_errors: of all, else of those that are
    there before any error."""
    wanted = METRICS - (NOT_MADE if after_errors else AFTER_ERRORS | NOT_MADE)
    return sorted(wanted - present_metrics(scraped))


def queries() -> list[str]:
    """Of all panels, with the variables' values for `All`."""
    text = (CHART / "dashboards" / "kvroute.json").read_text(encoding="utf-8")
    found = []
    rows = json.loads(text)["panels"]
    for panel in [*rows, *(panel for row in rows for panel in row.get("panels", ()))]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in _FILLED.items():
                expression = expression.replace(name, value)
            if "$" in expression:
                raise AssertionError(f"a variable that is not known, in {expression}")
            found.append(expression)
    return found


async def empty_queries(prometheus: Prometheus, begin_s: float, end_s: float) -> list[str]:
    """Those without a series at any time, but of metrics that are not made."""
    made = [one for one in queries() if not any(name in one for name in NOT_MADE)]
    return [one for one in made if not await prometheus.query_range(one, begin_s, end_s, STEP_S)]
