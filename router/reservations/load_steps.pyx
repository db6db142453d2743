# cython: language_level=3, boundscheck=False, wraparound=False
"""How a WorkerLoad (load.py) changes as reservations open and close. Pure.

The general path calls these steps by WorkerLoad's methods, the fast path directly.
"""

from indexer.arrays cimport address_of
from indexer.kernel cimport BlockUsers, users_close, users_open
from libc.stdint cimport uint64_t

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(void *)

HISTORY_MAX = 8192
HISTORY_S = 10.0
cdef Py_ssize_t HISTORY_MAX_C = HISTORY_MAX
cdef double HISTORY_S_C = HISTORY_S


cpdef int open_load(object load, object prefixes, bint has_tail, object new_tokens, double now_s) except -1:
    cdef BlockUsers users = load._users
    cdef size_t count = len(prefixes)
    if count and users_open(&users._users, <const uint64_t *>address_of(prefixes), count):
        raise MemoryError
    load._tails = load._tails + has_tail
    load.requests = load.requests + 1
    if new_tokens > 0:
        load.prefill_tokens = load.prefill_tokens + new_tokens
        load.prefills = load.prefills + 1
    return _remember(load, users, now_s)


cpdef int close_load(object load, object prefixes, bint has_tail, object new_tokens, double now_s) except -1:
    cdef BlockUsers users = load._users
    cdef size_t count = len(prefixes)
    if count and users._users.used:
        users_close(&users._users, <const uint64_t *>address_of(prefixes), count)
    load._tails = load._tails - has_tail
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
    change = (now_s, load.requests, users._users.used + load._tails)
    PyObject_GC_UnTrack(<void *>change)  # it refers to nothing that could refer to it
    history.append(change)
    return 0
