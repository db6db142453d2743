# cython: language_level=3, boundscheck=False, wraparound=False
"""The native twin of events.engines.skipping_reference: see there."""

from libc.stdint cimport uint8_t, uint64_t

cdef extern from "events/engines/native/msgpack_skip.h" nogil:
    int msgpack_skip(const uint8_t *, size_t, size_t *, uint64_t *, uint64_t)


def skip(bytes data not None, size_t at, uint64_t left, uint64_t steps):
    """See events.engines.skipping_reference.skip."""
    cdef size_t size = len(data)
    if at > size or left > size - at or msgpack_skip(data, size, &at, &left, steps):
        raise ValueError("MessagePack that ends too soon, or has a byte that it never uses")
    return at, left
