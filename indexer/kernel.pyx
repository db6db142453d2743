# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The native twin of indexer.hashing and indexer.reference: buffers in, arrays out.

The algorithms are in native/*.h; this file checks arguments and releases the GIL for long work. One
writer: an index must not be used by two threads at once.
"""

from indexer.arrays cimport address_of, words_of
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

import secrets

import numpy as np

from indexer.identity import Tier
from indexer.index import IndexStats, Match, mix_digest

DEF TIERS = 3
DEF LEVELS = 5
DEF ROWS = 4
cdef uint64_t CHAIN_SEED = 1337
cdef size_t LONG_WORK = 256
"""Least number of blocks for which the GIL is released: below it, releasing costs more."""
cdef uint64_t USERS_SALT = secrets.randbits(64) | 1
"""Secret, so that callers can't choose hashes that collide."""
cdef uint64_t SWEPT_AT_ONCE = 1 << 13
"""Steps of a sweep, about 0.5 ms."""


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


def token_prefixes(token_bytes not None, Py_ssize_t block_size, uint64_t seed):
    """PrefixHashes of the full blocks of little-endian u32 tokens, contiguous; raises ValueError."""
    if block_size < 1:
        raise ValueError(f"no block size: {block_size}")
    cdef size_t block_bytes = 4 * <size_t>block_size, count = <size_t>len(token_bytes) // block_bytes
    prefixes = np.empty(count, np.uint64)
    if not count:
        return prefixes
    cdef const uint8_t *tokens = <const uint8_t *>address_of(token_bytes)
    cdef uint64_t *out = <uint64_t *>address_of(prefixes)
    if count < LONG_WORK:
        xxh3_blocks(tokens, count, block_bytes, seed, out)
        xxh3_chain(out, count, 0, 0, CHAIN_SEED, out)
    else:
        with nogil:
            xxh3_blocks(tokens, count, block_bytes, seed, out)
            xxh3_chain(out, count, 0, 0, CHAIN_SEED, out)
    return prefixes


def add_items(const uint8_t[::1] token_bytes not None, Py_ssize_t block_size, uint64_t seed, const uint64_t[:, ::1] items not None, uint64_t[::1] hashes not None):
    """Replaces the BlockHashes of those blocks that items cover.

    items: content hash, first block and last block of each item, ascending."""
    cdef size_t count = hashes.shape[0], block_bytes = 4 * <size_t>block_size
    cdef int failed
    if block_size < 1 or items.shape[1] != 3 or count * block_bytes > <size_t>token_bytes.shape[0]:
        raise ValueError("block_size is below 1, items have not 3 columns, or hashes exceed the tokens' blocks")
    if not count or not items.shape[0]:
        return
    with nogil:
        failed = item_hashes(&token_bytes[0], count, block_bytes, seed, <const ItemSpan *>&items[0, 0], items.shape[0], &hashes[0])
    if failed:
        raise MemoryError


def prefix_hashes(const uint64_t[::1] blocks not None, parent=None):
    """PrefixHashes of a chain of BlockHashes, after `parent` if there is one."""
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

    def __cinit__(self, bytes_max=None, share_max=None):
        """bytes_max: of the whole index. share_max: placements of one worker. None: no limit."""
        if table_init(&self._table, secrets.randbits(64) | 1):
            raise MemoryError
        if bytes_max is not None:
            self._table.bytes_max = bytes_max
        if share_max is not None:
            self._table.share_max = share_max
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
        return self._store(self._checked(slot), tier, hashes)

    def remove(self, slot, tier, const uint64_t[::1] hashes not None):
        return self._remove(self._checked(slot), tier, hashes)

    def predict(self, slot, generation, hashes not None):
        # Each pick comes here: a typed view of the array would cost more than the rest.
        cdef size_t count = len(hashes)
        cdef uint32_t number = self._checked(slot)
        return self._store_at(number, TIERS + self._generation(generation), <const uint64_t *>address_of(hashes), count)

    def unpredict(self, slot, generation, const uint64_t[::1] hashes not None):
        return self._remove(self._checked(slot), TIERS + self._generation(generation), hashes)

    def clear(self, slot, tier=None):
        cdef uint32_t number = self._checked(slot)
        cdef uint64_t dropped = 0, predicted = 0
        cdef int level
        for level in range(LEVELS):
            if level >= TIERS:
                if tier is None or tier == 0:
                    predicted += table_retire(&self._table, number, level)
            elif tier is None or tier == level:
                dropped += table_retire(&self._table, number, level)
        if dropped + predicted and self._table.pool.live <= SWEPT_AT_ONCE:
            table_sweep(&self._table, 4 * SWEPT_AT_ONCE)
        return dropped

    def sweep(self, uint64_t steps=SWEPT_AT_ONCE):
        cdef int more
        with nogil:
            more = table_sweep(&self._table, steps)
        return bool(more)

    def match(self, const uint64_t[::1] hashes not None):
        cdef size_t count = hashes.shape[0]
        blocks = np.zeros((ROWS, self._table.slots_used), np.int32)
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

    def overlap(self, hashes not None, Py_ssize_t usable_max, slots not None, int32_t unit=1):
        cdef size_t count = 0, width = 0, i
        cdef const uint64_t *chain = <const uint64_t *>words_of(hashes, &count)
        cdef const Py_ssize_t *at = <const Py_ssize_t *>words_of(slots, &width)
        cdef size_t usable = max(0, min(usable_max, <Py_ssize_t>count))
        rows = np.zeros((2 + ROWS, width), np.int32)
        for i in range(width):
            if not 0 <= at[i] < self._table.slots_used:
                raise IndexError(f"no slot {at[i]}")
        if not count or not width:
            return rows
        cdef int32_t *out = <int32_t *>address_of(rows)
        if table_overlap(&self._table, chain, count, usable, at, width, out):
            raise MemoryError
        if unit != 1:
            for i in range((2 + ROWS) * width):
                out[i] *= unit
        return rows

    def count(self, slot, tier=None):
        cdef uint32_t number = self._checked(slot)
        cdef uint64_t total = 0
        cdef int level
        for level in range(TIERS):
            if tier is None or tier == level:
                total += table_holder(&self._table, number, level).held
        return total

    def told(self, slot):
        cdef uint32_t number = self._checked(slot)
        cdef uint64_t total = 0
        cdef int level
        for level in range(TIERS):
            total += table_holder(&self._table, number, level).told
        return total

    def whole(self, slot):
        cdef uint32_t number = self._checked(slot)
        cdef uint64_t published = 0, held = 0
        cdef int level
        for level in range(TIERS):
            published += table_holder(&self._table, number, level).told
            held += table_holder(&self._table, number, level).held
        return published == held

    def predicted(self, slot):
        cdef uint32_t number = self._checked(slot)
        return table_holder(&self._table, number, TIERS).held + table_holder(&self._table, number, TIERS + 1).held

    def digest(self, slot):
        cdef uint32_t number = self._checked(slot)
        return mix_digest(
            table_holder(&self._table, number, 0).digest,
            table_holder(&self._table, number, 1).digest,
            table_holder(&self._table, number, 2).digest,
        )

    def stats(self):
        placements = sum(self.count(slot) for slot in range(self._table.slots_used))
        return IndexStats(
            self._table.pool.live, placements, table_bytes(&self._table), self._table.forgotten
        )

    cdef uint64_t _store(self, uint32_t slot, int level, const uint64_t[::1] hashes) except? 0:
        return self._store_at(slot, level, &hashes[0], hashes.shape[0]) if hashes.shape[0] else 0

    cdef uint64_t _store_at(self, uint32_t slot, int level, const uint64_t *hashes, size_t count) except? 0:
        cdef uint64_t added
        if count < LONG_WORK:
            added = table_store(&self._table, slot, level, hashes, count)
        else:
            with nogil:
                added = table_store(&self._table, slot, level, hashes, count)
        if added == NO_MEMORY:
            raise MemoryError
        return added

    cdef uint64_t _remove(self, uint32_t slot, int level, const uint64_t[::1] hashes) except? 0:
        cdef size_t count = hashes.shape[0]
        cdef uint64_t removed
        if not count:
            return 0
        if count < LONG_WORK:
            removed = table_remove(&self._table, slot, level, &hashes[0], count)
        else:
            with nogil:
                removed = table_remove(&self._table, slot, level, &hashes[0], count)
        if removed == NO_MEMORY:
            raise MemoryError
        return removed

    cdef uint32_t _checked(self, slot) except? 0xFFFFFFFF:
        if not 0 <= slot < self._table.slots_used:
            raise IndexError(f"no slot {slot}")
        return slot

    cdef int _generation(self, generation) except -1:
        if generation not in (0, 1):
            raise ValueError(f"no generation {generation}")
        return generation


cdef class BlockUsers:
    """The distinct blocks that open requests use on one worker: a counted set of chains, each from
    its prompt's first block on. Blocks are the same only if all hashes up to them are, so hashes
    that a caller chose are counted like any others."""

    def __cinit__(self):
        self._users.salt = USERS_SALT

    def __dealloc__(self):
        users_free(&self._users)

    def __len__(self):
        return self._users.used

    def __repr__(self):
        return f"<BlockUsers {self._users.used} blocks>"

    def open(self, const uint64_t[::1] prefixes not None):
        """Adds a user to each block of a chain."""
        if prefixes.shape[0] and users_open(&self._users, &prefixes[0], prefixes.shape[0]):
            raise MemoryError

    def close(self, const uint64_t[::1] prefixes not None):
        """Takes a user from each block of a chain, which must have been opened."""
        if prefixes.shape[0] and self._users.used:
            users_close(&self._users, &prefixes[0], prefixes.shape[0])

    def leading(self, const uint64_t[::1] prefixes not None):
        """Leading blocks of a chain that have users."""
        if not prefixes.shape[0]:
            return 0
        return users_leading(&self._users, &prefixes[0], prefixes.shape[0])
