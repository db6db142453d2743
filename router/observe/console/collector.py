"""Metrics of the console."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from router.observe.console.console import Console
from router.observe.console.pages import RESULTS, ConsolePages
from router.observe.console.viewers import ENDS
from router.observe.metrics.families import counter, gauge


class ConsoleCollector(Collector):
    """Exports the numbers of viewers and sign-ins."""

    def __init__(self, console: Console, pages: ConsolePages) -> None:
        self._console = console
        self._pages = pages

    @override
    def collect(self) -> Iterator[Metric]:
        viewers, pages = self._console.viewers, self._pages
        yield gauge("kvroute_console_viewers", "Pages that watch the console now.", len(viewers))
        yield counter(
            "kvroute_console_viewers_ended",
            "Ends of pages that watched: left, dropped for being slow, signed out, stopped.",
            "reason",
            viewers.ended,
            ENDS,
        )
        yield counter(
            "kvroute_console_requests_refused",
            "Requests to the console: past 64 pages, or of another Host or Origin.",
            "reason",
            {"full": viewers.refused, "origin": pages.turned_away},
            ("full", "origin"),
        )
        yield counter(
            "kvroute_console_sign_ins",
            "Sign-ins to the console by result.",
            "result",
            pages.sign_ins,
            RESULTS,
        )
        yield CounterMetricFamily(
            "kvroute_console_failures",
            "Rounds of the console that a fault of the router ended.",
            value=self._console.failures,
        )
