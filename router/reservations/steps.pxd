# cython: language_level=3
"""Steps of loads and reservations, for the fast path."""

cpdef int open_load(object load, object prefixes, Py_ssize_t own_blocks, object new_tokens, double now_s) except -1
cpdef int close_load(object load, object prefixes, Py_ssize_t own_blocks, object new_tokens, double now_s) except -1
cpdef int open_reservation(object reservations, object load, object reservation, object output_tokens, object ordinal) except -1
cpdef int add_reservation(object reservations, object reservation) except -1
