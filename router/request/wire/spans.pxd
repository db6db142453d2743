"""Protobuf's wire format for the kernels of this folder and of the desk (native/wire.h)."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef extern from "router/request/wire/native/wire.h" nogil:
    ctypedef struct Span:
        const uint8_t *at
        size_t size
    ctypedef struct Field:
        uint32_t number
        int type
        uint64_t value
        Span bytes
    ctypedef struct Backward:
        uint8_t *bytes
        size_t capacity, at
        int failed
    int VARINT, BYTES, MAP_KEY, MAP_VALUE
    int read_any(Span *, Field *, size_t *)
    size_t written(const Backward *)
    const uint8_t *beginning(const Backward *)
    void put_varint(Backward *, uint64_t)
    void put_uint(Backward *, uint32_t, uint64_t)
    void put_uint_always(Backward *, uint32_t, uint64_t)
    void put_bytes(Backward *, uint32_t, Span)
    void put_bytes_always(Backward *, uint32_t, const void *, size_t)
    void put_double_always(Backward *, uint32_t, double)
    void put_term(Backward *, uint32_t, const char *, double)
    void put_message(Backward *, uint32_t, size_t)


cdef inline Span span_of(bytes content):
    """A span of bytes, which must be kept alive as long as the span is read."""
    return Span(<const uint8_t *>PyBytes_AS_STRING(content), PyBytes_GET_SIZE(content))
