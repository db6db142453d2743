"""The rows a decision is made of: one for each live worker of a pool, as columns.

Costs (router/policies) read these and nothing else, so a receipt that shows a row shows everything
that its worker was judged by.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.identity import WorkerKey

Column: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Live workers of a pool, row by row; excluded ones too, since means go over all."""

    workers: tuple[WorkerKey, ...]
    prompt_tokens: int
    """At least 1."""
    block_size: Column
    """Canonical, tokens."""
    overlap_tokens: Column
    """Usable: what the engine will reuse of the prompt, times trust."""
    trust: Column
    """Share of the usable overlap that overlap_tokens counts, by the state of the stream."""
    new_tokens: Column
    """prompt_tokens - overlap_tokens"""
    active_blocks: Column
    """Canonical blocks held by requests, reserved ones included."""
    total_blocks: Column
    """NaN: unknown."""
    running: Column
    """Requests, as the engine last told."""
    waiting: Column
    reserved: Column
    """Requests sent there that the engine's sample did not count yet."""
    total_slots: Column
    """Requests that can run at once. NaN: unknown."""
    prefill_tokens_active: Column
    """Prompt tokens sent there and not computed yet."""
    last_picked: Column
    """Ordinal of the last pick of this worker, 0 for never."""
    excluded: Sequence[str]
    """Why a row can't be picked; empty when it can."""

    def __len__(self) -> int:
        return len(self.workers)

    def active_slots(self) -> Column:
        """Queue depth: running + waiting + reserved but not yet seen by the engine."""
        return self.running + self.waiting + self.reserved

    def load(self) -> Column:
        """active_blocks / total_blocks; 0 where the total is unknown."""
        known = self.total_blocks > 0
        ratio = np.zeros(len(self))
        np.divide(self.active_blocks, self.total_blocks, out=ratio, where=known)
        return ratio

    def slot_ratio(self) -> Column:
        """active_slots / total_slots; 0 where the total is unknown."""
        ratio = np.zeros(len(self))
        np.divide(self.active_slots(), self.total_slots, out=ratio, where=self.total_slots > 0)
        return ratio

    def full(self) -> npt.NDArray[np.bool_]:
        """No slot or no block left. An unknown total never excludes (NaN compares false)."""
        slots = self.active_slots() >= self.total_slots
        return slots | (self.active_blocks >= self.total_blocks)
