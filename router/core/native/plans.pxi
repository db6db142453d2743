"""What decisions about one pool share, made once: its rows, and what answers repeat of its workers."""

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

    cdef int32_t engine_priority(self, int32_t priority):
        """A request's priority in the engine's direction; higher is sooner in the request."""
        if self.priority_direction > 0:
            return priority
        return 0x7FFFFFFF if priority == -0x80000000 else -priority  # the lowest has no opposite that fits

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
            _put_exclusions(&b, Counter([reason for _, reason in self.down]))
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
