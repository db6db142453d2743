# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The rows of one decision ranked in C: their costs, the pick and the rows next to it, and the guard.

Knows columns and numbers, and no router. The costs are those of a Kernel, the twin in C of a policy's
function over rows (native/policy.h), or any array. Pure.

    Ranking(table, tokens, ...) -> score(kernel) or take(costs) -> in_order() -> moved(), by the guard

The table is a part of the fleet's columns as they are; `table` makes it the ranking's own, for what is read later.
"""

from cpython.buffer cimport PyBUF_STRIDED_RO, PyBuffer_Release, PyObject_GetBuffer

from libc.math cimport INFINITY, isfinite, isnan
from libc.stdlib cimport free, malloc

import numpy as np

from indexer.arrays cimport address_of
from indexer.kernel cimport BlockUsers
from router.fleet.table import check_header
from router.fleet.topology import BEYOND
from router.decide.policies import cache_threshold, dynamo_adaptive, dynamo_blocks, pair, ttft
from router.decide.policies.policy import Parameters

WANTED_MAX = 20
"""Rows in order, at most: the pick, and as many alternatives as the configuration allows (16)."""
DEF ORDER_MAX = 20
assert WANTED_MAX == ORDER_MAX
check_header([COLUMN_NAMES[place].decode() for place in range(COLUMNS_COUNT)])
cdef extern from "router/decide/decision/native/policy.h" nogil:
    const int ADAPTIVE, BLOCKS, TTFT, PREFILL_QUEUE, DECODE_ROOM, THRESHOLD, LAST_KIND

cdef dict _kinds = {
    dynamo_adaptive.score: (ADAPTIVE, dynamo_adaptive.AdaptiveParameters),
    dynamo_blocks.score: (BLOCKS, dynamo_blocks.BlocksParameters),
    ttft.score: (TTFT, ttft.TtftParameters),
    pair.prefill_queue: (PREFILL_QUEUE, Parameters),
    pair.decode_room: (DECODE_ROOM, pair.RoomParameters),
    cache_threshold.score: (THRESHOLD, cache_threshold.ThresholdParameters),
}
"""By the function of a policy: its twin in native/policy.h, which gets the parameters in their order."""
KERNELS = tuple(_kinds)
"""Functions of policies that have a kernel."""
assert {kind for kind, _ in _kinds.values()} == set(range(1, LAST_KIND + 1)), "a kind of policy.h has no function"
assert dynamo_adaptive.AdaptiveParameters.__struct_fields__ == (
    "balance_threshold", "alpha_balance", "alpha_cache", "gamma", "queue_weight", "keep",
)
assert dynamo_blocks.BlocksParameters.__struct_fields__ == (
    "prefill_load_scale", "overlap_credit", "host_credit", "disk_credit", "credit_decay", "request_weight",
    "temperature",
)
assert ttft.TtftParameters.__struct_fields__ == (
    "keep", "crowding", "stall", "step_tokens", "tokens", "stay_s", "host_rate", "disk_rate",
)
assert cache_threshold.ThresholdParameters.__struct_fields__ == ("cache_threshold",)
assert pair.RoomParameters.__struct_fields__ == ("way_weight", "slots_unknown")
assert (BEYOND, pair.NO_ROOM) == (3, 1e3)  # native/halves.h has them, too
cdef object _empty = np.empty
cdef object _in_rows = np.ascontiguousarray
cdef object _places = np.arange(64)
"""0, 1, 2 ...: the slots of a table that has a place for each row."""


def kernel_of(policy):
    """A policy's Kernel; None: it has none, and its function makes the costs."""
    known = _kinds.get(policy.function)
    if known is None or policy.parameters.get("temperature"):  # such picks are drawn
        return None
    return Kernel(known[0], policy.parameters.values())


