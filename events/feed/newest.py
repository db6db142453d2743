"""The blocks that workers stored in the last second.

A copy of a request that another router serves comes at about the time of the request, and is
decided a little later: its own blocks may be in the index by then. Kept only while such requests
come. Pure: no clock, no I/O.

Laws:
- no block older than NEWEST_S counts;
- HASHES_MAX hashes are kept at most; past it the oldest go first;
- a look-up costs the prompt's blocks, whatever is kept.
"""

from collections import Counter, deque

from indexer.identity import HashArray

NEWEST_S = 1.0
HASHES_MAX = 1 << 16
"""Blocks of all workers: a second of a thousand workers that compute 1,000 tokens each a second."""


class Newest:
    """The newest stored blocks of all workers, by their slots in the index."""

    def __init__(self) -> None:
        self._order: deque[tuple[float, int, list[int]]] = deque()
        """Time, slot and hashes of each fact, the oldest first."""
        self._stored: dict[int, Counter[int]] = {}
        """Slot -> how many of its facts have a hash."""
        self.hashes = 0

    def __len__(self) -> int:
        """Facts that are kept."""
        return len(self._order)

    def add(self, slot: int, hashes: HashArray, now_s: float) -> None:
        """Takes a fact of blocks that were stored now."""
        kept: list[int] = hashes[-HASHES_MAX:].tolist()
        self._order.append((now_s, slot, kept))
        self._stored.setdefault(slot, Counter()).update(kept)
        self.hashes += len(kept)
        while self.hashes > HASHES_MAX:
            self._drop()
        self._end(now_s)

    def first(self, slot: int, prefixes: HashArray, now_s: float) -> int | None:
        """The place of the first of these prefixes that a worker stored just now; None: it stored
        none of them."""
        self._end(now_s)
        stored = self._stored.get(slot)
        if stored is None:
            return None
        hashes: list[int] = prefixes.tolist()
        return next((place for place, each in enumerate(hashes) if each in stored), None)

    def _end(self, now_s: float) -> None:
        while self._order and self._order[0][0] <= now_s - NEWEST_S:
            self._drop()

    def _drop(self) -> None:
        _, slot, hashes = self._order.popleft()
        self.hashes -= len(hashes)
        stored = self._stored[slot]
        for each in hashes:
            if stored[each] > 1:
                stored[each] -= 1
            else:
                del stored[each]
        if not stored:
            del self._stored[slot]
