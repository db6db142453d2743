# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The writer of answers: RouteResponse, Receipt and CandidateRow, from the arrays of their decisions."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.math cimport NAN
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free

from router.decide.decision.ranking cimport Cheapest, Decided, PickGuard, Ranking, Waits
from router.request.wire.spans cimport (
    MAP_KEY, MAP_VALUE, Backward, Span, beginning, put_bytes, put_bytes_always, put_double_always, put_message, put_term,
    put_uint, put_uint_always, span_of, written,
)

cdef extern from "router/request/wire/native/field_numbers.h" nogil:
    int ROUTE_RESPONSE_RESERVATION_ID, ROUTE_RESPONSE_WORKER_ID, ROUTE_RESPONSE_DP_RANK
    int ROUTE_RESPONSE_ADDRESS, ROUTE_RESPONSE_LABELS, ROUTE_RESPONSE_PREFILL_WORKER, ROUTE_RESPONSE_RECEIPT
    int ROUTE_RESPONSE_PREFILL_RECEIPT
    int ALTERNATIVE_WORKER_ID, ALTERNATIVE_DP_RANK, ALTERNATIVE_ADDRESS
    int CANDIDATE_ROW_WORKER_ID, CANDIDATE_ROW_DP_RANK, CANDIDATE_ROW_TERMS, CANDIDATE_ROW_NUMBERS
    int RECEIPT_POLICY, RECEIPT_FORMULA, RECEIPT_PARAMETERS, RECEIPT_TERMS, RECEIPT_EXCLUDED

cdef extern from "native/answer.h" nogil:
    ctypedef struct WrittenWorker "WrittenWorker":
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
        const WrittenWorker *worker
        const Condition *condition
    ctypedef struct About:
        Span policy, replica, prefill, excluded
        size_t not_live
        Cheapest cheapest
        double decided_at_s
        int32_t best_overlap_tokens
        const Moved *moved
    void put_answer(Backward *, const Decided *, const uint32_t *, size_t, size_t, const WrittenWorker *, double, const int32_t *, uint64_t, uint32_t, double)
    void put_receipt(Backward *, uint32_t, const Decided *, const About *, const uint32_t *, size_t, const WrittenWorker *, const Condition *)
    void put_receipt_body(Backward *, const Decided *, const About *, const uint32_t *, size_t, const WrittenWorker *, const Condition *)
    void put_row_body(Backward *, const Decided *, size_t, const WrittenWorker *, const Condition *)

DEF WANTED_MAX = 20
"""Rows in order: one pick, and as many alternatives as the configuration allows (16), or a runner-up."""
DEF POLICY_PARTS_MAX = 256
"""Policies whose part of a receipt is kept, written."""


