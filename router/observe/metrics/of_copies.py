"""Metrics of hot prefixes and their copies."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from router.decide.copies.copies import CopyFate
from router.decide.copies.hot_prefixes import REASONS, HotPrefixes
from router.observe.metrics.families import counters, forgotten, held, known


def hot_prefix_metrics(hot: HotPrefixes) -> Iterator[Metric]:
    """Counters of hot prefixes and their copies; nothing where copies are off."""
    if not hot.enabled:
        return
    fates = {(fate, ""): hot.copies.fates[fate] for fate in CopyFate}
    withheld = {("withheld", reason): hot.reasons[reason] for reason in REASONS}
    yield counters(
        "kvroute_hot_prefix_copies",
        "Copies of hot prefixes by fate: begun; of the begun ones done, failed or cancelled; of"
        " the done ones used, or useless (evicted before a use); withheld, by reason: a hot prefix"
        " that was considered and not copied, or not kept. Fates are not for adding up.",
        ["fate", "reason"],
        {**fates, **withheld},
    )
    yield known("hot_prefixes", len(hot))
    yield held("hot_prefixes", hot.byte_count)
    yield forgotten("hot_prefixes", {"no_room": hot.rates.forgotten})
