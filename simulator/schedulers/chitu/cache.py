"""The blocks of one rank's sequences, from lookup to release. Pure.

Which sequence gets blocks is decided in rank.py. A block is announced with the round that fills it.

Law: a sequence's blocks have room for all its computed tokens, and the pool knows the hashes of the
first `stored_count` blocks.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace

from typing_extensions import override

from simulator.engines.block_pool import BlockId, BlockPool, PoolEvent
from simulator.engines.decode_run import crossings
from simulator.engines.scheduler import Sequence, Submission
from simulator.schedulers.chitu.task import ChituConfig


class RankCache:
    """A block pool, and the blocks that sequences hold in it."""

    def __init__(self, config: ChituConfig, dp_rank: int) -> None:
        self.pool = BlockPool(config.block_count, config.block_size)
        self._size = config.block_size
        self._prefixes = config.prefix_caching
        self._dp_rank = dp_rank

    @override
    def __repr__(self) -> str:
        return f"<RankCache {self._dp_rank}: {self.pool!r}>"

    def take_events(self) -> list[PoolEvent]:
        """What happened since the last call, in order."""
        events = self.pool.take_events()
        if not self._dp_rank:
            return events
        return [replace(event, dp_rank=self._dp_rank) for event in events]

    def cached_tokens(self, submission: Submission) -> int:
        """Tokens that a request would reuse if it were admitted now. Changes nothing."""
        length = submission.prompt_tokens
        if not self._prefixes:
            return 0
        hashes = submission.content.hashes(length // self._size)
        return min(len(self.pool.find_prefix(hashes, length + 1)) * self._size, length - 1)

    def find(self, sequence: Sequence) -> list[BlockId]:
        """Blocks to reuse, up to all known tokens."""
        if not self._prefixes:
            return []
        hashes = sequence.content.hashes(sequence.known_tokens // self._size)
        return self.pool.find_prefix(hashes, sequence.known_tokens + 1)

    def next_hash(self, sequence: Sequence, reused: int) -> int | None:
        """Hash of the block after the `reused` blocks; None when no full block is missing."""
        full = sequence.known_tokens // self._size
        if reused == full or not self._prefixes:
            return None
        return sequence.content.hashes(full)[reused]

    def missing(self, sequence: Sequence, token_count: int) -> int:
        """Blocks that a sequence needs for `token_count` tokens and doesn't hold."""
        return max(0, self.blocks_for(token_count) - len(sequence.blocks))

    def blocks_for(self, token_count: int) -> int:
        return -(-token_count // self._size)

    def begin(self, sequence: Sequence, reused: list[BlockId], new_count: int) -> None:
        """Gives a sequence its first blocks. They must fit."""
        fresh = self.pool.take(reused, new_count)
        if fresh is None:
            raise RuntimeError(f"no {new_count} blocks: {self!r}")
        sequence.blocks = [*reused, *fresh]
        sequence.stored_count = len(reused)

    def grow(self, sequence: Sequence, token_count: int) -> bool:
        """Takes the missing blocks; False, and nothing changed, when there is no room."""
        missing = self.missing(sequence, token_count)
        if not missing:
            return True
        fresh = self.pool.take((), missing)
        if fresh is None:
            return False
        sequence.blocks += fresh
        return True

    def store(self, sequence: Sequence, token_count: int) -> None:
        """Announces the blocks that are full with the first `token_count` tokens."""
        first, last = sequence.stored_count, token_count // self._size
        if last <= first or not self._prefixes:
            return
        self.pool.store(sequence.blocks[first:last], sequence.content.stored(first, last))
        sequence.stored_count = last

    def release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.stored_count = 0

    # Consecutive decode steps: the first of them is scheduled, with its blocks.

    def steps_alike(
        self, sequences: list[Sequence], steps: int, blocked_hashes: Iterable[int]
    ) -> int:
        """How many of the next `steps` steps have blocks, until a step has stored one of
        `blocked_hashes`. At least 1."""
        if steps > 1 and not self._steps_fit(sequences, steps):
            steps = bisect_right(
                range(1, steps), False, key=lambda count: not self._steps_fit(sequences, count)
            )
        for block_hash in blocked_hashes:
            steps = self._steps_to_store(sequences, block_hash, steps)
        return max(steps, 1)

    def decode_ahead(self, sequences: list[Sequence], begun: int, steps: int) -> None:
        """Takes and announces the blocks of `steps` more steps, in the order of the steps.

        begun: steps whose blocks are taken and whose tokens are not out.
        """
        computed = [sequence.computed_tokens + begun for sequence in sequences]
        for _, place, tokens, full in crossings(computed, steps, self._size):
            if full:
                self.store(sequences[place], tokens)
            elif not self.grow(sequences[place], tokens):
                raise RuntimeError(f"a run of steps that doesn't fit: {self!r}")

    def _steps_fit(self, sequences: list[Sequence], steps: int) -> bool:
        missing = sum(
            self.missing(sequence, sequence.computed_tokens + steps) for sequence in sequences
        )
        return self.pool.fits((), missing)

    def _steps_to_store(self, sequences: list[Sequence], block_hash: int, steps: int) -> int:
        """Steps until `block_hash` is stored. The first step has stored its blocks already."""
        if block_hash in self.pool.contents():
            return 1
        for sequence in sequences:
            last = (sequence.computed_tokens + steps) // self._size
            hashes = sequence.content.hashes(last)
            if block_hash in hashes[sequence.stored_count : last]:
                at = hashes.index(block_hash, sequence.stored_count, last)
                steps = (at + 1) * self._size - sequence.computed_tokens
        return steps
