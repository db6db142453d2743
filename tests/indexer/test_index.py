"""The behaviour of a BlockIndex: one suite, run on every implementation.

To add an implementation, add its constructor to IMPLEMENTATIONS.
"""

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from indexer.hashing import HashArray
from indexer.identity import Tier
from indexer.index import GENERATIONS, PREDICTED, BlockIndex, mix_digest
from indexer.kernel import NativeIndex
from indexer.reference import ReferenceIndex

IMPLEMENTATIONS: dict[str, Callable[[], BlockIndex]] = {
    "reference": ReferenceIndex,
    "native": NativeIndex,
}

DEVICE, HOST, DISK = Tier
U64 = (1 << 64) - 1


@pytest.fixture(params=IMPLEMENTATIONS)
def index(request: pytest.FixtureRequest) -> BlockIndex:
    return IMPLEMENTATIONS[request.param]()


def array(hashes: Iterable[int]) -> HashArray:
    return np.fromiter(hashes, np.uint64)


def chain(first: int, count: int) -> HashArray:
    return array(range(first, first + count))


def run_of(index: BlockIndex, slot: int, hashes: HashArray) -> int:
    return int(index.match(hashes).run()[slot])


def by_tier(index: BlockIndex, slot: int, hashes: HashArray) -> list[int]:
    return [int(count) for count in index.match(hashes).blocks[:, slot]]


def test_a_match_is_the_leading_blocks_that_a_slot_holds(index: BlockIndex) -> None:
    a, b = index.open_slot(), index.open_slot()
    index.store(a, DEVICE, chain(1, 5))
    index.store(b, DEVICE, chain(1, 2))
    assert index.match(chain(1, 8)).run().tolist() == [5, 2]
    assert index.match(chain(2, 3)).run().tolist() == [3, 1]
    assert index.match(chain(100, 3)).run().tolist() == [0, 0]


def test_a_match_never_crosses_a_hole(index: BlockIndex) -> None:
    slot = index.open_slot()
    index.store(slot, DEVICE, chain(1, 5))
    assert index.remove(slot, DEVICE, array([3])) == 1
    assert run_of(index, slot, chain(1, 5)) == 2
    index.store(slot, DEVICE, array([3]))
    assert run_of(index, slot, chain(1, 5)) == 5


def test_a_hole_of_one_slot_stops_no_other(index: BlockIndex) -> None:
    a, b = index.open_slot(), index.open_slot()
    index.store(a, DEVICE, array([1, 3, 4]))
    index.store(b, DEVICE, array([1, 2, 3]))
    assert index.match(chain(1, 4)).run().tolist() == [1, 3]


def test_a_hole_on_one_tier_is_filled_by_another(index: BlockIndex) -> None:
    slot = index.open_slot()
    index.store(slot, DEVICE, array([1, 2, 5]))
    index.store(slot, HOST, array([2, 3]))
    index.store(slot, DISK, array([3, 4]))
    assert by_tier(index, slot, chain(1, 6)) == [3, 1, 1, 0]


def test_each_block_counts_once_on_its_fastest_tier(index: BlockIndex) -> None:
    slot = index.open_slot()
    for tier in Tier:
        index.store(slot, tier, chain(1, 4))
    assert by_tier(index, slot, chain(1, 4)) == [4, 0, 0, 0]
    index.clear(slot, DEVICE)
    assert by_tier(index, slot, chain(1, 4)) == [0, 4, 0, 0]
    index.remove(slot, HOST, array([2]))
    assert by_tier(index, slot, chain(1, 4)) == [0, 3, 1, 0]


def test_a_prediction_fills_a_hole_and_counts_in_a_row_of_its_own(index: BlockIndex) -> None:
    slot = index.open_slot()
    index.store(slot, DEVICE, array([1, 2, 4]))
    before = (index.count(slot), index.digest(slot), index.told(slot))
    assert index.predict(slot, 0, chain(1, 5)) == 2  # what it holds needs no prediction
    assert index.predicted(slot) == 2
    assert by_tier(index, slot, chain(1, 6)) == [3, 0, 0, 2]
    assert (index.count(slot), index.digest(slot), index.told(slot)) == before


