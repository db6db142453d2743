"""Metrics of the console."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from router.observe.console.pages import RESULTS, ConsolePages
from router.observe.console.viewers import ENDS
from router.observe.metrics.families import counters, failed, known


def console_metrics(pages: ConsolePages) -> Iterator[Metric]:
    """Numbers of viewers and sign-ins."""
    viewers = pages.console.viewers
    yield known("console_pages", len(viewers))
    yield counters(
        "kvroute_console_events",
        "Events of the console: ends of pages that watched (end); requests that were refused"
        " (refusal: full, past 64 pages; origin, of another Host or Origin); sign-ins by result"
        " (sign_in).",
        ["event", "result"],
        {
            **{("end", end): viewers.ended[end] for end in ENDS},
            ("refusal", "full"): viewers.refused,
            ("refusal", "origin"): pages.turned_away,
            **{("sign_in", result): pages.sign_ins[result] for result in RESULTS},
        },
    )
    yield failed("console", pages.console.failures)
