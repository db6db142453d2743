"""A paged KV cache with prefix caching, as vLLM keeps it. Pure: no clock, no sockets.

A block is in one of three states, and the law is that they add up:

    free + cached + in_use = total

*free*: without user and content. *cached*: without user, but with content, which can be looked up
by its hash. *in use*: at least one request uses it. Free and cached blocks share a queue: free
blocks first, then the longest unused. Taking a cached block evicts it.

Details of the engine that a naive model misses:
- a content hash can have several physical copies: a prompt that is cached to its last token
  recomputes its last block into a new block, and each copy is announced and removed by itself;
- a hit never covers the whole prompt, since at least one token must be computed;
- the end of a request causes no event; the eviction of its block does;
- a reset is announced with the next step's events, not at once.

Behaviour checked against a recording of vLLM 0.32 (tests/simulator/test_against_recording.py).
A difference: vLLM sets a block aside as a null block, so its 64 blocks are 63 here.
"""

from collections import OrderedDict
from collections.abc import Collection, KeysView, Sequence
from dataclasses import dataclass

from typing_extensions import override

from indexer.identity import Tier

BlockId = int
"""Place of a physical block in the pool, 0 <= id < block_count."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Event: a chain of blocks got content, after the block `parent` (a hash; None: the root)."""

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]
    """Tokens of these blocks only."""
    extra_keys: tuple[tuple[str, ...] | None, ...]
    """Hashed keys of each block besides its tokens: LoRA name, cache salt."""
    lora_name: str | None = None
    lora_id: int | None = None
    session_id: str | None = None
    tier: Tier = Tier.DEVICE
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """Event: one physical copy of each of these blocks was evicted, in this order."""

    hashes: tuple[int, ...]
    tier: Tier = Tier.DEVICE
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """Event: the cache was reset, so that all tiers are empty."""

    dp_rank: int = 0


PoolEvent = Stored | Removed | Cleared


class BlockPool:
    """A fixed number of blocks, looked up by content hash, evicted longest unused first."""

    def __init__(self, block_count: int, block_size: int) -> None:
        if block_count < 1 or block_size < 1:
            raise ValueError("block_count and block_size must be at least 1")
        self.block_count = block_count
        self.block_size = block_size
        self._users = [0] * block_count
        """block -> number of requests that use it"""
        self._content: list[int | None] = [None] * block_count
        """block -> hash of its content"""
        self._block_of: dict[int, BlockId] = {}
        """hash -> the oldest of its physical copies"""
        self._further: dict[int, list[BlockId]] = {}
        """hash -> its other copies, oldest first; never empty"""
        self._idle: OrderedDict[BlockId, None] = OrderedDict.fromkeys(range(block_count))
        """blocks without user, in the order in which they will be taken"""
        self._events: list[PoolEvent] = []

    @override
    def __repr__(self) -> str:
        return (
            f"<BlockPool {self.in_use_count} in use, {self.cached_count} cached, "
            f"{self.free_count} free of {self.block_count}>"
        )

    @property
    def in_use_count(self) -> int:
        return self.block_count - len(self._idle)

    @property
    def cached_count(self) -> int:
        """Blocks without user whose content is still cached. O(idle blocks)."""
        return sum(self._content[block] is not None for block in self._idle)

    @property
    def free_count(self) -> int:
        """Blocks without user and content. O(idle blocks)."""
        return len(self._idle) - self.cached_count

    def contents(self) -> KeysView[int]:
        """The hashes of all cached content."""
        return self._block_of.keys()

    def copies(self, block_hash: int) -> int:
        """Number of physical copies of the content with this hash."""
        return (block_hash in self._block_of) + len(self._further.get(block_hash, ()))

    def find_prefix(self, hashes: Sequence[int], token_count: int) -> list[BlockId]:
        """The blocks to reuse for a sequence: its longest cached run of leading blocks.

        At most (token_count - 1) // block_size blocks, so that a token is left to compute. Changes
        nothing: `take` does.
        """
        block_of = self._block_of
        prefix: list[BlockId] = []
        for block_hash in hashes[: max(0, token_count - 1) // self.block_size]:
            block = block_of.get(block_hash)
            if block is None:
                break
            prefix.append(block)
        return prefix

    def fits(self, reused: Collection[BlockId], new_count: int) -> bool:
        """Whether `new_count` blocks without user are left once the `reused` blocks have a user."""
        users = self._users
        return new_count <= len(self._idle) - sum(not users[block] for block in reused)

    def take(self, reused: Collection[BlockId], new_count: int) -> list[BlockId] | None:
        """Counts a new user of the `reused` blocks and takes `new_count` fresh blocks; returns the
        fresh blocks.

        None, and nothing changed, when there are not enough. Evicts the contents of fresh blocks.
        """
        if not self.fits(reused, new_count):
            return None
        users, idle = self._users, self._idle
        for block in reused:
            if not users[block]:
                del idle[block]
            users[block] += 1
        fresh = [idle.popitem(last=False)[0] for _ in range(new_count)]
        content, block_of, further = self._content, self._block_of, self._further
        evicted = []
        for block in fresh:
            users[block] = 1
            block_hash = content[block]
            if block_hash is not None:
                content[block] = None
                evicted.append(block_hash)
                if block_hash in further:
                    self._forget_copy(block_hash, block)
                else:
                    del block_of[block_hash]
        if evicted:
            self._events.append(Removed(tuple(evicted)))
        return fresh

    def store(self, blocks: Sequence[BlockId], stored: Stored) -> None:
        """Gives `blocks` their content, in the order of `stored.hashes`, and adds the event.

        Raises ValueError for a block with content, or without user.
        """
        users, content, block_of = self._users, self._content, self._block_of
        for block, block_hash in zip(blocks, stored.hashes, strict=True):
            if content[block] is not None or not users[block]:
                raise ValueError(f"block {block} to store has content already, or no user")
            content[block] = block_hash
            if block_hash in block_of:
                self._further.setdefault(block_hash, []).append(block)
            else:
                block_of[block_hash] = block
        self._events.append(stored)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drops a user of each of a sequence's blocks, given from the root on.

        Tails join the eviction queue before roots, so that a chain is evicted from its end. Blocks
        without content, such as a partly filled last block, go to the front: taking them evicts
        nothing. Raises ValueError for a block without user.
        """
        users, content, idle = self._users, self._content, self._idle
        for block in reversed(blocks):
            left = users[block] - 1
            if left < 0:
                raise ValueError(f"block {block} can't be released: it has no user")
            users[block] = left
            if not left:
                idle[block] = None
                if content[block] is None:
                    idle.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forgets all contents; False, and nothing changed, while any block is in use."""
        if self.in_use_count:
            return False
        self._content = [None] * self.block_count
        self._block_of.clear()
        self._further.clear()
        self._events.append(Cleared())
        return True

    def add_event(self, event: PoolEvent) -> None:
        """Adds an event of another tier, such as the host cache: the events of all tiers have one
        order."""
        self._events.append(event)

    def take_events(self) -> list[PoolEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _forget_copy(self, block_hash: int, block: BlockId) -> None:
        """Forgets that `block` is a copy of the content `block_hash`, which has several copies."""
        others = self._further[block_hash]
        if self._block_of[block_hash] == block:
            self._block_of[block_hash] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._further[block_hash]