def test_a_store_ends_the_prediction_so_that_a_removal_leaves_nothing(index: BlockIndex) -> None:
    slot, other = index.open_slot(), index.open_slot()
    index.predict(slot, 0, chain(1, 3))
    index.predict(other, 1, chain(1, 3))
    assert index.store(slot, HOST, chain(1, 2)) == 2
    assert index.predicted(slot) == 1
    assert by_tier(index, slot, chain(1, 3)) == [0, 2, 0, 1]
    index.remove(slot, HOST, array([1]))
    assert run_of(index, slot, chain(1, 3)) == 0
    assert run_of(index, other, chain(1, 3)) == 3


def test_a_block_predicted_again_lives_as_long_as_the_later_prediction(index: BlockIndex) -> None:
    slot = index.open_slot()
    index.predict(slot, 0, chain(1, 4))
    assert index.predict(slot, 1, chain(1, 2)) == 2
    assert index.unpredict(slot, 0, chain(1, 4)) == 2
    assert run_of(index, slot, chain(1, 4)) == 2
    assert index.unpredict(slot, 1, chain(1, 4)) == 2
    assert index.predicted(slot) == 0
    assert index.stats().blocks == 0


def test_clearing_the_device_ends_predictions_and_clearing_the_host_does_not(
    index: BlockIndex,
) -> None:
    slot = index.open_slot()
    for tier, left in ((HOST, 2), (DEVICE, 0), (None, 0)):
        index.predict(slot, 0, chain(1, 2))
        assert index.clear(slot, tier) == 0
        assert index.predicted(slot) == run_of(index, slot, chain(1, 2)) == left
    index.predict(slot, 1, chain(1, 2))
    assert index.forget(slot) == 0
    assert index.predicted(index.open_slot()) == 0


def test_an_overlap_tells_the_run_and_what_is_usable_of_it_for_the_slots_asked_for(
    index: BlockIndex,
) -> None:
    a, b, c = (index.open_slot() for _ in range(3))
    index.store(a, DEVICE, chain(1, 4))
    index.store(b, HOST, chain(1, 2))
    index.predict(c, 1, chain(1, 3))
    rows = index.overlap(chain(1, 4), 3, np.array([c, a, b], np.intp))
    assert rows.dtype == np.int32
    assert rows.tolist() == [
        [3, 4, 2],
        [3, 3, 2],
        [0, 3, 0],
        [0, 0, 2],
        [0, 0, 0],
        [3, 0, 0],
    ]
    assert index.overlap(array([]), 0, np.array([a], np.intp)).tolist() == [[0]] * 6
    assert index.overlap(chain(1, 4), 4, np.array([], np.intp)).shape == (6, 0)


def test_an_empty_prompt_matches_nothing_on_every_slot(index: BlockIndex) -> None:
    index.open_slot()
    index.open_slot()
    found = index.match(array([]))
    assert found.blocks.shape == (len(Tier) + 1, 2)
    assert found.run().tolist() == [0, 0]


def test_an_index_without_slots_answers_with_an_empty_table(index: BlockIndex) -> None:
    assert index.match(chain(1, 3)).blocks.shape == (len(Tier) + 1, 0)
    assert index.stats()[:2] == (0, 0)


def test_a_match_is_a_table_of_int32_that_later_changes_leave_alone(index: BlockIndex) -> None:
    slot = index.open_slot()
    index.store(slot, DEVICE, chain(1, 3))
    found = index.match(chain(1, 3))
    index.clear(slot)
    assert found.blocks.dtype == np.int32
    assert found.run().dtype == np.int32
    assert found.run().tolist() == [3]


def test_a_repeated_block_in_a_prompt_counts_each_time(index: BlockIndex) -> None:
    slot = index.open_slot()
    index.store(slot, DEVICE, array([7]))
    assert run_of(index, slot, array([7, 7, 7])) == 3


def test_storing_what_is_there_changes_nothing(index: BlockIndex) -> None:
    slot = index.open_slot()
    assert index.store(slot, DEVICE, array([1, 2, 2, 1])) == 2
    before = (index.count(slot), index.digest(slot), index.stats())
    assert index.store(slot, DEVICE, array([2, 1])) == 0
    assert (index.count(slot), index.digest(slot), index.stats()) == before


