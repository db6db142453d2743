# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The native twin of indexer.hashing and indexer.reference: buffers in, arrays out.

The algorithms stand in native/xxh3.h and native/block_table.h; this file checks arguments and lets
go of the GIL where work is long. One writer: an index must not be used by two threads at once.
"""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

import secrets

import numpy as np

from indexer.identity import Tier
from indexer.index import IndexStats, Match, mix_digest

cdef extern from "native/block_table.h" nogil:
    const uint64_t NO_MEMORY
    ctypedef struct Holder:
        uint64_t count, digest
    ctypedef struct Table:
        uint64_t entries, bytes
        Holder *holders
        uint32_t *slots
        uint32_t slots_used
    int table_init(Table *, uint64_t)
    void table_free(Table *)
    int table_reserve_slots(Table *, uint32_t)
    uint64_t table_store(Table *, uint32_t, int, const uint64_t *, size_t)
    uint64_t table_remove(Table *, uint32_t, int, const uint64_t *, size_t)
    uint64_t table_retire(Table *, uint32_t, int)
    int table_match(Table *, const uint64_t *, size_t, int32_t *)
    int table_has_dead(const Table *)
    int table_sweep(Table *, uint64_t)
    void xxh3_blocks(const uint8_t *, size_t, size_t, uint64_t, uint64_t *)
    void xxh3_chain(const uint64_t *, size_t, int, uint64_t, uint64_t, uint64_t *)
    void xxh3_secret(uint64_t, uint8_t *)
    uint64_t xxh3_64(const uint8_t *, size_t, uint64_t, const uint8_t *)

DEF TIERS = 3
cdef uint64_t CHAIN_SEED = 1337
cdef size_t LONG_WORK = 256
"""Blocks from which on letting go of the GIL costs less than holding it."""
cdef uint64_t SWEPT_AT_ONCE = 1 << 15
"""Entries (about 0.1 ms) that forgetting a worker may look at before it returns."""


def xxh3(const uint8_t[::1] data not None, uint64_t seed=0):
    """XXH3-64 of some bytes."""
    cdef uint8_t secret[192]
    xxh3_secret(seed, secret)
    return xxh3_64(&data[0] if data.shape[0] else secret, data.shape[0], seed, secret)


def block_hashes(const uint8_t[::1] token_bytes not None, Py_ssize_t block_size, uint64_t seed):
    """BlockHashes of the full blocks of little-endian u32 tokens; raises ValueError."""
    if block_size < 1:
        raise ValueError(f"no block size: {block_size}")
    cdef size_t block_bytes = 4 * <size_t>block_size
    cdef size_t count = <size_t>token_bytes.shape[0] // block_bytes
    hashes = np.empty(count, np.uint64)
    if not count:
        return hashes
    cdef uint64_t[::1] out = hashes
    if count < LONG_WORK:
        xxh3_blocks(&token_bytes[0], count, block_bytes, seed, &out[0])
    else:
        with nogil:
            xxh3_blocks(&token_bytes[0], count, block_bytes, seed, &out[0])
    return hashes


def prefix_hashes(const uint64_t[::1] blocks not None, parent=None):
    """PrefixHashes of a chain of BlockHashes that goes on after `parent`, if there is one."""
    cdef size_t count = blocks.shape[0]
    chain = np.empty(count, np.uint64)
    if not count:
        return chain
    cdef uint64_t[::1] out = chain
    cdef int has_parent = parent is not None
    cdef uint64_t before = parent if has_parent else 0
    xxh3_chain(&blocks[0], count, has_parent, before, CHAIN_SEED, &out[0])
    return chain


cdef class NativeIndex:
    """The overlap index: see indexer.index.BlockIndex, whose behaviour suite it passes.

    `stats().blocks` counts what forgotten workers held until `sweep` has passed.
    """

    cdef Table _table
    cdef list _free_slots

    def __cinit__(self):
        if table_init(&self._table, secrets.randbits(64) | 1):
            raise MemoryError
        self._free_slots = []

    def __dealloc__(self):
        table_free(&self._table)

    def __repr__(self):
        stats = self.stats()
        slots = self._table.slots_used - len(self._free_slots)
        return f"<NativeIndex {stats.blocks} blocks, {stats.placements} placed, {slots} slots>"

    def open_slot(self):
        if self._free_slots:
            return self._free_slots.pop()
        if table_reserve_slots(&self._table, self._table.slots_used + 1):
            raise MemoryError
        return self._table.slots_used - 1

    def forget(self, slot):
        dropped = self.clear(slot)
        self._free_slots.append(slot)
        return dropped

    def store(self, slot, tier, const uint64_t[::1] hashes not None):
        cdef size_t count = hashes.shape[0]
        cdef uint32_t number = self._checked(slot)
        cdef int level = tier
        cdef uint64_t added
        if not count:
            return 0
        if count < LONG_WORK:
            added = table_store(&self._table, number, level, &hashes[0], count)
        else:
            with nogil:
                added = table_store(&self._table, number, level, &hashes[0], count)
        if added == NO_MEMORY:
            raise MemoryError
        return added

    def remove(self, slot, tier, const uint64_t[::1] hashes not None):
        cdef size_t count = hashes.shape[0]
        cdef uint32_t number = self._checked(slot)
        cdef int level = tier
        cdef uint64_t removed
        if not count:
            return 0
        if count < LONG_WORK:
            removed = table_remove(&self._table, number, level, &hashes[0], count)
        else:
            with nogil:
                removed = table_remove(&self._table, number, level, &hashes[0], count)
        if removed == NO_MEMORY:
            raise MemoryError
        return removed

    def clear(self, slot, tier=None):
        cdef uint32_t number = self._checked(slot)
        cdef uint64_t dropped = 0
        cdef int level
        for level in range(TIERS):
            if tier is None or tier == level:
                dropped += table_retire(&self._table, number, level)
        if dropped and self._table.entries <= SWEPT_AT_ONCE:
            table_sweep(&self._table, 2 * SWEPT_AT_ONCE)
        return dropped

    def sweep(self, uint64_t entries=SWEPT_AT_ONCE):
        """Frees what forgotten workers held, about so many entries' worth. True: there is more."""
        cdef int more
        with nogil:
            more = table_sweep(&self._table, entries)
        return bool(more)

    def match(self, const uint64_t[::1] hashes not None):
        cdef size_t count = hashes.shape[0]
        blocks = np.zeros((TIERS, self._table.slots_used), np.int32)
        if not count or not self._table.slots_used:
            return Match(blocks)
        cdef int32_t[:, ::1] out = blocks
        cdef int failed
        if count < LONG_WORK:
            failed = table_match(&self._table, &hashes[0], count, &out[0, 0])
        else:
            with nogil:
                failed = table_match(&self._table, &hashes[0], count, &out[0, 0])
        if failed:
            raise MemoryError
        return Match(blocks)

    def count(self, slot, tier=None):
        cdef uint32_t number = self._checked(slot)
        cdef uint32_t holder
        cdef uint64_t total = 0
        cdef int level
        for level in range(TIERS):
            holder = self._table.slots[number * TIERS + level]
            if holder and (tier is None or tier == level):
                total += self._table.holders[holder].count
        return total

    def digest(self, slot):
        cdef uint32_t number = self._checked(slot)
        cdef uint32_t holder
        cdef int level
        digests = [0, 0, 0]
        for level in range(TIERS):
            holder = self._table.slots[number * TIERS + level]
            if holder:
                digests[level] = self._table.holders[holder].digest
        return mix_digest(*digests)

    def stats(self):
        placements = sum(self.count(slot) for slot in range(self._table.slots_used))
        return IndexStats(self._table.entries, placements, self._table.bytes)

    cdef uint32_t _checked(self, slot) except? 0xFFFFFFFF:
        if not 0 <= slot < self._table.slots_used:
            raise IndexError(f"no slot {slot}")
        return slot
