# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A worker's load as numbers in the columns of its slot (Pools.put_load). Pure."""

from indexer.arrays cimport address_of
from indexer.kernel cimport BlockUsers
from libc.math cimport isnan
from libc.stdint cimport int64_t, uint32_t

from router.fleet.table import check_header

cdef extern from "router/fleet/native/table.h" nogil:
    const char **COLUMN_NAMES
    const size_t COLUMNS_COUNT
    int COLUMN_BLOCK_SIZE, COLUMN_TOTAL_BLOCKS, COLUMN_TOTAL_SLOTS, COLUMN_TRUST, COLUMN_RUNNING
    int COLUMN_WAITING, COLUMN_RESERVED, COLUMN_ACTIVE_BLOCKS, COLUMN_PREFILL_TOKENS_ACTIVE
    int COLUMN_LAST_PICKED, COLUMN_ACTIVE_SLOTS, COLUMN_LOAD, COLUMN_SLOT_RATIO, COLUMN_FULL
    int COLUMN_LOAD_UNKNOWN, COLUMN_TPOT_S

check_header([COLUMN_NAMES[place].decode() for place in range(COLUMNS_COUNT)])


cdef class LoadColumns:
    def __init__(self):
        self.settled = {}
        self.full = set()
        self.over_estimate = set()

    def use(self, table, others_waiting):
        self._table, self._others = table, others_waiting
        self.at = <double *>address_of(table)
        self.others_at = <double *>address_of(others_waiting)
        self.width = table.shape[1]

    def drop(self, uint32_t slot):
        self.settled.pop(slot, None)
        self.full.discard(slot)
        self.over_estimate.discard(slot)

    cpdef int put(self, uint32_t slot, object load) except -1:
        cdef tuple settled = self.settled.get(slot)
        if settled is None:
            return 0  # the load will be read once the worker's heartbeat is
        cdef double *at = self.at + slot
        cdef size_t width = self.width
        cdef double total_blocks = settled[1], total_slots = settled[2], slots_known = settled[4], promised = settled[5]
        cdef double base_s = settled[9], request_s = settled[10], block_s = settled[11]
        cdef double prefill_tokens_max = settled[6], prefills_max = settled[7], decodes_max = settled[8]
        cdef BlockUsers users = load._users
        cdef double running = load.running, waiting = load.waiting, external = load.external_requests
        cdef double replica_requests, replica_blocks, replica_tokens
        replica_requests, replica_blocks, replica_tokens = load.replicas
        cdef double requests = load.requests, blocks = <double>(users._users.used + load._tails)
        cdef double active_slots = external + requests + replica_requests
        cdef double active_blocks = <double>load.external_blocks + blocks + replica_blocks
        cdef double reserved = active_slots - running - waiting
        cdef double prefill_tokens = <double>load.prefill_tokens + replica_tokens, prefills = load.prefills
        # A comparison with NaN, an unknown bound, is false.
        cdef bint out_of_room = (
            active_slots >= slots_known or active_blocks >= total_blocks or prefill_tokens >= prefill_tokens_max
            or prefills >= prefills_max or requests - prefills >= decodes_max
        )
        cdef bint full = out_of_room or active_slots >= total_slots or active_blocks >= promised
        cdef double unheard = load.unheard, others
        _put(self.full, slot, full)
        _put(self.over_estimate, slot, full and not out_of_room)
        if unheard:  # which makes a worker dearer, but not full: WorkerLoad.guessed
            others = requests + replica_requests
            active_slots += unheard
            if others:
                active_blocks += unheard * (blocks + replica_blocks) / others
        at[COLUMN_BLOCK_SIZE * width] = settled[0]
        at[COLUMN_TOTAL_BLOCKS * width] = total_blocks
        at[COLUMN_TOTAL_SLOTS * width] = total_slots
        at[COLUMN_TRUST * width] = settled[3]
        at[COLUMN_RUNNING * width] = running
        at[COLUMN_WAITING * width] = waiting
        at[COLUMN_RESERVED * width] = reserved
        at[COLUMN_ACTIVE_BLOCKS * width] = active_blocks
        at[COLUMN_PREFILL_TOKENS_ACTIVE * width] = prefill_tokens
        at[COLUMN_LAST_PICKED * width] = load.last_picked
        at[COLUMN_ACTIVE_SLOTS * width] = active_slots
        at[COLUMN_LOAD * width] = active_blocks / total_blocks if total_blocks > 0 else 0.0
        at[COLUMN_SLOT_RATIO * width] = active_slots / total_slots if total_slots > 0 else 0.0
        at[COLUMN_FULL * width] = full
        at[COLUMN_LOAD_UNKNOWN * width] = isnan(total_blocks)
        at[COLUMN_TPOT_S * width] = base_s + request_s * active_slots + block_s * active_blocks
        self.others_at[slot] = min(waiting, external)
        return 0


    def surely_fits(self, uint32_t slot, object load, int64_t tokens):
        cdef tuple settled = self.settled.get(slot)
        if load is None or settled is None or not settled[0]:
            return True
        cdef int64_t size = settled[0]
        cdef double promised = settled[5], need = (tokens + size - 1) // size
        cdef double replica_requests, replica_blocks, _, requests = load.requests, of_all = 1.0
        replica_requests, replica_blocks, _ = load.replicas
        if <double>load.external_requests + requests + replica_requests <= 0:
            return True
        cdef double outputs = load.outputs.tokens
        cdef BlockUsers users = load._users
        if outputs:
            if requests:
                of_all += replica_requests / requests
            need += outputs / size * of_all
        # A comparison with NaN, where nothing is known of what may be promised, is false.
        return not need > promised - (<double>load.external_blocks + users._users.used + <double>load._tails + replica_blocks)


cdef inline int _put(set slots, uint32_t slot, bint is_in) except -1:
    if is_in:
        slots.add(slot)
    elif slots:
        slots.discard(slot)
    return 0