cdef class Kernel:
    """A policy's costs in C, with the policy's parameters."""

    def __init__(self, int kind, numbers):
        cdef size_t i
        cdef double number
        if not 0 < kind <= LAST_KIND:
            raise ValueError(f"native/policy.h has no kernel {kind}")
        self.policy.kind = <Kind>kind
        for i, number in enumerate(numbers):
            if i >= NUMBERS_MAX:
                raise ValueError(f"a policy in C has at most {NUMBERS_MAX} parameters")
            self.policy.numbers[i] = number
        self.reads_users = kind not in (ADAPTIVE, PREFILL_QUEUE, THRESHOLD)
        self.reads_recent = kind in (ADAPTIVE, TTFT)
        self.reads_prefill = kind == TTFT


cdef class RowUsers:
    """Which blocks our open requests use on each worker of a pool."""

    def __init__(self, tuple workers not None):
        self._workers = workers

    def __dealloc__(self):
        free(self._users)

    cpdef int refresh(self, dict loads, uint64_t changes) except -1:
        """Reads the workers' loads again if some came or went: `changes` is how many did, ever."""
        cdef size_t row
        cdef BlockUsers users
        if self._is_read and changes == self._read:
            return 0
        if self._users == NULL:
            self._users = <const Users **>malloc(max(1, len(self._workers)) * sizeof(Users *))
            if self._users == NULL:
                raise MemoryError
        self._kept = []
        for row, key in enumerate(self._workers):
            load = loads.get(key)
            self._users[row] = NULL
            if load is not None:
                users = load._users
                self._kept.append(users)
                self._users[row] = &users._users
        self._read, self._is_read = changes, True
        return 0


def prefill_inputs(table, others_waiting, slots):
    """What policies that predict the first token read of a pool's workers: an array of shape (5, rows) of
    rate (0: nothing was ever sent there), ends_s, least_s, tokens, others_waiting.

    table: PrefillRates.table; others_waiting: a number for each slot."""
    cdef size_t rows = len(slots), row, width = table.shape[1]
    inputs = _empty((5, rows))
    if not rows:
        return inputs
    cdef double *out = <double *>address_of(inputs)
    cdef const double *rates = <const double *>address_of(table)
    cdef const double *others = <const double *>address_of(others_waiting)
    cdef const Py_ssize_t *at = <const Py_ssize_t *>address_of(slots)
    for row in range(rows):
        out[row] = rates[at[row]]
        out[rows + row] = rates[width + at[row]]
        out[2 * rows + row] = rates[2 * width + at[row]]
        out[3 * rows + row] = rates[3 * width + at[row]]
        out[4 * rows + row] = others[at[row]]
    return inputs


