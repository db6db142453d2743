# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The native lane: plain requests picked, reserved and answered from bytes to bytes.

A request is plain if it is decided by the fleet's policy, which must be one of native/policy.h, about a
pool of one block size, and names nothing that narrows the choice (native/plain_request.h). RouterCore and router/desk/answer_codec.py are the twin:
they take all other requests, and come to the same pick, answer, reservation and load for these. Both
work on the same loads, reservations and columns, whose insides are known here; nothing is kept but what
can be made again. tests/router/core/test_fast_path.py sends the same requests to both.

Laws:
- a request that is not plain, or that would be refused, changes nothing here: the general way
  answers it;
- an answer is written before its load is reserved, so what can't be answered reserves nothing.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeASCII
from libc.math cimport ceil, isnan
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

import uuid
from collections import Counter

import numpy as np

from indexer.hashing import HASH_SEED
from indexer.arrays cimport address_of
from indexer.kernel cimport (
    BlockUsers, NativeIndex, Users, table_holder, table_overlap, users_leading, xxh3_64, xxh3_blocks,
    xxh3_chain, xxh3_secret,
)
from router.fleet.load_columns cimport LoadColumns
from router.reservations.steps cimport open_reservation
from router.fleet.table import COLUMNS
from router.request.request import Role
from router.fleet.eligibility import OUTPUT_TOKENS_MAX
from router.fleet.rates import ATTENTION_TOKENS, REQUEST_TOKENS
from router.fleet.working_set import SAMPLE
from router.core.tally import BUCKETS_S, RATIO_DECISIONS, PickTally, STAGES as STAGE_NAMES
from router.policies import dynamo_adaptive, dynamo_blocks, ttft
from router.reservations.reservations import Reservation
from router.wire.received import TooMuch

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(void *)

cdef extern from "router/wire/native/field_numbers.h" nogil:
    int ROUTE_RESULTS_RESULTS, ROUTE_RESULT_INDEX, ROUTE_RESULT_RESPONSE, ROUTE_RESULT_STATUS
    int ROUTE_RESPONSE_RESERVATION_ID, ROUTE_RESPONSE_WORKER_ID, ROUTE_RESPONSE_DP_RANK
    int ROUTE_RESPONSE_ADDRESS, ROUTE_RESPONSE_LABELS
    int ALTERNATIVE_WORKER_ID, ALTERNATIVE_DP_RANK, ALTERNATIVE_ADDRESS
    int CANDIDATE_ROW_WORKER_ID, CANDIDATE_ROW_DP_RANK
    int RECEIPT_POLICY, RECEIPT_FORMULA, RECEIPT_PARAMETERS, RECEIPT_EXCLUDED

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
        int omit_receipt
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
        const double *in_use
        const Prefill *prefill
        size_t rows
        double prompt_tokens

cdef extern from "native/policy.h" nogil:
    const int NO_POLICY, ADAPTIVE, BLOCKS, TTFT
    const size_t NUMBERS_MAX
    ctypedef struct Policy:
        int kind
        double *numbers
    ctypedef struct Decided:
        Rows rows
        const Policy *policy
        const double *costs
    void score(Decided *, double *, double *)
    double shortest_ttft(const Rows *, const double *, const double *)

cdef extern from "native/order.h" nogil:
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

DEF FIELDS = 6
"""Of OverlapTokens: raw, usable, and the rows of a match."""
DEF TIERS = 3
DEF STAGES = 4
"""Of a decision: hash, match, cost, total."""
DEF BUCKETS = 11
DEF WANTED_MAX = 20
"""Rows in order: one pick, and as many alternatives as the configuration allows (16), or a runner-up."""
DEF MODEL_COUNTS = 3
"""Of PickTally.by_model: picks, prompt tokens, usable overlap."""
DEF ITEM_FIELDS_MAX = 8
"""Of an item and beside it, on average; the contract has 4."""
ITEMS_MAX = 4096
"""Items of a batch."""
LONG_BYTES = 512 * 1024
"""A request up to this size is read, hashed and picked for in one step."""
cdef size_t RUN_ITEMS_MAX = 16
"""Items decided without a look at the clock,"""
cdef size_t RUN_BYTES_MAX = 1 << 19
"""and bytes of them."""
cdef size_t LONG_BYTES_C = LONG_BYTES
cdef int64_t OUTPUT_TOKENS_MAX_C = OUTPUT_TOKENS_MAX
cdef uint64_t HASH_SEED_C = HASH_SEED
cdef uint64_t SAMPLE_C = SAMPLE
cdef size_t RATIO_DECISIONS_C = RATIO_DECISIONS
assert COLUMNS == (
    "block_size", "total_blocks", "total_slots", "trust", "running", "waiting", "reserved", "active_blocks",
    "prefill_tokens_active", "last_picked", "active_slots", "load", "slot_ratio", "full", "load_unknown",
)
cdef dict _kinds = {dynamo_adaptive.score: ADAPTIVE, dynamo_blocks.score: BLOCKS, ttft.score: TTFT}
"""By the function of a policy: its twin in native/policy.h, which gets the policy's parameters in this order:"""
assert dynamo_adaptive.AdaptiveParameters.__struct_fields__ == (
    "balance_threshold", "alpha_balance", "alpha_cache", "gamma",
)
assert dynamo_blocks.BlocksParameters.__struct_fields__ == (
    "prefill_load_scale", "overlap_credit", "host_credit", "disk_credit", "credit_decay", "request_weight",
    "temperature",
)
assert ttft.TtftParameters.__struct_fields__ == (
    "keep", "crowding", "stall", "step_tokens", "decode_s", "stay_s", "host_rate", "disk_rate",
)
assert (REQUEST_TOKENS, ATTENTION_TOKENS) == (500, 50_000)  # native/ttft.h has them, too
assert len(BUCKETS_S) == BUCKETS and len(STAGE_NAMES) == STAGES
cdef object _both = Role.BOTH
cdef object _empty = np.empty
cdef object _u64 = np.uint64


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


