# cython: language_level=3
"""What the kernel declares: its algorithms (native/*.h), and its types for other native code."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

cdef extern from "indexer/native/block_table.h" nogil:
    const uint64_t NO_MEMORY
    ctypedef struct Holder:
        uint64_t held, told, digest
    ctypedef struct Pool:
        uint64_t live
    ctypedef struct Table:
        Pool pool
        Holder *holders
        uint32_t *slots
        uint32_t slots_used
        uint64_t bytes_max, share_max, forgotten
    int table_init(Table *, uint64_t)
    void table_free(Table *)
    uint64_t table_bytes(const Table *)
    int table_reserve_slots(Table *, uint32_t)
    const Holder *table_holder(const Table *, uint32_t, int)
    uint64_t table_store(Table *, uint32_t, int, const uint64_t *, size_t)
    uint64_t table_remove(Table *, uint32_t, int, const uint64_t *, size_t)
    uint64_t table_retire(Table *, uint32_t, int)
    int table_match(Table *, const uint64_t *, size_t, int32_t *)
    int table_overlap(Table *, const uint64_t *, size_t, size_t, const Py_ssize_t *, size_t, int32_t *)
    int table_has_dead(const Table *)
    int table_sweep(Table *, uint64_t)
    void xxh3_blocks(const uint8_t *, size_t, size_t, uint64_t, uint64_t *)
    void xxh3_chain(const uint64_t *, size_t, int, uint64_t, uint64_t, uint64_t *)
    void xxh3_secret(uint64_t, uint8_t *)
    uint64_t xxh3_64(const uint8_t *, size_t, uint64_t, const uint8_t *)

cdef extern from "indexer/native/item_hashes.h" nogil:
    ctypedef struct ItemSpan:
        uint64_t content, first, last
    int item_hashes(const uint8_t *, size_t, size_t, uint64_t, const ItemSpan *, size_t, uint64_t *)

cdef extern from "indexer/native/block_users.h" nogil:
    ctypedef struct Users "BlockUsers":
        uint64_t used, salt
    int users_open(Users *, const uint64_t *, size_t)
    void users_close(Users *, const uint64_t *, size_t)
    uint64_t users_leading(const Users *, const uint64_t *, size_t)
    void users_free(Users *)


cdef class NativeIndex:
    cdef Table _table
    cdef list _free_slots

    cdef uint64_t _store(self, uint32_t slot, int level, const uint64_t[::1] hashes) except? 0
    cdef uint64_t _store_at(self, uint32_t slot, int level, const uint64_t *hashes, size_t count) except? 0
    cdef uint64_t _remove(self, uint32_t slot, int level, const uint64_t[::1] hashes) except? 0
    cdef uint32_t _checked(self, slot) except? 0xFFFFFFFF
    cdef int _generation(self, generation) except -1


cdef class BlockUsers:
    cdef Users _users