def test_removing_what_is_not_there_changes_nothing(index: BlockIndex) -> None:
    slot, other = index.open_slot(), index.open_slot()
    index.store(slot, DEVICE, chain(1, 3))
    index.store(other, DEVICE, array([9]))
    before = (index.count(slot), index.digest(slot), index.stats())
    assert index.remove(slot, DEVICE, array([4, 9])) == 0
    assert index.remove(slot, HOST, chain(1, 3)) == 0
    assert (index.count(slot), index.digest(slot), index.stats()) == before
    assert index.remove(slot, DEVICE, array([1, 1])) == 1


def test_clearing_a_tier_leaves_the_others(index: BlockIndex) -> None:
    slot = index.open_slot()
    index.store(slot, DEVICE, chain(1, 4))
    index.store(slot, HOST, chain(1, 2))
    assert index.clear(slot, DEVICE) == 4
    assert index.count(slot) == index.count(slot, HOST) == 2
    assert index.count(slot, DEVICE) == 0
    assert run_of(index, slot, chain(1, 4)) == 2


def test_clearing_leaves_no_trace(index: BlockIndex) -> None:
    slot, other = index.open_slot(), index.open_slot()
    index.store(other, HOST, chain(3, 3))
    clean = (index.stats()[:2], index.digest(other), index.match(chain(1, 9)).blocks.tolist())
    index.store(slot, DEVICE, chain(1, 9))
    index.store(slot, DISK, chain(1, 4))
    assert index.clear(slot) == 13
    assert index.digest(slot) == index.count(slot) == 0
    after = (index.stats()[:2], index.digest(other), index.match(chain(1, 9)).blocks.tolist())
    assert after == clean
    assert index.clear(slot) == 0


def test_forgetting_leaves_no_trace_and_gives_the_slot_back(index: BlockIndex) -> None:
    a, b = index.open_slot(), index.open_slot()
    index.store(a, DEVICE, chain(1, 3))
    index.store(b, DEVICE, chain(1, 1))
    assert index.forget(a) == 3
    assert index.stats()[:2] == (1, 1)
    again = index.open_slot()
    assert again == a
    assert index.count(again) == index.digest(again) == 0
    assert index.match(chain(1, 3)).run().tolist() == [0, 1]
    assert index.open_slot() == 2


def test_slots_count_from_0_without_holes(index: BlockIndex) -> None:
    assert [index.open_slot() for _ in range(5)] == [0, 1, 2, 3, 4]
    index.forget(3)
    index.forget(1)
    assert {index.open_slot(), index.open_slot()} == {1, 3}
    assert index.open_slot() == 5


def test_the_ends_of_the_number_range_are_hashes_like_others(index: BlockIndex) -> None:
    slot = index.open_slot()
    ends = array([0, U64, 1 << 63])
    assert index.store(slot, DISK, ends) == 3
    assert run_of(index, slot, ends) == 3
    assert index.digest(slot) == mix_digest(0, 0, U64 ^ 1 << 63)
    assert index.remove(slot, DISK, ends) == 3


def test_an_array_that_a_message_owns_may_be_stored(index: BlockIndex) -> None:
    slot = index.open_slot()
    packed = np.frombuffer(bytes(range(16)), "<u8")  # read only
    assert index.store(slot, DEVICE, packed) == 2
    assert run_of(index, slot, packed) == 2


def test_the_digest_shows_a_block_that_changed_its_tier() -> None:
    assert mix_digest(5, 0, 0) == 5
    assert mix_digest(0, 1, 0) == 1 << 21
    assert mix_digest(0, 0, 1) == 1 << 42
    assert mix_digest(0, 1 << 63, 0) == 1 << 20
    assert mix_digest(0, 0, 1 << 63) == 1 << 41
    assert mix_digest(3, 3, 3) == 3 ^ 3 << 21 ^ 3 << 42


Held = dict[int, dict[Tier, set[int]]]
Predicted = dict[int, list[set[int]]]

few = st.lists(st.integers(1, 12), max_size=6)
tiers = st.sampled_from(Tier)


