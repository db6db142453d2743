"""Answers of the general path: router/desk/answer_codec.py is the twin, and writes those of pairs."""

DEF POLICY_PARTS_MAX = 256


cdef class AnswerWriter:
    """Writes answers to picks of one RouterCore from the arrays of their decisions."""

    cdef object _core
    cdef dict _loads, _faces, _policy_parts
    cdef NativeIndex _index
    cdef bytes _replica
    cdef object _places
    """0, 1, 2 ...: the slots of a table that has a column for each row."""
    cdef Backward _answer, _parts

    def __init__(self, core):
        """core: with a NativeIndex."""
        self._core = core
        self._loads = core.fleet.loads
        self._index = core.fleet.view.index
        self._replica = core.replica.encode()
        self._faces, self._policy_parts = {}, {}
        self._places = np.arange(64)

    def __dealloc__(self):
        free(self._answer.bytes)
        free(self._parts.bytes)

    def write(self, pick, int32_t priority, bint omit_receipt):
        """A RouteResponse; None: the codec must write it."""
        reservation, decision = pick.reservation, pick.decision
        if decision.prefill is not None or decision.how is not None or len(decision.order) > WANTED_MAX:
            return None
        try:
            self._put(reservation, decision, priority, omit_receipt)
            _put_text(&self._answer, ROUTE_RESPONSE_RESERVATION_ID, reservation.id)
        except BaseException:
            _begin(&self._answer)
            _begin(&self._parts)
            raise
        return _taken(&self._answer)

    cdef int _put(self, reservation, decision, int32_t priority, bint omit_receipt) except -1:
        """All but the reservation's id."""
        cdef Face faces[WANTED_MAX]
        cdef Face moved_from
        cdef Condition conditions[2]
        cdef Condition condition
        cdef Moved moved
        cdef PickGuard guard
        cdef Waits waits
        cdef About about
        cdef Columns columns
        cdef Decided decided
        cdef _WorkerFace face
        cdef uint32_t order[WANTED_MAX]
        cdef int32_t *engine_priority = NULL
        cdef size_t i, ordered = len(decision.order)
        cdef double now_s = decision.decided_at_s
        cdef bytes part
        cdef list keep = []
        rows, sources, scores = decision.rows, decision.sources, decision.scores
        routing = self._core.routing
        table = _in_rows(rows.table, np.float64)
        tokens, costs = _in_rows(decision.tokens, np.int32), _in_rows(scores.costs, np.float64)
        if len(self._places) < len(rows):
            self._places = np.arange(2 * len(rows))
        _point(&columns, <double *>address_of(table), len(rows))
        decided.policy = NULL
        decided.costs = <const double *>address_of(costs)
        decided.rows = Rows(
            &columns, <const Py_ssize_t *>address_of(self._places), NULL, <const int32_t *>address_of(tokens), NULL, NULL, 0,
            NULL, len(rows), rows.prompt_tokens,
        )
        for i in range(ordered):
            order[i] = decision.order[i]
            face = self._face(sources[order[i]])
            keep.append(face)
            faces[i] = face.spans()
        face = keep[0]
        if face.priority_direction:
            priority = face.engine_priority(priority)
            engine_priority = &priority
        if not omit_receipt:
            for i in range(min(2, ordered)):
                self._condition(decision, order[i], &conditions[i], keep)
            about.moved = NULL
            guarded = decision.guarded
            if guarded is not None:
                guard = PickGuard(guarded.waits.settings.request_tokens, guarded.waits.settings.margin)
                waits = Waits(guarded.waits.least_requests, guarded.waits.least_tokens, guarded.waits.margin_tokens)
                face = self._face(sources[guarded.cheapest])
                keep.append(face)
                moved_from = face.spans()
                self._condition(decision, guarded.cheapest, &condition, keep)
                moved = Moved(guarded.cheapest, &guard, &waits, &moved_from, &condition)
                about.moved = &moved
            part = self._policy_part(decision.policy) + self._terms(RECEIPT_TERMS, scores.shared_terms)
            keep.append(part)
            about.policy = _span(part)
            about.replica = _span(self._replica)
            _put_exclusions(&self._parts, decision.exclusions())
            part = _taken(&self._parts)
            keep.append(part)
            about.excluded = _span(part)
            about.not_live = len(decision.not_live)
            about.cheapest = Cheapest(0.0, decision.tied, 0, 0, 0)
            about.decided_at_s = now_s
            about.best_overlap_tokens = decision.best_overlap_tokens()
        put_answer(
            &self._answer, &decided, NULL if omit_receipt else &about, order, ordered, routing.alternatives, faces,
            conditions, routing.lease_s, engine_priority,
            # hot prefixes need the tokens, and so do LoRAs
            rows.shared_block_size if self._core.hot is None and not decision.request.prompt.lora_name else 0,
        )
        if self._answer.failed:
            raise MemoryError
        return 0

    cdef int _condition(self, decision, size_t row, Condition *condition, list keep) except -1:
        """See _read_condition; and the terms of the row's cost."""
        _read_condition(decision.sources[row], self._index, self._loads, decision.decided_at_s, condition, keep)
        cdef bytes terms = self._terms(
            CANDIDATE_ROW_TERMS, {name: column.item(row) for name, column in decision.scores.row_terms.items()}
        )
        keep.append(terms)
        condition.terms = _span(terms)
        return 0

    cdef _WorkerFace _face(self, source):
        cdef _WorkerFace face = self._faces.get(source.key)
        if face is None or face.heartbeat is not source.heartbeat:
            if len(self._faces) > 2 * len(self._core.fleet.view.sources):
                self._faces.clear()  # of workers that are gone
            face = self._faces[source.key] = _WorkerFace(source)
        return face

    cdef bytes _policy_part(self, policy):
        """Receipt: policy, formula and parameters, written."""
        part = self._policy_parts.get(policy)
        if part is None:
            if len(self._policy_parts) >= POLICY_PARTS_MAX:
                self._policy_parts.clear()
            _put_policy(&self._parts, policy)
            part = self._policy_parts[policy] = _taken(&self._parts)
        return part

    cdef bytes _terms(self, uint32_t number, terms):
        """A map of names to numbers, written."""
        cdef size_t before
        cdef double value
        cdef bytes name
        for text, value in terms.items():
            name = text.encode()
            before = written(&self._parts)
            put_double_always(&self._parts, MAP_VALUE, value)
            put_bytes_always(&self._parts, MAP_KEY, PyBytes_AS_STRING(name), len(name))
            put_message(&self._parts, number, before)
        return _taken(&self._parts)
