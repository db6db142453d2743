# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The copies of an engine's blocks, and the prefixes that they make: binds native/copies.h.

Only this file knows that a name of an engine, a number or bytes of any length, is kept as 128 bits: two of XXH3-64
with different seeds, for bytes.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t

import secrets

import numpy as np

from indexer.arrays cimport address_of, words_of
from indexer.identity import Tier

cdef extern from "indexer/native/copies.h" nogil:
    const uint32_t COPY_GROUPS, COPY_GROUPS_FIRST, NO_BLOCK, COPY_TIERS
    const int HAS_END
    ctypedef struct BlockName:
        uint64_t low, high
    ctypedef struct Block:
        uint64_t seed, end
        uint8_t flags
    ctypedef struct HeldPrefix:
        uint64_t prefix
        uint32_t *holders
    ctypedef struct CopyChange:
        uint64_t parent
        size_t begin
        uint8_t is_placed, tier, has_parent
    ctypedef struct Copies:
        uint32_t blocks, groups, pages, parts
        size_t block_bytes
        HeldPrefix *held
        uint64_t held_room
        uint64_t *held_on
        uint64_t *xor_on
        CopyChange *changes
        size_t changes_used, hashes_used
        uint64_t *hashes
        uint64_t salt, capped
        uint32_t copies_max
        int may_miss, no_memory
    Block *copies_block(const Copies *, uint32_t)
    uint32_t copies_find(const Copies *, BlockName)
    void copies_shape(Copies *, size_t, size_t)
    int copies_widen(Copies *)
    uint32_t copies_add(Copies *, BlockName, uint32_t, uint64_t, const uint8_t *, const uint8_t *, size_t)
    uint32_t copies_put(Copies *, BlockName, uint64_t)
    void copies_copy(Copies *, uint32_t, uint32_t, int, const uint64_t *)
    int copies_remove(Copies *, uint32_t, uint32_t, int)
    void copies_clear(Copies *)
    void copies_free(Copies *)
    size_t saved_bytes(const Copies *)
    int copies_save(const Copies *, uint8_t *)
    uint32_t copies_restore(Copies *, const uint8_t *, uint32_t)
    void xxh3_secret(uint64_t, uint8_t *)
    uint64_t xxh3_64(const uint8_t *, size_t, uint64_t, const uint8_t *)

DEF SECRET_BYTES = 192
cdef size_t SIZE_MAX = 1 << 24
GROUPS_MAX = COPY_GROUPS
"""KV cache groups whose copies are counted."""
cdef uint64_t FIRST_SEED = 0x6B76726F757465
cdef uint64_t SECOND_SEED = 0x6E616D6573
cdef uint8_t[SECRET_BYTES] first_secret
cdef uint8_t[SECRET_BYTES] second_secret
xxh3_secret(FIRST_SEED, first_secret)
xxh3_secret(SECOND_SEED, second_secret)
cdef tuple tiers = tuple(Tier)


cdef BlockName name_of(object name) except *:
    """Raises TypeError; OverflowError for a number that is not of 64 bits, unsigned."""
    cdef BlockName known
    cdef const uint8_t *at
    cdef size_t size
    if isinstance(name, bytes):
        at = <const uint8_t *>PyBytes_AS_STRING(name)
        size = len(name)
        known.low = xxh3_64(at, size, FIRST_SEED, first_secret)
        known.high = xxh3_64(at, size, SECOND_SEED, second_secret) | 2
    else:
        known.low, known.high = name, 1  # bytes have another second half
    return known


