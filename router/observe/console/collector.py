"""Metrics of the console."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from router.observe.console.console import Console
from router.observe.console.pages import RESULTS, ConsolePages
from router.observe.console.viewers import ENDS
from router.observe.metrics.families import failed, known


class ConsoleCollector(Collector):
    """Exports the numbers of viewers and sign-ins."""

    def __init__(self, console: Console, pages: ConsolePages) -> None:
        self._console = console
        self._pages = pages

    @override
    def collect(self) -> Iterator[Metric]:
        viewers, pages = self._console.viewers, self._pages
        yield known("console_pages", len(viewers))
        events = CounterMetricFamily(
            "kvroute_console_events",
            "Events of the console: ends of pages that watched (end); requests that were refused"
            " (refusal: full, past 64 pages; origin, of another Host or Origin); sign-ins by result"
            " (sign_in).",
            labels=["event", "result"],
        )
        for end in ENDS:
            events.add_metric(["end", end], viewers.ended[end])
        events.add_metric(["refusal", "full"], viewers.refused)
        events.add_metric(["refusal", "origin"], pages.turned_away)
        for result in RESULTS:
            events.add_metric(["sign_in", result], pages.sign_ins[result])
        yield events
        yield failed("console", self._console.failures)
