# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The native lane: plain requests picked, reserved and answered from bytes to bytes.

A request is plain if it is decided by the fleet's policy, which must have a kernel (router/decision/native/policy.h),
about a pool of one block size, and names nothing that narrows the choice (native/plain_request.h). The desk, the core
and the decider take all other requests, and come to the same pick and answer for these: costs, order and guard are the
same C on both ways, and so are answers (AnswerWriter writes those of the general way), loads and reservations
(router/reservations/steps.pyx), columns (router/fleet/load_columns.pyx) and counts (counts.pyx). Nothing is kept here
but what can be made again. tests/router/core/test_fast_path.py sends the same requests to both.

The file has includes by subject (native/*.pxi), which are compiled as one module, so that a decision crosses none.

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

import uuid
from collections import Counter

import numpy as np

from indexer.hashing import HASH_SEED
from indexer.arrays cimport address_of
from indexer.kernel cimport (
    BlockUsers, NativeIndex, Users, table_holder, table_overlap, users_leading, xxh3_64, xxh3_blocks,
    xxh3_chain, xxh3_secret,
)
from router.core.counts cimport Counts
from router.decision.ranking cimport (
    ADAPTIVE, BLOCKS, Cheapest, Columns, Decided, NO_POLICY, PickGuard, Policy, Prefill, Ranking, Rows, TTFT, Waits, cheapest_of,
    longest_ago, order_of, passes_over, score, waits_of,
)
from router.fleet.load_columns cimport LoadColumns
from router.reservations.steps cimport open_reservation
from router.fleet.table import COLUMNS
from router.request.request import Role
from router.fleet.eligibility import OUTPUT_TOKENS_MAX
from router.fleet.rates import ATTENTION_TOKENS, REQUEST_TOKENS
from router.core.tally import PickTally
from router.policies import dynamo_adaptive, dynamo_blocks, ttft
from router.reservations.reservations import Reservation
from router.wire.received import TooMuch

include "native/declared.pxi"

DEF FIELDS = 6
"""Of OverlapTokens: raw, usable, and the rows of a match."""
DEF TIERS = 3
DEF WANTED_MAX = 20
"""Rows in order: one pick, and as many alternatives as the configuration allows (16), or a runner-up."""
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
cdef object _both = Role.BOTH
cdef object _empty = np.empty
cdef object _u64 = np.uint64


include "native/writing.pxi"
include "native/plans.pxi"
include "native/batches.pxi"
include "native/decision.pxi"
include "native/general_answer.pxi"


cdef class Lane(_Decision):
    """The native lane of one RouterCore: requests read, picked for, reserved and answered."""

    cdef object _core, _pools, _view, _reservations
    cdef list _drawn
    """Ids that come next (ReservationIds)."""
    cdef dict _live, _by_request, _probing
    cdef object _routing
    """The message that the fields below, and those of the policy, were read from."""
    cdef bint _by_session, _timed
    cdef public bint traces
    """Whether the general path has requests of sampled traces: it has the times of their stages."""
    cdef size_t _alternatives
    cdef uint64_t _prompt_tokens_max
    cdef double _lease_s
    cdef bytes _policy_part, _replica
    cdef Counts _counts
    cdef dict _plans
    cdef uint8_t _secret[192]
    cdef Backward _answer

    def __init__(self, core, rng):
        """core: with a NativeIndex. rng: the core's own."""
        super().__init__(core, rng)
        fleet = core.fleet
        self._core = core
        self._pools = fleet.pools
        self._view = fleet.view
        self._reservations = core.reservations
        self._probing = fleet.outliers.probing
        self._live = fleet.pools._pools
        self._by_request = core.reservations._by_request
        self._drawn = core.ids.drawn
        self._plans = {}
        self._replica = core.replica.encode()
        self.tally = PickTally()
        xxh3_secret(HASH_SEED, self._secret)

    def __dealloc__(self):
        free(self._answer.bytes)

    @property
    def tally(self):
        """Counts the picks that are answered here; a PickTally."""
        return self._counts.tally

    @tally.setter
    def tally(self, tally):
        self._counts = Counts(tally)
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
        if not self._prepare(request_id) or self._by_session and plain.session_id.size or self.traces and plain.traced:
            return None
        cdef str model = _text(plain.model)
        if is_behind is not None and is_behind(model):
            return None
        cdef _Plan plan = self._plan_of(model)
        if not self._takes(plan, plain.hashes_block_size, plain.prompt_tokens, plain.output_tokens):
            return None
        cdef size_t count = plain.prompt_tokens / plan.block_size
        prefixes = _empty(count, _u64)
        cdef uint64_t *hashes = NULL
        if count:
            hashes = <uint64_t *>address_of(prefixes)
            if plain.hashes_block_size:
                memcpy(hashes, plain.hashes.at, plain.hashes.size)
            else:
                xxh3_blocks(plain.tokens.at, count, 4 * <size_t>plan.block_size, HASH_SEED_C, hashes)
            xxh3_chain(hashes, count, 0, 0, HASH_SEED_C, hashes)
        self._counts.mark(0)
        self._match(plan, prefixes, plain.prompt_tokens)
        self._counts.mark(1)
        if not self._decide(plain.session_id.size > 0, now_s) or self._core.decider.looks_ahead and not self._fits(plain.output_tokens):
            return None
        self._counts.mark(2)
        cdef uint64_t fingerprint = self._fingerprint(plain, hashes, count)
        if not request_id:
            request_id = uuid.uuid4().hex
        try:
            self._write(plain, now_s)
            reservation = self._reserve(request_id, (fingerprint, plan.block_size, model, _both), plain.output_tokens, now_s)
        except BaseException:
            _begin(&self._answer)
            raise
        try:
            self._on_reserved(plain.session_id, plain.priority, reservation, now_s)
        except BaseException:
            _begin(&self._answer)
            self._core.withdraw(reservation, now_s)
            raise
        self._counts.overlap(
            plain.prompt_tokens, self._best_overlap(), self._overlaps + self._order[0], self._decided.rows.rows,
            self._plan.model_row(self._order[0], self._counts.tally),
        )
        self._counts.total()
        return reservation

    cdef uint64_t _fingerprint(self, const PlainRequest *plain, const uint64_t *prefixes, size_t count):
        """Prompt.fingerprint, in the block size that the prompt's prefixes are in."""
        cdef uint64_t value = plain.prompt_tokens | <uint64_t>plain.hashes_block_size << 32
        cdef Span tail = Span(NULL, 0)
        cdef size_t begin = 4 * count * <size_t>self._plan.block_size
        if not plain.hashes_block_size and plain.tokens.size > begin:
            tail = Span(plain.tokens.at + begin, plain.tokens.size - begin)
        if count:
            value ^= prefixes[count - 1]
        return value ^ xxh3_64(tail.at, tail.size, HASH_SEED_C, self._secret)

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
        _put_policy(&self._answer, policy)
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

    cdef object _reserve(self, str request_id, tuple fingerprint, int64_t output_tokens, double now_s):
        """ReservationLife.open, of the decision at hand."""
        cdef size_t rows = self._decided.rows.rows, row = self._order[0]
        cdef const int32_t *overlaps = self._overlaps + row
        cdef uint64_t prompt_tokens = <uint64_t>self._decided.rows.prompt_tokens
        cdef uint32_t size = self._plan.block_size
        cdef int32_t reported = overlaps[2 * rows] + overlaps[3 * rows] + overlaps[4 * rows]
        cdef int own_blocks = prompt_tokens % size > 0
        source = self._plan.sources[row]
        core = self._core
        if output_tokens < 0:
            output_tokens = self._output_tokens
        if not self._drawn:
            core.ids.draw()
        life = core.life
        ordinal = life.picks = life.picks + 1
        reservation = Reservation(
            self._drawn.pop(), request_id, source.key, fingerprint, self._prefixes, own_blocks, prompt_tokens, reported,
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

    cdef int _on_reserved(self, Span session_id, int32_t priority, reservation, double now_s) except -1:
        """RouterCore._on_reserved and on_priority; and the answer, of which all but the reservation's id is
        written."""
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
            self._note_ttft(reservation)
        if priority and not self._plan.priority_seen and not self._plan.face(self._order[0]).priority_direction:
            self._plan.priority_seen = self._plan.model is not None  # a pool of several models has more to note
            self._core.on_priority(source)
        return 0

    cdef int _time(self, reservation, double now_s) except -1:
        """ReservationLife.time, of a reservation that was just made."""
        cdef uint32_t row = self._order[0]
        source = self._plan.sources[row]
        self._rates.on_pick(
            source.key, source.slot, self._plan.models[row], reservation.id, reservation.new_tokens,
            reservation.prompt_tokens, now_s,
        )
        self._working_sets.on_pick(source.key, source.slot, self._prefixes, now_s)
        return 0

    cdef int _note_ttft(self, reservation) except -1:
        """TtftCheck.on_pick and PickTally.predicted, of a pick whose time to the first token was predicted."""
        cdef double seconds = (self._times + self._decided.rows.rows)[self._order[0]]
        self._core.ttft_check.on_pick(reservation.id, seconds)
        self._counts.tally.predicted(seconds, self._decided.ttft.shortest_s)
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
            priority = face.engine_priority(priority)
            engine_priority = &priority
        if not plain.omit_receipt:
            for i in range(min(2, self._ordered)):
                _read_condition(self._plan.sources[self._order[i]], self._index, self._loads, now_s, &conditions[i], keep)
            about.moved = NULL
            if self._moved_from != self._order[0]:
                face = self._plan.face(self._moved_from)
                keep.append(face)
                moved_from = face.spans()
                _read_condition(self._plan.sources[self._moved_from], self._index, self._loads, now_s, &condition, keep)
                moved = Moved(self._moved_from, &self._guard, &self._waits, &moved_from, &condition)
                about.moved = &moved
            about.policy = _span(self._policy_part)
            about.replica = _span(self._replica)
            about.prefill = Span(NULL, 0)
            about.excluded = _span(self._plan.excluded)
            about.not_live = self._plan.not_live
            about.cheapest = self._cheapest
            about.decided_at_s = now_s
            about.best_overlap_tokens = self._best_overlap()
        put_answer(
            &self._answer, &self._decided, NULL if plain.omit_receipt else &about, self._order,
            self._ordered, self._alternatives, faces, conditions, self._lease_s, engine_priority,
            <uint64_t>self._decided.rows.prompt_tokens - <uint32_t>self._overlaps[self._decided.rows.rows + self._order[0]],
            self._plan.block_size if self._core.hot is None else 0,
        )
        if self._answer.failed:
            raise MemoryError
        return 0
