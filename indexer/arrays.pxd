# cython: language_level=3
"""Where numpy's arrays lie, for native code. Inline: there is no module of this name."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer


cdef inline const void *address_of(object array) except? NULL:
    """Where an array lies, which must be contiguous and outlive the use."""
    cdef Py_buffer view
    PyObject_GetBuffer(array, &view, PyBUF_SIMPLE)
    cdef const void *at = view.buf
    PyBuffer_Release(&view)
    return at