cdef class Ranking:
    """Rows, their costs and their order."""

    def __init__(self, table not None, tokens not None, double prompt_tokens, prefixes, barred):
        """table: shape (columns, rows), which nobody writes to before the ranking is made; tokens: shape (fields of
        Overlap, rows), int32. prefixes: of the prompt's full blocks, where all rows have one block size. barred: a byte for each row, not 0 where it must not be
        picked; None: all may be."""
        global _places
        cdef size_t rows = table.shape[1]
        cdef Rows *r = &self.decided.rows
        self._table, self._prefixes, self._barred = table, prefixes, barred
        self._tokens = tokens = _in_rows(tokens, np.int32)
        self.moved_from = -1
        if <size_t>len(_places) < rows:
            _places = np.arange(2 * rows)
        r.rows = rows
        r.prompt_tokens = prompt_tokens
        r.columns = &self._columns
        r.slots = <const Py_ssize_t *>address_of(_places)
        self._users = _places  # outlives a larger one
        if rows:
            self._point()
            r.overlaps = <const int32_t *>address_of(tokens)
            if barred is not None:
                r.drained = <const uint8_t *>address_of(barred)
        if prefixes is not None and len(prefixes):
            r.prefixes = <const uint64_t *>address_of(prefixes)
            r.prefixes_count = len(prefixes)

    def __len__(self):
        return self.decided.rows.rows

    @property
    def table(self):
        """The columns as they are at the first call, copied: nobody writes to them later."""
        if not self._is_own:
            self._table = self._table.copy()
            self._table.flags.writeable = False
            self._is_own = True
            if self.decided.rows.rows:
                self._point()
        return self._table

    @property
    def tied(self):
        """Rows that share the lowest cost of those that can be picked."""
        return self.cheapest.tied

    @property
    def full(self):
        """Rows that can't be picked for want of room alone."""
        return self.cheapest.full

    @property
    def not_finite(self):
        """Rows that can't be picked since their cost is no number."""
        return self.cheapest.not_finite

    cpdef int score(
        self, Kernel kernel, object users, object recent, object inputs, double mean_work, double now_s,
        double output_tokens, object distance,
    ) except -1:
        """Costs by a kernel; of at least one row. users: a RowUsers that was refreshed, where the kernel reads it;
        recent: blocks of each row's working set, and inputs: prefill_inputs, where it reads those. mean_work: of a
        prompt, tokens. output_tokens: as the request says; 0: it does not. distance: of each row to where
        the KV cache has to come from; None: nothing has to."""
        cdef Rows *r = &self.decided.rows
        cdef size_t rows = r.rows
        r.output_tokens = output_tokens
        if distance is not None:
            self._distance = distance = _in_rows(distance, np.float64)
            r.distance = <const double *>address_of(distance)
        cdef const double *at
        cdef double *seconds = NULL
        self.costs = _empty(rows)
        self._kernel = kernel
        if kernel.reads_users:
            self._users = users, self._users
            r.users = (<RowUsers>users)._users
        if kernel.reads_recent:
            self._recent = recent
            r.recent_blocks = <const double *>address_of(recent)
        if kernel.reads_prefill:
            self._inputs = inputs
            at = <const double *>address_of(inputs)
            self._prefill = Prefill(
                at + rows, at + 2 * rows, at + 3 * rows, at + 4 * rows, at, mean_work, now_s
            )
            r.prefill = &self._prefill
            self.seconds = _empty(rows)
            seconds = <double *>address_of(self.seconds)
        self.decided.policy = &kernel.policy
        score(&self.decided, <double *>address_of(self.costs), seconds)
        return 0

    cpdef int take(self, object costs, object seconds) except -1:
        """Costs that were made elsewhere, contiguous; seconds: to each row's first token, or None."""
        self.costs, self.seconds = costs, seconds
        self.decided.costs = <const double *>address_of(costs) if len(costs) else NULL
        return 0

    def invest(self, object tokens):
        """Tokens of each row's new ones that count for later prompts, in costs and for the guard; None: none. Before
        the rows are scored."""
        self._invested = tokens
        if tokens is not None:
            self.decided.rows.invested_tokens = <const double *>address_of(tokens)

    def lessen(self, Py_ssize_t row, double bonus):
        """Takes a bonus off the cost of a row."""
        cdef double *costs = <double *>address_of(self.costs)
        costs[row] -= bonus

    cpdef list in_order(self, size_t wanted, bint in_turn, object rng):
        """The pick, and the rows next to it that could be picked, cheapest first: `wanted` at most.

        Rows that tie for the lowest cost begin, in turn, with the one whose worker was picked longest ago, so that
        sessions that begin are spread evenly over workers that are alike; else with a random one, so that picks
        of several routers differ."""
        cdef const Rows *r = &self.decided.rows
        cdef uint32_t order[ORDER_MAX]
        cdef size_t first, count
        wanted = min(wanted, <size_t>ORDER_MAX)
        self.cheapest = cheapest_of(self.decided.costs, self._columns.full, r.drained, r.slots, r.rows)
        if not self.cheapest.tied:
            return []
        if self.seconds is not None:
            self._find_shortest()
        first = self._first(&self.cheapest, r.drained, in_turn, rng)
        count = order_of(self.decided.costs, self._columns.full, r.drained, r.slots, r.rows, &self.cheapest, first, wanted, order)
        return [order[row] for row in range(count)]

    cpdef list moved(self, double request_tokens, double margin, list order, bint in_turn, object rng):
        """An order whose pick the guard leaves where it is (router/decide/decision/guard.py); moved_from is the row that it
        passed over then, else -1. The rows that it passes over come last."""
        cdef const Rows *r = &self.decided.rows
        cdef const double *costs = self.decided.costs
        cdef size_t i, first, count, wanted = len(order)
        cdef uint32_t ordered[ORDER_MAX]
        cdef uint8_t *stay_out
        cdef uint8_t *others_out
        cdef bint out
        cdef Cheapest cheapest
        if not wanted:
            return order
        self.guard = PickGuard(request_tokens, margin)
        self.waits = waits_of(&self.guard, r, costs)
        cdef size_t row = order[0]
        if not passes_over(&self.guard, &self.waits, r, row):
            return order
        stay_out = <uint8_t *>malloc(2 * r.rows)
        if stay_out == NULL:
            raise MemoryError
        try:
            others_out = stay_out + r.rows
            for i in range(r.rows):
                out = r.drained != NULL and r.drained[i]
                stay_out[i] = others_out[i] = out
                if passes_over(&self.guard, &self.waits, r, i):
                    stay_out[i] = True
                else:
                    others_out[i] = True
            cheapest = cheapest_of(costs, self._columns.full, stay_out, r.slots, r.rows)
            first = self._first(&cheapest, stay_out, in_turn, rng)
            count = order_of(costs, self._columns.full, stay_out, r.slots, r.rows, &cheapest, first, wanted, ordered)
            if count < wanted:
                cheapest = cheapest_of(costs, self._columns.full, others_out, r.slots, r.rows)
                count += order_of(
                    costs, self._columns.full, others_out, r.slots, r.rows, &cheapest, 0, wanted - count, ordered + count
                )
        finally:
            free(stay_out)
        self.moved_from = row
        return [ordered[i] for i in range(count)]

    def tpot_s(self, size_t row):
        """Predicted seconds between tokens at a row; None: unknown."""
        cdef double seconds = self._columns.tpot_s[self.decided.rows.slots[row]]
        return None if isnan(seconds) else seconds

    def best_overlap(self):
        """The largest usable overlap of any row, tokens."""
        cdef const Rows *r = &self.decided.rows
        cdef int32_t best = 0
        cdef size_t row
        for row in range(r.rows):
            best = max(best, r.overlaps[r.rows + row])
        return best

    def bad_rows(self):
        """Rows whose cost is no finite number."""
        cdef size_t row
        return [row for row in range(self.decided.rows.rows) if not isfinite(self.decided.costs[row])]

    cdef size_t _first(self, const Cheapest *cheapest, const uint8_t *out, bint in_turn, object rng) except? 0:
        cdef const Rows *r = &self.decided.rows
        if cheapest.tied < 2:
            return 0
        if not in_turn:
            return rng.randrange(cheapest.tied)
        return longest_ago(
            self.decided.costs, self._columns.full, out, r.slots, r.rows, cheapest,
            self._columns.last_picked,
        )

    cdef int _find_shortest(self) except -1:
        cdef const Rows *r = &self.decided.rows
        cdef const double *seconds = <const double *>address_of(self.seconds)
        cdef size_t row
        self.shortest_s = INFINITY
        for row in range(r.rows):
            if (
                seconds[row] < self.shortest_s and isfinite(self.decided.costs[row])
                and can_take(self._columns.full, r.drained, r.slots, row)
            ):
                self.shortest_s = seconds[row]
        return 0

    cdef int _point(self) except -1:
        """Looks where the table's columns are (router/fleet/table.py)."""
        cdef Py_buffer view
        PyObject_GetBuffer(self._table, &view, PyBUF_STRIDED_RO)
        cdef const double *at = <const double *>view.buf
        cdef bint fits = view.ndim == 2 and view.itemsize == 8 and view.strides[1] == 8
        cdef size_t width = view.strides[0] // 8 if fits else 0
        PyBuffer_Release(&view)
        if not fits:
            raise ValueError("a table has two dimensions of float64, each column in one piece")
        point_columns(&self._columns, at, width)
        return 0
