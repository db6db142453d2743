"""What answers are written from: texts, policies, workers and their state; with native/wire.h."""

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


cdef int _put_policy(Backward *b, policy) except -1:
    """Receipt: policy, formula, parameters."""
    cdef double value
    cdef bytes name
    for text, value in sorted(policy.parameters.items(), reverse=True):
        name = text.encode()
        put_term(b, RECEIPT_PARAMETERS, name, value)
    _put_text(b, RECEIPT_FORMULA, policy.formula)
    _put_text(b, RECEIPT_POLICY, policy.name)
    return 0


cdef int _put_exclusions(Backward *b, counts) except -1:
    """Receipt.excluded, by reason."""
    cdef size_t before
    cdef bytes reason
    for text, count in counts.items():
        before = written(b)
        put_uint_always(b, MAP_VALUE, count)
        reason = text.encode()
        put_bytes_always(b, MAP_KEY, PyBytes_AS_STRING(reason), len(reason))
        put_message(b, RECEIPT_EXCLUDED, before)
    return 0


cdef int _read_condition(source, NativeIndex index, dict loads, double now_s, Condition *condition, list keep) except -1:
    """What of a worker only its stream and its load know; keep: gets what must outlive it."""
    cdef bytes state = source.stream.state.encode()
    keep.append(state)
    condition.stream_state = _span(state)
    condition.terms = condition.excluded = Span(NULL, 0)
    condition.stream_complete = source.stream.complete and _holds_all(index, source.slot)
    load = loads.get(source.key)
    condition.sample_age_s = 0.0
    if load is not None and load.sampled_at_s is not None:
        condition.sample_age_s = max(0.0, now_s - <double>load.sampled_at_s)
    return 0


cdef bint _holds_all(NativeIndex index, uint32_t slot):
    """Whether the index has all blocks that a worker reported: none was forgotten."""
    cdef uint64_t reported = 0, held = 0
    cdef int level
    for level in range(TIERS):
        reported += table_holder(&index._table, slot, level).told
        held += table_holder(&index._table, slot, level).held
    return reported == held
