# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Messages as they were received, bounded and read without protobuf's objects.

A prompt of a million tokens is read here, at the speed of memory. native/received.h does the work.

Law: the work and the memory for a message that is over a bound are those of counting up to it.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, uint32_t

from router.request.wire.spans cimport BYTES, MAP_KEY, MAP_VALUE, VARINT, Field, Span, read_any, span_of

cdef extern from "native/field_numbers.h" nogil:
    cdef enum:
        ROUTE_REQUEST_REQUEST_ID, ROUTE_REQUEST_MODEL, ROUTE_REQUEST_LORA_NAME, ROUTE_REQUEST_CACHE_SALT
        ROUTE_REQUEST_MULTIMODAL_ITEMS, ROUTE_REQUEST_EXPECTED_OUTPUT_TOKENS, ROUTE_REQUEST_PRIORITY
        ROUTE_REQUEST_TENANT, ROUTE_REQUEST_SESSION_ID, ROUTE_REQUEST_TTFT_SLO_MS, ROUTE_REQUEST_TPOT_SLO_MS, ROUTE_REQUEST_QUEUE_TIMEOUT_MS
        ROUTE_REQUEST_PHASE, ROUTE_REQUEST_REQUIRED_LABELS, ROUTE_REQUEST_ALLOWED_WORKER_IDS
        ROUTE_REQUEST_EXCLUDED_WORKER_IDS, ROUTE_REQUEST_POLICY, ROUTE_REQUEST_OMIT_RECEIPT
        ROUTE_REQUEST_WAITED_MS, ROUTE_REQUEST_QUEUE_PROGRESS, ROUTE_REQUEST_TRACEPARENT
        ROUTE_REQUEST_OBSERVED
        ROUTE_REQUEST_EXCLUDED_LABELS, ROUTE_REQUEST_CHARGED_TOKENS, ROUTE_REQUEST_RETURN_TOKENS, ROUTE_REQUEST_REQUIRE_TOKENS

cdef extern from "native/received.h" nogil:
    int MANY_FIELDS, MANY_BYTES, MANY_TOKENS, TOKEN_IDS, TOKEN_BYTES, BLOCK_HASHES, TEXT, ESTIMATED_TOKENS
    ctypedef struct Bounds:
        size_t fields, bytes, elements
    ctypedef struct Received:
        Bounds seen
        int form
        Span tokens
        size_t elements
        uint32_t block_size, prompt_tokens
    int is_text(uint32_t)
    int is_prompt(const Field *)
    int look_at_request(Span, const Bounds *, Received *)
    int find_text "text_form" (Span, size_t)
    int copy_elements(const Received *, void *)
    int count_fields(Span, uint32_t, size_t, size_t, size_t *)
    int next_bytes(Span *, uint32_t, Span *)

globals().update(
    TOKEN_IDS=TOKEN_IDS, TOKEN_BYTES=TOKEN_BYTES, BLOCK_HASHES=BLOCK_HASHES, ESTIMATED_TOKENS=ESTIMATED_TOKENS,
)
TEXT_FIELDS_MAX = 32768
"""Fields up to which a text is looked for: more than a request may have."""
OTHER_FIELDS_MAX = 1024
"""Most fields of a message beside those that Pieces takes."""


class TooMuch(ValueError):
    """A message is over a bound; `what` is "fields", "bytes", "tokens" or "items"."""

    def __init__(self, what):
        super().__init__(f"too many {what}")
        self.what = what


cdef _check(int failed):
    if failed == MANY_FIELDS:
        raise TooMuch("fields")
    if failed == MANY_BYTES:
        raise TooMuch("bytes")
    if failed == MANY_TOKENS:
        raise TooMuch("tokens")
    if failed:
        raise ValueError("Error parsing message")


cdef str _text(Span text):
    return PyUnicode_DecodeUTF8(<const char *>text.at, text.size, NULL)


