"""The blocks that workers stored in the last second.

An observed request, which another router serves, reaches this router at about the same time and is
decided a little later: its own blocks may be in the index by then, and the decision leaves out what
was stored just now. Kept only while observed requests come. Pure: no clock, no I/O.

Laws:
- no block older than NEWEST_S counts;
- HASHES_MAX hashes are kept at most; past it the oldest go first;
- a look-up takes time in proportion to the prompt's blocks, however many hashes are kept.
"""

from collections import Counter, deque

from indexer.identity import HashArray

NEWEST_S = 1.0
HASHES_MAX = 1 << 16
"""Hashes kept of all workers: a second of a thousand workers that compute 1,000 tokens/s each."""


class Newest:
    """The newest stored blocks of all workers, by their slots in the index."""

    def __init__(self) -> None:
        self._order: deque[tuple[float, int, list[int]]] = deque()
        """Time, slot and hashes of each fact, the oldest first."""
        self._stored: dict[int, Counter[int]] = {}
        """Slot -> hash -> how many of the slot's kept facts have it."""
        self.hashes = 0

    def __len__(self) -> int:
        """Facts that are kept."""
        return len(self._order)

    def add(self, slot: int, hashes: HashArray, now_s: float) -> None:
        """Records the hashes of a fact that stored blocks for a worker's index slot at now_s."""
        kept: list[int] = hashes[-HASHES_MAX:].tolist()
        if not kept:
            return  # the bound counts hashes: facts without any would have none
        self._order.append((now_s, slot, kept))
        self._stored.setdefault(slot, Counter()).update(kept)
        self.hashes += len(kept)
        while self.hashes > HASHES_MAX:
            self._drop()
        self._end(now_s)

    def first(self, slot: int, prefixes: HashArray, now_s: float) -> int | None:
        """Place of the first of `prefixes` that the worker of an index slot stored in the last
        NEWEST_S; None: it stored none of them."""
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
