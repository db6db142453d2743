"""What one rank of a Dynamo worker holds: its engine's hashes are names, ours say what is in it.

Dynamo's publishers count copies themselves and tell only a last copy's removal, so that a name is
either held on a tier or not: a set, where events/ledger.py counts. Pure: no clock, no sockets.

Laws:
- what was reported placed and not yet gone is exactly `placements()`;
- a name means one prefix, on all tiers: told otherwise, the older meaning is forgotten;
- nothing is guessed: blocks after a parent that is not known are left out, counted.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from typing_extensions import override

from events.ledger import Change, Gone, Placed, Wiped
from events.left_out import LeftOut
from indexer.hashing import prefix_hashes
from indexer.identity import BlockHash, PrefixHash, Tier
from indexer.index import mix_digest


class DynamoLedger:
    """The blocks that one (worker, rank) holds."""

    def __init__(self, blocks_max: int = 1 << 22, dropped: Counter[str] | None = None) -> None:
        """blocks_max bounds the map; stores beyond it are counted as `map_full`."""
        self._blocks_max = blocks_max
        self.dropped: Counter[str] = Counter() if dropped is None else dropped
        """Reason -> blocks left out."""
        self.left_out = LeftOut()
        """Blocks that the worker holds and this ledger doesn't."""
        self._names: tuple[dict[int, PrefixHash], ...] = tuple({} for _ in Tier)
        """tier -> the engine's hash -> what it means"""
        self._held: tuple[dict[PrefixHash, int], ...] = tuple({} for _ in Tier)
        """tier -> PrefixHash -> names that mean it"""
        self._xor = [0 for _ in Tier]

    @override
    def __repr__(self) -> str:
        held = "+".join(str(len(one)) for one in self._held)
        return f"<DynamoLedger {len(self)} names, {held} placements>"

    def __len__(self) -> int:
        """Entries of the map."""
        return sum(map(len, self._names))

    def store(
        self,
        tier: Tier,
        parent: int | None,
        names: Sequence[int],
        blocks: Sequence[BlockHash],
        *,
        begins: bool = True,
    ) -> list[Change]:
        """A tier holds a chain; begins: without a parent it starts a prompt."""
        before: PrefixHash | None = None
        if parent is not None:
            before = self._prefix(parent)
        if before is None and (parent is not None or not begins):
            self.dropped["unknown_parent"] += len(names)
            self.left_out.add("unknown_parent", names)
            return []
        chain: list[PrefixHash]
        chain = prefix_hashes(np.array(blocks, dtype=np.uint64), before).tolist()
        changes: list[Change] = []
        run: list[PrefixHash] | None = None
        """The last chain of the changes, as long as it goes on."""
        own, held = self._names[tier], self._held[tier]
        room = self._blocks_max - len(self)
        for i, (name, prefix) in enumerate(zip(names, chain, strict=True)):
            known = self._prefix(name)
            if known is not None and known != prefix:
                self.dropped["renamed"] += 1
                changes += self._forget(name)
                run = None
            fresh = False
            if name not in own:
                if room <= 0:
                    self.dropped["map_full"] += len(names) - i
                    self.left_out.add("map_full", names[i:])
                    break
                room -= 1
                own[name] = prefix
                held[prefix] = held.get(prefix, 0) + 1
                fresh = held[prefix] == 1
            if fresh:
                self._xor[tier] ^= prefix
                if run is None:
                    run = []
                    changes.append(Placed(tier, before, run))
                run.append(prefix)
            else:
                run = None
            before = prefix
        return changes

    def remove(self, tier: Tier, names: Sequence[int]) -> list[Change]:
        """A tier holds these no more."""
        gone: list[PrefixHash] = []
        own = self._names[tier]
        for name in names:
            prefix = own.pop(name, None)
            if prefix is None:
                self.dropped["unknown_removal"] += 1
                self.left_out.remove(name)
            elif self._release(tier, prefix):
                gone.append(prefix)
        return [Gone(tier, gone)] if gone else []

    def wipe(self) -> list[Change]:
        """Forgets all."""
        had_any = any(self._held)
        for tier in Tier:
            self._names[tier].clear()
            self._held[tier].clear()
            self._xor[tier] = 0
        self.left_out.clear()
        return [Wiped()] if had_any else []

    def count(self) -> int:
        """Placements: (tier, PrefixHash) pairs."""
        return sum(map(len, self._held))

    def digest(self) -> int:
        """Same as the digest of an index that holds the same placements."""
        return mix_digest(*self._xor)

    def placements(self) -> Iterator[tuple[Tier, list[PrefixHash]]]:
        """All that is held, a copy by tier."""
        for tier in Tier:
            yield tier, list(self._held[tier])

    def _prefix(self, name: int) -> PrefixHash | None:
        """What a name means, on any tier."""
        for names in self._names:
            prefix = names.get(name)
            if prefix is not None:
                return prefix
        return None

    def _forget(self, name: int) -> list[Change]:
        changes: list[Change] = []
        for tier in Tier:
            prefix = self._names[tier].pop(name, None)
            if prefix is not None and self._release(tier, prefix):
                changes.append(Gone(tier, [prefix]))
        return changes

    def _release(self, tier: Tier, prefix: PrefixHash) -> bool:
        """Whether this was the last name that means it."""
        held = self._held[tier]
        if held[prefix] > 1:
            held[prefix] -= 1
            return False
        del held[prefix]
        self._xor[tier] ^= prefix
        return True