cdef class _WorkerFace:
    """What answers repeat of a worker, written as its heartbeat had it."""

    cdef object heartbeat
    cdef bytes picked, alternative, row
    cdef int priority_direction
    """1: higher is sooner, -1: lower is; 0: the engine doesn't schedule by priority."""

    def __init__(self, source):
        cdef Backward b
        cdef size_t before
        cdef bytes encoded
        heartbeat = self.heartbeat = source.heartbeat
        worker_id, dp_rank = source.key
        b.bytes, b.capacity, b.at, b.failed = NULL, 0, 0, 0
        try:
            for name, value in sorted(heartbeat.labels.items(), reverse=True):
                before = written(&b)
                encoded = value.encode()
                put_bytes_always(&b, MAP_VALUE, PyBytes_AS_STRING(encoded), len(encoded))
                encoded = name.encode()
                put_bytes_always(&b, MAP_KEY, PyBytes_AS_STRING(encoded), len(encoded))
                put_message(&b, ROUTE_RESPONSE_LABELS, before)
            _put_text(&b, ROUTE_RESPONSE_ADDRESS, heartbeat.address)
            if heartbeat.multi_rank:
                put_uint_always(&b, ROUTE_RESPONSE_DP_RANK, dp_rank)
            _put_text(&b, ROUTE_RESPONSE_WORKER_ID, worker_id)
            self.picked = _taken(&b)
            _put_text(&b, ALTERNATIVE_ADDRESS, heartbeat.address)
            if heartbeat.multi_rank:
                put_uint_always(&b, ALTERNATIVE_DP_RANK, dp_rank)
            _put_text(&b, ALTERNATIVE_WORKER_ID, worker_id)
            self.alternative = _taken(&b)
            put_uint(&b, CANDIDATE_ROW_DP_RANK, dp_rank)
            _put_text(&b, CANDIDATE_ROW_WORKER_ID, worker_id)
            self.row = _taken(&b)
        finally:
            free(b.bytes)
        self.priority_direction = 0
        if heartbeat.priority_scheduling:
            self.priority_direction = 1 if heartbeat.priority_scheduling == "higher" else -1

    cdef Face spans(self):
        return Face(_span(self.picked), _span(self.alternative), _span(self.row))


cdef class _Plan:
    """The parts of decisions that all requests for a pool share."""

    cdef object live, pool, down
    cdef tuple sources
    cdef const Py_ssize_t *slots
    cdef size_t rows
    cdef uint32_t block_size
    """0: requests for this pool are not plain."""
    cdef double shortest_len
    cdef list faces
    cdef list model_rows
    """For each row: where PickTally.by_model counts its model; None: no pick of the row was counted yet."""
    cdef bytes excluded
    """Receipt.excluded of the workers that make no row, written."""
    cdef size_t not_live
    cdef tuple models
    cdef str model
    """The model that all workers of the pool serve; None: they serve several."""
    cdef Py_ssize_t last_slot
    cdef const Users **users
    """For each row: the users of its worker's blocks; NULL: its load is unknown."""
    cdef list users_kept
    cdef uint64_t users_read
    """Number of loads added and removed when `users` was read; another number: it is read again."""
    cdef bytes drained
    """A byte for each row, valid while `drains` is the fleet's; None: no worker is drained."""
    cdef uint64_t drains
    cdef bint priority_seen
    """Whether a worker that schedules by no priority got a request with one: then the core knows of its model."""

    def __init__(self, live, bint plain):
        """live: the pool and its workers that are down, as Pools.live has them. plain: whether the
        model and its settings let requests be plain."""
        cdef Backward b
        cdef size_t before
        cdef bytes encoded
        self.live = live
        self.pool, self.down = live
        pool = self.pool
        self.sources = pool.sources
        self.rows = len(pool.sources)
        self.block_size = 0
        if self.rows and len(pool.block_sizes) == 1 and pool.roles <= {_both} and plain:
            self.block_size = next(iter(pool.block_sizes))
        self.slots = <const Py_ssize_t *>address_of(pool.slots)
        self.models = pool.models
        self.model = pool.models[0] if len(set(pool.models)) == 1 else None
        self.last_slot = max(pool.slots.tolist(), default=0)
        self.shortest_len = pool.shortest_len
        self.faces = [None] * self.rows
        self.model_rows = [None] * self.rows
        self.not_live = len(self.down)
        b.bytes, b.capacity, b.at, b.failed = NULL, 0, 0, 0
        try:
            for reason, count in Counter([reason for _, reason in self.down]).items():
                before = written(&b)
                put_uint_always(&b, MAP_VALUE, count)
                encoded = reason.encode()
                put_bytes_always(&b, MAP_KEY, PyBytes_AS_STRING(encoded), len(encoded))
                put_message(&b, RECEIPT_EXCLUDED, before)
            self.excluded = _taken(&b)
        finally:
            free(b.bytes)

    def __dealloc__(self):
        free(self.users)

    cdef const Users **users_of(self, dict loads, uint64_t changes) except NULL:
        """loads: of workers, after so many of them came and went; kept until the next one does."""
        cdef size_t row
        cdef BlockUsers users
        if self.users == NULL or changes != self.users_read:
            if self.users == NULL:
                self.users = <const Users **>malloc(self.rows * sizeof(Users *))
                if self.users == NULL:
                    raise MemoryError
            self.users_kept = []
            for row in range(self.rows):
                load = loads.get(self.sources[row].key)
                self.users[row] = NULL
                if load is not None:
                    users = load._users
                    self.users_kept.append(users)
                    self.users[row] = &users._users
            self.users_read = changes
        return self.users

    cdef const uint8_t *drained_rows(self, dict drained, uint64_t drains) except? NULL:
        """drained: ids of workers, after so many changes of it."""
        if drains != self.drains:
            self.drained = bytes([one.key.worker_id in drained for one in self.sources]) if drained else None
            self.drains = drains
        return <const uint8_t *>PyBytes_AS_STRING(self.drained) if self.drained is not None else NULL

    cdef int64_t model_row(self, size_t row, tally) except -1:
        """PickTally.model_row of a row's worker."""
        known = self.model_rows[row]
        if known is None:
            known = self.model_rows[row] = tally.model_row(self.pool.models[row])
        return known

    cdef _WorkerFace face(self, size_t row):
        source = self.sources[row]
        cdef _WorkerFace face = self.faces[row]
        if face is None or face.heartbeat is not source.heartbeat:
            face = self.faces[row] = _WorkerFace(source)
        return face


