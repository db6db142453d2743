"""A paged KV cache with prefix caching, as vLLM keeps it. Pure: no clock, no sockets.

A block is in one of three states, and the law is that they add up:

    free + cached + in_use = total

*free*: nobody uses it and it has no content. *cached*: nobody uses it, but its content has a hash
and can be found again. *in use*: at least one request counts on it. Free and cached blocks stand in
one queue, free ones and then the longest unused first; taking a cached block evicts it.

What a naive model of this cache gets wrong, and this one does like the engine:
- a content hash can have several physical copies: a prompt that is cached to its last token
  recomputes its last block into a new one, and each copy is announced and removed by itself;
- a hit never covers the whole prompt, since at least one token must be computed;
- nothing is told when a request ends, only when somebody else takes its block;
- a reset is told with the next step's events, not at once.

Behaviour checked against a recording of vLLM 0.32 (tests/simulator/test_against_recording.py).
One difference: vLLM sets one block aside as a null block, so its 64 blocks are 63 here.
"""

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass

from typing_extensions import override

from indexer.identity import Tier

BlockId = int
"""A physical block: its place in the pool, 0 <= id < block_count."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A chain of blocks got content, after `parent` if there is one."""

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]
    """Of these blocks only."""
    extra_keys: tuple[tuple[str, ...] | None, ...]
    """For each block, what besides its tokens went into its hash: LoRA name, cache salt."""
    lora_name: str | None = None
    lora_id: int | None = None
    session_id: str | None = None
    tier: Tier = Tier.DEVICE
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """One physical copy of a block was evicted."""

    block_hash: int
    tier: Tier = Tier.DEVICE
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache was reset: no block can be found any more, on any tier."""

    dp_rank: int = 0


PoolEvent = Stored | Removed | Cleared


class BlockPool:
    """A fixed number of blocks, found by content hash, evicted longest unused first."""

    def __init__(self, block_count: int, block_size: int) -> None:
        if block_count < 1 or block_size < 1:
            raise ValueError("block_count and block_size must be at least 1")
        self.block_count = block_count
        self.block_size = block_size
        self._users = [0] * block_count
        """block -> requests that count on it"""
        self._content: list[int | None] = [None] * block_count
        """block -> hash of its content"""
        self._copies: dict[int, dict[BlockId, None]] = {}
        """hash -> its physical copies, oldest first; never empty"""
        self._idle: OrderedDict[BlockId, None] = OrderedDict.fromkeys(range(block_count))
        """blocks nobody uses, in the order in which they will be taken"""
        self._events: list[PoolEvent] = []

    @override
    def __repr__(self) -> str:
        return (
            f"<BlockPool {self.in_use_count} in use, {self.cached_count} cached, "
            f"{self.free_count} free of {self.block_count}>"
        )

    @property
    def idle_count(self) -> int:
        """Blocks that can be taken: free and cached ones."""
        return len(self._idle)

    @property
    def in_use_count(self) -> int:
        return self.block_count - len(self._idle)

    @property
    def cached_count(self) -> int:
        """Blocks that nobody uses and whose content can still be found. O(idle blocks)."""
        return sum(self._content[block] is not None for block in self._idle)

    @property
    def free_count(self) -> int:
        """Blocks that nobody uses and that hold nothing. O(idle blocks)."""
        return len(self._idle) - self.cached_count

    def contents(self) -> KeysView[int]:
        """The hashes that can be found."""
        return self._copies.keys()

    def copies(self, block_hash: int) -> int:
        """Physical copies of a content."""
        return len(self._copies.get(block_hash, ()))

    def find_prefix(self, hashes: Sequence[int], token_count: int) -> list[BlockId]:
        """The blocks to reuse for a sequence: its longest cached run of leading blocks.

        At most (token_count - 1) // block_size of them, so that one token is left to compute.
        Takes nothing: `take` does.
        """
        found: list[BlockId] = []
        for block_hash in hashes[: max(0, token_count - 1) // self.block_size]:
            copies = self._copies.get(block_hash)
            if copies is None:
                break
            found.append(next(iter(copies)))
        return found

    def fits(self, reused: Iterable[BlockId], new_count: int) -> bool:
        """Whether `new_count` blocks are left once `reused` ones are out of the queue."""
        return new_count <= len(self._idle) - sum(not self._users[block] for block in reused)

    def take(self, reused: Sequence[BlockId], new_count: int) -> list[BlockId] | None:
        """Counts a new user on `reused` blocks and takes `new_count` fresh ones; returns the fresh.

        None, and nothing changed, when there are not enough. Evicts the contents of what it takes.
        """
        if not self.fits(reused, new_count):
            return None
        for block in reused:
            if not self._users[block]:
                del self._idle[block]
            self._users[block] += 1
        fresh = [self._idle.popitem(last=False)[0] for _ in range(new_count)]
        for block in fresh:
            self._users[block] = 1
            self._evict(block)
        return fresh

    def store(self, blocks: Sequence[BlockId], told: Stored) -> None:
        """Gives `blocks` their content, `told.hashes` one by one, and tells it."""
        for block, block_hash in zip(blocks, told.hashes, strict=True):
            if self._content[block] is not None or not self._users[block]:
                raise ValueError(f"block {block} has content already, or no user")
            self._content[block] = block_hash
            self._copies.setdefault(block_hash, {})[block] = None
        self._events.append(told)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drops one user of each of a sequence's blocks, given from the root on.

        Tails join the queue before roots, so that a chain is evicted from its end. Blocks without
        content, such as a half-filled last one, go to the front: taking them again costs nobody.
        """
        for block in reversed(blocks):
            if not self._users[block]:
                raise ValueError(f"block {block} has no user")
            self._users[block] -= 1
            if not self._users[block]:
                self._idle[block] = None
                if self._content[block] is None:
                    self._idle.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forgets all contents; False, and nothing changed, while any block is in use."""
        if self.in_use_count:
            return False
        self._content = [None] * self.block_count
        self._copies.clear()
        self._events.append(Cleared())
        return True

    def take_events(self) -> list[PoolEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _evict(self, block: BlockId) -> None:
        block_hash = self._content[block]
        if block_hash is None:
            return
        self._content[block] = None
        copies = self._copies[block_hash]
        del copies[block]
        if not copies:
            del self._copies[block_hash]
        self._events.append(Removed(block_hash))
