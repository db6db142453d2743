# cython: language_level=3
"""Steps of a load, for the fast path."""

cpdef int open_load(object load, object prefixes, bint has_tail, object new_tokens, double now_s) except -1
cpdef int close_load(object load, object prefixes, bint has_tail, object new_tokens, double now_s) except -1
