"""The blocks of one rank of a Dynamo worker: the engine's hashes are names of PrefixHashes.

Dynamo's publishers count copies themselves and report only the removal of the last copy, so a name
is either held on a tier or not: a set, where events/relay/ledger.py counts. Pure: no clock, no
sockets.

Laws:
- the blocks reported placed and not gone since are exactly `placements()`;
- a name stands for one prefix, on all tiers: a store with another prefix replaces the older;
- nothing is guessed: blocks after an unknown parent are left out and counted.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from typing_extensions import override

from events.plane.left_out import LeftOut
from events.relay.ledger import SHELVES, Change, Gone, Placed, Wiped, new_shelves
from indexer.hashing import prefix_hashes
from indexer.identity import BlockHash, PrefixHash, Tier
from indexer.index import mix_digest


class DynamoLedger:
    """The blocks of one (worker, rank)."""

    def __init__(self, blocks_max: int = 1 << 22, dropped: Counter[str] | None = None) -> None:
        """blocks_max bounds the ledger; stores beyond it are counted as `ledger_full`."""
        self._blocks_max = blocks_max
        self.dropped: Counter[str] = Counter() if dropped is None else dropped
        """Reason -> blocks left out."""
        self.left_out = LeftOut()
        """Blocks of the worker that are not in this ledger."""
        self._names: list[list[dict[int, PrefixHash]]] = [new_shelves() for _ in Tier]
        """Tier -> shelf of the engine's hash -> engine's hash -> PrefixHash"""
        self._names_count = [0 for _ in Tier]
        self._held: list[list[dict[PrefixHash, int]]] = [new_shelves() for _ in Tier]
        """Tier -> shelf of the PrefixHash -> PrefixHash -> names that stand for it"""
        self._held_count = [0 for _ in Tier]
        self._xor = [0 for _ in Tier]

    @override
    def __repr__(self) -> str:
        held = "+".join(map(str, self._held_count))
        return f"<DynamoLedger {len(self)} names, {held} placements>"

    def __len__(self) -> int:
        """Entries of the ledger."""
        return sum(self._names_count)

    def store(
        self,
        tier: Tier,
        parent: int | None,
        names: Sequence[int],
        blocks: Sequence[BlockHash],
        *,
        begins: bool = True,
    ) -> list[Change]:
        """A chain arrived on a tier; begins: without a parent, it starts a prompt."""
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
        """The chain that the next placed block continues; None: it starts a new chain."""
        names_of_tier, held_of_tier = self._names[tier], self._held[tier]
        room = self._blocks_max - len(self)
        for i, (name, prefix) in enumerate(zip(names, chain, strict=True)):
            known = self._prefix(name)
            if known is not None and known != prefix:
                self.dropped["renamed"] += 1
                changes += self._forget(name)
                run = None
            fresh = False
            own = names_of_tier[name % SHELVES]
            if name not in own:
                if room <= 0:
                    self.dropped["ledger_full"] += len(names) - i
                    self.left_out.add("ledger_full", names[i:])
                    break
                room -= 1
                own[name] = prefix
                self._names_count[tier] += 1
                held = held_of_tier[prefix % SHELVES]
                held[prefix] = held.get(prefix, 0) + 1
                fresh = held[prefix] == 1
            if fresh:
                self._held_count[tier] += 1
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
        """Names left a tier."""
        gone: list[PrefixHash] = []
        for name in names:
            prefix = self._take(tier, name)
            if prefix is None:
                self.dropped["unknown_removal"] += 1
                self.left_out.remove(name)
            elif self._release(tier, prefix):
                gone.append(prefix)
        return [Gone(tier, gone)] if gone else []

    def wipe(self) -> list[Change]:
        """Forgets all blocks."""
        had_any = any(self._held_count)
        self.left_out.clear()
        self._names, self._names_count = [new_shelves() for _ in Tier], [0 for _ in Tier]
        self._held, self._held_count = [new_shelves() for _ in Tier], [0 for _ in Tier]
        self._xor = [0 for _ in Tier]
        return [Wiped()] if had_any else []

    def count(self) -> int:
        """Placements: (tier, PrefixHash) pairs."""
        return sum(self._held_count)

    def digest(self) -> int:
        """Equal to the digest of an index with the same placements."""
        return mix_digest(*self._xor)

    def placements(self) -> Iterator[tuple[Tier, list[PrefixHash]]]:
        """All placements: each tier with a new list of its prefixes."""
        for tier in Tier:
            yield tier, [prefix for shelf in self._held[tier] for prefix in shelf]

    def shelves(self) -> Iterator[tuple[Tier, int, dict[PrefixHash, int]]]:
        """All placements in the ledger's own dictionaries: tier, number of the shelf, shelf."""
        for tier in Tier:
            for number, shelf in enumerate(self._held[tier]):
                yield tier, number, shelf

    def _prefix(self, name: int) -> PrefixHash | None:
        """The prefix of a name, from any tier."""
        place = name % SHELVES
        for names in self._names:
            prefix = names[place].get(name)
            if prefix is not None:
                return prefix
        return None

    def _take(self, tier: Tier, name: int) -> PrefixHash | None:
        """Forgets a name on a tier; returns its prefix, None if it had none."""
        prefix = self._names[tier][name % SHELVES].pop(name, None)
        if prefix is not None:
            self._names_count[tier] -= 1
        return prefix

    def _forget(self, name: int) -> list[Change]:
        changes: list[Change] = []
        for tier in Tier:
            prefix = self._take(tier, name)
            if prefix is not None and self._release(tier, prefix):
                changes.append(Gone(tier, [prefix]))
        return changes

    def _release(self, tier: Tier, prefix: PrefixHash) -> bool:
        """Drops a name of a prefix; returns whether it was the last."""
        held = self._held[tier][prefix % SHELVES]
        if held[prefix] > 1:
            held[prefix] -= 1
            return False
        del held[prefix]
        self._held_count[tier] -= 1
        self._xor[tier] ^= prefix
        return True
