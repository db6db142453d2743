# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Batches of a RouteStream: requests in, results out, item by item, read and written where they lie (native/batch.h)."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from router.request.wire.spans cimport BYTES, Backward, Span, beginning, put_uint, put_varint, span_of, written

from router.request.wire.received import TooMuch

cdef extern from "native/field_numbers.h" nogil:
    int ROUTE_RESULTS_RESULTS, ROUTE_RESULT_INDEX, ROUTE_RESULT_RESPONSE, ROUTE_RESULT_STATUS

cdef extern from "native/batch.h" nogil:
    int TOO_MANY
    ctypedef struct Item:
        uint64_t index, timeout_ms
        int is_request, is_cancel
        size_t request_bytes
    int read_item(Span *, size_t, size_t *, Item *)
    void copy_request(const Item *, uint8_t *)

DEF ITEM_FIELDS_MAX = 8
"""Most fields of an item, on average, those around it included; the contract has 4."""
ITEMS_MAX = 4096
"""Most items of a batch."""


cdef class Batch:
    """Reads a RouteBatch: `next` goes to the next item, which the attributes then describe."""

    cdef bytes _content
    cdef Span _left
    cdef Item _item
    cdef size_t _count, _fields_max

    def __init__(self, bytes content not None, size_t items_max=ITEMS_MAX):
        """Raises ValueError for bytes that are no batch, TooMuch for over items_max items."""
        cdef Span left = span_of(content)
        cdef size_t fields = 0
        cdef int more = 1
        self._fields_max = items_max * ITEM_FIELDS_MAX
        while (more := read_item(&left, self._fields_max, &fields, &self._item)) > 0:
            self._count += 1
            if self._count > items_max:
                raise TooMuch("items")
        if more == TOO_MANY:
            raise TooMuch("items")
        if more < 0:
            raise ValueError("Error parsing message")
        self._content = content
        self._left = span_of(content)

    def __len__(self):
        """Items that are left."""
        return self._count

    def next(self):
        """Goes to the next item; returns whether there is one."""
        cdef size_t fields = 0
        if read_item(&self._left, self._fields_max, &fields, &self._item) <= 0:
            return False
        self._count -= 1
        return True

    @property
    def index(self):
        return self._item.index

    @property
    def timeout_ms(self):
        return self._item.timeout_ms

    @property
    def cancel(self):
        return bool(self._item.is_cancel)

    @property
    def request(self):
        """Bytes of the item's RouteRequest; None: it has none."""
        cdef bytes request
        if not self._item.is_request:
            return None
        request = PyBytes_FromStringAndSize(NULL, self._item.request_bytes)
        copy_request(&self._item, <uint8_t *>PyBytes_AS_STRING(request))
        return request


cdef class Results:
    """A RouteResults message that grows."""

    cdef uint8_t *_bytes
    cdef size_t _used, _capacity, _count

    def __dealloc__(self):
        free(self._bytes)

    def __len__(self):
        return self._count

    def add_answer(self, uint64_t index, bytes answer not None):
        """Adds the RouteResponse of the item with this index."""
        self._add(index, ROUTE_RESULT_RESPONSE, span_of(answer))

    def add_status(self, uint64_t index, bytes status not None):
        """Adds the google.rpc.Status of the item with this index."""
        self._add(index, ROUTE_RESULT_STATUS, span_of(status))

    def take(self):
        """The message's bytes; then begins an empty message."""
        cdef bytes message = PyBytes_FromStringAndSize(<const char *>self._bytes, self._used)
        self._used = self._count = 0
        return message

    cdef int _add(self, uint64_t index, uint32_t number, Span content) except -1:
        cdef uint8_t room[48]
        cdef Backward head
        cdef size_t size
        head.bytes, head.capacity, head.at, head.failed = room, sizeof(room), sizeof(room), 0
        put_varint(&head, content.size)
        put_varint(&head, number << 3 | BYTES)
        put_uint(&head, ROUTE_RESULT_INDEX, index)
        put_varint(&head, written(&head) + content.size)
        put_varint(&head, ROUTE_RESULTS_RESULTS << 3 | BYTES)
        size = written(&head)
        if self._used + size + content.size > self._capacity:
            self._grow(self._used + size + content.size)
        memcpy(self._bytes + self._used, beginning(&head), size)
        memcpy(self._bytes + self._used + size, content.at, content.size)
        self._used += size + content.size
        self._count += 1
        return 0

    cdef int _grow(self, size_t needed) except -1:
        cdef size_t capacity = max(4096, 2 * self._capacity)
        while capacity < needed:
            capacity *= 2
        cdef uint8_t *grown = <uint8_t *>realloc(self._bytes, capacity)
        if not grown:
            raise MemoryError
        self._bytes = grown
        self._capacity = capacity
        return 0
