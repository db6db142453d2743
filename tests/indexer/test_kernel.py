"""The native kernel against its plain-Python twin and the xxhash package."""

import random

import numpy as np
import pytest
import xxhash

from indexer import kernel, reference
from indexer.identity import HashArray, Tier
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
        for parent in (None, 0, rng.getrandbits(64)):
            chain = kernel.prefix_hashes(blocks, parent)
            twin = reference.prefix_hashes(blocks, parent)  # type: ignore[arg-type]
            assert chain.tolist() == twin.tolist()


def test_a_prompt_shorter_than_a_block_has_no_hashes() -> None:
    assert kernel.block_hashes(b"", 16, 1337).tolist() == []
    assert kernel.block_hashes(bytes(63), 16, 1337).tolist() == []
    assert kernel.prefix_hashes(np.empty(0, np.uint64)).tolist() == []
    with pytest.raises(ValueError, match="no block size"):
        kernel.block_hashes(bytes(64), 0, 1337)


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
        if what < 0.6:
            assert native.store(slot, tier, some) == twin.store(slot, tier, some)
        elif what < 0.85:
            assert native.remove(slot, tier, some) == twin.remove(slot, tier, some)
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
        for slot in self.slots:
            assert native[:, slot].tolist() == twin[:, slot].tolist()
            assert self.native.digest(slot) == self.twin.digest(slot)
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
    while index.sweep(50_000):
        slices += 1
    assert slices > 3
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
        index.sweep(10_000)
        assert index.count(slot) == 10
        assert index.match(chain[start:]).blocks[:, slot].tolist() == [0, 10, 0]
        index.clear(slot)
    while index.sweep():
        pass
    assert index.stats()[:2] == (0, 0)


def test_the_repr_tells_what_is_in_it() -> None:
    index = kernel.NativeIndex()
    index.store(index.open_slot(), Tier.DISK, keys(7))
    assert repr(index) == "<NativeIndex 7 blocks, 7 placed, 1 slots>"
