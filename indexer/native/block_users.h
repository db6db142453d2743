/* How many open requests use each block of a worker: a counted set of chains of PrefixHashes.
 *
 * Whoever uses a block uses all before it, so what is used is a tree. It is kept in runs: blocks in a
 * row that the same requests use. A run is found by its first key, which names everything before it,
 * too; and two chains that agree on a key agree on all before, so looking where they part takes a
 * few halvings, not a look at each block. A request that ends within a run, or leaves it, splits it.
 *
 * Laws: chains begin at a prompt's first block; a chain that is open ends where a run ends; a run
 * has a user at least. */
#ifndef KVROUTE_BLOCK_USERS_H
#define KVROUTE_BLOCK_USERS_H

#include <stdlib.h>
#include <string.h>

#include "xxh3.h"

#define SMALLEST_USERS 16

typedef struct {
    uint64_t users;
    size_t length; /* at least 1 */
    uint64_t keys[];
} BlockRun;

typedef struct {
    BlockRun **places; /* open addressing, by the first key */
    uint64_t capacity, runs;
    uint64_t used; /* blocks of all runs */
} BlockUsers;

static inline uint64_t run_place(const BlockUsers *u, uint64_t key) {
    return xxh_fold(key ^ XXH_P64_2, XXH_P64_1) & (u->capacity - 1);
}

/* Where the run is that begins with this key, or an empty place. */
static inline BlockRun **run_find(const BlockUsers *u, uint64_t key) {
    uint64_t at = run_place(u, key);
    while (u->places[at] && u->places[at]->keys[0] != key) at = (at + 1) & (u->capacity - 1);
    return &u->places[at];
}

/* How many keys a run shares with a chain that begins with its first. */
static inline size_t run_shared(const BlockRun *run, const uint64_t *keys, size_t count) {
    size_t high = run->length < count ? run->length : count, low = 1;
    if (run->keys[high - 1] == keys[high - 1]) return high;
    while (low + 1 < high) {
        size_t middle = low + (high - low) / 2;
        if (run->keys[middle - 1] == keys[middle - 1]) low = middle;
        else high = middle;
    }
    return low;
}

static int users_resize(BlockUsers *u, uint64_t capacity) {
    BlockUsers resized = {(BlockRun **)calloc(capacity, sizeof(BlockRun *)), capacity, u->runs, u->used};
    if (!resized.places) return -1;
    for (uint64_t i = 0; i < u->capacity; i++)
        if (u->places[i]) *run_find(&resized, u->places[i]->keys[0]) = u->places[i];
    free(u->places);
    *u = resized;
    return 0;
}

static BlockRun *run_new(const uint64_t *keys, size_t length, uint64_t users) {
    BlockRun *run = (BlockRun *)malloc(sizeof(BlockRun) + length * sizeof(uint64_t));
    if (!run) return NULL;
    run->users = users;
    run->length = length;
    memcpy(run->keys, keys, length * sizeof(uint64_t));
    return run;
}

/* Adds a run made of these keys. 0; -1 without memory; 1 if there is one of that name, which only
 * colliding hashes can bring about: what they count may be wrong, and nothing else. */
static int run_add(BlockUsers *u, const uint64_t *keys, size_t length, uint64_t users) {
    if (2 * (u->runs + 1) > u->capacity &&
        users_resize(u, u->capacity ? 2 * u->capacity : SMALLEST_USERS))
        return -1;
    BlockRun **place = run_find(u, keys[0]);
    if (*place) return 1;
    BlockRun *run = (BlockRun *)malloc(sizeof(BlockRun) + length * sizeof(uint64_t));
    if (!run) return -1;
    run->users = users;
    run->length = length;
    memcpy(run->keys, keys, length * sizeof(uint64_t));
    *place = run;
    u->runs++;
    return 0;
}

/* One more user of each block of a chain. 0, or -1 without memory, with no users changed. */
static int users_open(BlockUsers *u, const uint64_t *keys, size_t count) {
    size_t known = 0;
    int failed = 0;
    while (known < count && u->runs) {
        BlockRun *run = *run_find(u, keys[known]);
        if (!run) break;
        size_t shared = run_shared(run, keys + known, count - known);
        known += shared;
        if (shared == run->length) continue;
        failed = run_add(u, run->keys + shared, run->length - shared, run->users);
        if (failed) break;
        run->length = shared;
    }
    if (failed >= 0 && known < count) {
        failed = run_add(u, keys + known, count - known, 0);
        if (!failed) u->used += count - known;
    }
    if (failed < 0) return -1;
    for (size_t at = 0; at < count;) {
        BlockRun *run = *run_find(u, keys[at]);
        if (!run) break;
        run->users++;
        at += run->length;
    }
    return 0;
}

static void run_drop(BlockUsers *u, BlockRun **place) {
    uint64_t mask = u->capacity - 1, gap = (uint64_t)(place - u->places);
    u->used -= (*place)->length;
    u->runs--;
    free(*place);
    for (uint64_t at = (gap + 1) & mask; u->places[at]; at = (at + 1) & mask) {
        uint64_t home = run_place(u, u->places[at]->keys[0]);
        if (((at - home) & mask) < ((at - gap) & mask)) continue;
        u->places[gap] = u->places[at];
        gap = at;
    }
    u->places[gap] = NULL;
}

/* One user less of each block of a chain, which must be open. */
static void users_close(BlockUsers *u, const uint64_t *keys, size_t count) {
    for (size_t at = 0; at < count && u->runs;) {
        BlockRun **place = run_find(u, keys[at]);
        if (!*place) return;
        at += (*place)->length;
        if (!--(*place)->users) run_drop(u, place);
    }
    if (u->capacity > SMALLEST_USERS && 16 * u->runs < u->capacity)
        users_resize(u, u->capacity / 4 > SMALLEST_USERS ? u->capacity / 4 : SMALLEST_USERS);
}

/* How many blocks of a chain are used, from its first on. */
static uint64_t users_leading(const BlockUsers *u, const uint64_t *keys, size_t count) {
    size_t known = 0;
    while (known < count && u->runs) {
        const BlockRun *run = *run_find(u, keys[known]);
        if (!run) break;
        size_t shared = run_shared(run, keys + known, count - known);
        known += shared;
        if (shared < run->length) break;
    }
    return known;
}

static void users_free(BlockUsers *u) {
    for (uint64_t i = 0; i < u->capacity; i++) free(u->places[i]);
    free(u->places);
}

#endif
