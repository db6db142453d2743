/* How many open requests use each block of a worker: a counted set of PrefixHashes.
 *
 * Open addressing with linear probing and without tombstones; grows and shrinks by two. A count of
 * 0 marks an empty place. */
#ifndef KVROUTE_BLOCK_USERS_H
#define KVROUTE_BLOCK_USERS_H

#include <stdlib.h>

#include "xxh3.h"

#define SMALLEST_USERS 64

typedef struct {
    uint64_t key;
    uint64_t users;
} BlockUse;

typedef struct {
    BlockUse *places;
    uint64_t capacity, used;
} BlockUsers;

static inline uint64_t use_place(const BlockUsers *u, uint64_t key) {
    return xxh_fold(key ^ XXH_P64_2, XXH_P64_1) & (u->capacity - 1);
}

static inline BlockUse *use_find(const BlockUsers *u, uint64_t key) {
    uint64_t at = use_place(u, key);
    while (u->places[at].users && u->places[at].key != key) at = (at + 1) & (u->capacity - 1);
    return &u->places[at];
}

static int users_resize(BlockUsers *u, uint64_t capacity) {
    BlockUsers resized = {(BlockUse *)calloc(capacity, sizeof(BlockUse)), capacity, u->used};
    if (!resized.places) return -1;
    for (uint64_t i = 0; i < u->capacity; i++)
        if (u->places[i].users) *use_find(&resized, u->places[i].key) = u->places[i];
    free(u->places);
    *u = resized;
    return 0;
}

/* One more user of each block. 0, or -1 without memory, with nothing changed. */
static int users_open(BlockUsers *u, const uint64_t *keys, size_t count) {
    uint64_t capacity = u->capacity ? u->capacity : SMALLEST_USERS;
    while (2 * (u->used + count) > capacity) capacity *= 2;
    if (capacity > u->capacity && users_resize(u, capacity)) return -1;
    for (size_t i = 0; i < count; i++) {
        if (i + 8 < count) __builtin_prefetch(&u->places[use_place(u, keys[i + 8])]);
        BlockUse *use = use_find(u, keys[i]);
        u->used += !use->users;
        use->key = keys[i];
        use->users++;
    }
    return 0;
}

/* One user less of each block, all of which must have one. */
static void users_close(BlockUsers *u, const uint64_t *keys, size_t count) {
    uint64_t mask = u->capacity - 1;
    for (size_t i = 0; i < count; i++) {
        if (i + 8 < count) __builtin_prefetch(&u->places[use_place(u, keys[i + 8])]);
        BlockUse *use = use_find(u, keys[i]);
        if (!use->users || --use->users) continue;
        u->used--;
        uint64_t gap = (uint64_t)(use - u->places);
        for (uint64_t at = (gap + 1) & mask; u->places[at].users; at = (at + 1) & mask) {
            uint64_t home = use_place(u, u->places[at].key);
            if (((at - home) & mask) < ((at - gap) & mask)) continue;
            u->places[gap] = u->places[at];
            gap = at;
        }
        u->places[gap].users = 0;
    }
    if (u->capacity > SMALLEST_USERS && 16 * u->used < u->capacity)
        users_resize(u, u->capacity / 4 > SMALLEST_USERS ? u->capacity / 4 : SMALLEST_USERS);
}

/* How many blocks of a chain are used, from its first on. Whoever uses a block uses those before it,
 * so the used ones of a chain come first, and halving finds where they end. */
static uint64_t users_leading(const BlockUsers *u, const uint64_t *keys, size_t count) {
    size_t low = 0, high = u->used ? count : 0;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (use_find(u, keys[middle])->users) low = middle + 1;
        else high = middle;
    }
    return low;
}

#endif
