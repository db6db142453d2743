"""Metrics of the decision log, of shadow policies and of spans."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from router.observe.audit.decision_log import RESULTS
from router.observe.audit.observers import Watchers
from router.observe.audit.shadow_policy import Agreement, Shadow
from router.observe.metrics.families import change, counter, failed, records
from router.observe.tracing.export import SpanExport


def watch_metrics(watchers: Watchers) -> Iterator[Metric]:
    """Counters of the shadow policy and the decision log; nothing while both are off."""
    if not watchers.watch:
        return
    yield failed("watch", watchers.watch.failures)
    if watchers.shadow is not None:
        yield from _of_shadow(watchers.shadow)
    if watchers.log.is_on:
        yield records("decision_log", watchers.log.lines, RESULTS)


def _of_shadow(shadow: Shadow) -> Iterator[Metric]:
    yield counter(
        "kvroute_shadow_decisions",
        "Decisions that the shadow policy scored, by its agreement with the pick.",
        "agreement",
        {agreement.value: count for agreement, count in shadow.decisions.items()},
        Agreement,
    )
    yield change(
        "kvroute_shadow_overlap_tokens",
        "Usable overlap, in tokens, that the shadow policy's choices would have won or lost.",
        shadow.overlap_tokens,
    )
    yield change(
        "kvroute_shadow_ttft_seconds",
        "Predicted TTFT that the shadow policy's choices would have won or lost, in seconds.",
        shadow.ttft_s,
    )


def span_metrics(export: SpanExport) -> Iterator[Metric]:
    """Counters of spans."""
    yield records("spans", export.counts, export.counts)
