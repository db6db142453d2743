# cython: language_level=3
"""Where numpy's arrays lie, for native code. Inline: there is no module of this name."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer


cdef inline const void *words_of(object array, size_t *count) except? NULL:
    """Where an array of 64-bit numbers lies, as address_of has it, and how many they are."""
    cdef Py_buffer view
    PyObject_GetBuffer(array, &view, PyBUF_SIMPLE)
    cdef const void *at = view.buf
    cdef Py_ssize_t size = view.itemsize
    count[0] = view.len // 8
    PyBuffer_Release(&view)
    if size != 8:
        raise ValueError(f"an array of numbers of {size} bytes, not of 8")
    return at


cdef inline const void *address_of(object array) except? NULL:
    """Where an array lies, which must be contiguous and outlive the use."""
    cdef Py_buffer view
    PyObject_GetBuffer(array, &view, PyBUF_SIMPLE)
    cdef const void *at = view.buf
    PyBuffer_Release(&view)
    return at
