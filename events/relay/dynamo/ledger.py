"""The blocks of one rank of a Dynamo worker: the engine's hashes are names of PrefixHashes.

Dynamo's publishers count copies themselves and report only the removal of the last copy, so a name
is either held on a tier or not, where events/relay/ledger.py counts copies. Pure: no clock, no
sockets.

Laws:
- the blocks reported placed and not gone since are exactly `placements()`;
- a name stands for one prefix on all tiers: a store with another prefix replaces the older prefix;
- nothing is guessed: blocks after an unknown parent are left out and counted.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from events.relay.ledger import BLOCKS_MAX, Change, HeldBlocks
from indexer.hashing import prefix_hashes
from indexer.identity import BlockHash, Tier


class DynamoLedger(HeldBlocks):
    """The blocks that one rank of a Dynamo worker holds."""

    def __init__(self, blocks_max: int = BLOCKS_MAX, dropped: Counter[str] | None = None) -> None:
        super().__init__(blocks_max, 1, dropped)

    def store(
        self,
        tier: Tier,
        parent: int | None,
        names: Sequence[int],
        blocks: Sequence[BlockHash],
        *,
        begins: bool = True,
    ) -> list[Change]:
        """Records a chain of blocks that arrived on a tier; returns the changes. begins: whether a
        chain without a parent starts a prompt; if not, its parent is unknown."""
        self._is_half_applied = True
        before = None if parent is None else self._copies.end(parent)
        if before is None and (parent is not None or not begins):
            self.dropped["unknown_parent"] += len(names)
            self.left_out.add("unknown_parent", names)
            return self._changes()
        chain = prefix_hashes(np.array(blocks, dtype=np.uint64), before)
        stored, renamed = self._copies.put(names, chain, before, tier)
        if renamed:
            self.dropped["renamed"] += renamed
        if stored < len(names):
            self.dropped["ledger_full"] += len(names) - stored
            self.left_out.add("ledger_full", names[stored:])
        return self._changes()

    def remove(self, tier: Tier, names: Sequence[int]) -> list[Change]:
        """Records that the blocks of these names left a tier; returns the changes."""
        self._is_half_applied = True
        for name in self._copies.remove(names, 0, tier):
            self.dropped["unknown_removal"] += 1
            self.left_out.remove(name)
        return self._changes()
