"""The native kernel against its plain-Python twin and the xxhash package."""

import random
from collections import Counter

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from indexer import kernel, reference
from indexer.identity import HashArray, Tier
from indexer.index import PREDICTED
from indexer.reference import ReferenceIndex

SEED = 20261121


def keys(count: int, seed: int = SEED) -> HashArray:
    return np.random.default_rng(seed).integers(0, 1 << 64, count, dtype=np.uint64)


def test_xxh3_equals_the_package_at_every_length_class_and_its_edges() -> None:
    rng = random.Random(SEED)
    lengths = [*range(300), 511, 512, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 5000]
    for length in lengths:
        data = rng.randbytes(length)
        for seed in (0, 1337, rng.getrandbits(64)):
            expected = xxhash.xxh3_64_intdigest(data, seed)
            assert kernel.xxh3(data, seed) == expected, (length, seed)


@pytest.mark.parametrize("block_size", [1, 3, 16, 31, 32, 60, 61, 64, 256, 300])
def test_hashes_equal_the_twins_for_any_block_size_seed_and_parent(block_size: int) -> None:
    rng = random.Random(SEED)
    tokens = rng.randbytes(4 * 2000 + 3)
    for seed in (1337, rng.getrandbits(64)):
        blocks = kernel.block_hashes(tokens, block_size, seed)
        assert blocks.tolist() == reference.block_hashes(tokens, block_size, seed).tolist()
        whole = reference.prefix_hashes(blocks).tolist()
        assert kernel.token_prefixes(memoryview(tokens), block_size, seed).tolist() == whole
        for parent in (None, 0, rng.getrandbits(64)):
            chain = kernel.prefix_hashes(blocks, parent)
            twin = reference.prefix_hashes(blocks, parent)  # type: ignore[arg-type]
            assert chain.tolist() == twin.tolist()


def test_a_prompt_shorter_than_a_block_has_no_hashes() -> None:
    assert kernel.block_hashes(b"", 16, 1337).tolist() == []
    assert kernel.block_hashes(bytes(63), 16, 1337).tolist() == []
    assert kernel.prefix_hashes(np.empty(0, np.uint64)).tolist() == []
    assert kernel.token_prefixes(bytes(63), 16, 1337).tolist() == []
    for hashes in (kernel.block_hashes, kernel.token_prefixes):
        with pytest.raises(ValueError, match="no block size"):
            hashes(bytes(64), 0, 1337)


def test_a_slot_that_was_never_opened_is_refused() -> None:
    index = kernel.NativeIndex()
    for slot in (0, -1, 5):
        with pytest.raises(IndexError):
            index.store(slot, Tier.DEVICE, keys(1))
    index.open_slot()
    with pytest.raises(IndexError):
        index.count(1)


