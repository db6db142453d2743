"""A ledger beside a multiset of copies: arrivals and departures are the same."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.engines.events import BlocksCleared, BlocksStored
from events.relay.ledger import (
    COPIES_MAX,
    Change,
    Gone,
    Ledger,
    LedgerCopy,
    Placed,
    Wiped,
    canonical_block_size,
)
from indexer.hashing import hash_seed
from indexer.identity import EngineHash, Tier
from indexer.index import mix_digest
from tests.events.relay.test_ledger import held, prefixes_of, removed, tokens_of

DEVICE, HOST, DISK = Tier
MEDIUMS = {DEVICE: "GPU", HOST: "CPU", DISK: "STORAGE"}


class Node(NamedTuple):
    """An engine block, as the path to it: its namespace, then a block's content and hash variant.

    Blocks of other variants have the same tokens and other engine hashes.
    """

    namespace: int
    path: tuple[tuple[int, int], ...]

    @property
    def parent(self) -> "Node | None":
        return Node(self.namespace, self.path[:-1]) if len(self.path) > 1 else None

    @property
    def content(self) -> list[int]:
        return [content for content, _ in self.path]


NAMESPACES: list[dict[str, str]] = [
    {},
    {"lora_name": "ad"},
    {"cache_salt": "tenant"},
    {"lora_name": "ad", "cache_salt": "tenant"},
]
GROUPS = [None, 0, 7]


class Multiset:
    """What the laws say: copies, and all that follows from them."""

    def __init__(self, size: int, canonical: int) -> None:
        self.size = size
        self.canonical = canonical
        self.pages = max(1, canonical // size)
        self.copies: Counter[tuple[Node, Tier, int | None]] = Counter()
        self.dropped: Counter[str] = Counter()
        """What the ledger is to count, in its own words."""
        self._names: dict[Node, EngineHash] = {}
        self._prefixes: dict[Node, list[int]] = {}

    def name(self, node: Node) -> EngineHash:
        return self._names.setdefault(node, (len(self._names) * 2654435761 + 1) % (1 << 64))

    def prefixes(self, node: Node) -> list[int]:
        """PrefixHashes of the whole path."""
        if node not in self._prefixes:
            seed = hash_seed(**NAMESPACES[node.namespace])
            self._prefixes[node] = prefixes_of(node.content, self.size, self.canonical, seed)
        return self._prefixes[node]

    def on(self, node: Node, tier: Tier) -> bool:
        return any(self.copies[node, tier, group] for group in GROUPS)

    def known(self) -> set[Node]:
        """Held on any tier, or before a known page inside one canonical block."""
        known: set[Node] = set()
        for (node, _, _), copies in self.copies.items():
            one: Node | None = node if copies else None
            while one is not None:
                known.add(one)
                one = one.parent
                if one is not None and len(one.path) % self.pages == 0:
                    break
        return known

    def held(self) -> dict[Tier, set[int]]:
        held: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        for (node, tier, _), copies in self.copies.items():
            if not copies:
                continue
            if self.pages == 1:
                inside = self.size // self.canonical
                held[tier] |= set(self.prefixes(node)[-inside:])
            elif len(node.path) % self.pages == 0:
                chunk: list[Node] = [node]
                while len(chunk) < self.pages:
                    before = chunk[-1].parent
                    assert before is not None
                    chunk.append(before)
                if all(self.on(page, tier) for page in chunk):
                    held[tier].add(self.prefixes(node)[-1])
        return held

    def parents(self) -> dict[int, int | None]:
        """PrefixHash -> the one before it, for all that was ever named."""
        return {
            prefix: before
            for chain in self._prefixes.values()
            for before, prefix in zip([None, *chain], chain, strict=False)
        }


SIZES = [(16, None), (64, 16), (48, 24), (8, None), (4, None), (1, None), (4, 8), (5, None)]

numbers = st.integers(0, 1 << 16)
forks = st.lists(st.tuples(numbers, numbers, st.integers(0, 1)), min_size=1, max_size=5)
actions = st.lists(
    st.tuples(
        st.sampled_from(["store"] * 4 + ["remove"] * 4 + ["offload", "strand", "clear", "again"]),
        numbers,
        numbers,
        numbers,
        st.sampled_from([DEVICE, DEVICE, DEVICE, HOST, DISK]),
        st.sampled_from([*GROUPS, None]),
    ),
    min_size=1,
    max_size=40,
)


def leaves(depth: int, drawn: list[tuple[int, int, int]]) -> list[Node]:
    """Chains that branch from one another, in several namespaces."""
    found = [Node(0, tuple((i, 0) for i in range(depth)))]
    for n, (which, place, variant) in enumerate(drawn):
        old = found[which % len(found)]
        at = place % depth
        new = tuple((100 * (n + 1) * (1 - variant) + i, variant) for i in range(at, depth))
        found.append(
            Node(which % len(NAMESPACES) if at == 0 else old.namespace, old.path[:at] + new)
        )
    return found


def range_of(leaf: Node, first: int, count: int, most: int) -> list[Node]:
    start = first % len(leaf.path)
    stop = min(len(leaf.path), start + 1 + count % most)
    return [Node(leaf.namespace, leaf.path[: i + 1]) for i in range(start, stop)]


@pytest.mark.parametrize(("size", "wanted"), SIZES)
@settings(derandomize=True, deadline=None, max_examples=120, database=None)
@given(drawn=forks, steps=actions)
def test_what_was_reported_is_what_a_multiset_of_copies_holds(
    size: int,
    wanted: int | None,
    drawn: list[tuple[int, int, int]],
    steps: list[tuple[str, int, int, int, Tier, int | None]],
) -> None:
    canonical = canonical_block_size(size, wanted)
    assert canonical is not None
    ledger, oracle = Ledger(wanted), Multiset(size, canonical)
    chains = leaves(max(3, oracle.pages * 5 // 2), drawn)
    reported: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    for what, which, first, count, tier, group in steps:
        leaf = chains[which % len(chains)]
        known = oracle.known()
        if what == "clear":
            if count % 4:
                continue
            changes = ledger.apply(BlocksCleared())
            oracle.copies.clear()
        elif what == "again":
            changes, ledger = [], again(ledger, wanted)
            oracle.dropped.clear()
        elif what in ("store", "strand"):  # from the root, or somewhere in a chain
            if what == "store":
                nodes = range_of(leaf, 0 if first % 3 else first, count, len(leaf.path))
            else:
                nodes = range_of(leaf, first, count, 3)
            changes = ledger.apply(store_of(oracle, nodes, tier, group))
            if nodes[0].parent is None or nodes[0].parent in known:
                oracle.copies.update((node, tier, group) for node in nodes)
            else:
                oracle.dropped["unknown_parent"] += len(nodes)
        elif what == "offload":
            nodes = range_of(leaf, first, count, len(leaf.path))
            names = [oracle.name(node) for node in nodes]
            changes = ledger.apply(
                BlocksStored(tuple(names), None, (), 0, medium=MEDIUMS[tier], group=group)
            )
            oracle.copies.update((node, tier, group) for node in nodes if node in known)
            oracle.dropped["unresolved"] += sum(node not in known for node in nodes)
        else:
            nodes = range_of(leaf, first, count, 1 + len(leaf.path) // 2)[::-1]
            names = [oracle.name(node) for node in nodes]
            changes = ledger.apply(removed(names, MEDIUMS[tier], group))
            for node in nodes:
                if oracle.copies[node, tier, group]:
                    oracle.copies[node, tier, group] -= 1
                else:
                    oracle.dropped["unknown_removal"] += 1
        for key, copies in oracle.copies.items():
            oracle.copies[key] = min(copies, COPIES_MAX)

        assert_changes_are_news(changes, reported, oracle)
        assert reported == oracle.held() == held(ledger)
        assert len(ledger) == len(oracle.known())
        assert ledger.count() == sum(map(len, reported.values()))
        assert ledger.digest() == mix_digest(*(xor_of(reported[one]) for one in Tier))
        assert +ledger.dropped == +oracle.dropped


def again(ledger: Ledger, wanted: int | None) -> Ledger:
    """The same ledger, by way of bytes."""
    encoded = msgspec.msgpack.encode(ledger.copy())
    return Ledger.restored(msgspec.msgpack.decode(encoded, type=LedgerCopy), wanted)


def store_of(oracle: Multiset, nodes: list[Node], tier: Tier, group: int | None) -> BlocksStored:
    names = NAMESPACES[nodes[0].namespace]
    parent = nodes[0].parent
    for node in nodes:
        oracle.prefixes(node)
    return BlocksStored(
        hashes=tuple(oracle.name(node) for node in nodes),
        parent=None if parent is None else oracle.name(parent),
        token_ids=tokens_of([node.content[-1] for node in nodes], oracle.size),
        block_size=oracle.size,
        medium=MEDIUMS[tier],
        group=group,
        lora_name=names.get("lora_name"),
        cache_salt=None if parent else names.get("cache_salt"),
    )


def assert_changes_are_news(
    changes: list[Change], reported: dict[Tier, set[int]], oracle: Multiset
) -> None:
    """Applies changes to what was reported; nothing arrives twice, nor goes without being there."""
    parents = oracle.parents()
    for change in changes:
        match change:
            case Placed(tier, parent, hashes):
                for before, prefix in pairs_of(parent, hashes):
                    assert prefix not in reported[tier]
                    assert before is None or parents[prefix] == before
                    reported[tier].add(prefix)
            case Gone(tier, hashes):
                assert reported[tier].issuperset(hashes)
                assert len(set(hashes)) == len(hashes)
                reported[tier] -= set(hashes)
            case Wiped():
                assert any(reported.values())
                for one in reported.values():
                    one.clear()


def pairs_of(parent: int | None, hashes: Sequence[int]) -> Iterator[tuple[int | None, int]]:
    return zip([parent, *hashes], hashes, strict=False)


def xor_of(hashes: set[int]) -> int:
    total = 0
    for one in hashes:
        total ^= one
    return total


def test_a_wipe_forgets_what_was_left_out() -> None:
    ledger = Ledger()
    ledger.apply(BlocksStored(tuple(range(1000)), 5000, list(range(1000)), 1))
    assert ledger.left_out.reasons() == ("unknown_parent",)
    ledger.wipe()
    assert ledger.left_out.reasons() == ()
