/* The memory of entries, in the order of their arrival, so that a chain's blocks are adjacent.
 *
 * The pool is chunks of extents of EXTENT entries. New entries fill the current extent; an empty
 * extent is filled again. In a walk along a chain, most blocks come right after their predecessor,
 * in the same or the next cache line, so that they need no lookup.
 *
 * Laws: an entry keeps its place until it is freed or moved by `pool_thin`; an extent is filled
 * again only when it is empty; at least half of the extents' places are used, up to a chunk. */
#ifndef KVROUTE_ENTRY_POOL_H
#define KVROUTE_ENTRY_POOL_H

#include <stdint.h>
#include <stdlib.h>

#define EXTENT 32u
#define CHUNK_BITS 14
#define CHUNK_ENTRIES (1u << CHUNK_BITS)
#define CHUNK_EXTENTS (CHUNK_ENTRIES / EXTENT)

typedef struct {
    uint64_t key, value; /* value 0: free */
} Entry;

typedef struct {
    Entry entries[CHUNK_ENTRIES];
    uint8_t live[CHUNK_EXTENTS]; /* entries in use, by extent */
    uint8_t seen[CHUNK_EXTENTS]; /* whether a match used it since the clock's hand passed */
} Chunk;

typedef struct {
    Chunk **chunks;
    uint32_t chunks_used, chunks_capacity;
    uint32_t cursor;   /* the next place to take */
    uint32_t end;      /* of the current extent; cursor == end: there is none */
    uint32_t *vacant;  /* empty extents */
    uint32_t vacant_used, vacant_capacity;
    uint32_t thin_at;  /* extent at which the search for thin extents continues */
    uint64_t live, bytes;
} Pool;

static inline Entry *pool_entry(const Pool *p, uint32_t at) {
    return &p->chunks[at >> CHUNK_BITS]->entries[at & (CHUNK_ENTRIES - 1)];
}

static inline uint8_t *extent_live(const Pool *p, uint32_t extent) {
    return &p->chunks[extent / CHUNK_EXTENTS]->live[extent % CHUNK_EXTENTS];
}

static inline uint8_t *extent_seen(const Pool *p, uint32_t extent) {
    return &p->chunks[extent / CHUNK_EXTENTS]->seen[extent % CHUNK_EXTENTS];
}

static inline uint32_t pool_extents(const Pool *p) { return p->chunks_used * CHUNK_EXTENTS; }

/* Whether a place is inside the pool; place 0 is never taken. */
static inline int pool_has(const Pool *p, uint32_t at) {
    return at >> CHUNK_BITS < p->chunks_used;
}

static inline int extent_is_current(const Pool *p, uint32_t extent) {
    return p->cursor != p->end && p->cursor / EXTENT == extent;
}

/* Adds a chunk, and its extents to the vacant extents; returns 0, or -1 without memory. */
static int pool_grow(Pool *p) {
    if (p->chunks_used == p->chunks_capacity) {
        uint32_t capacity = p->chunks_capacity ? 2 * p->chunks_capacity : 4;
        Chunk **chunks = (Chunk **)realloc(p->chunks, capacity * sizeof(*chunks));
        if (!chunks) return -1;
        p->chunks = chunks;
        p->bytes += (capacity - p->chunks_capacity) * sizeof(*chunks);
        p->chunks_capacity = capacity;
    }
    uint32_t extents = pool_extents(p) + CHUNK_EXTENTS;
    if (extents > p->vacant_capacity) {
        uint32_t capacity = extents + extents / 2;
        uint32_t *vacant = (uint32_t *)realloc(p->vacant, capacity * sizeof(*vacant));
        if (!vacant) return -1;
        p->vacant = vacant;
        p->bytes += (capacity - p->vacant_capacity) * sizeof(*vacant);
        p->vacant_capacity = capacity;
    }
    Chunk *chunk = (Chunk *)calloc(1, sizeof(Chunk));
    if (!chunk) return -1;
    p->bytes += sizeof(Chunk);
    p->chunks[p->chunks_used++] = chunk;
    /* The last extent first, so that they are taken in order; never extent 0's first place. */
    for (uint32_t extent = extents; extent-- > extents - CHUNK_EXTENTS;)
        p->vacant[p->vacant_used++] = extent;
    return 0;
}

/* Makes the next vacant extent the current extent; there must be a vacant extent. */
static inline void pool_next_extent(Pool *p) {
    uint32_t extent = p->vacant[--p->vacant_used];
    p->cursor = extent * EXTENT + (extent == 0);
    p->end = (extent + 1) * EXTENT;
    *extent_seen(p, extent) = 0; /* the hand has just passed, or comes last */
}

/* A place for another entry; there must be a current extent. */
static inline uint32_t pool_take(Pool *p) {
    uint32_t at = p->cursor++;
    ++*extent_live(p, at / EXTENT);
    p->live++;
    return at;
}

static inline void pool_give_back(Pool *p, uint32_t at) {
    *pool_entry(p, at) = (Entry){0, 0};
    p->live--;
    uint32_t extent = at / EXTENT;
    if (--*extent_live(p, extent) == 0 && !extent_is_current(p, extent))
        p->vacant[p->vacant_used++] = extent;
}

static void pool_free(Pool *p) {
    for (uint32_t i = 0; i < p->chunks_used; i++) free(p->chunks[i]);
    free(p->chunks);
    free(p->vacant);
}

#endif