class AgainstSets(RuleBasedStateMachine):
    """The index beside a dict of sets."""

    make: Callable[[], BlockIndex]

    @initialize()
    def start(self) -> None:
        self.index = type(self).make()
        self.held: Held = {}
        self.predicted: Predicted = {}
        self.slots = 0

    def pick(self, number: int) -> int:
        return sorted(self.held)[number % len(self.held)]

    @rule()
    def open(self) -> None:
        slot = self.index.open_slot()
        assert slot not in self.held
        self.slots = max(self.slots, slot + 1)
        self.held[slot] = {tier: set() for tier in Tier}
        self.predicted[slot] = [set() for _ in range(GENERATIONS)]

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99))
    def forget(self, number: int) -> None:
        slot = self.pick(number)
        del self.predicted[slot]
        assert self.index.forget(slot) == sum(map(len, self.held.pop(slot).values()))

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99), tier=tiers, hashes=few)
    def store(self, number: int, tier: Tier, hashes: list[int]) -> None:
        held = self.held[self.pick(number)][tier]
        assert self.index.store(self.pick(number), tier, array(hashes)) == len(set(hashes) - held)
        held |= set(hashes)
        for generation in self.predicted[self.pick(number)]:
            generation -= set(hashes)

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99), generation=st.integers(0, 1), hashes=few)
    def predict(self, number: int, generation: int, hashes: list[int]) -> None:
        slot = self.pick(number)
        new = set(hashes).difference(*self.held[slot].values())
        new -= self.predicted[slot][generation]
        assert self.index.predict(slot, generation, array(hashes)) == len(new)
        self.predicted[slot][generation] |= new
        self.predicted[slot][1 - generation] -= new

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99), generation=st.integers(0, 1), hashes=few)
    def unpredict(self, number: int, generation: int, hashes: list[int]) -> None:
        predicted = self.predicted[self.pick(number)][generation]
        ended = len(set(hashes) & predicted)
        assert self.index.unpredict(self.pick(number), generation, array(hashes)) == ended
        predicted -= set(hashes)

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99), tier=tiers, hashes=few)
    def remove(self, number: int, tier: Tier, hashes: list[int]) -> None:
        held = self.held[self.pick(number)][tier]
        assert self.index.remove(self.pick(number), tier, array(hashes)) == len(set(hashes) & held)
        held -= set(hashes)

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99), tier=tiers | st.none())
    def clear(self, number: int, tier: Tier | None) -> None:
        cleared = [
            held
            for one, held in self.held[self.pick(number)].items()
            if tier is None or one is tier
        ]
        assert self.index.clear(self.pick(number), tier) == sum(map(len, cleared))
        for held in cleared:
            held.clear()
        if tier in (None, DEVICE):
            for generation in self.predicted[self.pick(number)]:
                generation.clear()

    @rule(prompt=few)
    def match(self, prompt: list[int]) -> None:
        blocks = self.index.match(array(prompt)).blocks
        expected = np.zeros((PREDICTED + 1, self.slots), np.int32)
        for slot, held in self.held.items():
            rows = [*held.values(), set().union(*self.predicted[slot])]
            for block in prompt:
                row = next((i for i, blocks in enumerate(rows) if block in blocks), None)
                if row is None:
                    break
                expected[row, slot] += 1
        assert blocks.tolist() == expected.tolist()

    @invariant()
    def counts_digests_and_stats_are_those_of_the_sets(self) -> None:
        for slot, held in self.held.items():
            assert self.index.count(slot) == self.index.told(slot) == sum(map(len, held.values()))
            assert self.index.predicted(slot) == sum(map(len, self.predicted[slot]))
            xors = []
            for tier in Tier:
                assert self.index.count(slot, tier) == len(held[tier])
                xors.append(int(np.bitwise_xor.reduce(array(held[tier]))))
            assert self.index.digest(slot) == mix_digest(*xors)
        stats = self.index.stats()
        every = [blocks for held in self.held.values() for blocks in held.values()]
        guessed = [blocks for both in self.predicted.values() for blocks in both]
        assert stats.blocks == len(set().union(*every, *guessed))
        assert stats.placements == sum(map(len, every))
        assert stats.bytes >= 8 * stats.placements


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_index_answers_like_a_dict_of_sets(name: str) -> None:
    machine = type("Machine", (AgainstSets,), {"make": staticmethod(IMPLEMENTATIONS[name])})
    run_state_machine_as_test(
        machine,
        settings=settings(
            derandomize=True, deadline=None, max_examples=60, stateful_step_count=40, database=None
        ),
    )
