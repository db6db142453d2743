"""Names in, placements out: examples, and a set of names beside the ledger."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from events.relay.dynamo.ledger import DynamoLedger
from events.relay.ledger import Change, Gone, Placed, Wiped
from indexer.hashing import extend_prefix
from indexer.identity import BlockHash, PrefixHash, Tier
from indexer.index import mix_digest

DEVICE, HOST, DISK = Tier


def chain(blocks: Sequence[int], parent: PrefixHash | None = None) -> list[PrefixHash]:
    """PrefixHashes of a chain, one by one."""
    prefixes = []
    for block in blocks:
        parent = extend_prefix(parent, BlockHash(block))
        prefixes.append(parent)
    return prefixes


def hashes(blocks: Sequence[int]) -> list[BlockHash]:
    return [BlockHash(block) for block in blocks]


class Placements:
    """What the changes of a ledger add up to."""

    def __init__(self) -> None:
        self.held: set[tuple[Tier, PrefixHash]] = set()

    def apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            match change:
                case Placed(tier, _, prefixes):
                    fresh = {(tier, one) for one in prefixes}
                    assert len(fresh) == len(prefixes), "placed twice at once"
                    assert not fresh & self.held, "placed twice"
                    self.held |= fresh
                case Gone(tier, prefixes):
                    gone = {(tier, one) for one in prefixes}
                    assert gone <= self.held, "gone before it came"
                    self.held -= gone
                case Wiped():
                    self.held.clear()


def test_a_chain_is_placed_after_its_parent_and_extended() -> None:
    ledger = DynamoLedger()
    first = chain([10, 20])
    assert ledger.store(DEVICE, None, [1, 2], hashes([10, 20])) == [Placed(DEVICE, None, first)]
    more = chain([30], first[-1])
    assert ledger.store(DEVICE, 2, [3], hashes([30])) == [Placed(DEVICE, first[-1], more)]
    assert ledger.remove(DEVICE, [3, 1]) == [Gone(DEVICE, [more[0], first[0]])]
    assert list(ledger.placements()) == [(DEVICE, [first[1]]), (HOST, []), (DISK, [])]


def test_what_follows_an_unknown_parent_is_left_out_and_counted() -> None:
    ledger = DynamoLedger()
    assert ledger.store(DEVICE, 77, [1, 2], hashes([10, 20])) == []
    assert ledger.store(DEVICE, None, [3], hashes([30]), begins=False) == []
    assert ledger.dropped == {"unknown_parent": 3}
    assert (ledger.count(), len(ledger)) == (0, 0)


def test_a_name_that_means_something_else_is_forgotten_first() -> None:
    ledger = DynamoLedger()
    old, new = chain([10]), chain([20])
    ledger.store(DEVICE, None, [1], hashes([10]))
    ledger.store(HOST, None, [1], hashes([10]))
    changes = ledger.store(DEVICE, None, [1], hashes([20]))
    assert changes == [Gone(DEVICE, old), Gone(HOST, old), Placed(DEVICE, None, new)]
    assert ledger.dropped == {"renamed": 1}


def test_the_map_has_a_bound() -> None:
    ledger = DynamoLedger(blocks_max=2)
    ledger.store(DEVICE, None, [1, 2, 3, 4], hashes([10, 20, 30, 40]))
    assert (len(ledger), ledger.dropped) == (2, {"ledger_full": 2})
    ledger.store(DEVICE, None, [1], hashes([10]))
    assert ledger.dropped == {"ledger_full": 2}, "what is known needs no place"
    ledger.remove(DEVICE, [1])
    assert ledger.store(DEVICE, None, [5], hashes([50])) == [Placed(DEVICE, None, chain([50]))]


NAMES = st.integers(0, 9)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "wipe"]),
        st.sampled_from(list(Tier)),
        st.none() | NAMES,
        st.lists(NAMES, max_size=4),
    ),
    max_size=40,
)


@given(STEPS, st.integers(0, 2))
def test_the_ledger_is_the_set_of_what_was_told(
    steps: list[tuple[str, Tier, int | None, list[int]]], contents: int
) -> None:
    """contents: of how many blocks each name's comes; with few, names share prefixes."""
    ledger = DynamoLedger()
    told = Placements()
    names: dict[tuple[Tier, int], PrefixHash] = {}
    dropped = Counter[str]()

    def meaning(name: int) -> PrefixHash | None:
        return next((names[tier, name] for tier in Tier if (tier, name) in names), None)

    for what, tier, parent, some in steps:
        match what:
            case "store":
                told.apply(
                    ledger.store(
                        tier, parent, some, hashes([name % (contents + 2) for name in some])
                    )
                )
                before = None if parent is None else meaning(parent)
                if parent is not None and before is None:
                    dropped["unknown_parent"] += len(some)
                    continue
                for name in some:
                    before = extend_prefix(before, BlockHash(name % (contents + 2)))
                    if meaning(name) not in (None, before):
                        dropped["renamed"] += 1
                        for other in Tier:
                            names.pop((other, name), None)
                    names[tier, name] = before
            case "remove":
                told.apply(ledger.remove(tier, some))
                for name in some:
                    dropped["unknown_removal"] += names.pop((tier, name), None) is None
            case _:
                told.apply(ledger.wipe())
                names.clear()
        held = {(tier, prefix) for (tier, _), prefix in names.items()}
        assert told.held == held
        assert {(tier, one) for tier, all_of in ledger.placements() for one in all_of} == held
        assert (ledger.count(), len(ledger)) == (len(held), len({name for _, name in names}))
        xors = [0, 0, 0]
        for tier, prefix in held:
            xors[tier] ^= prefix
        assert ledger.digest() == mix_digest(*xors)
        assert +ledger.dropped == +dropped
