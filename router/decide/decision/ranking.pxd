# cython: language_level=3
"""What a ranking is made of, for the writer of answers."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from indexer.kernel cimport Users

cdef extern from "router/fleet/native/table.h" nogil:
    const size_t COLUMNS_COUNT
    const char **COLUMN_NAMES
    ctypedef struct Columns:
        const double *last_picked
        const double *full
        const double *tpot_s
    void point_columns(Columns *, const double *, size_t)

cdef extern from "router/decide/decision/native/columns.h" nogil:
    ctypedef struct Prefill:
        const double *ends_s
        const double *least_s
        const double *tokens
        const double *others_waiting
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
        const double *recent_blocks
        const double *invested_tokens
        size_t rows
        double prompt_tokens, output_tokens
        const double *distance

cdef extern from "router/decide/decision/native/policy.h" nogil:
    const size_t NUMBERS_MAX
    enum Kind:
        pass
    ctypedef struct Policy:
        Kind kind
        double *numbers
    ctypedef struct TtftShared:
        double shortest_s
    ctypedef struct Decided:
        Rows rows
        const Policy *policy
        const double *costs
        TtftShared ttft
    void score(Decided *, double *, double *)

cdef extern from "router/decide/decision/native/order.h" nogil:
    ctypedef struct Cheapest:
        double lowest
        size_t tied, drained, full, not_finite
    int can_take(const double *, const uint8_t *, const Py_ssize_t *, size_t)
    Cheapest cheapest_of(const double *, const double *, const uint8_t *, const Py_ssize_t *, size_t)
    size_t longest_ago(const double *, const double *, const uint8_t *, const Py_ssize_t *, size_t, const Cheapest *, const double *)
    size_t order_of(const double *, const double *, const uint8_t *, const Py_ssize_t *, size_t, const Cheapest *, size_t, size_t, uint32_t *)

cdef extern from "router/decide/decision/native/guard.h" nogil:
    ctypedef struct PickGuard:
        double request_tokens, margin
    ctypedef struct Waits:
        double least_requests, least_tokens, margin_tokens
    Waits waits_of(const PickGuard *, const Rows *, const double *)
    int passes_over(const PickGuard *, const Waits *, const Rows *, size_t)


cdef class Kernel:
    cdef Policy policy
    cdef readonly bint reads_users, reads_recent, reads_prefill


cdef class RowUsers:
    cdef tuple _workers
    cdef list _kept
    cdef const Users **_users
    cdef uint64_t _read
    cdef bint _is_read

    cpdef int refresh(self, dict loads, uint64_t changes) except -1


cdef class Ranking:
    cdef Decided decided
    cdef Columns _columns
    cdef Prefill _prefill
    cdef bint _is_own
    cdef object _table, _tokens, _prefixes, _barred, _kernel, _users, _inputs, _recent, _invested, _distance
    cdef readonly object costs
    cdef readonly object seconds
    cdef Cheapest cheapest
    cdef PickGuard guard
    cdef Waits waits
    cdef readonly Py_ssize_t moved_from
    cdef readonly double shortest_s
    """The least of `seconds` over rows that could be picked, where some row could."""

    cpdef int score(self, Kernel kernel, object users, object recent, object inputs, double mean_work, double now_s, double output_tokens, object distance) except -1
    cpdef int take(self, object costs, object seconds) except -1
    cpdef list in_order(self, size_t wanted, bint in_turn, object rng)
    cpdef list moved(self, double request_tokens, double margin, list order, bint in_turn, object rng)
    cdef int _find_shortest(self) except -1
    cdef int _point(self) except -1
    cdef size_t _first(self, const Cheapest *cheapest, const uint8_t *out, bint in_turn, object rng) except? 0
