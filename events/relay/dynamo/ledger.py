"""What one rank of a Dynamo worker holds: its engine's hashes are names, ours say what is in it.

Dynamo's publishers count copies themselves and tell only a last copy's removal, so that a name is
either held on a tier or not: a set, where events/relay/ledger.py counts. Pure: no clock, no
sockets.

Laws:
- what was reported placed and not yet gone is exactly `placements()`;
- a name means one prefix, on all tiers: told otherwise, the older meaning is forgotten;
- nothing is guessed: blocks after a parent that is not known are left out, counted.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from events.plane.left_out import LeftOut
from events.relay.ledger import SHELVES, Change, Gone, Placed, Wiped, new_shelves
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
        self._names: list[list[dict[int, PrefixHash]]] = [new_shelves() for _ in Tier]
        """tier -> on the shelf of its remainder: the engine's hash -> what it means"""
        self._names_count = [0 for _ in Tier]
        self._held: list[list[dict[PrefixHash, int]]] = [new_shelves() for _ in Tier]
        """tier -> on the shelf of its remainder: PrefixHash -> names that mean it"""
        self._held_count = [0 for _ in Tier]
        self._xor = [0 for _ in Tier]
        self._doomed: list[dict[Any, Any]] = []
        """What was held before it was wiped, and is let go in slices: see `sweep`."""

    @override
    def __repr__(self) -> str:
        held = "+".join(map(str, self._held_count))
        return f"<DynamoLedger {len(self)} names, {held} placements>"

    def __len__(self) -> int:
        """Entries of the map."""
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
                    self.dropped["map_full"] += len(names) - i
                    self.left_out.add("map_full", names[i:])
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
        """A tier holds these no more."""
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
        """Forgets all. Its memory is let go by `sweep`."""
        had_any = any(self._held_count)
        shelves: Iterable[dict[Any, Any]]
        shelves = itertools.chain(*self._names, *self._held, [self.left_out.clear()])
        self._doomed += filter(None, shelves)
        self._names, self._names_count = [new_shelves() for _ in Tier], [0 for _ in Tier]
        self._held, self._held_count = [new_shelves() for _ in Tier], [0 for _ in Tier]
        self._xor = [0 for _ in Tier]
        return [Wiped()] if had_any else []

    def inherit(self, other: "DynamoLedger") -> None:
        """Takes over what another ledger holds and nobody asks for any more, for `sweep`."""
        other.wipe()
        self._doomed += other._doomed
        other._doomed = []

    def sweep(self, units: int) -> bool:
        """Lets go of so many entries of what was wiped; False when nothing is left of it."""
        while self._doomed and units > 0:
            doomed = self._doomed[-1]
            while doomed and units > 0:
                doomed.popitem()
                units -= 1
            if not doomed:
                self._doomed.pop()
        return bool(self._doomed)

    def count(self) -> int:
        """Placements: (tier, PrefixHash) pairs."""
        return sum(self._held_count)

    def digest(self) -> int:
        """Same as the digest of an index that holds the same placements."""
        return mix_digest(*self._xor)

    def placements(self) -> Iterator[tuple[Tier, list[PrefixHash]]]:
        """All that is held, a copy by tier."""
        for tier in Tier:
            yield tier, [prefix for shelf in self._held[tier] for prefix in shelf]

    def shelves(self) -> Iterator[tuple[Tier, int, dict[PrefixHash, int]]]:
        """All that is held, in the ledger's own dictionaries, with their numbers by tier."""
        for tier in Tier:
            for number, shelf in enumerate(self._held[tier]):
                yield tier, number, shelf

    def _prefix(self, name: int) -> PrefixHash | None:
        """What a name means, on any tier."""
        place = name % SHELVES
        for names in self._names:
            prefix = names[place].get(name)
            if prefix is not None:
                return prefix
        return None

    def _take(self, tier: Tier, name: int) -> PrefixHash | None:
        """Forgets a name; what it meant there, None if nothing."""
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
        """Whether this was the last name that means it."""
        held = self._held[tier][prefix % SHELVES]
        if held[prefix] > 1:
            held[prefix] -= 1
            return False
        del held[prefix]
        self._held_count[tier] -= 1
        self._xor[tier] ^= prefix
        return True
