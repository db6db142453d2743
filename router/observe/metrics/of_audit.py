"""Metrics of the decision log, of shadow policies and of spans."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from router.observe.audit.decision_log import RESULTS
from router.observe.audit.observers import Watchers
from router.observe.audit.shadow_policy import Agreement, Shadow
from router.observe.metrics.families import change, counter, failed, records
from router.observe.tracing.export import SpanExport


class WatchCollector(Collector):
    """Exports counters of the shadow policy and the decision log; nothing while both are off."""

    def __init__(self, watchers: Watchers) -> None:
        self._watchers = watchers

    @override
    def collect(self) -> Iterator[Metric]:
        watchers = self._watchers
        if watchers.watch is None:
            return
        yield failed("watch", watchers.failures)
        if watchers.shadow is not None:
            yield from self._of_shadow(watchers.shadow)
        if watchers.log.is_on:
            yield records("decision_log", watchers.log.lines, RESULTS)

    def _of_shadow(self, shadow: Shadow) -> Iterator[Metric]:
        yield counter(
            "kvroute_shadow_decisions",
            "Decisions that the shadow policy scored, by what it says of the pick.",
            "agreement",
            {agreement.value: count for agreement, count in shadow.decisions.items()},
            tuple(Agreement),
        )
        yield change(
            "kvroute_shadow_overlap_tokens",
            "Usable overlap that the shadow policy's choices would have won or lost.",
            shadow.overlap_tokens,
        )
        yield change(
            "kvroute_shadow_ttft_seconds",
            "Predicted TTFT that the shadow policy's choices would have won or lost, in seconds.",
            shadow.ttft_s,
        )


class SpanCollector(Collector):
    """Exports counters of spans."""

    def __init__(self, export: SpanExport) -> None:
        self._export = export

    @override
    def collect(self) -> Iterator[Metric]:
        counts = self._export.counts
        yield records("spans", counts, counts)
