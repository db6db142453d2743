"""Consecutive decode steps: the end of each, and how many end by a given time. Pure.

While the same sequences decode, each step makes every sequence a token longer and changes nothing
else. So the cost model yields the end of any step without a loop.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from simulator.engines.cost_model import CostModel


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Times of the steps of a run that begins at start_s; the caller knows the number of steps."""

    cost: CostModel
    start_s: float
    sequences: int
    context_tokens: int
    """Tokens that the first step attends to, summed over the sequences."""

    def end_s(self, steps: int) -> float:
        """Time at which the first `steps` steps have ended, in seconds."""
        return self.start_s + self.cost.run_s(steps, self.sequences, self.context_tokens)

    def ended(self, now_s: float, steps_max: int) -> int:
        """How many of the first `steps_max` steps have ended by now."""
        return bisect_right(range(1, steps_max + 1), now_s, key=self.end_s)

    def begun(self, now_s: float, steps_max: int) -> int:
        """How many of the first `steps_max` steps have begun before now, at least 1."""
        return bisect_left(range(1, steps_max), now_s, key=self.end_s) + 1


Crossing = tuple[int, int, int, bool]
"""(step, place in the batch, tokens computed after the step, whether a block becomes full) where a
sequence fills a block, or needs a block for its next token. Step 1 is the next one."""


def crossings(computed: Iterable[int], steps: int, block_size: int) -> list[Crossing]:
    """Where the sequences of a decode batch need a new KV block, or fill one, in the next `steps`
    steps, each of which adds a token to each sequence; in the order of single steps: by step, by
    place in the batch, and a block's beginning before its end.

    computed: tokens of each sequence that are computed before these steps.
    """
    crossed: list[Crossing] = []
    for place, tokens in enumerate(computed):
        news = range(1 + -tokens % block_size, steps + 1, block_size)
        fulls = range(block_size - tokens % block_size, steps + 1, block_size)
        crossed += [(step, place, tokens + step, False) for step in news]
        crossed += [(step, place, tokens + step, True) for step in fulls]
    return sorted(crossed)