cdef class Batch:
    """A RouteBatch, item by item: `next` goes on to one, and the attributes are of that one."""

    cdef bytes _content
    cdef Span _left
    cdef Item _item
    cdef size_t _count, _at

    def __init__(self, bytes content not None, size_t items_max=ITEMS_MAX):
        """Raises ValueError for bytes that must be put in order first, TooMuch for more items."""
        cdef int64_t count = count_items(_span(content), items_max, items_max * ITEM_FIELDS_MAX)
        if count == -2:
            raise TooMuch("items")
        if count < 0:
            raise ValueError("a batch that can't be read in place")
        self._content = content
        self._left = _span(content)
        self._count = count

    def __len__(self):
        """Items that are left."""
        return self._count

    def next(self):
        """Whether there is another one."""
        self._at = self._left.at - _span(self._content).at
        if read_item(&self._left, &self._item) <= 0:
            return False
        self._count -= 1
        return True

    @property
    def place(self):
        """Where the item is that the batch is at, for request_of."""
        return self._at

    @property
    def index(self):
        return self._item.index

    @property
    def timeout_ms(self):
        return self._item.timeout_ms

    @property
    def cancel(self):
        return bool(self._item.is_cancel)

    def request_of(self, size_t place):
        """The RouteRequest's bytes of the item at a place, wherever the batch is at.

        The caller chooses indexes, and may give the same to several items. Raises KeyError."""
        cdef Span left = _span(self._content)
        cdef Item item
        if place <= left.size:
            left.at += place
            left.size -= place
            if read_item(&left, &item) > 0 and item.is_request:
                return PyBytes_FromStringAndSize(<const char *>item.request.at, item.request.size)
        raise KeyError(place)

    @property
    def request(self):
        """A RouteRequest's bytes; None for an item without."""
        if not self._item.is_request:
            return None
        return PyBytes_FromStringAndSize(<const char *>self._item.request.at, self._item.request.size)


cdef class Results:
    """A RouteResults message that grows."""

    cdef uint8_t *_bytes
    cdef size_t _used, _capacity, _count

    def __dealloc__(self):
        free(self._bytes)

    def __len__(self):
        return self._count

    def add_answer(self, uint64_t index, bytes answer not None):
        """An item's RouteResponse."""
        self._add(index, ROUTE_RESULT_RESPONSE, _span(answer))

    def add_status(self, uint64_t index, bytes status not None):
        """An item's google.rpc.Status."""
        self._add(index, ROUTE_RESULT_STATUS, _span(status))

    def take(self):
        """The message's bytes; the next one begins."""
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


cdef class _Counts:
    """Where a PickTally counts."""

    cdef object tally
    cdef int64_t *durations[STAGES]
    cdef double *totals_s[STAGES]
    cdef int64_t *tokens
    cdef int64_t *recent
    cdef int64_t *picks
    cdef int64_t *by_model
    cdef double bounds_s[BUCKETS]
    cdef double began_s
    cdef double ends_s[STAGES - 1]
    """Of the decision at hand."""

    def __init__(self, tally):
        self.tally = tally
        for i, stage in enumerate(tally.stages.values()):
            self.durations[i] = <int64_t *>address_of(stage.counts)
            self.totals_s[i] = <double *>address_of(stage.total_s)
        self.tokens = <int64_t *>address_of(tally.tokens)
        self.recent = <int64_t *>address_of(tally.recent)
        self.picks = <int64_t *>address_of(tally.picks)
        self.by_model = <int64_t *>address_of(tally.by_model)
        for i, bound in enumerate(BUCKETS_S):
            self.bounds_s[i] = bound

    cdef void begin(self):
        self.began_s = _clock_s()

    cdef void mark(self, int stage):
        """The end of a stage, which counts once a worker is picked: what is not picked here is
        measured where it is."""
        self.ends_s[stage] = _clock_s()

    cdef void picked(self, uint64_t prompt_tokens, uint64_t reachable_tokens, const int32_t *overlaps, size_t rows, int64_t model_row):
        """Overlaps: of the pick, at every `rows`th place. model_row: in by_model."""
        cdef size_t at = 2 * (<size_t>self.picks[0] % RATIO_DECISIONS_C), i
        cdef double last_s = self.began_s
        cdef int64_t *of_model = self.by_model + MODEL_COUNTS * model_row
        of_model[0] += 1
        of_model[1] += prompt_tokens
        of_model[2] += overlaps[rows]
        self.tokens[0] += prompt_tokens
        self.tokens[1] += reachable_tokens
        for i in range(2, FIELDS):
            self.tokens[i] += overlaps[i * rows]
        self.recent[at] = overlaps[rows]
        self.recent[at + 1] = prompt_tokens
        self.picks[0] += 1
        for i in range(STAGES - 1):
            self._add(i, self.ends_s[i] - last_s)
            last_s = self.ends_s[i]
        self._add(STAGES - 1, _clock_s() - self.began_s)

    cdef void _add(self, int stage, double seconds):
        cdef int i = 0
        while i < BUCKETS and self.bounds_s[i] < seconds:
            i += 1
        self.durations[stage][i] += 1
        self.totals_s[stage][0] += seconds


