"""What fast_path.pyx uses of the headers beside it."""

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(void *)

cdef extern from "router/wire/native/field_numbers.h" nogil:
    int ROUTE_RESULTS_RESULTS, ROUTE_RESULT_INDEX, ROUTE_RESULT_RESPONSE, ROUTE_RESULT_STATUS
    int ROUTE_RESPONSE_RESERVATION_ID, ROUTE_RESPONSE_WORKER_ID, ROUTE_RESPONSE_DP_RANK
    int ROUTE_RESPONSE_ADDRESS, ROUTE_RESPONSE_LABELS, ROUTE_RESPONSE_PREFILL_WORKER, ROUTE_RESPONSE_RECEIPT
    int ROUTE_RESPONSE_PREFILL_RECEIPT
    int ALTERNATIVE_WORKER_ID, ALTERNATIVE_DP_RANK, ALTERNATIVE_ADDRESS
    int CANDIDATE_ROW_WORKER_ID, CANDIDATE_ROW_DP_RANK, CANDIDATE_ROW_TERMS
    int RECEIPT_POLICY, RECEIPT_FORMULA, RECEIPT_PARAMETERS, RECEIPT_TERMS, RECEIPT_EXCLUDED

cdef extern from "router/wire/native/wire.h" nogil:
    ctypedef struct Span:
        const uint8_t *at
        size_t size
    ctypedef struct Backward:
        uint8_t *bytes
        size_t capacity, at
        int failed
    size_t written(const Backward *)
    const uint8_t *beginning(const Backward *)
    void put_raw(Backward *, const void *, size_t)
    void put_varint(Backward *, uint64_t)
    void put_uint(Backward *, uint32_t, uint64_t)
    void put_uint_always(Backward *, uint32_t, uint64_t)
    void put_bytes(Backward *, uint32_t, Span)
    void put_bytes_always(Backward *, uint32_t, const void *, size_t)
    void put_double_always(Backward *, uint32_t, double)
    void put_term(Backward *, uint32_t, const char *, double)
    void put_message(Backward *, uint32_t, size_t)
    int MAP_KEY, MAP_VALUE, BYTES

cdef extern from "native/plain_request.h" nogil:
    ctypedef struct PlainRequest:
        Span request_id, model, session_id, tokens, hashes
        uint32_t hashes_block_size
        uint64_t prompt_tokens
        int64_t output_tokens
        int32_t priority
        int omit_receipt, traced
    ctypedef struct Item:
        uint64_t index, timeout_ms
        Span request
        int is_request, is_cancel
    int read_plain(Span, PlainRequest *)
    int read_item(Span *, Item *)
    int64_t count_items(Span, size_t, size_t)

cdef extern from "native/answer.h" nogil:
    ctypedef struct Face "Face":
        Span picked, alternative, row
    ctypedef struct Condition:
        Span stream_state
        int stream_complete
        double sample_age_s
        Span terms, excluded
    ctypedef struct Moved:
        uint32_t cheapest
        const PickGuard *guard
        const Waits *waits
        const Face *face
        const Condition *condition
    ctypedef struct About:
        Span policy, replica, prefill, excluded
        size_t not_live
        Cheapest cheapest
        double decided_at_s
        int32_t best_overlap_tokens
        const Moved *moved
    void put_answer(Backward *, const Decided *, const About *, const uint32_t *, size_t, size_t, const Face *, const Condition *, double, const int32_t *, uint64_t, uint32_t)
    void put_receipt(Backward *, uint32_t, const Decided *, const About *, const uint32_t *, size_t, const Face *, const Condition *)
    void put_receipt_body(Backward *, const Decided *, const About *, const uint32_t *, size_t, const Face *, const Condition *)
    void put_row_body(Backward *, const Decided *, size_t, const Face *, const Condition *)
