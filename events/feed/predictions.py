"""What workers will probably hold soon: the prompts we sent them, until their events tell.

Engines announce a block once it is computed, which is too late for a burst of siblings: they would
be spread over the fleet before the first of them shows. And an engine that announces nothing is
known by our own picks alone. So a pick predicts its blocks. A store in the worker's events ends the
prediction of a block, and so does time.

Each worker has two generations in the index: one fills, the one before runs out. Both change places
once the elder is empty and the younger as old as a time to live, so that a prediction lives one to
two of them, and nobody counts the age of a block. Pure: no clock, no I/O.

Laws:
- a worker has at most so many predicted blocks; the oldest make room;
- a tick ends at most TICK_BLOCKS predictions: what is over lives a tick longer.
"""

from collections import deque
from dataclasses import dataclass, field

from typing_extensions import override

from indexer.identity import HashArray
from indexer.index import BlockIndex

TICK_BLOCKS = 50_000
"""About 2 ms of the index's time."""


@dataclass(slots=True)
class _Guess:
    """The predictions of one slot."""

    young: int = 0
    """The generation that fills."""
    turned_at_s: float = 0.0
    """When it began to."""
    ttl_s: float = 0.0
    told: tuple[deque[HashArray], deque[HashArray]] = field(
        default_factory=lambda: (deque(), deque())
    )
    """By generation: what was predicted in it, the oldest first."""


class Predictions:
    """The predictions of every worker."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._guesses: dict[int, _Guess] = {}
        """By slot."""

    @override
    def __repr__(self) -> str:
        blocks = sum(map(self._index.predicted, self._guesses))
        return f"<Predictions {blocks} blocks of {len(self._guesses)} workers>"

    def add(
        self, slot: int, prefixes: HashArray, *, ttl_s: float, blocks_max: int, now_s: float
    ) -> None:
        """A worker will hold these blocks. ttl_s: of all its predictions from now on."""
        prefixes = prefixes[:blocks_max]
        if not len(prefixes):
            return
        guess = self._guesses.get(slot)
        if guess is None:
            guess = self._guesses[slot] = _Guess(turned_at_s=now_s)
        guess.ttl_s = ttl_s
        while self._index.predicted(slot) + len(prefixes) > blocks_max:
            if not any(guess.told):
                break
            if not guess.told[1 - guess.young]:
                self._turn(guess, now_s)
            self._end_oldest(slot, guess)
        self._index.predict(slot, guess.young, prefixes)
        guess.told[guess.young].append(prefixes)

    def forget(self, slot: int) -> None:
        """The index has dropped what it predicted of a slot."""
        self._guesses.pop(slot, None)

    def tick(self, now_s: float) -> None:
        """Time went by."""
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

    def _turn(self, guess: _Guess, now_s: float) -> None:
        """The elder generation is empty: it is the one to fill now."""
        guess.young = 1 - guess.young
        guess.turned_at_s = now_s

    def _end_oldest(self, slot: int, guess: _Guess) -> int:
        """Ends the oldest prediction of the elder generation. Returns the blocks looked at."""
        elder = 1 - guess.young
        prefixes = guess.told[elder].popleft()
        self._index.unpredict(slot, elder, prefixes)
        return len(prefixes)
