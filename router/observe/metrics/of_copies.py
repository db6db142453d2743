"""Metrics of hot prefixes and their copies."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from router.decide.copies.copies import CopyFate
from router.decide.copies.hot_prefixes import REASONS, HotPrefixes
from router.observe.metrics.families import forgotten, held, known


class HotPrefixCollector(Collector):
    """Exports counters of hot prefixes and their copies; nothing where copies are off."""

    def __init__(self, hot: HotPrefixes) -> None:
        self._hot = hot

    @override
    def collect(self) -> Iterator[Metric]:
        hot = self._hot
        if not hot.enabled:
            return
        copies = CounterMetricFamily(
            "kvroute_hot_prefix_copies",
            "Copies of hot prefixes: begun; of these done, failed or cancelled; of those done used,"
            " or useless: evicted before a use. withheld: by reason, a hot prefix that was not"
            " copied when it was weighed, or not kept. Fates are not for adding up.",
            labels=["fate", "reason"],
        )
        for fate in CopyFate:
            copies.add_metric([fate, ""], hot.copies.fates[fate])
        for reason in REASONS:
            copies.add_metric(["withheld", reason], hot.reasons[reason])
        yield copies
        yield known("hot_prefixes", len(hot))
        yield held("hot_prefixes", hot.byte_count)
        yield forgotten("hot_prefixes", {"no_room": hot.rates.forgotten})
