"""Metrics of the files of certificates and keys, and of identities at their limits."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from router.net.keys.door import Door
from router.net.keys.followed import Followed
from router.observe.metrics.families import READS, READS_LABELS, counters, failed


def key_metrics(followed: Followed, door: Door | None) -> Iterator[Metric]:
    """Counters of re-read files and of identities at their limits."""
    reads = dict(followed.counts)
    if door is not None and len(door.issuers):
        reads |= {("issuers", result): count for result, count in door.issuers.fetches.items()}
    yield counters(*READS, READS_LABELS, dict(sorted(reads.items())))
    yield counters(
        "kvroute_key_limit_refusals",
        "Calls, and items of streams, refused past a limit of their identity.",
        ["identity", "limit"],
        {} if door is None else dict(sorted(door.refused().items())),
    )
    yield failed("key", 0 if door is None else door.faults)
