"""Metrics of hot prefixes and their copies."""

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from router.decide.copies.copies import CopyFate
from router.decide.copies.hot_prefixes import REASONS, HotPrefixes
from router.observe.metrics.families import counter, gauge


class HotPrefixCollector(Collector):
    """Exports counters of hot prefixes and their copies; nothing where copies are off."""

    def __init__(self, hot: HotPrefixes) -> None:
        self._hot = hot

    @override
    def collect(self) -> Iterator[Metric]:
        hot = self._hot
        if not hot.enabled:
            return
        yield counter(
            "kvroute_hot_prefix_copies",
            "Copies of hot prefixes: begun; of these done, failed or cancelled; of those done used,"
            " or useless: evicted before a use.",
            "fate",
            {str(fate): count for fate, count in hot.copies.fates.items()},
            tuple(CopyFate),
        )
        yield counter(
            "kvroute_hot_prefixes_not_copied",
            "Why a hot prefix was not copied when it was weighed, or not kept.",
            "reason",
            hot.reasons,
            REASONS,
        )
        yield gauge("kvroute_hot_prefixes", "Prefixes that are hot at the moment.", len(hot))
        yield gauge(
            "kvroute_hot_prefix_bytes", "Memory that hot prefixes take, in bytes.", hot.byte_count
        )
        yield CounterMetricFamily(
            "kvroute_hot_prefixes_forgotten",
            "Prefixes whose hits were forgotten for want of room.",
            value=hot.rates.forgotten,
        )
