# cython: language_level=3
"""Counts of picks, for native code."""

from libc.stdint cimport int32_t, int64_t, uint64_t


cdef class Counts:
    cdef readonly object tally
    cdef int64_t *_durations[4]
    cdef double *_totals_s[4]
    cdef int64_t *_tokens
    cdef int64_t *_recent
    cdef int64_t *_picks
    cdef int64_t *_by_pool
    cdef uint64_t _lengths[16]
    cdef double _bounds_s[11]
    cdef double _began_s, _last_s
    cdef double _spent_s[4]

    cpdef void begin(self)
    cdef void mark(self, int stage)
    cpdef int total(self) except -1
    cdef void overlap(self, uint64_t prompt_tokens, uint64_t reachable_tokens, const int32_t *overlaps, size_t rows, int64_t pool_row)
    cdef void _add(self, int stage, double seconds)
