"""Which blocks each worker was asked for lately: what is likely to be asked for again. Pure.

A worker's working set is the distinct blocks of the prompts that this replica sent there within the
last WINDOW_S. A cache that it fits in loses nothing that matters when a new prompt comes; one that
it fills loses as much of it as the prompt needs. Counted by a sample: of all prefixes those whose
hash is a multiple of SAMPLE, so that the sample is the same in all prompts and memory stays small.

Laws:
- a block that is asked for again counts once;
- a worker has SAMPLES_MAX of them at most, all workers ALL_SAMPLES_MAX: a prompt past either has
  the oldest of its worker forgotten, and counted.

Source: Denning, The Working Set Model for Program Behavior, CACM 1968; the sample as in Waldspurger
and others, Efficient MRC Construction with SHARDS, FAST 2015.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np

from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from router.fleet.table import Column

WINDOW_S = 60.0
"""As hot prefixes: agents and people come back within a minute, or mostly not at all."""
SAMPLE = 16
SAMPLES_MAX = 1 << 16
"""Of a worker: a million blocks, more than any has."""
ALL_SAMPLES_MAX = 1 << 20
"""About 200 MB."""


class WorkingSets:
    """All workers'."""

    def __init__(self) -> None:
        self.forgotten = 0
        """Samples dropped while they still counted, for want of room."""
        self._asked: dict[WorkerKey, OrderedDict[int, float]] = {}
        """Sampled prefixes and when each was last asked for, the oldest first."""
        self._count = 0
        """Of all workers."""

    def __len__(self) -> int:
        return self._count

    def blocks(self, workers: Sequence[WorkerKey]) -> Column:
        """About how many blocks are in each worker's working set."""
        asked = self._asked
        return np.array([SAMPLE * len(asked.get(key, ())) for key in workers], np.float64)

    def on_pick(self, key: WorkerKey, prefixes: HashArray, now_s: float) -> None:
        """A prompt is on its way to a worker. prefixes: of its full blocks."""
        asked = self._asked.setdefault(key, OrderedDict())
        self._count -= len(asked)
        for prefix in prefixes[prefixes % np.uint64(SAMPLE) == 0].tolist():
            asked[prefix] = now_s
            asked.move_to_end(prefix)
        over = max(len(asked) - SAMPLES_MAX, self._count + len(asked) - ALL_SAMPLES_MAX)
        for _ in range(min(over, len(asked))):
            asked.popitem(last=False)
            self.forgotten += 1
        self._count += len(asked)

    def on_forgotten(self, workers: Collection[WorkerKey]) -> None:
        """Workers that are known no more."""
        for key in workers:
            self._count -= len(self._asked.pop(key, ()))

    def tick(self, now_s: float) -> None:
        """Drops what was asked for too long ago."""
        for asked in self._asked.values():
            while asked and next(iter(asked.values())) < now_s - WINDOW_S:
                asked.popitem(last=False)
                self._count -= 1
