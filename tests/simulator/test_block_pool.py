"""Laws of the block pool. Order of eviction, copies and resets are held against vLLM's own in
schedulers/test_vllm_against_recording.py, and against joined steps in test_vllm_laws.py."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from simulator.engines.block_pool import BlockId, BlockPool, Cleared, Removed, Stored
from simulator.engines.content import ChainContent
from simulator.engines.scheduler import Sequence, Submission
from simulator.engines.sequence_blocks import SequenceBlocks

SIZE = 4


def stored(hashes: list[int], parent: int | None = None) -> Stored:
    return Stored(tuple(hashes), parent, (0,) * SIZE * len(hashes), (None,) * len(hashes))


def fill(pool: BlockPool, hashes: list[int]) -> list[BlockId]:
    """A sequence that fills as many blocks as it has hashes."""
    fresh = pool.take((), len(hashes))
    assert fresh is not None
    pool.store(fresh, stored(hashes))
    return fresh


def test_nothing_is_found_across_a_hole() -> None:
    pool = BlockPool(8, SIZE)
    pool.release(fill(pool, [1, 2, 3]))
    assert len(pool.find_prefix([1, 9, 3], 100)) == 1
    assert pool.find_prefix([9, 2, 3], 100) == []


def test_mistakes_of_the_caller_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0, SIZE)
    pool = BlockPool(2, SIZE)
    blocks = fill(pool, [1])
    with pytest.raises(ValueError, match="content already"):
        pool.store(blocks, stored([2]))
    pool.release(blocks)
    with pytest.raises(ValueError, match="no user"):
        pool.release(blocks)


def test_a_sequence_that_needs_more_blocks_than_there_are_is_our_own_mistake() -> None:
    submission = Submission(
        request_id="a", content=ChainContent([1, 2], "a"), prompt_tokens=2 * SIZE, output_tokens=9
    )
    blocks = SequenceBlocks(2, SIZE)
    with pytest.raises(RuntimeError, match="room for 3 blocks"):
        blocks.take(Sequence(submission, 2 * SIZE, 0.0), [], 3)
    sequence = Sequence(submission, 2 * SIZE, 0.0, computed_tokens=2 * SIZE)
    blocks.take(sequence, [], 2)
    with pytest.raises(RuntimeError, match="doesn't fit"):
        blocks.decode_ahead([sequence], 0, 1)


class PoolLaws(RuleBasedStateMachine):
    """Any life of a small pool, beside a subscriber that counts copies from the events alone."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10, SIZE)
        self.live: list[list[BlockId]] = []
        self.heard: Counter[int] = Counter()

    @rule(branch=st.integers(0, 2), length=st.integers(1, 6), exact=st.booleans())
    def start(self, branch: int, length: int, exact: bool) -> None:
        hashes = [10 * branch + i if i > 1 else i for i in range(length)]
        reused = self.pool.find_prefix(hashes, SIZE * length + (not exact))
        fresh = self.pool.take(reused, length - len(reused))
        if fresh is None:
            return
        if fresh:
            parent = hashes[len(reused) - 1] if reused else None
            self.pool.store(fresh, stored(hashes[len(reused) :], parent))
        self.live.append([*reused, *fresh])

    @rule(count=st.integers(1, 3))
    def take_half_filled(self, count: int) -> None:
        if fresh := self.pool.take((), count):
            self.live.append(fresh)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        self.pool.release(self.live.pop(index))

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == (not self.live)

    @invariant()
    def free_and_cached_and_in_use_are_all(self) -> None:
        pool = self.pool
        assert pool.free_count + pool.cached_count + pool.in_use_count == pool.block_count
        assert pool.in_use_count == len({block for blocks in self.live for block in blocks})

    @invariant()
    def the_events_tell_every_copy(self) -> None:
        for event in self.pool.take_events():
            match event:
                case Stored():
                    self.heard.update(event.hashes)
                case Removed():
                    self.heard.subtract(event.hashes)
                case Cleared():
                    self.heard.clear()
        for block_hash in range(40):
            assert self.pool.copies(block_hash) == self.heard[block_hash]


PoolLaws.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolLaws = PoolLaws.TestCase