cdef class BlockCopies:
    """See copies.pyi."""

    cdef Copies _copies
    cdef uint32_t _blocks_max

    def __cinit__(self, uint32_t blocks_max, uint32_t copies_max):
        if not 0 < copies_max < 256:
            raise ValueError(f"1 to 255 copies of a block are counted, not {copies_max}")
        self._copies.salt = secrets.randbits(64) | 1
        self._copies.copies_max = copies_max
        self._blocks_max = blocks_max
        copies_clear(&self._copies)

    def __dealloc__(self):
        copies_free(&self._copies)

    def __len__(self):
        return self._copies.blocks

    def __contains__(self, name):
        return copies_find(&self._copies, name_of(name)) != NO_BLOCK

    def __repr__(self):
        return f"<BlockCopies {len(self)} blocks, {self.count()} placements>"

    @property
    def capped(self):
        return self._copies.capped

    @property
    def may_miss(self):
        return bool(self._copies.may_miss)

    @may_miss.setter
    def may_miss(self, bint may_miss):
        self._copies.may_miss = may_miss

    def shape(self, size_t block_size, size_t canonical_size):
        if self._copies.blocks:
            raise ValueError("the sizes of blocks are set before any block comes")
        if not 0 < block_size <= SIZE_MAX or not 0 < canonical_size <= SIZE_MAX:
            raise ValueError(f"blocks of {block_size} and {canonical_size} tokens are not of 1 to {SIZE_MAX}")
        if block_size % canonical_size and canonical_size % block_size:
            raise ValueError(f"neither {block_size} nor {canonical_size} tokens is a multiple of the other")
        copies_clear(&self._copies)
        copies_shape(&self._copies, block_size, canonical_size)

    def store(self, names, parent, tokens not None, uint64_t seed, uint32_t group, int tier, suffixes=None):
        cdef Copies *c = &self._copies
        cdef uint32_t before = NO_BLOCK, number
        cdef size_t place, count = len(names), suffix_bytes = 0
        cdef const uint8_t *suffix = NULL
        cdef bytes extra
        cdef const uint8_t *content
        cdef uint64_t end
        cdef BlockName name
        self._check(group, tier)
        if suffixes is not None and (c.pages > 1 or c.parts > 1):
            raise ValueError("blocks that are split or merged have no suffixes")
        if suffixes is not None and <size_t>len(suffixes) < count:
            raise ValueError(f"{len(suffixes)} suffixes for {count} blocks")
        if parent is not None:
            before = copies_find(c, name_of(parent))
            if before == NO_BLOCK:
                return -1
        cdef Py_buffer view
        PyObject_GetBuffer(tokens, &view, PyBUF_SIMPLE)
        try:
            if not c.block_bytes or <size_t>view.len < count * c.block_bytes:
                raise ValueError(f"{view.len} bytes of tokens for {count} blocks of {c.block_bytes}")
            content = <const uint8_t *>view.buf
            for place in range(count):
                name = name_of(names[place])
                number = copies_find(c, name)
                if number == NO_BLOCK:
                    if c.blocks >= self._blocks_max:
                        return place
                    if suffixes is not None:
                        extra = suffixes[place]
                        suffix = <const uint8_t *>PyBytes_AS_STRING(extra)
                        suffix_bytes = len(extra)
                    number = copies_add(c, name, before, seed, content + place * c.block_bytes, suffix, suffix_bytes)
                    if number == NO_BLOCK:
                        self._fail()
                if before == NO_BLOCK:
                    copies_copy(c, number, group, tier, NULL)
                else:
                    end = copies_block(c, before).end
                    copies_copy(c, number, group, tier, &end)
                self._check_memory()
                before = number
        finally:
            PyBuffer_Release(&view)
        return count

    def put(self, names, prefixes not None, parent, int tier):
        cdef Copies *c = &self._copies
        cdef uint32_t number
        cdef size_t place, count = 0, renamed = 0
        cdef const uint64_t *chain = <const uint64_t *>words_of(prefixes, &count)
        cdef uint64_t before = 0 if parent is None else parent
        cdef BlockName name
        cdef int other
        self._check(0, tier)
        if c.pages > 1 or c.parts > 1 or count < <size_t>len(names):
            raise ValueError(f"{count} prefixes for {len(names)} blocks, or blocks that are not canonical")
        count = len(names)
        for place in range(count):
            name = name_of(names[place])
            number = copies_find(c, name)
            if number != NO_BLOCK and copies_block(c, number).end != chain[place]:
                renamed += 1
                for other in range(<int>COPY_TIERS):
                    while copies_remove(c, copies_find(c, name), 0, other):
                        pass
                number = NO_BLOCK
            if number == NO_BLOCK:
                if c.blocks >= self._blocks_max:
                    count = place
                    break
                number = copies_put(c, name, chain[place])
                if number == NO_BLOCK:
                    self._fail()
            copies_copy(c, number, 0, tier, &before if place or parent is not None else NULL)
            self._check_memory()
            before = chain[place]
        return count, renamed

    def store_known(self, names, uint32_t group, int tier):
        cdef uint32_t number
        self._check(group, tier)
        unknown = []
        for name in names:
            number = copies_find(&self._copies, name_of(name))
            if number == NO_BLOCK:
                unknown.append(name)
            else:
                copies_copy(&self._copies, number, group, tier, NULL)
                self._check_memory()
        return unknown

    def remove(self, names, uint32_t group, int tier):
        self._check(group, tier)
        unknown = []
        for name in names:
            if not copies_remove(&self._copies, copies_find(&self._copies, name_of(name)), group, tier):
                unknown.append(name)
            self._check_memory()
        return unknown

    def end(self, name):
        cdef uint32_t number = copies_find(&self._copies, name_of(name))
        if number == NO_BLOCK or not copies_block(&self._copies, number).flags & HAS_END:
            return None
        return copies_block(&self._copies, number).end

    def take(self):
        cdef Copies *c = &self._copies
        cdef size_t i, at, end
        cdef CopyChange *change
        changes = []
        for i in range(c.changes_used):
            change = &c.changes[i]
            end = c.changes[i + 1].begin if i + 1 < c.changes_used else c.hashes_used
            hashes = [c.hashes[at] for at in range(change.begin, end)]
            parent = change.parent if change.has_parent else None
            changes.append((bool(change.is_placed), tiers[change.tier], parent, hashes))
        c.changes_used = c.hashes_used = 0
        return changes

    def clear(self):
        copies_clear(&self._copies)

    def count(self):
        return self._copies.held_on[0] + self._copies.held_on[1] + self._copies.held_on[2]

    def xors(self):
        return self._copies.xor_on[0], self._copies.xor_on[1], self._copies.xor_on[2]

    def held(self, int tier):
        cdef uint64_t at, count = 0
        self._check(0, tier)
        prefixes = np.empty(self._copies.held_on[tier], np.uint64)
        cdef uint64_t *out = <uint64_t *>address_of(prefixes)
        for at in range(self._copies.held_room):
            if self._copies.held[at].holders[tier]:
                out[count] = self._copies.held[at].prefix
                count += 1
        return prefixes

    def save(self):
        cdef size_t size = saved_bytes(&self._copies) * self._copies.blocks
        saved = PyBytes_FromStringAndSize(NULL, 1 + size)
        cdef uint8_t *out = <uint8_t *>PyBytes_AS_STRING(saved)
        out[0] = <uint8_t>self._copies.groups
        if copies_save(&self._copies, out + 1):
            raise MemoryError
        return saved

    def restore(self, bytes saved not None):
        cdef const uint8_t *at = <const uint8_t *>PyBytes_AS_STRING(saved)
        cdef size_t size = len(saved)
        cdef uint32_t taken, count
        if self._copies.blocks:
            raise ValueError("saved blocks are restored into an empty object only")
        copies_clear(&self._copies)
        if not size or at[0] not in (COPY_GROUPS_FIRST, COPY_GROUPS):
            raise ValueError("the first byte of saved blocks is no number of groups")
        if at[0] != self._copies.groups:
            self._check(COPY_GROUPS - 1, 0)
        whole, left = divmod(size - 1, saved_bytes(&self._copies))
        if left or whole > self._blocks_max:
            raise ValueError(f"{size - 1} bytes are not at most {self._blocks_max} saved blocks")
        if whole and not self._copies.block_bytes:
            raise ValueError(f"{whole} saved blocks of an unknown size")
        count = whole
        with nogil:
            taken = copies_restore(&self._copies, at + 1, count)
        self._check_memory()
        if taken < count:
            copies_clear(&self._copies)
            raise ValueError(f"saved block {taken} of {count} is there twice, or fits no other")

    cdef int _check(self, uint32_t group, int tier) except -1:
        """Makes room for a group's counts; raises ValueError."""
        if not 0 <= tier < <int>COPY_TIERS or group >= COPY_GROUPS:
            raise ValueError(f"no tier {tier}, or no group {group}")
        if group >= self._copies.groups and copies_widen(&self._copies):
            self._fail()
        return 0

    cdef int _check_memory(self) except -1:
        return self._fail() if self._copies.no_memory else 0

    cdef int _fail(self) except -1:
        """Clears all, since a part of a call was left out; raises MemoryError."""
        copies_clear(&self._copies)
        raise MemoryError