cdef class ReceivedRequest:
    """A RouteRequest, read of a message (read_request) or made by this process (request_of); its fields by
    their names in the contract. len() is its size in bytes."""

    cdef public int form
    """The number of the prompt's field: TOKEN_IDS, TOKEN_BYTES, BLOCK_HASHES, ESTIMATED_TOKENS; another one: a text or a
    body; 0: there is none."""
    cdef public object data
    """Of the prompt: little-endian, u32 of tokens or u64 of hashes; or the bytes of a text or a body. Of TOKEN_BYTES a
    part of the message, which it keeps."""
    cdef public uint32_t block_size, prompt_tokens
    """Tokens of a block, and of the prompt, of BLOCK_HASHES; prompt_tokens also of ESTIMATED_TOKENS and `made`."""
    cdef public object made
    """Of a text or a body: its tokens or the estimate of its length, a PromptTokens; None: there is none so far."""
    cdef public str request_id, model, lora_name, cache_salt, tenant, session_id, policy, traceparent
    cdef public object expected_output_tokens, ttft_slo_ms, tpot_slo_ms, queue_timeout_ms
    """None: not set."""
    cdef public int32_t priority
    cdef public int32_t phase
    cdef public uint32_t waited_ms, charged_tokens
    cdef public bint omit_receipt, return_tokens, require_tokens, queue_progress, observed
    cdef public dict required_labels, excluded_labels
    cdef public list allowed_worker_ids, excluded_worker_ids, multimodal_items
    """None: not set. Items: the bytes of each MultimodalItem."""
    cdef readonly size_t longest, entries
    """Bytes of the longest field, and how many entries lists and maps have in all, counted as they came."""
    cdef public size_t size

    def __cinit__(self):
        self.data = b""
        self.request_id = self.model = self.lora_name = self.cache_salt = ""
        self.tenant = self.session_id = self.policy = self.traceparent = ""

    def __len__(self):
        return self.size

    cdef int _count(self, object text) except -1:
        """Counts the bytes of a field that is set: into size, and longest."""
        cdef Py_ssize_t size
        if isinstance(text, bytes):
            size = len(text)
        else:
            PyUnicode_AsUTF8AndSize(text, &size)
        self.longest = max(self.longest, <size_t>size)
        self.size += size
        return 0

    cdef int _read(self, const Field *field) except -1:
        """Takes a field over. What is of another type than the contract's is unknown, as for protobuf."""
        if field.type == BYTES:
            self.longest = max(self.longest, field.bytes.size)
            if field.number == ROUTE_REQUEST_REQUEST_ID:
                self.request_id = _text(field.bytes)
            elif field.number == ROUTE_REQUEST_MODEL:
                self.model = _text(field.bytes)
            elif field.number == ROUTE_REQUEST_LORA_NAME:
                self.lora_name = _text(field.bytes)
            elif field.number == ROUTE_REQUEST_CACHE_SALT:
                self.cache_salt = _text(field.bytes)
            elif field.number == ROUTE_REQUEST_TENANT:
                self.tenant = _text(field.bytes)
            elif field.number == ROUTE_REQUEST_SESSION_ID:
                self.session_id = _text(field.bytes)
            elif field.number == ROUTE_REQUEST_POLICY:
                self.policy = _text(field.bytes)
            elif field.number == ROUTE_REQUEST_TRACEPARENT:
                self.traceparent = _text(field.bytes)
            elif field.number == ROUTE_REQUEST_REQUIRED_LABELS:
                self.entries += 1
                self.required_labels = _with_label(self.required_labels, field.bytes)
            elif field.number == ROUTE_REQUEST_EXCLUDED_LABELS:
                self.entries += 1
                self.excluded_labels = _with_label(self.excluded_labels, field.bytes)
            elif field.number == ROUTE_REQUEST_ALLOWED_WORKER_IDS:
                self.entries += 1
                if self.allowed_worker_ids is None:
                    self.allowed_worker_ids = []
                self.allowed_worker_ids.append(_text(field.bytes))
            elif field.number == ROUTE_REQUEST_EXCLUDED_WORKER_IDS:
                self.entries += 1
                if self.excluded_worker_ids is None:
                    self.excluded_worker_ids = []
                self.excluded_worker_ids.append(_text(field.bytes))
            elif field.number == ROUTE_REQUEST_MULTIMODAL_ITEMS:
                self.entries += 1
                if self.multimodal_items is None:
                    self.multimodal_items = []
                self.multimodal_items.append(PyBytes_FromStringAndSize(<const char *>field.bytes.at, field.bytes.size))
        elif field.type == VARINT:
            if field.number == ROUTE_REQUEST_EXPECTED_OUTPUT_TOKENS:
                self.expected_output_tokens = <uint32_t>field.value
            elif field.number == ROUTE_REQUEST_PRIORITY:
                self.priority = <int32_t><uint32_t>field.value
            elif field.number == ROUTE_REQUEST_TTFT_SLO_MS:
                self.ttft_slo_ms = <uint32_t>field.value
            elif field.number == ROUTE_REQUEST_TPOT_SLO_MS:
                self.tpot_slo_ms = <uint32_t>field.value
            elif field.number == ROUTE_REQUEST_QUEUE_TIMEOUT_MS:
                self.queue_timeout_ms = <uint32_t>field.value
            elif field.number == ROUTE_REQUEST_PHASE:
                self.phase = <int32_t><uint32_t>field.value
            elif field.number == ROUTE_REQUEST_WAITED_MS:
                self.waited_ms = <uint32_t>field.value
            elif field.number == ROUTE_REQUEST_CHARGED_TOKENS:
                self.charged_tokens = <uint32_t>field.value
            elif field.number == ROUTE_REQUEST_OMIT_RECEIPT:
                self.omit_receipt = field.value != 0
            elif field.number == ROUTE_REQUEST_RETURN_TOKENS:
                self.return_tokens = field.value != 0
            elif field.number == ROUTE_REQUEST_REQUIRE_TOKENS:
                self.require_tokens = field.value != 0
            elif field.number == ROUTE_REQUEST_QUEUE_PROGRESS:
                self.queue_progress = field.value != 0
            elif field.number == ROUTE_REQUEST_OBSERVED:
                self.observed = field.value != 0
        return 0


