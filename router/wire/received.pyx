# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Messages as they were received, bounded and taken apart before protobuf builds objects of them.

A prompt of a million tokens is read here, at the speed of memory; protobuf gets the rest, which is
small. native/received.h does the work.

Law: the work and the memory for a message that is over a bound are those of counting up to it.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef extern from "native/wire.h" nogil:
    ctypedef struct Span:
        const uint8_t *at
        size_t size
    int VARINT, BYTES

cdef extern from "native/field_numbers.h" nogil:
    int ROUTE_BATCH_ITEMS, ROUTE_ITEM_INDEX, ROUTE_ITEM_REQUEST, ROUTE_ITEM_CANCEL, ROUTE_ITEM_TIMEOUT_MS

cdef extern from "native/received.h" nogil:
    int TOO_MANY
    int MANY_FIELDS, MANY_BYTES, MANY_TOKENS, TOKEN_IDS, TOKEN_BYTES, BLOCK_HASHES, TEXT
    ctypedef struct Bounds:
        size_t fields, bytes, elements
    ctypedef struct Received:
        Bounds seen
        int form
        Span tokens
        size_t elements
        uint32_t block_size, prompt_tokens
    int look_at_request(Span, const Bounds *, Received *)
    int find_text "text_form" (Span, size_t)
    void copy_rest(Span, uint8_t *)
    int copy_elements(const Received *, void *)
    int count_fields(Span, uint32_t, size_t, size_t, size_t *)
    int next_bytes(Span *, uint32_t, Span *)
    int read_odd_item(Span *, size_t *, OddItem *)
    ctypedef struct OddItem:
        uint64_t index, timeout_ms
        int is_request, is_cancel
        Span first
        size_t request_bytes
    void copy_requests(const OddItem *, uint8_t *)

globals().update(TOKEN_IDS=TOKEN_IDS, TOKEN_BYTES=TOKEN_BYTES, BLOCK_HASHES=BLOCK_HASHES, TEXT=TEXT)
TEXT_FIELDS_MAX = 32768
"""Fields up to which a text is looked for: more than a request may have."""
OTHER_FIELDS_MAX = 1024
"""Fields of a message in pieces that are no pieces."""


class TooMuch(ValueError):
    """A message is over a bound; `what` is "fields", "bytes" or "tokens"."""

    def __init__(self, what):
        super().__init__(f"too many {what}")
        self.what = what


cdef inline Span _span(bytes content):
    return Span(<const uint8_t *>PyBytes_AS_STRING(content), PyBytes_GET_SIZE(content))


cdef _check(int failed):
    if failed == MANY_FIELDS:
        raise TooMuch("fields")
    if failed == MANY_BYTES:
        raise TooMuch("bytes")
    if failed == MANY_TOKENS:
        raise TooMuch("tokens")
    if failed:
        raise ValueError("Error parsing message")


def take_apart(bytes content not None, size_t fields_max, size_t bytes_max, size_t tokens_max):
    """A RouteRequest without its prompt, and the prompt: (rest, form, data, block_size, prompt_tokens).

    form: the number of the prompt's field; 0: there is none. data: little-endian, u32 of tokens,
    u64 of hashes; or the bytes of a prompt without tokens (a form of TEXT or more). The last two are those of block_hashes. The bounds are for the fields beside the
    prompt, their bytes, and the elements of token_ids and block_hashes. Raises TooMuch; ValueError
    for bytes that are no message.
    """
    cdef Received received
    cdef Bounds most = Bounds(fields_max, bytes_max, tokens_max)
    cdef Span message = _span(content)
    _check(look_at_request(message, &most, &received))
    cdef bytes rest = PyBytes_FromStringAndSize(NULL, received.seen.bytes)
    copy_rest(message, <uint8_t *>PyBytes_AS_STRING(rest))
    cdef bytes data = b""
    if received.form == TOKEN_BYTES or received.form >= TEXT:
        data = PyBytes_FromStringAndSize(<const char *>received.tokens.at, received.tokens.size)
    elif received.form:
        data = PyBytes_FromStringAndSize(NULL, received.elements * (8 if received.form == BLOCK_HASHES else 4))
        _check(copy_elements(&received, <void *>PyBytes_AS_STRING(data)))
    return rest, received.form, data, received.block_size, received.prompt_tokens


def text_form(bytes content not None):
    """The number of a RouteRequest's prompt if this is a text or a body; 0: it has tokens, or no
    prompt, or can't be read as a request."""
    return find_text(_span(content), TEXT_FIELDS_MAX)


def check_fields(bytes content not None, size_t most):
    """Raises TooMuch for a message of more fields, ValueError for bytes that are no message."""
    cdef size_t count
    _check(count_fields(_span(content), 0, 0, most, &count))


def in_order(bytes batch not None, size_t items_max):
    """A RouteBatch as the lane reads it: each item once, its request in one piece, nothing unknown.

    A request in several fields is their bytes in a row, which is what merging comes to. Raises
    TooMuch for more items; ValueError for bytes that are no batch.
    """
    cdef Span left = _span(batch)
    cdef size_t fields = 0
    cdef OddItem item
    cdef int more
    cdef list pieces = []
    cdef bytes request
    while (more := read_odd_item(&left, &fields, &item)) > 0:
        if len(pieces) >= items_max or fields > 8 * items_max:
            raise TooMuch("items")
        inner = _field(ROUTE_ITEM_INDEX, item.index)
        if item.is_request:
            request = PyBytes_FromStringAndSize(NULL, item.request_bytes)
            copy_requests(&item, <uint8_t *>PyBytes_AS_STRING(request))
            inner += _tag(ROUTE_ITEM_REQUEST, BYTES) + _varint(item.request_bytes) + request
        elif item.is_cancel:
            inner += _field(ROUTE_ITEM_CANCEL, 1)
        inner += _field(ROUTE_ITEM_TIMEOUT_MS, item.timeout_ms)
        pieces.append(_tag(ROUTE_BATCH_ITEMS, BYTES) + _varint(len(inner)) + inner)
    if more == TOO_MANY:
        raise TooMuch("items")
    if more < 0:
        raise ValueError("Error parsing message")
    return b"".join(pieces)


cdef bytes _varint(uint64_t value):
    cdef list out = []
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


cdef bytes _tag(uint32_t number, int kind):
    return _varint(number << 3 | kind)


cdef bytes _field(uint32_t number, uint64_t value):
    return _tag(number, VARINT) + _varint(value) if value else b""


cdef class Pieces:
    """The messages of one repeated field, piece by piece as bytes; len() is how many are left."""

    cdef bytes _content
    cdef Span _left
    cdef uint32_t _number
    cdef size_t _count

    def __init__(self, bytes content not None, uint32_t number, size_t most):
        """Raises TooMuch for more than `most` of them, ValueError for bytes that are no message."""
        _check(count_fields(_span(content), number, most, OTHER_FIELDS_MAX, &self._count))
        self._content = content
        self._left = _span(content)
        self._number = number

    def __len__(self):
        return self._count

    def take(self, size_t count):
        """The next ones, `count` of them at most."""
        cdef list pieces = []
        cdef Span piece
        while count and next_bytes(&self._left, self._number, &piece):
            pieces.append(PyBytes_FromStringAndSize(<const char *>piece.at, piece.size))
            self._count -= 1
            count -= 1
        return pieces
