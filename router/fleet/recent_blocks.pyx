# cython: language_level=3, boundscheck=False, wraparound=False
"""Prefixes that a worker's prompts used lately, sampled by their hash. Pure."""

import secrets

from libc.stdint cimport uint32_t, uint64_t

cdef extern from "native/recent_blocks.h" nogil:
    ctypedef struct Block "RecentBlock":
        uint64_t prefix
        double at_s
        uint32_t newer
    ctypedef struct Blocks "RecentBlocks":
        Block *blocks
        uint32_t used, oldest, fresh
        uint64_t salt
    int recent_use_sampled(Blocks *, const uint64_t *, size_t, uint64_t, double)
    void recent_drop_oldest(Blocks *)
    void recent_trim(Blocks *)
    void recent_free(Blocks *)

cdef uint64_t SALT = secrets.randbits(64) | 1


cdef class RecentBlocks:
    cdef Blocks _blocks
    cdef uint64_t _mask

    def __cinit__(self, uint64_t sample):
        if not sample or sample & (sample - 1):
            raise ValueError(f"{sample} is no power of two")
        self._mask = sample - 1
        self._blocks.salt = SALT
        self._blocks.fresh = 1

    def __dealloc__(self):
        recent_free(&self._blocks)

    def __len__(self):
        return self._blocks.used

    def use(self, const uint64_t[::1] prefixes not None, double now_s):
        cdef size_t count = prefixes.shape[0]
        if count and recent_use_sampled(&self._blocks, &prefixes[0], count, self._mask, now_s):
            raise MemoryError

    def drop_oldest(self, uint32_t count):
        cdef uint32_t dropped = min(count, self._blocks.used)
        for _ in range(dropped):
            recent_drop_oldest(&self._blocks)
        recent_trim(&self._blocks)
        return dropped

    def drop_before(self, double time_s):
        cdef uint32_t before = self._blocks.used
        while self._blocks.used and self._blocks.blocks[self._blocks.oldest].at_s < time_s:
            recent_drop_oldest(&self._blocks)
        recent_trim(&self._blocks)
        return before - self._blocks.used

    def entries(self):
        cdef uint32_t number = self._blocks.oldest
        cdef list entries = []
        while number:
            entries.append((self._blocks.blocks[number].prefix, self._blocks.blocks[number].at_s))
            number = self._blocks.blocks[number].newer
        return entries
