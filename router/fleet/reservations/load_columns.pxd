# cython: language_level=3
"""The columns of workers' loads, for the steps of reservations."""

from libc.stdint cimport uint32_t


cdef class LoadColumns:
    cdef readonly dict settled
    cdef readonly set full, over_estimate
    cdef object _table, _others
    cdef double *at
    cdef double *others_at
    cdef size_t width

    cpdef int put(self, uint32_t slot, object load) except -1