cdef dict _with_label(dict labels, Span entry):
    """The labels with one more; None: there are none so far."""
    cdef Field field
    cdef size_t fields = 0
    cdef str key = "", value = ""
    cdef bint is_known = True
    while entry.size:
        if read_any(&entry, &field, &fields):
            raise ValueError("Error parsing message")
        if field.type == BYTES and field.number == <uint32_t>MAP_KEY:
            key = _text(field.bytes)
        elif field.type == BYTES and field.number == <uint32_t>MAP_VALUE:
            value = _text(field.bytes)
        else:
            is_known = False
    if not is_known:  # protobuf takes no entry that holds more than a key and a value
        return labels
    if labels is None:
        labels = {}
    labels[key] = value
    return labels


cdef bytes _prompt_of(const Received *received):
    cdef bytes data
    if not received.form or received.form == ESTIMATED_TOKENS:
        return b""
    if received.form == TOKEN_BYTES or is_text(received.form):
        return PyBytes_FromStringAndSize(<const char *>received.tokens.at, received.tokens.size)
    data = PyBytes_FromStringAndSize(NULL, received.elements * (8 if received.form == BLOCK_HASHES else 4))
    _check(copy_elements(received, <void *>PyBytes_AS_STRING(data)))
    return data


def read_request(bytes content not None, size_t fields_max, size_t bytes_max, size_t tokens_max):
    """A RouteRequest read. The bounds are for the fields beside the prompt, their bytes, and the elements of token_ids
    and block_hashes. Raises TooMuch; ValueError for bytes that are no message, and for a field that is no UTF-8.

    What protobuf refuses of the fields that it knows is refused here, but for the inside of multimodal_items."""
    cdef Received received
    cdef Bounds most = Bounds(fields_max, bytes_max, tokens_max)
    cdef Span message = span_of(content)
    cdef Field field
    cdef size_t fields = 0
    cdef Py_ssize_t begin
    cdef ReceivedRequest request = ReceivedRequest.__new__(ReceivedRequest)
    _check(look_at_request(message, &most, &received))
    request.form = received.form
    if received.form == TOKEN_BYTES:
        begin = received.tokens.at - message.at
        request.data = memoryview(content)[begin:begin + received.tokens.size]
    else:
        request.data = _prompt_of(&received)
    request.block_size, request.prompt_tokens = received.block_size, received.prompt_tokens
    request.size = message.size
    while message.size:
        if read_any(&message, &field, &fields):
            raise ValueError("Error parsing message")
        if not is_prompt(&field):
            request._read(&field)
    return request


def request_of(int form, object data not None, dict fields not None):
    """A request that is made here: its prompt, and other fields by their names. Raises TypeError, OverflowError and
    ValueError for values that don't fit their fields."""
    cdef ReceivedRequest request = ReceivedRequest.__new__(ReceivedRequest)
    request.form, request.data, request.size = form, data, len(data)
    for name, value in fields.items():
        setattr(request, name, value)
        if isinstance(value, str):
            request._count(value)
        elif isinstance(value, dict):
            request.entries += <size_t>len(value)
            for text in (*value, *value.values()):
                request._count(text)
        elif isinstance(value, list):
            request.entries += <size_t>len(value)
            for text in value:
                request._count(text)
    return request


def text_form(message not None):
    """The number of a RouteRequest's prompt if this is a text or a body, of one that is read or of its bytes; 0: it has
    another prompt, or none, or can't be read as a request."""
    if isinstance(message, ReceivedRequest):
        return (<ReceivedRequest>message).form if is_text((<ReceivedRequest>message).form) else 0
    return find_text(span_of(message), TEXT_FIELDS_MAX)


def check_fields(bytes content not None, size_t most):
    """Raises TooMuch for a message of more fields, ValueError for bytes that are no message."""
    cdef size_t count
    _check(count_fields(span_of(content), 0, 0, most, &count))


cdef class Pieces:
    """The messages of one repeated field, piece by piece as bytes; len() is how many are left."""

    cdef bytes _content
    cdef Span _left
    cdef uint32_t _number
    cdef size_t _count

    def __init__(self, bytes content not None, uint32_t number, size_t most):
        """Raises TooMuch for more than `most` of them, ValueError for bytes that are no message."""
        _check(count_fields(span_of(content), number, most, OTHER_FIELDS_MAX, &self._count))
        self._content = content
        self._left = span_of(content)
        self._number = number

    def __len__(self):
        return self._count

    def take(self, size_t count):
        """The next messages, `count` of them at most."""
        cdef list pieces = []
        cdef Span piece
        while count and next_bytes(&self._left, self._number, &piece):
            pieces.append(PyBytes_FromStringAndSize(<const char *>piece.at, piece.size))
            self._count -= 1
            count -= 1
        return pieces