cdef inline double _clock_s() noexcept nogil:
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return <double>time.tv_sec + 1e-9 * <double>time.tv_nsec


cdef class Lane:
    """The native lane of one RouterCore."""

    cdef object _core, _fleet, _pools, _view, _reservations, _rng
    cdef list _drawn
    """Ids that come next (ReservationIds)."""
    cdef dict _loads, _live, _by_request, _drained, _probing
    cdef LoadColumns _written
    cdef NativeIndex _index
    cdef object _routing
    """The message that the fields below were read from."""
    cdef Policy _policy
    cdef bint _by_session, _timed
    cdef size_t _alternatives, _wanted
    cdef uint64_t _prompt_tokens_max
    cdef int64_t _output_tokens
    cdef double _lease_s
    cdef bint _guards
    cdef PickGuard _guard
    cdef bytes _policy_part, _replica
    cdef _Counts _counts
    cdef dict _plans
    cdef double *_columns_at
    """The array that `_columns` points into."""
    cdef size_t _columns_width
    cdef Columns _columns
    cdef int32_t *_overlaps
    cdef double *_costs
    cdef double *_in_use
    """A number for each row; and then, as many of each: rates, and seconds to the first token."""
    cdef uint8_t *_out
    """A byte for each row: whether it is drained, or passed over; twice."""
    cdef size_t _rows_max
    cdef uint8_t _secret[192]
    cdef Backward _answer
    # The decision at hand:
    cdef _Plan _plan
    cdef Decided _decided
    cdef Cheapest _cheapest
    cdef uint32_t _order[WANTED_MAX]
    cdef size_t _ordered
    cdef uint32_t _moved_from
    """The row that is cheapest; another one than the first in order where the guard moved the pick."""
    cdef Waits _waits
    cdef Prefill _prefill
    cdef object _rates, _working_sets, _rate_table, _recent_table
    """The arrays that the next two point into, and their widths."""
    cdef const double *_rates_at
    cdef const double *_recent_at
    cdef Py_ssize_t _rate_width, _recent_width
    cdef object _prefixes

    def __init__(self, core, rng):
        """core: with a NativeIndex. rng: the core's own."""
        self._core = core
        self._fleet = fleet = core.fleet
        self._rates = fleet.rates
        self._working_sets = fleet.working_sets
        self._rng = rng
        self._pools = fleet.pools
        self._view = fleet.view
        self._reservations = core.reservations
        self._loads = fleet.loads
        self._drained = fleet.drained
        self._probing = fleet.outliers.probing
        self._written = fleet.pools.written
        self._live = fleet.pools._pools
        self._by_request = core.reservations._by_request
        self._index = fleet.view.index
        self._drawn = core.ids.drawn
        self._plans = {}
        self._replica = core.replica.encode()
        self.tally = PickTally()
        xxh3_secret(HASH_SEED, self._secret)

    def __dealloc__(self):
        free(self._overlaps)
        free(self._costs)
        free(self._in_use)
        free(self._out)
        free(self._answer.bytes)

    @property
    def tally(self):
        """Counts the picks that are answered here; a PickTally."""
        return self._counts.tally

    @tally.setter
    def tally(self, tally):
        self._counts = _Counts(tally)
        self._plans.clear()  # they know where the last one counted their models

    def answer(self, bytes request not None, double now_s, is_behind=None):
        """A RouteRequest's reservation, with its answer; None: the general way must answer.

        is_behind: of a model's name, whether other requests wait for its workers, so that the
        general way must answer; None: no request waits."""
        cdef PlainRequest plain
        if not read_plain(_span(request), &plain):
            return None
        self._pools.refresh()
        return self._picked(&plain, now_s, is_behind)

    def answers(self, Batch batch not None, Results results not None, uint64_t waited_ms, double now_s, dict reservations not None, list places, is_behind=None):
        """Answers a batch's items from the next one on, until one isn't plain, or is long, or enough is done.

        waited_ms: how long they have waited; one that has waited too long stays, too.
        reservations: gets each item's, by index. places: gets each with the item's place, for
        Batch.request_of; None: nobody wants them. is_behind: see `answer`.
        """
        cdef Span left
        cdef Item item
        cdef PlainRequest plain
        cdef size_t count = 0, size = 0
        self._pools.refresh()
        while count < RUN_ITEMS_MAX and size < RUN_BYTES_MAX:
            left = batch._left
            if read_item(&left, &item) <= 0 or not item.is_request or item.request.size > LONG_BYTES_C:
                return
            if 0 < item.timeout_ms <= waited_ms or not read_plain(item.request, &plain):
                return
            reservation = self._picked(&plain, now_s, is_behind)
            if reservation is None:
                return
            try:
                results._add(item.index, ROUTE_RESULT_RESPONSE, _span(reservation.answer))
            except BaseException:
                self._core.withdraw(reservation, now_s)
                raise
            if places is not None:
                places.append((reservation, batch._left.at - _span(batch._content).at))
            batch._left = left
            batch._count -= 1
            reservations[item.index] = reservation
            count += 1
            size += item.request.size

    cdef object _picked(self, PlainRequest *plain, double now_s, is_behind):
        """A reservation with its answer; None: the general way must pick."""
        cdef str request_id = _text(plain.request_id)
        self._counts.begin()
        if not self._prepare(request_id) or self._by_session and plain.session_id.size:
            return None
        cdef str model = _text(plain.model)
        if is_behind is not None and is_behind(model):
            return None
        cdef _Plan plan = self._plan_of(model)
        if not self._takes(plan, plain.hashes_block_size, plain.prompt_tokens, plain.output_tokens):
            return None
        cdef size_t count = plain.prompt_tokens / plan.block_size
        prefixes = _empty(count, _u64)
        cdef uint64_t *hashes
        cdef Span content = plain.hashes if plain.hashes_block_size else plain.tokens
        if count:
            hashes = <uint64_t *>address_of(prefixes)
            if plain.hashes_block_size:
                memcpy(hashes, content.at, content.size)
            else:
                xxh3_blocks(content.at, count, 4 * <size_t>plan.block_size, HASH_SEED_C, hashes)
            xxh3_chain(hashes, count, 0, 0, HASH_SEED_C, hashes)
        self._counts.mark(0)
        self._match(plan, prefixes, plain.prompt_tokens)
        self._counts.mark(1)
        if not self._decide(plain.session_id.size > 0, now_s) or self._core.decider.looks_ahead and not self._fits(plain.output_tokens):
            return None
        self._counts.mark(2)
        cdef uint64_t form = plain.prompt_tokens | <uint64_t>plain.hashes_block_size << 32
        cdef uint64_t fingerprint = xxh3_64(content.at, content.size, HASH_SEED_C, self._secret) ^ form
        if not request_id:
            request_id = uuid.uuid4().hex
        cdef double best_s = 0.0
        if self._policy.kind == TTFT:  # of workers that have room now; the pick may take the last of it
            best_s = shortest_ttft(&self._decided.rows, self._costs, self._in_use + 2 * self._decided.rows.rows)
        try:
            self._write(plain, now_s)
            reservation = self._reserve(request_id, (fingerprint, model, _both), plain.output_tokens, now_s)
        except BaseException:
            _begin(&self._answer)
            raise
        try:
            self._on_reserved(plain.session_id, plain.priority, reservation, best_s, now_s)
        except BaseException:
            _begin(&self._answer)
            self._core.withdraw(reservation, now_s)
            raise
        self._counts.picked(
            plain.prompt_tokens, self._best_overlap(), self._overlaps + self._order[0], self._decided.rows.rows,
            self._plan.model_row(self._order[0], self._counts.tally),
        )
        return reservation

    cdef bint _prepare(self, str request_id) except -1:
        """Whether a new request with this id may be picked here."""
        if request_id in self._by_request or self._reservations.full():
            return False
        if self._core.routing is not self._routing:
            self._read_settings(self._core.routing)
        return self._policy.kind != NO_POLICY and self._wanted <= WANTED_MAX

    cdef int _read_settings(self, routing) except -1:
        """Takes over what decides requests that name no policy."""
        cdef size_t i
        cdef double number
        cdef bytes name
        policy = self._core.policies[routing.policy]
        numbers = policy.parameters
        self._routing = routing
        self._policy.kind = _kinds.get(policy.function, NO_POLICY)
        if self._policy.kind == BLOCKS and numbers["temperature"]:  # its picks are drawn
            self._policy.kind = NO_POLICY
        if self._policy.kind == NO_POLICY:
            return 0
        for i, number in enumerate(numbers.values()):
            self._policy.numbers[i] = number
        for text, value in sorted(numbers.items(), reverse=True):
            name = text.encode()
            put_term(&self._answer, RECEIPT_PARAMETERS, name, value)
        _put_text(&self._answer, RECEIPT_FORMULA, policy.formula)
        _put_text(&self._answer, RECEIPT_POLICY, policy.name)
        self._policy_part = _taken(&self._answer)
        self._timed = policy.timed
        self._by_session = routing.affinity.looks_at(policy.name)
        self._alternatives = routing.alternatives
        self._wanted = 1 + max(1, routing.alternatives)
        self._prompt_tokens_max = routing.prompt_tokens_max
        self._output_tokens = routing.expected_output_tokens
        self._lease_s = routing.lease_s
        self._guards = routing.guard.looks_at(policy.name)
        self._guard.request_tokens = routing.guard.request_tokens
        self._guard.margin = routing.guard.margin
        return 0

    cdef _Plan _plan_of(self, str model):
        """Raises Refusal if no worker serves the model."""
        live = self._live.get(model)
        if live is None:
            live = self._pools.live(model, self._fleet.ready)
            if len(self._plans) >= len(self._live):
                self._plans.clear()  # of pools that ended; a refusal changes no plan
        cdef _Plan plan = self._plans.get(model)
        if plan is None or plan.live is not live:
            plain = not self._pools.lora_of(model) and not self._core.decider.has_own(model, live[0])
            plan = self._plans[model] = _Plan(live, plain)
        return plan

    cdef bint _takes(self, _Plan plan, uint32_t hashes_block_size, uint64_t prompt_tokens, int64_t output_tokens) except -1:
        """Whether all workers of a pool may take a prompt (router/fleet/eligibility.py)."""
        if output_tokens < 0:
            output_tokens = self._output_tokens
        output_tokens = min(output_tokens, OUTPUT_TOKENS_MAX_C)
        return (
            plan.block_size != 0
            and prompt_tokens <= self._prompt_tokens_max
            and hashes_block_size in (0, plan.block_size)
            and <double>prompt_tokens + <double>output_tokens <= plan.shortest_len
        )

    cdef int _match(self, _Plan plan, prefixes, uint64_t prompt_tokens) except -1:
        """Finds what a plan's workers hold of a prompt."""
        cdef size_t count = len(prefixes), rows = plan.rows, i
        cdef size_t usable = (prompt_tokens - 1) / plan.block_size
        cdef const uint64_t *hashes = NULL
        self._make_room(rows)
        cdef int32_t *overlaps = self._overlaps
        for i in range(FIELDS * rows):
            overlaps[i] = 0
        if count:
            hashes = <const uint64_t *>address_of(prefixes)
            if table_overlap(&self._index._table, hashes, count, min(usable, count), plan.slots, rows, overlaps):
                raise MemoryError
        for i in range(FIELDS * rows):
            overlaps[i] *= <int32_t>plan.block_size
        self._plan = plan
        self._prefixes = prefixes
        self._decided.rows.slots = plan.slots
        self._decided.rows.overlaps = overlaps
        self._decided.rows.rows = rows
        self._decided.rows.prompt_tokens = <double>prompt_tokens
        return 0

    cdef bint _decide(self, bint in_turn, double now_s) except -1:
        """Whether any worker can be picked. Sets the costs and the order of the workers. in_turn: see _first."""
        cdef Rows *r = &self._decided.rows
        cdef size_t first
        self._read_columns()
        r.columns = &self._columns
        r.drained = self._plan.drained_rows(self._drained, self._fleet.drains)
        if self._policy.kind != ADAPTIVE:
            self._read_users()
        if self._policy.kind == TTFT:
            self._read_prefill(now_s)
        self._decided.policy = &self._policy
        score(&self._decided, self._costs, self._in_use + 2 * r.rows)
        self._cheapest = cheapest_of(self._costs, self._columns.full, r.drained, r.slots, r.rows)
        if not self._cheapest.tied:
            return False
        first = self._first(&self._cheapest, r.drained, in_turn)
        self._ordered = order_of(self._costs, self._columns.full, r.drained, r.slots, r.rows, &self._cheapest, first, self._wanted, self._order)
        self._moved_from = self._order[0]
        if self._guards:
            self._move(in_turn)
        return True

    cdef size_t _first(self, const Cheapest *cheapest, const uint8_t *out, bint in_turn) except? 0:
        """Which of the rows that tie is the pick: Decider._rotated. in_turn: the one whose worker was picked longest
        ago, else a random one."""
        cdef const Rows *r = &self._decided.rows
        if cheapest.tied < 2:
            return 0
        if not in_turn:
            return self._rng.randrange(cheapest.tied)
        return longest_ago(self._costs, self._columns.full, out, r.slots, r.rows, cheapest, self._columns_at + 9 * self._columns_width)

    cdef bint _fits(self, int64_t output_tokens) except -1:
        """Whether the pick has KV blocks for the whole request: see Decider._with_blocks."""
        cdef uint32_t row = self._order[0]
        cdef uint32_t slot = self._plan.slots[row]
        cdef double promised = (<tuple>self._written.settled[slot])[5], need
        cdef size_t count = len(self._prefixes)
        if isnan(promised) or self._columns.active_slots[slot] <= 0:
            return True
        if output_tokens < 0:
            output_tokens = self._output_tokens
        output_tokens = min(output_tokens, OUTPUT_TOKENS_MAX_C)
        need = ceil((self._decided.rows.prompt_tokens + <double>output_tokens) / self._plan.block_size)
        load = self._loads.get(self._plan.sources[row].key)
        if load is not None and load.outputs.tokens:  # what is not certain to fit goes the general way
            need += <double>load.outputs.tokens / self._plan.block_size * <double>load.of_all()
        cdef const Users **users = self._plan.users_of(self._loads, self._fleet.loads_changed)
        if count and users[row] and users[row].used:
            need -= <double>users_leading(users[row], <const uint64_t *>address_of(self._prefixes), count)
        return need <= promised - self._columns.active_blocks[slot]

    cdef int _read_users(self) except -1:
        """Further.blocks_in_use, of what was matched."""
        cdef size_t i, count = len(self._prefixes), rows = self._plan.rows
        cdef const Users **users = self._plan.users_of(self._loads, self._fleet.loads_changed)
        cdef const uint64_t *hashes = NULL
        if count:
            hashes = <const uint64_t *>address_of(self._prefixes)
        for i in range(rows):
            self._in_use[i] = 0.0
            if count and users[i] and users[i].used:
                self._in_use[i] = <double>users_leading(users[i], hashes, count)
        self._decided.rows.in_use = self._in_use
        return 0

    cdef int _read_prefill(self, double now_s) except -1:
        """PrefillRates.columns and WorkingSets.blocks, of the plan's workers."""
        cdef _Plan plan = self._plan
        cdef size_t row, rows = plan.rows
        cdef double *rate = self._in_use + rows
        rates, sets = self._rates, self._working_sets
        cdef double anchor = 0.0
        if rates._columns is not self._rate_table or plan.last_slot >= self._rate_width:
            self._rate_table = rates.table(plan.last_slot)
            self._rate_width = self._rate_table.shape[1]
            self._rates_at = <const double *>address_of(self._rate_table)
        if sets._blocks is not self._recent_table or plan.last_slot >= self._recent_width:
            self._recent_table = sets.table(plan.last_slot)
            self._recent_width = len(self._recent_table)
            self._recent_at = <const double *>address_of(self._recent_table)
        cdef const double *at = self._rates_at
        cdef Py_ssize_t width = self._rate_width
        for row in range(rows):
            rate[row] = at[plan.slots[row]]
            if rate[row] == 0:  # nothing was ever sent there
                if plan.model is None:
                    rate[row] = rates.anchor(plan.models[row])
                    continue
                if anchor == 0:
                    anchor = rates.anchor(plan.model)
                rate[row] = anchor
        self._prefill = Prefill(
            at + width, at + 2 * width, at + 3 * width, self._written.others_at, self._recent_at, rate, rates.mean_work, now_s,
        )
        self._decided.rows.prefill = &self._prefill
        return 0

    cdef int _time(self, reservation, double now_s) except -1:
        """RouterCore.time, of a reservation that was just made."""
        cdef size_t i, count = len(self._prefixes)
        cdef uint32_t row = self._order[0]
        cdef const uint64_t *hashes = NULL
        cdef list sample = []
        source = self._plan.sources[row]
        if count:
            hashes = <const uint64_t *>address_of(self._prefixes)
        for i in range(count):
            if hashes[i] % SAMPLE_C == 0:
                sample.append(hashes[i])
        self._rates.on_pick(
            source.key, source.slot, self._plan.models[row], reservation.id, reservation.new_tokens,
            reservation.prompt_tokens, now_s,
        )
        self._working_sets.on_sample(source.key, source.slot, sample, now_s)
        return 0

    cdef int _note_ttft(self, reservation, double best_s) except -1:
        """TtftCheck.on_pick and PickTally.count, of a pick whose time to the first token was predicted.

        best_s: the shortest that was predicted of any worker with room, before the pick took of it."""
        cdef double seconds = (self._in_use + 2 * self._decided.rows.rows)[self._order[0]]
        self._core.ttft_check.on_pick(reservation.id, seconds)
        self._counts.tally.predicted(seconds, best_s)
        return 0

    cdef int _move(self, bint in_turn) except -1:
        """Decider._guarded: moves the pick on while the guard passes it over. in_turn: see _first."""
        cdef const Rows *r = &self._decided.rows
        cdef const double *costs = self._costs
        cdef uint8_t *stay_out = self._out
        cdef uint8_t *others_out = self._out + r.rows
        cdef size_t i, first, wanted = self._ordered
        cdef bint out
        cdef Cheapest cheapest
        self._waits = waits_of(&self._guard, r, costs)
        if not passes_over(&self._guard, &self._waits, r, self._order[0]):
            return 0
        for i in range(r.rows):
            out = r.drained != NULL and r.drained[i]
            stay_out[i] = others_out[i] = out
            if passes_over(&self._guard, &self._waits, r, i):
                stay_out[i] = True
            else:
                others_out[i] = True
        cheapest = cheapest_of(costs, self._columns.full, stay_out, r.slots, r.rows)
        first = self._first(&cheapest, stay_out, in_turn)
        self._ordered = order_of(costs, self._columns.full, stay_out, r.slots, r.rows, &cheapest, first, wanted, self._order)
        if self._ordered < wanted:
            cheapest = cheapest_of(costs, self._columns.full, others_out, r.slots, r.rows)
            self._ordered += order_of(
                costs, self._columns.full, others_out, r.slots, r.rows, &cheapest, 0, wanted - self._ordered,
                self._order + self._ordered,
            )
        return 0

    cdef object _reserve(self, str request_id, tuple fingerprint, int64_t output_tokens, double now_s):
        """RouterCore.reserve, of the decision at hand."""
        cdef size_t rows = self._decided.rows.rows, row = self._order[0]
        cdef const int32_t *overlaps = self._overlaps + row
        cdef uint64_t prompt_tokens = <uint64_t>self._decided.rows.prompt_tokens
        cdef uint32_t size = self._plan.block_size
        cdef int32_t reported = overlaps[2 * rows] + overlaps[3 * rows] + overlaps[4 * rows]
        cdef bint has_tail = prompt_tokens % size > 0
        source = self._plan.sources[row]
        core = self._core
        if output_tokens < 0:
            output_tokens = self._output_tokens
        if not self._drawn:
            core.ids.draw()
        ordinal = core._picks = core._picks + 1
        reservation = Reservation(
            self._drawn.pop(), request_id, source.key, fingerprint, self._prefixes, has_tail, prompt_tokens, reported,
            prompt_tokens - <uint64_t>overlaps[rows], now_s, now_s + self._lease_s, b"",
        )
        # They refer to nothing that could refer to them: no need to look for cycles through them.
        PyObject_GC_UnTrack(<void *>fingerprint)
        PyObject_GC_UnTrack(<void *>reservation)
        load = self._loads.get(source.key)
        if load is None:
            load = self._fleet.load(source.key)
        open_reservation(self._reservations, load, reservation, min(output_tokens, OUTPUT_TOKENS_MAX_C), ordinal)
        self._written.put(source.slot, load)
        if self._moved_from != row:
            core.guarded = core.guarded + 1
        return reservation

    cdef int _on_reserved(self, Span session_id, int32_t priority, reservation, double best_s, double now_s) except -1:
        """RouterCore._on_reserved and on_priority; and the answer, of which all but the reservation's id is
        written. best_s: see _note_ttft."""
        cdef uint32_t size = self._plan.block_size
        source = self._plan.sources[self._order[0]]
        cdef size_t held = <int32_t>reservation.predicted_tokens / size, count = len(self._prefixes)
        if held < count:
            self._view.predict(source, self._prefixes[held:] if held else self._prefixes, now_s)
        if self._probing and source.key in self._probing:
            self._fleet.outliers.on_pick(source.key, reservation.id, now_s)
        _put_text(&self._answer, ROUTE_RESPONSE_RESERVATION_ID, reservation.id)
        reservation.answer = _taken(&self._answer)
        if session_id.size:
            self._fleet.sessions.put(_text(session_id), reservation, size, "", now_s)
        if self._timed or self._core.watched.timed:
            self._time(reservation, now_s)
        if self._policy.kind == TTFT:
            self._note_ttft(reservation, best_s)
        if priority and not self._plan.priority_seen and not self._plan.face(self._order[0]).priority_direction:
            self._plan.priority_seen = self._plan.model is not None  # a pool of several models has more to note
            self._core.on_priority(source)
        return 0

    cdef int _write(self, PlainRequest *plain, double now_s) except -1:
        """Writes the answer to the decision at hand, but for its reservation's id. Before that is
        made: a receipt shows workers as they were."""
        cdef Face faces[WANTED_MAX]
        cdef Face moved_from
        cdef Condition conditions[2]
        cdef Condition condition
        cdef Moved moved
        cdef About about
        cdef size_t i
        cdef _WorkerFace face
        cdef int32_t priority = plain.priority
        cdef int32_t *engine_priority = NULL
        cdef list keep = []
        for i in range(self._ordered):
            face = self._plan.face(self._order[i])
            keep.append(face)
            faces[i] = face.spans()
        face = keep[0]
        if face.priority_direction:
            if face.priority_direction < 0:  # the lowest int32 has no opposite that fits
                priority = 0x7FFFFFFF if priority == -0x80000000 else -priority
            engine_priority = &priority
        if not plain.omit_receipt:
            for i in range(min(2, self._ordered)):
                self._read_condition(self._order[i], &conditions[i], now_s, keep)
            about.moved = NULL
            if self._moved_from != self._order[0]:
                face = self._plan.face(self._moved_from)
                keep.append(face)
                moved_from = face.spans()
                self._read_condition(self._moved_from, &condition, now_s, keep)
                moved = Moved(self._moved_from, &self._guard, &self._waits, &moved_from, &condition)
                about.moved = &moved
            about.policy = _span(self._policy_part)
            about.replica = _span(self._replica)
            about.excluded = _span(self._plan.excluded)
            about.not_live = self._plan.not_live
            about.cheapest = self._cheapest
            about.decided_at_s = now_s
            about.best_overlap_tokens = self._best_overlap()
        put_answer(
            &self._answer, &self._decided, NULL if plain.omit_receipt else &about, self._order,
            self._ordered, self._alternatives, faces, conditions, self._lease_s, engine_priority,
            self._plan.block_size if self._core.hot is None else 0,
        )
        if self._answer.failed:
            raise MemoryError
        return 0

    cdef int _read_condition(self, size_t row, Condition *condition, double now_s, list keep) except -1:
        """What of a worker only its stream and its load know; keep: gets what must outlive it."""
        source = self._plan.sources[row]
        cdef bytes state = source.stream.state.encode()
        keep.append(state)
        condition.stream_state = _span(state)
        condition.stream_complete = source.stream.complete and self._holds_all(source.slot)
        load = self._fleet.loads.get(source.key)
        condition.sample_age_s = 0.0
        if load is not None and load.sampled_at_s is not None:
            condition.sample_age_s = max(0.0, now_s - <double>load.sampled_at_s)
        return 0

    cdef int32_t _best_overlap(self):
        """The largest usable overlap of any worker."""
        cdef const int32_t *usable = self._overlaps + self._decided.rows.rows
        cdef int32_t best = 0
        cdef size_t i
        for i in range(self._decided.rows.rows):
            best = max(best, usable[i])
        return best

    cdef bint _holds_all(self, uint32_t slot):
        """Whether the index has all blocks that a worker reported: none was forgotten."""
        cdef uint64_t reported = 0, held = 0
        cdef int level
        for level in range(TIERS):
            reported += table_holder(&self._index._table, slot, level).told
            held += table_holder(&self._index._table, slot, level).held
        return reported == held

    cdef int _make_room(self, size_t rows) except -1:
        if rows <= self._rows_max:
            return 0
        cdef int32_t *overlaps = <int32_t *>realloc(self._overlaps, FIELDS * rows * sizeof(int32_t))
        if not overlaps:
            raise MemoryError
        self._overlaps = overlaps
        cdef double *costs = <double *>realloc(self._costs, rows * sizeof(double))
        if not costs:
            raise MemoryError
        self._costs = costs
        cdef double *in_use = <double *>realloc(self._in_use, 3 * rows * sizeof(double))
        if not in_use:
            raise MemoryError
        self._in_use = in_use
        cdef uint8_t *out = <uint8_t *>realloc(self._out, 2 * rows)
        if not out:
            raise MemoryError
        self._out = out
        self._rows_max = rows
        return 0

    cdef int _read_columns(self) except -1:
        """Looks where the fleet's columns are; they move when there are more slots."""
        cdef double *at = self._written.at
        cdef size_t width = self._written.width
        if at == self._columns_at and width == self._columns_width:
            return 0
        self._columns_at, self._columns_width = at, width
        self._columns.block_size = at
        self._columns.total_blocks = at + width
        self._columns.total_slots = at + 2 * width
        self._columns.trust = at + 3 * width
        self._columns.running = at + 4 * width
        self._columns.waiting = at + 5 * width
        self._columns.reserved = at + 6 * width
        self._columns.active_blocks = at + 7 * width
        self._columns.prefill_tokens_active = at + 8 * width
        self._columns.active_slots = at + 10 * width
        self._columns.load = at + 11 * width
        self._columns.slot_ratio = at + 12 * width
        self._columns.full = at + 13 * width
        self._columns.load_unknown = at + 14 * width
        return 0
