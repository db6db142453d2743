# cython: language_level=3, boundscheck=False, wraparound=False
"""The order of a decision's rows, in C (native/order.h): the fast path uses the same. Pure."""

from libc.math cimport isfinite
from libc.stdint cimport intptr_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc

import numpy as np

cdef extern from "router/decision/native/order.h" nogil:
    ctypedef struct Cheapest:
        double lowest
        size_t tied, drained, full, not_finite
    Cheapest cheapest_of(const double *, const double *, const uint8_t *, const intptr_t *, size_t)
    size_t order_of(const double *, const double *, const uint8_t *, const intptr_t *, size_t, const Cheapest *, size_t, size_t, uint32_t *)


def cheapest(const double[::1] costs not None, can, Py_ssize_t count):
    cdef Py_ssize_t rows = costs.shape[0], row
    cdef const uint8_t[::1] out
    cdef const uint8_t *barred = NULL
    cdef const double *at = &costs[0] if rows else NULL
    if can is not None:
        if len(can) != rows:
            raise ValueError(f"{len(can)} bools for {rows} costs")
        out = (~can).view(np.uint8)
        barred = &out[0] if rows else NULL
    cdef Cheapest lowest = cheapest_of(at, NULL, barred, NULL, rows)
    cdef list bad = [row for row in range(rows) if not isfinite(at[row])]
    if not lowest.tied:
        return [], [], bad
    cdef size_t wanted = max(count, <Py_ssize_t>lowest.tied)
    cdef uint32_t *order = <uint32_t *>malloc(wanted * sizeof(uint32_t))
    if not order:
        raise MemoryError
    try:
        wanted = order_of(at, NULL, barred, NULL, rows, &lowest, 0, wanted, order)
        ordered = [order[row] for row in range(<Py_ssize_t>wanted)]
    finally:
        free(order)
    return ordered[: lowest.tied], ordered[lowest.tied :], bad
