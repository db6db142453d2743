"""An engine's page of Prometheus metrics, of which only wanted lines are read. Pure."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from events.engines.numbers import OWN_VALUE_MAX
from events.engines.pages.load import (
    COUNT_MAX,
    DOCUMENT_BYTES_MAX,
    SHARE_MAX,
    UNIX_SECONDS_MAX,
    LoadUnreadable,
    bounded,
    positive,
)

LINES_MAX = 1 << 14
"""Lines of a metrics page that are read: 1,024 ranks with some 16 each."""
HEADS_BYTES_MAX = 16 << 20
"""Estimated memory of parsed heads (names with labels) that are kept from page to page: a rank of
vLLM has some 25 KiB. Beyond it all are forgotten, so that larger pages are parsed each time."""


class Page:
    """The samples of wanted names on a page of Prometheus metrics. Raises LoadUnreadable.

    Pages have a thousand lines and are read every second, so lines with other names, and a
    counter's `_created`, are dropped before parsing; and of a line whose name and labels were on an
    earlier page, only the value is read.
    """

    def __init__(self, text: str, names: Iterable[str]) -> None:
        if len(text) > DOCUMENT_BYTES_MAX:
            raise LoadUnreadable(
                f"the metrics page has {len(text)} characters, more than {DOCUMENT_BYTES_MAX}"
            )
        lines = _wanted_lines(tuple(names)).findall("\n" + text)
        if len(lines) > LINES_MAX:
            raise LoadUnreadable(
                f"the metrics page has {len(lines)} lines about load, more than {LINES_MAX}"
            )
        self._by_rank: dict[tuple[str, str], dict[int, Sample]] = {}
        self._samples: dict[str, list[Sample]] = {}
        self._parts: dict[str, list[Sample]] = {}
        """Samples with a priority label: parts of the sample without it, where there is one."""
        try:
            for sample in map(HEADS.sample, lines):
                among = self._parts if sample.labels.get("priority") else self._samples
                among.setdefault(sample.name, []).append(sample)
        except Exception as error:  # the parser's errors have no common base class
            raise LoadUnreadable(f"the metrics page can't be parsed: {error!r}") from None

    def samples(self, name: str) -> list[Sample]:
        return self._samples.get(name, [])

    def samples_or_parts(self, name: str) -> list[Sample]:
        """The samples of a name; those with a priority where all have one."""
        return self._samples.get(name) or self._parts.get(name, [])

    def single(self, name: str) -> float | None:
        """The finite value of a name without labels; None: absent or not finite."""
        samples = self.samples(name)
        # An integer of 400 digits is less than infinity, but no float.
        return samples[0].value if samples and -math.inf < samples[0].value < math.inf else None

    def start_s(self) -> float | None:
        """When the process started, Unix time."""
        start_s = self.single("process_start_time_seconds")
        if start_s is not None and not 0 <= start_s <= UNIX_SECONDS_MAX:
            raise LoadUnreadable(f"process_start_time_seconds is {start_s}, which is no time")
        return start_s

    def by_rank(self, name: str, label: str) -> Mapping[int, Sample]:
        """Rank -> its largest sample of a name, as tensor-parallel ranks may all report the same
        load. label: the label with the rank."""
        ranks = self._by_rank.get((name, label))
        if ranks is None:
            ranks = self._by_rank[name, label] = self._read_ranks(name, label)
        return ranks

    def _read_ranks(self, name: str, label: str) -> dict[int, Sample]:
        ranks: dict[int, Sample] = {}
        for sample in self.samples(name):
            rank = rank_of(sample, label)
            if rank not in ranks or sample.value > ranks[rank].value:
                ranks[rank] = sample
        return ranks

    def rank_sample(self, rank: int, label: str, *names: str) -> Sample | None:
        """The rank's sample under the first of the names that has a sample."""
        return next((s for s in self._of_rank(rank, label, names)), None)

    def _of_rank(self, rank: int, label: str, names: Iterable[str]) -> Iterator[Sample]:
        for name in names:
            sample = self.by_rank(name, label).get(rank)
            if sample is not None:
                yield sample


_PATTERNS: dict[tuple[str, ...], re.Pattern[str]] = {}


def _wanted_lines(names: tuple[str, ...]) -> re.Pattern[str]:
    pattern = _PATTERNS.get(names)
    if pattern is None:
        alternatives = "|".join(re.escape(name) for name in names)
        # A pattern that begins with a character is searched for ten times as fast as one with ^.
        pattern = _PATTERNS[names] = re.compile(rf"\n(?:{alternatives})[{{ \t].*")
    return pattern


class Heads:
    """Parsed samples by their heads (name and labels), so that only the value is read again."""

    def __init__(self) -> None:
        self.samples: dict[str, Sample] = {}
        self.bytes = 0

    def sample(self, line: str) -> Sample:
        """A line's sample; raises ValueError and other errors of the parser."""
        head, _, value = line.rpartition(" ")
        known = self.samples.get(head)
        if known is not None and _NUMBER.fullmatch(value):
            return known._replace(value=_number(value))
        ((sample,),) = (family.samples for family in text_string_to_metric_families(line))
        # Behind a head stands the value alone: no timestamp, no exemplar.
        if known is None and head.endswith("}") and sample.timestamp is None:
            self._keep(head, sample)
        return sample

    def _keep(self, head: str, sample: Sample) -> None:
        size = 600 + 3 * len(head)  # the labels' strings are copies
        if self.bytes + size > HEADS_BYTES_MAX:
            self.samples.clear()
            self.bytes = 0
        self.samples[head] = sample
        self.bytes += size


HEADS = Heads()
"""Heads of all pages that this process reads: engines of a model differ in few labels."""
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,15}(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,2})?|Inf)|NaN")
"""Values that the parser reads as `_number` does."""


def _number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def own_numbers(
    page: bytes, wanted: Mapping[str, str], label: str
) -> dict[int | None, dict[str, float]]:
    """Rank -> name -> value of an operator's own numbers (`wanted`: name -> metric); rank None for
    samples whose `label` has no rank, which are of the whole engine.

    Of several samples of a rank, those of a counter (..._total, _sum, _count) are added up, and of
    others the largest counts. Values that are not finite, or over OWN_VALUE_MAX, are left out.
    Raises LoadUnreadable.
    """
    samples = Page(page.decode("utf-8", "replace"), wanted.values())
    numbers: dict[int | None, dict[str, float]] = {}
    for name, metric in wanted.items():
        values: dict[int | None, list[float]] = {}
        for sample in samples.samples_or_parts(metric):
            text = sample.labels.get(label)
            if _fits(sample.value):
                rank = 0 if text == "0" else positive(text)
                values.setdefault(rank, []).append(float(sample.value))
        for rank, of_rank in values.items():
            number = sum(of_rank) if metric.endswith(_COUNTERS) else max(of_rank)
            if _fits(number):
                numbers.setdefault(rank, {})[name] = number
    return numbers


def _fits(number: float) -> bool:
    return -OWN_VALUE_MAX <= number <= OWN_VALUE_MAX  # NaN does not


_COUNTERS = ("_total", "_sum", "_count")


def rank_of(sample: Sample, label: str) -> int:
    text = sample.labels.get(label, "0")
    rank = positive(text)
    if rank is None and text != "0":
        raise LoadUnreadable(f'{sample.name}: {label}="{text}" is no rank')
    return rank or 0


def whole(sample: Sample, limit: int = COUNT_MAX) -> int:
    return int(bounded(sample.name, sample.value, limit))


def share(sample: Sample) -> float:
    return bounded(sample.name, sample.value, SHARE_MAX)
