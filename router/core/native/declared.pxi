"""What fast_path.pyx uses of the headers beside it."""

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(void *)

cdef extern from "router/wire/native/field_numbers.h" nogil:
    int ROUTE_RESULTS_RESULTS, ROUTE_RESULT_INDEX, ROUTE_RESULT_RESPONSE, ROUTE_RESULT_STATUS
    int ROUTE_RESPONSE_RESERVATION_ID, ROUTE_RESPONSE_WORKER_ID, ROUTE_RESPONSE_DP_RANK
    int ROUTE_RESPONSE_ADDRESS, ROUTE_RESPONSE_LABELS
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

cdef extern from "native/columns.h" nogil:
    ctypedef struct Columns:
        const double *block_size
        const double *total_blocks
        const double *total_slots
        const double *trust
        const double *running
        const double *waiting
        const double *reserved
        const double *active_blocks
        const double *prefill_tokens_active
        const double *active_slots
        const double *load
        const double *slot_ratio
        const double *full
        const double *load_unknown
    ctypedef struct Prefill:
        const double *ends_s
        const double *least_s
        const double *tokens
        const double *others_waiting
        const double *recent_blocks
        const double *rate
        double mean_work, now_s
    ctypedef struct Rows:
        const Columns *columns
        const Py_ssize_t *slots
        const uint8_t *drained
        const int32_t *overlaps
        const Users **users
        const uint64_t *prefixes
        size_t prefixes_count
        const Prefill *prefill
        size_t rows
        double prompt_tokens

cdef extern from "native/policy.h" nogil:
    const int NO_POLICY, ADAPTIVE, BLOCKS, TTFT
    const size_t NUMBERS_MAX
    ctypedef struct Policy:
        int kind
        double *numbers
    ctypedef struct TtftShared:
        double shortest_s
    ctypedef struct Decided:
        Rows rows
        const Policy *policy
        const double *costs
        TtftShared ttft
    void score(Decided *, double *, double *)

cdef extern from "router/decision/native/order.h" nogil:
    ctypedef struct Cheapest:
        double lowest
        size_t tied, drained, full, not_finite
    Cheapest cheapest_of(const double *, const double *, const uint8_t *, const Py_ssize_t *, size_t)
    size_t longest_ago(const double *, const double *, const uint8_t *, const Py_ssize_t *, size_t, const Cheapest *, const double *)
    size_t order_of(const double *, const double *, const uint8_t *, const Py_ssize_t *, size_t, const Cheapest *, size_t, size_t, uint32_t *)

cdef extern from "native/guard.h" nogil:
    ctypedef struct PickGuard:
        double request_tokens, margin
    ctypedef struct Waits:
        double least_requests, least_tokens, margin_tokens
    Waits waits_of(const PickGuard *, const Rows *, const double *)
    int passes_over(const PickGuard *, const Waits *, const Rows *, size_t)

cdef extern from "native/answer.h" nogil:
    ctypedef struct Face "Face":
        Span picked, alternative, row
    ctypedef struct Condition:
        Span stream_state
        int stream_complete
        double sample_age_s
        Span terms
    ctypedef struct Moved:
        uint32_t cheapest
        const PickGuard *guard
        const Waits *waits
        const Face *face
        const Condition *condition
    ctypedef struct About:
        Span policy, replica, excluded
        size_t not_live
        Cheapest cheapest
        double decided_at_s
        int32_t best_overlap_tokens
        const Moved *moved
    void put_answer(Backward *, const Decided *, const About *, const uint32_t *, size_t, size_t, const Face *, const Condition *, double, const int32_t *, uint32_t)
