"""The decision about one plain request: match, cost, and the order of the workers. The twin of Decider (router/decision)."""

cdef class _Decision:
    """What policies look at, and the decision at hand. The numbers lie here, so that none is made for a request."""

    cdef object _fleet, _rng
    cdef dict _loads, _drained
    cdef LoadColumns _written
    cdef NativeIndex _index
    cdef Policy _policy
    cdef size_t _wanted
    """Workers in order."""
    cdef int64_t _output_tokens
    """Expected where a request doesn't say."""
    cdef bint _guards
    cdef PickGuard _guard
    cdef double *_columns_at
    """The array that `_columns` points into."""
    cdef size_t _columns_width
    cdef Columns _columns
    cdef int32_t *_overlaps
    cdef double *_costs
    cdef double *_times
    """Of each row the prefill rate; and then, of each, the seconds to the first token."""
    cdef uint8_t *_out
    """A byte for each row: whether it is drained, or passed over; twice."""
    cdef size_t _rows_max
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
        self._fleet = fleet = core.fleet
        self._rng = rng
        self._rates = fleet.rates
        self._working_sets = fleet.working_sets
        self._loads = fleet.loads
        self._drained = fleet.drained
        self._written = fleet.pools.written
        self._index = fleet.view.index

    def __dealloc__(self):
        free(self._overlaps)
        free(self._costs)
        free(self._times)
        free(self._out)

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
        self._decided.rows.prefixes = hashes
        self._decided.rows.prefixes_count = count
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
            r.users = self._plan.users_of(self._loads, self._fleet.loads_changed)
        if self._policy.kind == TTFT:
            self._read_prefill(now_s)
        self._decided.policy = &self._policy
        score(&self._decided, self._costs, self._times + r.rows)
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
        """Which of the rows that tie is the pick, as Ranking.in_order has it. in_turn: the one whose worker was picked longest
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

    cdef int _read_prefill(self, double now_s) except -1:
        """PrefillRates.columns and WorkingSets.blocks, of the plan's workers."""
        cdef _Plan plan = self._plan
        cdef size_t row, rows = plan.rows
        cdef double *rate = self._times
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

    cdef int _move(self, bint in_turn) except -1:
        """Ranking.moved: moves the pick on while the guard passes it over. in_turn: see _first."""
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

    cdef int32_t _best_overlap(self):
        """The largest usable overlap of any worker."""
        cdef const int32_t *usable = self._overlaps + self._decided.rows.rows
        cdef int32_t best = 0
        cdef size_t i
        for i in range(self._decided.rows.rows):
            best = max(best, usable[i])
        return best

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
        cdef double *times = <double *>realloc(self._times, 2 * rows * sizeof(double))
        if not times:
            raise MemoryError
        self._times = times
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
        _point(&self._columns, at, width)
        return 0


cdef void _point(Columns *columns, const double *at, size_t width):
    """Sets the columns of a table of this width (router/fleet/table.py)."""
    columns.block_size = at
    columns.total_blocks = at + width
    columns.total_slots = at + 2 * width
    columns.trust = at + 3 * width
    columns.running = at + 4 * width
    columns.waiting = at + 5 * width
    columns.reserved = at + 6 * width
    columns.active_blocks = at + 7 * width
    columns.prefill_tokens_active = at + 8 * width
    columns.active_slots = at + 10 * width
    columns.load = at + 11 * width
    columns.slot_ratio = at + 12 * width
    columns.full = at + 13 * width
    columns.load_unknown = at + 14 * width
