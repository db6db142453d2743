# cython: language_level=3, boundscheck=False, wraparound=False
"""How a WorkerLoad (load.py) and Reservations (reservations.py) change as reservations open and close. Pure."""

from indexer.arrays cimport address_of
from indexer.kernel cimport BlockUsers, users_close, users_open
from libc.stdint cimport uint32_t, uint64_t

from router.fleet.reservations.load_columns cimport LoadColumns

HISTORY_MAX = 8192
HISTORY_S = 10.0
cdef Py_ssize_t HISTORY_MAX_C = HISTORY_MAX
cdef double HISTORY_S_C = HISTORY_S


cpdef int open_load(object load, object prefixes, Py_ssize_t own_blocks, object new_tokens, double now_s) except -1:
    cdef BlockUsers users = load._users
    cdef size_t count = len(prefixes)
    if count and users_open(&users._users, <const uint64_t *>address_of(prefixes), count):
        raise MemoryError
    load._tails = load._tails + own_blocks
    load.requests = load.requests + 1
    if new_tokens > 0:
        load.prefill_tokens = load.prefill_tokens + new_tokens
        load.prefills = load.prefills + 1
    return _remember(load, users, now_s)


def close_load(object load, object prefixes, Py_ssize_t own_blocks, object new_tokens, double now_s):
    cdef BlockUsers users = load._users
    cdef size_t count = len(prefixes)
    if count and users._users.used:
        users_close(&users._users, <const uint64_t *>address_of(prefixes), count)
    load._tails = load._tails - own_blocks
    load.requests = load.requests - 1
    if new_tokens > 0:
        load.prefill_tokens = load.prefill_tokens - new_tokens
        load.prefills = load.prefills - 1
    return _remember(load, users, now_s)


cdef int _remember(object load, BlockUsers users, double now_s) except -1:
    """A change of our requests and blocks, in the history."""
    cdef list history = load._history
    load.changed = True
    if len(history) >= HISTORY_MAX_C or <double>(<tuple>history[0])[0] < now_s - HISTORY_S_C:
        load._forget_some(now_s)
    history.append((now_s, load.requests, users._users.used + load._tails))
    return 0


def open_reservation(reservations, load, reservation, output_tokens, ordinal, LoadColumns columns not None, uint32_t slot):
    opened_at_s = reservation.opened_at_s
    open_load(load, reservation.prefixes, reservation.own_blocks, reservation.new_tokens, opened_at_s)
    if output_tokens > 1:
        load.outputs.add(reservation.id, opened_at_s, output_tokens)
    add_reservation(reservations, reservation)
    load.last_picked = ordinal
    columns.put(slot, load)


cpdef int add_reservation(object reservations, object reservation) except -1:
    cdef dict by_request = reservations._by_request
    cdef size_t size = sizeof(uint64_t) * len(reservation.prefixes)
    opened = reservations._open
    if (
        <size_t>len(opened) + <size_t>len(reservations._ended) >= <size_t>reservations._entries_max
        or <size_t>reservations._hash_bytes >= <size_t>reservations._hash_bytes_max
    ):
        reservations._make_room()
    reservations._hash_bytes = reservations._hash_bytes + size
    reservations._open_hash_bytes = reservations._open_hash_bytes + size
    opened[reservation.id] = reservation
    by_request[reservation.request_id] = reservation
    return 0
