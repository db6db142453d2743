"""The blocks that workers stored in the last second.

A copy of a request that another router serves comes at about the time of the request, and is
decided a little later: its own blocks may be in the index by then. Kept only where such requests
come. Pure: no clock, no I/O.

Laws:
- no block older than NEWEST_S counts;
- HASHES_MAX hashes are kept at most; past it the oldest go first.
"""

from collections import deque

import numpy as np

from indexer.identity import HashArray

NEWEST_S = 1.0
HASHES_MAX = 1 << 20


class Newest:
    """The newest stored blocks of all workers, by their slots in the index."""

    def __init__(self) -> None:
        self._order: deque[tuple[float, int]] = deque()
        """Time and slot of each fact, the oldest first."""
        self._stores: dict[int, deque[HashArray]] = {}
        """Slot -> blocks of its facts, the oldest first."""
        self.hashes = 0

    def __len__(self) -> int:
        """Facts that are kept."""
        return len(self._order)

    def add(self, slot: int, hashes: HashArray, now_s: float) -> None:
        """Takes a fact of blocks that were stored now."""
        self._order.append((now_s, slot))
        self._stores.setdefault(slot, deque()).append(hashes)
        self.hashes += len(hashes)
        while self.hashes > HASHES_MAX:
            self._drop()
        self._end(now_s)

    def first(self, slot: int, prefixes: HashArray, now_s: float) -> int | None:
        """The place of the first of these prefixes that a worker stored just now; None: it stored
        none of them."""
        self._end(now_s)
        if (stored := self._stores.get(slot)) is None:
            return None
        places = np.flatnonzero(np.isin(prefixes, np.concatenate(stored)))
        return int(places[0]) if len(places) else None

    def _end(self, now_s: float) -> None:
        while self._order and self._order[0][0] <= now_s - NEWEST_S:
            self._drop()

    def _drop(self) -> None:
        _, slot = self._order.popleft()
        stored = self._stores[slot]
        self.hashes -= len(stored.popleft())
        if not stored:
            del self._stores[slot]
