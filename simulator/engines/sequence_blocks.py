"""The blocks that sequences hold in a block pool, from admission to release. Pure.

Laws:
- a sequence's blocks have room for all its computed tokens, and the pool knows the hashes of the
  first `stored_count` blocks;
- consecutive decode steps take and announce the same blocks as single steps, in the same order.
"""

from bisect import bisect_right
from collections.abc import Sequence as Listed

from simulator.engines.block_pool import BlockId, BlockPool
from simulator.engines.decode_run import crossings
from simulator.engines.scheduler import BlockCounts, Sequence


class SequenceBlocks:
    """A block pool, and the blocks that sequences hold in it."""

    def __init__(self, block_count: int, block_size: int) -> None:
        self.pool = BlockPool(block_count, block_size)

    def counts(self) -> BlockCounts:
        pool = self.pool
        return BlockCounts(pool.free_count, pool.cached_count, pool.in_use_count, pool.block_count)

    def blocks_for(self, token_count: int) -> int:
        return -(-token_count // self.pool.block_size)

    def missing(self, sequence: Sequence, token_count: int) -> int:
        """Blocks that a sequence needs for `token_count` tokens and doesn't hold."""
        return max(0, self.blocks_for(token_count) - len(sequence.blocks))

    def take(self, sequence: Sequence, reused: list[BlockId], new_count: int) -> None:
        """Gives a sequence the `reused` blocks and new blocks. Raises RuntimeError without room."""
        fresh = self.pool.take(reused, new_count)
        if fresh is None:
            raise RuntimeError(f"no room for {new_count} blocks in {self.pool!r}")
        if not sequence.blocks:
            sequence.stored_count = len(reused)
        sequence.blocks += [*reused, *fresh]

    def grow(self, sequence: Sequence, token_count: int) -> bool:
        """Takes the blocks that a sequence lacks for `token_count` tokens; False, and nothing
        changed, when there is no room."""
        missing = self.missing(sequence, token_count)
        if not missing:
            return True
        fresh = self.pool.take((), missing)
        if fresh is None:
            return False
        sequence.blocks += fresh
        return True

    def store(self, sequence: Sequence, token_count: int) -> None:
        """Stores, with an event, the blocks that the first `token_count` tokens fill."""
        first, last = sequence.stored_count, token_count // self.pool.block_size
        if last > first:
            self.pool.store(sequence.blocks[first:last], sequence.content.stored(first, last))
            sequence.stored_count = last

    def fill(self, sequence: Sequence, token_count: int) -> None:
        """Stores the blocks that a step fills. token_count: the sequence's computed tokens after
        the step, without drafts that may yet be rejected.
        """
        self.store(sequence, token_count)

    def settle(self) -> None:
        """Called at the end of the decision of each step, for subclasses with a host cache."""

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks back."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.stored_count = 0

    # Consecutive decode steps: the first of them is scheduled, with its blocks.

    def steps_that_fit(self, sequences: Listed[Sequence], steps: int) -> int:
        """How many of the next `steps` decode steps the pool has blocks for, at least 1."""
        if steps > 1 and not self._fit(sequences, steps):
            steps = bisect_right(range(1, steps), False, key=lambda n: not self._fit(sequences, n))
        return max(steps, 1)

    def step_that_stores(
        self, sequences: Listed[Sequence], block_hash: int, steps: int
    ) -> int | None:
        """Which of the next `steps` decode steps, counted from 1, is the first to store the block
        with this hash; None: no step does."""
        size = self.pool.block_size
        first = None
        for sequence in sequences:
            last = (sequence.computed_tokens + steps) // size
            hashes = sequence.content.hashes(last)
            if block_hash in hashes[sequence.stored_count : last]:
                at = hashes.index(block_hash, sequence.stored_count, last)
                first = steps = (at + 1) * size - sequence.computed_tokens
        return first

    def decode_ahead(self, sequences: Listed[Sequence], begun: int, steps: int) -> None:
        """Takes and stores the blocks of `steps` more decode steps, in the order of the steps.

        begun: number of steps before these whose blocks are taken and whose tokens are not out.
        Raises RuntimeError when the blocks don't fit.
        """
        computed = [sequence.computed_tokens + begun for sequence in sequences]
        present = 0
        for step, place, tokens, full in crossings(computed, steps, self.pool.block_size):
            if step > present:
                self.settle()
                present = step
            if full:
                self.fill(sequences[place], tokens)
            elif not self.grow(sequences[place], tokens):
                raise RuntimeError(f"a run of {steps} steps doesn't fit into {self.pool!r}")
        self.settle()

    def _fit(self, sequences: Listed[Sequence], steps: int) -> bool:
        missing = sum(
            self.missing(sequence, sequence.computed_tokens + steps) for sequence in sequences
        )
        return self.pool.fits((), missing)