class Twins:
    """The same operations on both; answers must agree after each."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.native = kernel.NativeIndex()
        self.twin = ReferenceIndex()
        self.slots: list[int] = []
        self.universe = keys(rng.choice([5, 60, 2000]), rng.randrange(1 << 32))

    def some_keys(self) -> HashArray:
        start = self.rng.randrange(len(self.universe))
        return self.universe[start : start + self.rng.choice([1, 4, 30, 400])]

    def step(self) -> None:
        rng, native, twin = self.rng, self.native, self.twin
        what = rng.random()
        if not self.slots or (what < 0.1 and len(self.slots) < 80):
            slot = native.open_slot()
            assert twin.open_slot() == slot
            self.slots.append(slot)
            return
        slot, tier, some = rng.choice(self.slots), rng.choice(list(Tier)), self.some_keys()
        if what < 0.55:
            assert native.store(slot, tier, some) == twin.store(slot, tier, some)
        elif what < 0.8:
            assert native.remove(slot, tier, some) == twin.remove(slot, tier, some)
        elif what < 0.88:
            generation = rng.randrange(2)
            change = rng.choice(["predict", "predict", "unpredict"])
            ours = getattr(native, change)(slot, generation, some)
            assert ours == getattr(twin, change)(slot, generation, some)
        elif what < 0.9:
            one = rng.choice([tier, None])
            assert native.clear(slot, one) == twin.clear(slot, one)
        elif what < 0.93:
            assert native.forget(slot) == twin.forget(slot)
            self.slots.remove(slot)
        else:
            native.sweep(rng.choice([100, 100_000]))
            self.compare(some)

    def compare(self, prompt: HashArray) -> None:
        native, twin = self.native.match(prompt).blocks, self.twin.match(prompt).blocks
        slots = np.array(self.rng.sample(self.slots, len(self.slots)), np.intp)
        usable_max = self.rng.randrange(len(prompt) + 2)
        unit = self.rng.choice([1, 16, 784])
        ours = self.native.overlap(prompt, usable_max, slots, unit)
        assert ours.tolist() == self.twin.overlap(prompt, usable_max, slots, unit).tolist()
        for slot in self.slots:
            assert native[:, slot].tolist() == twin[:, slot].tolist()
            assert self.native.digest(slot) == self.twin.digest(slot)
            assert self.native.predicted(slot) == self.twin.predicted(slot)
            assert self.native.whole(slot)
            for tier in Tier:
                assert self.native.count(slot, tier) == self.twin.count(slot, tier)

    def finish(self) -> None:
        self.compare(self.universe)
        while self.native.sweep(1 << 30):
            pass
        native, twin = self.native.stats(), self.twin.stats()
        assert (native.blocks, native.placements) == (twin.blocks, twin.placements)


@pytest.mark.parametrize("seed", range(SEED, SEED + 60))
def test_random_operations_leave_both_alike(seed: int) -> None:
    twins = Twins(random.Random(seed))
    for _ in range(400):
        twins.step()
    twins.finish()


def test_memory_returns_to_what_it_was_after_a_churn_of_shared_blocks() -> None:
    index = kernel.NativeIndex()
    slots = [index.open_slot() for _ in range(70)]
    chain = keys(3000)
    sizes = []
    for _ in range(3):
        for i, slot in enumerate(slots):
            index.store(slot, Tier.DEVICE, chain[: len(chain) * (i + 1) // len(slots)])
        for slot in slots:
            index.remove(slot, Tier.DEVICE, chain)
        assert index.stats()[:2] == (0, 0)
        sizes.append(index.stats().bytes)
    assert sizes[0] == sizes[1] == sizes[2]


def test_blocks_held_by_all_cost_less_than_a_byte_a_holder() -> None:
    index = kernel.NativeIndex()
    slots = [index.open_slot() for _ in range(64)]
    empty = index.stats().bytes
    for slot in slots:
        index.store(slot, Tier.DEVICE, keys(20_000))
    stats = index.stats()
    assert (stats.blocks, stats.placements) == (20_000, 64 * 20_000)
    assert (stats.bytes - empty) / stats.placements < 1.0


def test_a_forgotten_worker_is_gone_at_once_and_its_memory_in_slices() -> None:
    index = kernel.NativeIndex()
    kept, gone = index.open_slot(), index.open_slot()
    chain = keys(200_000)
    index.store(kept, Tier.DEVICE, chain[:1000])
    index.store(gone, Tier.DEVICE, chain)
    assert index.forget(gone) == 200_000
    assert index.match(chain).run().tolist() == [1000, 0]
    assert index.stats().placements == 1000
    slices = 1
    while index.sweep(10_000):
        slices += 1
    assert slices > 10
    assert index.stats()[:2] == (1000, 1000)
    again = index.open_slot()
    assert again == gone
    assert index.count(again) == 0


def test_a_slot_that_is_used_again_while_its_last_owner_is_swept_starts_empty() -> None:
    index = kernel.NativeIndex()
    slot = index.open_slot()
    chain = keys(100_000)
    for start in range(0, 100_000, 25_000):
        index.store(slot, Tier.DEVICE, chain)
        index.clear(slot)
        index.store(slot, Tier.HOST, chain[start : start + 10])
        index.sweep(1000)
        assert index.count(slot) == 10
        assert index.match(chain[start:]).blocks[:, slot].tolist() == [0, 10, 0, 0]
        index.clear(slot)
    while index.sweep():
        pass
    assert index.stats()[:2] == (0, 0)


def test_the_repr_tells_what_is_in_it() -> None:
    index = kernel.NativeIndex()
    index.store(index.open_slot(), Tier.DISK, keys(7))
    assert repr(index) == "<NativeIndex 7 blocks, 7 placed, 1 slots>"


class Limited(Twins):
    """An index that forgets beside one that does not: it knows less, and never anything wrong."""

    def __init__(self, rng: random.Random, bytes_max: int | None, share_max: int | None) -> None:
        super().__init__(rng)
        self.native = kernel.NativeIndex(bytes_max, share_max)
        self.told: dict[int, set[tuple[Tier, int]]] = {}

    @override
    def step(self) -> None:
        """As engines are told of: what is there is not stored again, nor removed what is not."""
        rng, native, twin = self.rng, self.native, self.twin
        if len(self.slots) < 6:
            self.slots.append(native.open_slot())
            assert twin.open_slot() == self.slots[-1]
            return
        slot, tier, some = rng.choice(self.slots), rng.choice(list(Tier)), self.some_keys()
        there = self.told.setdefault(slot, set())
        what = rng.random()
        if what < 0.6:
            new = [one for one in dict.fromkeys(some.tolist()) if (tier, one) not in there]
            there.update((tier, one) for one in new)
            fact = np.array(new, np.uint64)
            native.store(slot, tier, fact)
            twin.store(slot, tier, fact)
        elif what < 0.85:
            gone = [one for one in dict.fromkeys(some.tolist()) if (tier, one) in there]
            there.difference_update((tier, one) for one in gone)
            fact = np.array(gone, np.uint64)
            assert native.remove(slot, tier, fact) == twin.remove(slot, tier, fact)
        elif what < 0.9:
            native.predict(slot, rng.randrange(2), some)
        elif what < 0.92:
            there.clear()
            native.clear(slot)
            twin.clear(slot)
        else:
            native.sweep(100)
            self.compare(some)

    @override
    def compare(self, prompt: HashArray) -> None:
        known, there = self.native.match(prompt).blocks, self.twin.match(prompt).run()
        for slot in self.slots:
            if not known[PREDICTED, slot]:
                assert known[:PREDICTED, slot].sum() <= there[slot]
            assert self.native.digest(slot) == self.twin.digest(slot)
            assert self.native.told(slot) == self.twin.count(slot)
            assert self.native.count(slot) <= self.twin.count(slot)

    @override
    def finish(self) -> None:
        self.compare(self.universe)
        for slot in self.slots:  # what it holds, it was told
            held = [one for one in self.universe if self.native.match(one[None]).run()[slot]]
            told = {one for _, one in self.told.get(slot, ())}
            assert len(told.intersection(map(int, held))) + self.native.predicted(slot) >= len(held)


@pytest.mark.parametrize("seed", range(SEED, SEED + 40))
def test_an_index_with_limits_knows_a_part_of_what_is_true(seed: int) -> None:
    rng = random.Random(seed)
    bytes_max = rng.choice([None, 8_000, 60_000])
    limited = Limited(rng, bytes_max, rng.choice([None, 50, 700]))
    for _ in range(400):
        limited.step()
    limited.finish()


@pytest.mark.parametrize("pattern", ["chains", "lone blocks", "a set for each block"])
def test_the_index_stays_within_its_bytes_whatever_is_stored(pattern: str) -> None:
    limit = 3 << 20
    rng = np.random.default_rng(SEED)
    index = kernel.NativeIndex(limit)
    slots = [index.open_slot() for _ in range(40)]
    shared = keys(40_000)
    for i, slot in enumerate(slots * 5):
        match pattern:
            case "chains":
                index.store(slot, Tier.DEVICE, keys(2000, i))
            case "lone blocks":
                for one in keys(2000, i):
                    index.store(slot, Tier.HOST, one[None])
            case _:
                index.clear(slot)
                index.store(slot, Tier.DEVICE, shared[rng.random(len(shared)) < 0.5])
        assert index.stats().bytes <= 1.1 * limit
        index.sweep(1 << 30)
    assert index.stats().forgotten > 0
    assert all(index.count(slot) <= index.told(slot) for slot in slots)
    assert [index.whole(slot) for slot in slots] == [
        index.count(slot) == index.told(slot) for slot in slots
    ]
    assert not all(map(index.whole, slots))


def test_what_is_matched_is_kept_and_what_nobody_asks_for_is_forgotten() -> None:
    index = kernel.NativeIndex(4 << 20)
    slot = index.open_slot()
    hot = keys(2000)
    index.store(slot, Tier.DEVICE, hot)
    for i in range(1, 400):
        index.store(slot, Tier.DEVICE, keys(1000, i))
        assert index.match(hot).run()[slot] == 2000
    assert index.stats().forgotten > 200_000
    assert index.told(slot) == 2000 + 399 * 1000


def test_a_worker_over_its_share_loses_its_own_and_nobody_elses() -> None:
    index = kernel.NativeIndex(share_max=5000)
    greedy, modest = index.open_slot(), index.open_slot()
    index.store(modest, Tier.DEVICE, keys(1000, 1))
    for i in range(2, 30):
        index.store(greedy, Tier.DEVICE, keys(1000, i))
        index.store(greedy, Tier.HOST, keys(100, i))
    assert index.count(greedy) == 5000
    assert index.told(greedy) == 28 * 1100
    assert index.match(keys(1000, 1)).run()[modest] == 1000
    assert index.stats().forgotten == 28 * 1100 - 5000
    for i in range(2, 30):
        assert index.remove(greedy, Tier.DEVICE, keys(1000, i)) == 1000
    assert index.remove(greedy, Tier.HOST, keys(100, 5)) == 100


def test_a_pool_that_has_become_thin_is_filled_again() -> None:
    index = kernel.NativeIndex()
    slot = index.open_slot()
    rng = np.random.default_rng(SEED)
    kept = keys(0)
    sizes = []
    for i in range(12):
        chain = keys(60_000, i)
        index.store(slot, Tier.DEVICE, chain)
        stays = rng.random(len(chain)) < 0.2
        index.remove(slot, Tier.DEVICE, chain[~stays])
        kept = np.concatenate([kept, chain[stays]])
        if i >= 6:  # what stayed a while ago goes, block by block
            index.remove(slot, Tier.DEVICE, kept[:12_000])
            kept = kept[12_000:]
        sizes.append(index.stats().bytes)
    assert index.count(slot) == len(kept)
    assert all(index.match(one[None]).run()[slot] for one in kept[::97])
    assert sizes[-1] <= 1.25 * sizes[6]
    assert sizes[-1] < 120 * len(kept)


def test_users_of_blocks_are_counted_block_by_block() -> None:
    users = kernel.BlockUsers()
    rng = random.Random(SEED)
    expected: Counter[int] = Counter()
    trunks = [keys(1500)]
    opened: list[HashArray] = []
    for i in range(900):
        if opened and rng.random() < 0.45:
            chain = opened.pop(rng.randrange(len(opened)))
            users.close(chain)
            expected.subtract(chain.tolist())
        else:
            trunk = rng.choice(trunks)
            shared = trunk[: rng.choice([0, 1, 2, rng.randrange(1500), len(trunk)])]
            own = keys(rng.choice([0, 0, 1, 20, 500]), seed=1000 + i)
            chain = np.concatenate([shared, own])
            if len(chain):
                trunks = [*trunks[-20:], chain]
            opened.append(chain)
            users.open(chain)
            expected.update(chain.tolist())
        expected = +expected
        assert len(users) == len(expected)
        probe = rng.choice(trunks)
        used = [key in expected for key in probe.tolist()]
        assert users.leading(probe) == (used.index(False) if False in used else len(used))
    for chain in opened:
        users.close(chain)
    assert len(users) == 0


@given(
    lives=st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.integers(0, 3), max_size=12)), max_size=60
    )
)
@settings(derandomize=True, deadline=None, max_examples=400)
def test_chosen_hashes_are_counted_and_end_at_zero(lives: list[tuple[int, list[int]]]) -> None:
    """A caller may send any hashes in any order: a block is what stands before it, and itself."""
    users = kernel.BlockUsers()
    opened: list[list[int]] = []
    for choice, chain in lives:
        if opened and choice < 4:
            users.close(np.array(opened.pop(choice % len(opened)), np.uint64))
        else:
            opened.append(chain)
            users.open(np.array(chain, np.uint64))
        used = {tuple(one[:end]) for one in opened for end in range(1, len(one) + 1)}
        assert len(users) == len(used)
        known = [tuple(chain[:end]) in used for end in range(1, len(chain) + 1)]
        assert users.leading(np.array(chain, np.uint64)) == [*known, False].index(False)
    for one in reversed(opened):
        users.close(np.array(one, np.uint64))
    assert len(users) == 0


def test_nine_requests_with_chosen_hashes_leave_no_block_in_use() -> None:
    """A long prompt; others that begin with its later hashes; others that leave it there."""
    users = kernel.BlockUsers()
    long = keys(30_000)
    beginning = [long[i : i + 1] for i in range(1, 5)]
    leaving = [np.concatenate([long[:i], keys(30_000, seed=i)]) for i in range(1, 5)]
    for chain in (long, *beginning, *leaving):
        users.open(chain)
    for chain in (*beginning, *leaving, long):
        users.close(chain)
    assert len(users) == 0
    assert users.leading(long) == 0


def test_a_long_prompt_that_is_split_at_every_block_is_whole_again() -> None:
    users = kernel.BlockUsers()
    chain = keys(2_000)
    users.open(chain)
    for end in range(1, 2_000):
        users.open(chain[:end])
        assert len(users) == users.leading(chain) == len(chain)
    users.close(chain)
    for end in range(1, 2_000):
        assert users.leading(chain) == 1_999
        users.close(chain[:end])
    assert len(users) == 0


def test_the_used_blocks_of_a_chain_are_counted_from_its_first_on() -> None:
    users = kernel.BlockUsers()
    chain = keys(1000)
    assert users.leading(chain) == users.leading(chain[:0]) == 0
    for longest in (1, 7, 512, 999, 1000):
        users.open(chain[:longest])
        assert [users.leading(chain[:asked]) for asked in (0, 1, 8, 600, 1000)] == [
            min(asked, longest) for asked in (0, 1, 8, 600, 1000)
        ]
    for longest in (1000, 999):
        users.close(chain[:longest])
    assert users.leading(chain) == 512


@pytest.mark.parametrize("seed", range(SEED, SEED + 20))
def test_an_overlap_is_the_reference_s_wherever_what_is_usable_ends(seed: int) -> None:
    rng = random.Random(seed)
    native, reference = kernel.NativeIndex(), ReferenceIndex()
    both = (native, reference)
    slots = range(rng.choice([2, 5, 70]))
    for index in both:
        assert [index.open_slot() for _ in slots] == list(slots)
    prompt = keys(12, seed)
    for _ in range(rng.randrange(150)):
        slot, tier = rng.choice(slots), rng.choice(list(Tier))
        some = prompt[rng.choice([0, 0, 0, 5]) : rng.randrange(13)]
        what = rng.randrange(8)
        for index in both:
            match what:
                case 0:
                    index.clear(slot)
                case 1:
                    index.remove(slot, tier, some[-1:])
                case 2:
                    index.predict(slot, 0, some)
                case _:
                    index.store(slot, tier, some)
    asked = np.array(rng.sample(slots, rng.randrange(1, len(slots) + 1)), np.intp)
    for count in range(13):
        for usable in range(13):
            found, expected = (index.overlap(prompt[:count], usable, asked) for index in both)
            assert found.tolist() == expected.tolist()


def test_an_overlap_of_slots_that_were_never_opened_is_refused() -> None:
    index = kernel.NativeIndex()
    index.open_slot()
    for slot in (1, -1):
        with pytest.raises(IndexError):
            index.overlap(keys(3), 3, np.array([0, slot]))


def test_an_overlap_takes_arrays_of_64_bits() -> None:
    index = kernel.NativeIndex()
    slots = np.array([index.open_slot()], np.intp)
    with pytest.raises(ValueError, match="of 4 bytes, not of 8"):
        index.overlap(keys(4).astype(np.uint32), 4, slots)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of 4 bytes, not of 8"):
        index.overlap(keys(4), 4, slots.astype(np.int32))  # type: ignore[arg-type]
