"""Predicted against reported cached tokens, and the rules that explain a difference. Pure.

A rule names a fact about engines, or about what a router can know, and the evidence that it was at
work in this very request. What no rule explains is unexplained.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from tests.real_engines.engines import Prompt

Worker = tuple[str, int]
"""Id and rank."""


@dataclass(slots=True)
class Sample:
    """One request."""

    phase: str
    quiet: bool
    """Nothing else was going on, and the router had heard all that the engines did before."""
    prompt: Prompt
    worker: Worker
    engine: str
    block_size: int
    predicted: int
    """Tokens: the picked worker's usable overlap."""
    reported: int
    """Tokens: what the engine says it reused."""
    stream_state: str
    stream_complete: bool
    companions: int = 0
    """Other requests on the same rank at the same time, or just before."""
    why: str = ""
    """The rule that explains the difference."""

    @property
    def verdict(self) -> Literal["exact", "over", "under"]:
        if self.predicted == self.reported:
            return "exact"
        return "over" if self.predicted > self.reported else "under"


RULES = {
    "late clear": (
        "vLLM tells of a cache reset only with the rank's next step, which is this request"
    ),
    "announced again": (
        "vLLM's report mode 'full' announces reused blocks as if they were new copies; when the"
        " only copy goes, the count says that one is left"
    ),
    "not read": (
        "the request wants log probabilities of its prompt, so the engine computes all of it again"
    ),
    "concurrent": (
        "other requests on the same rank stored or evicted blocks between the pick and the"
        " engine's own look-up"
    ),
    "untrusted": "the stream was not live, and the router said so",
    "partial": "the stream was partial, and the router said so: it may hold more than it told",
}


@dataclass
class Judge:
    """Remembers what explains later differences."""

    samples: list[Sample] = field(default_factory=list)
    _unheard_reset: set[Worker] = field(default_factory=set)
    """Ranks whose reset no step has told yet."""
    _again: dict[Worker, set[int]] = field(default_factory=dict)
    """Blocks that were announced more often than copied."""

    def on_reset(self, worker: Worker, told_late: bool) -> None:
        """The engine emptied a rank's cache."""
        if told_late:
            self._unheard_reset.add(worker)
        else:
            self._again.pop(worker, None)

    def on_restart(self, worker: Worker) -> None:
        """The engine lives again."""
        self._unheard_reset.discard(worker)
        self._again.pop(worker, None)

    def judge(self, sample: Sample) -> Sample:
        """Adds a sample, with the rule that explains it where it needs one."""
        if sample.verdict != "exact":
            sample.why = self._rule(sample)
        if sample.worker in self._unheard_reset:
            self._unheard_reset.discard(sample.worker)
            self._again.pop(sample.worker, None)
        if sample.prompt.report_full:
            again = self._again.setdefault(sample.worker, set())
            again.update(_blocks(sample.prompt, sample.block_size, 0, sample.reported))
        self.samples.append(sample)
        return sample

    def unexplained(self, quiet: bool) -> list[Sample]:
        """What nobody understands yet."""
        return [
            one
            for one in self.samples
            if one.quiet == quiet and one.verdict != "exact" and not one.why
        ]

    def table(self) -> dict[str, Counter[str]]:
        """Phase -> how often each verdict, and each rule."""
        rows: dict[str, Counter[str]] = {}
        for one in self.samples:
            row = rows.setdefault(one.phase, Counter())
            row["requests"] += 1
            row[one.verdict] += 1
            if one.verdict != "exact":
                row[f"{one.verdict}: {one.why or 'unexplained'}"] += 1
        return rows

    def _rule(self, sample: Sample) -> str:
        over = sample.verdict == "over"
        if over and sample.worker in self._unheard_reset and sample.reported == 0:
            return "late clear"
        if over and self._first_missing(sample) in self._again.get(sample.worker, ()):
            return "announced again"
        if over and sample.prompt.logprobs and sample.reported == 0:
            return "not read"
        if sample.stream_state != "live":
            return "untrusted"
        if not over and not sample.stream_complete:
            return "partial"
        if not sample.quiet and sample.companions:
            return "concurrent"
        return ""

    @staticmethod
    def _first_missing(sample: Sample) -> int | None:
        """The first block that was predicted and not reused."""
        end = sample.reported + sample.block_size
        return next(_blocks(sample.prompt, sample.block_size, sample.reported, end), None)


def _blocks(prompt: Prompt, size: int, start: int, end: int) -> Iterator[int]:
    """Identities of the full blocks between two places in a prompt, each with all before it."""
    for at in range(start, min(end, len(prompt.tokens)) - size + 1, size):
        yield hash((prompt.lora, prompt.salt, prompt.tokens[: at + size]))
