"""Metrics of the files of certificates and keys, and of identities at their limits."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from router.net.keys.door import Door
from router.net.keys.followed import Followed


class KeyCollector(Collector):
    """Exports the counters of re-read files and of identities at their limits."""

    def __init__(self, followed: Followed, door: Door | None) -> None:
        self._followed = followed
        self._door = door

    @override
    def collect(self) -> Iterator[Metric]:
        reads = CounterMetricFamily(
            "kvroute_key_reads",
            "Times that changed certificates or keys were read, or could not be.",
            labels=["source", "result"],
        )
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
        yield CounterMetricFamily(
            "kvroute_key_faults",
            "Calls that were refused as without a valid key for a fault of the router's own.",
            value=0 if self._door is None else self._door.faults,
        )
