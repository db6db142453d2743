"""Predicted blocks: the prompts sent to a worker, until its events report their blocks.

Engines announce a block once it is computed. That is too late for a burst of requests with the same
prefix, which would be spread over the fleet before the first announcement. And of an engine without
events, only our own picks are known. So a pick predicts its blocks. A prediction ends with the
block's store in the worker's events, or by time.

Each worker has two generations in the index: the young generation fills, the elder runs out. They
swap once the elder is empty and the young is one time to live old, so that a prediction lives one
to two times to live, without an age for each block. Pure: no clock, no I/O.

Laws:
- the predicted blocks of a worker never exceed blocks_max; the oldest are dropped first;
- a tick ends at most about TICK_BLOCKS predictions; others that are due end with the next tick.
"""

from collections import deque
from dataclasses import dataclass, field

from typing_extensions import override

from indexer.identity import HashArray
from indexer.index import BlockIndex

TICK_BLOCKS = 50_000
"""Predictions that a tick ends, at most: about 2 ms of the index's time."""


@dataclass(slots=True)
class _Guess:
    """The predictions of one worker."""

    young: int = 0
    """Number of the generation that fills, 0 or 1."""
    turned_at_s: float = 0.0
    """When the young generation began to fill."""
    ttl_s: float = 0.0
    told: tuple[deque[HashArray], deque[HashArray]] = field(
        default_factory=lambda: (deque(), deque())
    )
    """Generation -> the predictions in it, the oldest first."""


class Predictions:
    """The predictions of every worker."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._guesses: dict[int, _Guess] = {}
        """Slot of a worker in the index -> its predictions"""

    @override
    def __repr__(self) -> str:
        blocks = sum(map(self._index.predicted, self._guesses))
        return f"<Predictions {blocks} blocks of {len(self._guesses)} workers>"

    def add(
        self, slot: int, prefixes: HashArray, ttl_s: float, blocks_max: int, now_s: float
    ) -> None:
        """Predicts the first blocks_max of `prefixes` for the worker of an index slot. ttl_s:
        seconds for which all predictions of the worker hold from now on.
        """
        count = len(prefixes)
        if count > blocks_max:
            prefixes, count = prefixes[:blocks_max], blocks_max
        if not count:
            return
        guess = self._guesses.get(slot)
        if guess is None:
            guess = self._guesses[slot] = _Guess(turned_at_s=now_s)
        guess.ttl_s = ttl_s
        if self._index.predicted(slot) + count > blocks_max:
            self._make_room(slot, guess, blocks_max - count, now_s)
        # Before `predict`, which may raise MemoryError: the blocks predicted until then end, too.
        guess.told[guess.young].append(prefixes)
        self._index.predict(slot, guess.young, prefixes)

    def forget(self, slot: int) -> None:
        """Forgets all predictions of an index slot; call after the index has dropped them."""
        self._guesses.pop(slot, None)

    def tick(self, now_s: float) -> None:
        """Ends predictions whose time to live is over."""
        left = TICK_BLOCKS
        for slot, guess in list(self._guesses.items()):
            if now_s - guess.turned_at_s < guess.ttl_s:
                continue
            while guess.told[1 - guess.young]:
                if left <= 0:
                    return
                left -= self._end_oldest(slot, guess)
            if guess.told[guess.young]:
                self._turn(guess, now_s)
            else:
                del self._guesses[slot]

    def _make_room(self, slot: int, guess: _Guess, blocks_max: int, now_s: float) -> None:
        """Ends the oldest predictions of a worker, until blocks_max are left."""
        while self._index.predicted(slot) > blocks_max and any(guess.told):
            if not guess.told[1 - guess.young]:
                self._turn(guess, now_s)
            self._end_oldest(slot, guess)

    def _turn(self, guess: _Guess, now_s: float) -> None:
        """Swaps the generations: the elder, now empty, fills from now on."""
        guess.young = 1 - guess.young
        guess.turned_at_s = now_s

    def _end_oldest(self, slot: int, guess: _Guess) -> int:
        """Ends the oldest prediction of the elder generation. Returns its number of blocks."""
        elder = 1 - guess.young
        prefixes = guess.told[elder].popleft()
        self._index.unpredict(slot, elder, prefixes)
        return len(prefixes)
