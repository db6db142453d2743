"""Metrics of the files of certificates and keys, and of identities at their limits."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from router.net.keys.door import Door
from router.net.keys.followed import Followed
from router.observe.metrics.families import READS, READS_LABELS, failed


class KeyCollector(Collector):
    """Exports the counters of re-read files and of identities at their limits."""

    def __init__(self, followed: Followed, door: Door | None) -> None:
        self._followed = followed
        self._door = door

    @override
    def collect(self) -> Iterator[Metric]:
        reads = CounterMetricFamily(*READS, labels=READS_LABELS)
        for (name, result), count in sorted(self._followed.counts.items()):
            reads.add_metric([name, result], count)
        if self._door is not None and len(self._door.issuers):
            for result, count in sorted(self._door.issuers.fetches.items()):
                reads.add_metric(["issuers", result], count)
        yield reads
        limits = CounterMetricFamily(
            "kvroute_key_limit_refusals",
            "Calls and items past a limit of their identity.",
            labels=["identity", "limit"],
        )
        if self._door is not None:
            for labels, count in sorted(self._door.refused().items()):
                limits.add_metric(labels, count)
        yield limits
        yield failed("key", 0 if self._door is None else self._door.faults)
