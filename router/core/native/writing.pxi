"""Texts and bytes between Python and native/wire.h."""

cdef inline Span _span(bytes content):
    return Span(<const uint8_t *>PyBytes_AS_STRING(content), PyBytes_GET_SIZE(content))


cdef inline str _text(Span text):
    return PyUnicode_DecodeASCII(<const char *>text.at, text.size, NULL)


cdef void _begin(Backward *b):
    b.at = b.capacity
    b.failed = 0


cdef bytes _taken(Backward *b):
    """What was written, as bytes; begins again."""
    cdef bytes content
    if b.failed:
        _begin(b)
        raise MemoryError
    content = PyBytes_FromStringAndSize(<const char *>beginning(b), written(b))
    _begin(b)
    return content


cdef void _put_text(Backward *b, uint32_t number, str text):
    cdef bytes encoded = text.encode()
    put_bytes(b, number, _span(encoded))
