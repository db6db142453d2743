"""Decode steps on end: when each of them ends, and how many will do. Pure.

While the same sequences decode, each step differs from the one before only in that every sequence
is one token longer, so the cost model knows the end of any of them without counting up to it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from simulator.engines.cost_model import CostModel


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """The prices of a run. Its length is its owner's business."""

    cost: CostModel
    start_s: float
    sequences: int
    context_tokens: int
    """That the first step attends to, summed over the sequences."""

    def end_s(self, steps: int) -> float:
        """When the first `steps` steps have ended."""
        return self.start_s + self.cost.run_s(steps, self.sequences, self.context_tokens)

    def ended(self, now_s: float, steps_max: int) -> int:
        """How many of the first `steps_max` steps have ended by now."""
        return bisect_right(range(1, steps_max + 1), now_s, key=self.end_s)

    def begun(self, now_s: float, steps_max: int) -> int:
        """How many of them have begun before now, at least one."""
        return bisect_left(range(1, steps_max), now_s, key=self.end_s) + 1


class Crossing(NamedTuple):
    """A step of a run in which a sequence fills a block, or needs a new one for its next token."""

    step: int
    """1 is the next one."""
    place: int
    """Of the sequence in the batch."""
    tokens: int
    """That it will have computed with this step."""
    full: bool


def crossings(computed: Iterable[int], steps: int, block_size: int) -> list[Crossing]:
    """Where the next `steps` steps concern blocks, in the order in which steps one by one would:
    by step, by place, and a new block before it is full.

    computed: tokens of each sequence of the batch that are computed before these steps.
    """
    found: list[Crossing] = []
    for place, tokens in enumerate(computed):
        news = range(1 + -tokens % block_size, steps + 1, block_size)
        fulls = range(block_size - tokens % block_size, steps + 1, block_size)
        found += [Crossing(step, place, tokens + step, False) for step in news]
        found += [Crossing(step, place, tokens + step, True) for step in fulls]
    return sorted(found)