cdef class AnswerWriter:
    """Writes answers to picks of one RouterCore, and the records of its decisions."""

    cdef object _core, _complete
    cdef readonly object prefill_worker
    cdef dict _loads, _written, _policy_parts
    cdef bytes _replica
    cdef Backward _answer, _parts

    def __init__(self, core, prefill_worker):
        """prefill_worker: makes the PrefillWorker message from the decision about a prefill and the bootstrap room."""
        self._core = core
        self.prefill_worker = prefill_worker
        self._loads = core.fleet.loads
        self._complete = core.fleet.view.complete
        self._replica = core.replica.encode()
        self._written, self._policy_parts = {}, {}

    def __dealloc__(self):
        free(self._answer.bytes)
        free(self._parts.bytes)

    def answer(self, pick, int32_t priority, bint omit_receipt):
        """A RouteResponse, to a pick that is not reserved yet: its receipts show workers as they were."""
        cdef bytes part
        reservation, decision = pick.reservation, pick.decision
        try:
            if not omit_receipt:
                if decision.prefill is not None:
                    self._put_receipt(ROUTE_RESPONSE_PREFILL_RECEIPT, decision.prefill)
                self._put_receipt(ROUTE_RESPONSE_RECEIPT, decision)
            if reservation.prefill is not None:
                part = self.prefill_worker(decision.computing, reservation.prefill.room)
                put_bytes(&self._answer, ROUTE_RESPONSE_PREFILL_WORKER, span_of(part))
            self._put(decision, priority, reservation.new_tokens)
            _put_text(&self._answer, ROUTE_RESPONSE_RESERVATION_ID, reservation.id)
        except BaseException:
            self._begin_again()
            raise
        return _taken(&self._answer)

    def receipt(self, decision):
        """The Receipt of a decision, with or without a pick."""
        try:
            self._put_receipt(0, decision)
        except BaseException:
            self._begin_again()
            raise
        return _taken(&self._answer)

    def row(self, decision, size_t row):
        """A CandidateRow."""
        cdef Condition condition
        cdef Ranking ranking = decision.ranking
        cdef Decided decided = ranking.decided
        cdef _WrittenWorker worker = self._written_worker(decision.pool.sources[row])
        cdef WrittenWorker spans = worker.spans()
        cdef bytes excluded = decision.excluded[row].encode()
        cdef list keep = []
        if row >= <size_t>len(ranking):
            raise IndexError(f"row {row} of {len(ranking)}")
        try:
            scores = self._scores(decision, &decided)
            self._condition(decision, scores, row, &condition, keep)
            condition.excluded = span_of(excluded)
            put_row_body(&self._answer, &decided, row, &spans, &condition)
        except BaseException:
            self._begin_again()
            raise
        return _taken(&self._answer)

    cdef void _begin_again(self):
        _begin(&self._answer)
        _begin(&self._parts)

    cdef int _put(self, decision, int32_t priority, uint64_t new_tokens) except -1:
        """All but the receipts, the prefill worker and the reservation's id."""
        cdef WrittenWorker workers[WANTED_MAX]
        cdef Ranking ranking = decision.ranking
        cdef _WrittenWorker worker
        cdef uint32_t order[WANTED_MAX]
        cdef int32_t *engine_priority = NULL
        cdef list keep = []
        cdef size_t i, ordered = self._written_of(decision, WANTED_MAX, order, workers, keep)
        routing, ttft_s = self._core.routing, decision.computing.ttft_s
        worker = keep[0]
        if worker.priority_direction:
            priority = worker.engine_priority(priority)
            engine_priority = &priority
        put_answer(
            &self._answer, &ranking.decided, order, ordered, routing.alternatives, workers, routing.lease_s,
            engine_priority, new_tokens,
            # LoRAs need the tokens, too
            decision.pool.only_block_size if not self._core.keeps_tokens and not decision.request.prompt.lora_name else 0,
            NAN if ttft_s is None else 1000 * <double>ttft_s,
        )
        if self._answer.failed:
            raise MemoryError
        return 0

    cdef size_t _written_of(self, decision, size_t most, uint32_t *order, WrittenWorker *workers, list keep) except? 0:
        """The first rows in order, with their workers. Returns how many there are."""
        cdef list rows = decision.order
        cdef size_t i, ordered = min(<size_t>len(rows), most)
        cdef tuple sources = decision.pool.sources
        cdef _WrittenWorker worker
        for i in range(ordered):
            order[i] = rows[i]
            worker = self._written_worker(sources[order[i]])
            keep.append(worker)
            workers[i] = worker.spans()
        return ordered

    cdef int _put_receipt(self, uint32_t number, decision) except -1:
        """Writes the Receipt of a decision as the field `number` of a RouteResponse; 0: as a message by itself."""
        cdef WrittenWorker workers[2]
        cdef WrittenWorker moved_from
        cdef Condition conditions[2]
        cdef Condition condition
        cdef Moved moved
        cdef About about
        cdef Ranking ranking = decision.ranking
        cdef Decided decided = ranking.decided
        cdef _WrittenWorker worker
        cdef uint32_t order[2]
        cdef list keep = []
        cdef size_t i, ordered = self._written_of(decision, 2, order, workers, keep)
        cdef bytes part
        scores = self._scores(decision, &decided)
        for i in range(ordered):
            self._condition(decision, scores, order[i], &conditions[i], keep)
        about.moved = NULL
        if ordered and ranking.moved_from >= 0:
            worker = self._written_worker(decision.pool.sources[ranking.moved_from])
            keep.append(worker)
            moved_from = worker.spans()
            self._condition(decision, scores, ranking.moved_from, &condition, keep)
            moved = Moved(ranking.moved_from, &ranking.guard, &ranking.waits, &moved_from, &condition)
            about.moved = &moved
        part = self._policy_part(decision.policy)
        if scores is not None:
            part = part + self._terms(RECEIPT_TERMS, scores.shared_terms)
        keep.append(part)
        about.policy = span_of(part)
        about.replica = span_of(self._replica)
        about.prefill = about.excluded = Span(NULL, 0)
        if decision.how is not None:
            part = decision.how.encode()
            keep.append(part)
            about.prefill = span_of(part)
        about.cheapest = ranking.cheapest
        if decision.not_live or decision.barred.mask is not None:
            _put_exclusions(&self._parts, decision.exclusions())
            part = _taken(&self._parts)
            keep.append(part)
            about.excluded = span_of(part)
            about.cheapest.drained = about.cheapest.full = about.cheapest.not_finite = 0
        about.not_live = len(decision.not_live)
        about.decided_at_s = decision.decided_at_s
        about.best_overlap_tokens = ranking.best_overlap()
        if number:
            put_receipt(&self._answer, number, &decided, &about, order, ordered, workers, conditions)
        else:
            put_receipt_body(&self._answer, &decided, &about, order, ordered, workers, conditions)
        if self._answer.failed:
            raise MemoryError
        return 0

    cdef object _scores(self, decision, Decided *decided):
        """The scores that the terms of costs are written from, if the decision was kept or its policy has no kernel;
        None: the policy's kernel in C makes the terms, from the workers' present numbers."""
        scores = decision.scores_made
        if scores is None and decided.policy == NULL:
            scores = decision.scores
        if scores is not None:
            decided.policy = NULL
        return scores

    cdef int _condition(self, decision, scores, size_t row, Condition *condition, list keep) except -1:
        """Writes a row's stream state, age of load and terms of cost into `condition`. scores: those that the terms are
        made of; None: the policy's kernel makes the terms. keep: gets objects that must outlive the condition."""
        cdef bytes terms, state
        source = decision.pool.sources[row]
        state = _state(source.stream.state)
        condition.stream_state = span_of(state)
        condition.terms = condition.excluded = Span(NULL, 0)
        condition.stream_complete = self._complete(source)
        condition.sample_age_s = 0.0
        load = self._loads.get(source.key)
        if load is not None and load.sampled_at_s is not None:
            condition.sample_age_s = max(0.0, <double>decision.decided_at_s - <double>load.sampled_at_s)
        if scores is not None:
            terms = self._terms(CANDIDATE_ROW_TERMS, {name: column.item(row) for name, column in scores.row_terms.items()})
        elif decision.policy.affinity_bonus:
            terms = self._terms(CANDIDATE_ROW_TERMS, {"affinity": decision.affinity_at(row)})
        else:
            return 0
        keep.append(terms)
        condition.terms = span_of(terms)
        return 0

    cdef _WrittenWorker _written_worker(self, source):
        cdef _WrittenWorker worker = self._written.get(source.key)
        if worker is None or worker.heartbeat is not source.heartbeat:
            if len(self._written) > 2 * len(self._core.fleet.view.sources):
                self._written.clear()  # of workers that are gone
            worker = self._written[source.key] = _WrittenWorker(source)
        return worker

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


cdef class _WrittenWorker:
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
            for name, number in heartbeat.own_numbers.items():
                encoded = name.encode()
                put_term(&b, CANDIDATE_ROW_NUMBERS, encoded, number)
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

    cdef WrittenWorker spans(self):
        return WrittenWorker(span_of(self.picked), span_of(self.alternative), span_of(self.row))


cdef dict _states = {}
"""StreamState -> its name, encoded; there are a few."""


cdef bytes _state(state):
    cdef bytes name = _states.get(state)
    if name is None:
        name = _states[state] = state.encode()
    return name


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
    put_bytes(b, number, span_of(encoded))


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
