"""The blocks of one rank's sequences, from lookup to release. Pure.

Which sequence gets blocks is decided in rank.py. A block is stored, with its event, in the round
that fills it.
"""

from collections.abc import Iterable
from dataclasses import replace

from typing_extensions import override

from simulator.engines.block_pool import BlockId, PoolEvent
from simulator.engines.scheduler import Sequence, Submission
from simulator.engines.sequence_blocks import SequenceBlocks
from simulator.schedulers.chitu.task import ChituConfig


class RankCache(SequenceBlocks):
    """The block pool of one rank, and the blocks that sequences hold in it."""

    def __init__(self, config: ChituConfig, dp_rank: int) -> None:
        super().__init__(config.block_count, config.block_size)
        self._size = config.block_size
        self._prefixes = config.prefix_caching
        self._dp_rank = dp_rank

    def take_events(self) -> list[PoolEvent]:
        """The events since the last call, in order, with the number of the rank."""
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
        """The cached blocks that a sequence can reuse: its longest cached prefix, up to all known
        tokens."""
        if not self._prefixes:
            return []
        hashes = sequence.content.hashes(sequence.known_tokens // self._size)
        return self.pool.find_prefix(hashes, sequence.known_tokens + 1)

    def next_hash(self, sequence: Sequence, reused: int) -> int | None:
        """Hash of the first full block of a sequence behind its `reused` blocks; None: there is
        none."""
        full = sequence.known_tokens // self._size
        if reused == full or not self._prefixes:
            return None
        return sequence.content.hashes(full)[reused]

    @override
    def store(self, sequence: Sequence, token_count: int) -> None:
        if self._prefixes:
            super().store(sequence, token_count)

    def steps_alike(
        self, sequences: list[Sequence], steps: int, blocked_hashes: Iterable[int]
    ) -> int:
        """How many of the next `steps` decode steps can be joined: the pool has their blocks, and
        no step before the last stores one of `blocked_hashes`. At least 1."""
        steps = self.steps_that_fit(sequences, steps)
        for block_hash in blocked_hashes:
            if block_hash in self.pool.contents():  # the first step has stored its blocks already
                return 1
            steps = self.step_that_stores(sequences, block_hash, steps) or steps
        return steps
