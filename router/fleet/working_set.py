"""Blocks of the prompts that each worker got lately, which are likely to come again. Pure.

A worker's working set is the distinct blocks of the prompts that this replica sent there within the
last WINDOW_S. A cache with room beside the working set loses nothing that matters when a new prompt
comes; one that the working set fills loses as much of it as the prompt needs. Blocks are counted by
a sample, those whose PrefixHash is a multiple of SAMPLE: the same in all prompts, in little memory.

Laws:
- a block that comes again counts once;
- a slot's number is that of the worker in it, and goes with the worker to another slot;
- a worker has SAMPLES_MAX samples at most, all workers ALL_SAMPLES_MAX: for a prompt past either,
  the oldest samples of its worker are forgotten, and counted.

Source: Denning, The Working Set Model for Program Behavior, CACM 1968; the sample as in Waldspurger
and others, Efficient MRC Construction with SHARDS, FAST 2015.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from router.fleet.recent_blocks import RecentBlocks
from router.fleet.table import Column

WINDOW_S = 60.0
"""Seconds for which a block counts after its last prompt, as for hot prefixes: agents and people
come back within a minute, or mostly not at all."""
SAMPLE = 16
SAMPLES_MAX = 1 << 16
"""Samples of a worker, at most: a million blocks, more than any has."""
ALL_SAMPLES_MAX = 1 << 20
"""Samples of all workers, at most: about 70 MB."""


@dataclass(slots=True)
class _WorkingSet:
    """A worker's working set."""

    slot: int
    blocks: RecentBlocks = field(default_factory=lambda: RecentBlocks(SAMPLE))


class WorkingSets:
    """The working sets of all workers."""

    def __init__(self) -> None:
        self.forgotten = 0
        """Samples dropped while they still counted, for want of room."""
        self._of_worker: dict[WorkerKey, _WorkingSet] = {}
        self._in_slot: dict[int, _WorkingSet] = {}
        """Slot -> the working set that its number is about. Another worker that comes into the slot
        takes this place, even before `on_moved` is called for the one that left."""
        self._blocks = np.zeros(0)
        """Estimated number of blocks in the worker's working set, by slot."""
        self._count = 0
        """Samples of all workers."""

    def __len__(self) -> int:
        return self._count

    def table(self, last_slot: int) -> Column:
        """Number of blocks in each worker's working set, by slot, up to a slot at least. Read
        only.
        """
        there = len(self._blocks)
        if last_slot >= there:
            self._blocks = np.pad(self._blocks, (0, max(last_slot + 1, 2 * there) - there))
        return self._blocks

    def on_pick(self, key: WorkerKey, slot: int, prefixes: HashArray, now_s: float) -> None:
        """Adds a prompt that was sent to a worker. prefixes: hashes of its full blocks."""
        known = self._of_worker.get(key)
        if known is None:
            known = self._of_worker[key] = _WorkingSet(slot)
            self._in_slot[slot] = known
        elif known.slot != slot:
            self.on_moved(key, slot)
        blocks = known.blocks
        before = len(blocks)
        try:
            blocks.use(prefixes, now_s)
        finally:
            self._count += len(blocks) - before
        over = max(len(blocks) - SAMPLES_MAX, self._count - ALL_SAMPLES_MAX)
        if over > 0:
            dropped = blocks.drop_oldest(over)
            self._count -= dropped
            self.forgotten += dropped
        self._put(known)

    def on_forgotten(self, workers: Collection[WorkerKey]) -> None:
        """Forgets workers that left the fleet view."""
        for key in workers:
            if (known := self._of_worker.pop(key, None)) is not None:
                self._count -= len(known.blocks)
                self._leave_slot(known)

    def on_moved(self, key: WorkerKey, slot: int) -> None:
        """Moves a worker's number to its new slot, as after a snapshot of its blocks."""
        known = self._of_worker.get(key)
        if known is not None and known.slot != slot:
            self._leave_slot(known)
            known.slot = slot
            self._in_slot[slot] = known
            self._put(known)

    def tick(self, now_s: float) -> None:
        """Drops prefixes older than WINDOW_S."""
        for known in self._of_worker.values():
            if dropped := known.blocks.drop_before(now_s - WINDOW_S):
                self._count -= dropped
                self._put(known)

    def _put(self, known: _WorkingSet) -> None:
        if self._in_slot.get(known.slot) is known:
            self.table(known.slot)[known.slot] = SAMPLE * len(known.blocks)

    def _leave_slot(self, known: _WorkingSet) -> None:
        if self._in_slot.get(known.slot) is known:
            del self._in_slot[known.slot]
            self._blocks[known.slot] = 0.0
