/* The number of open requests that use each block of a worker: a counted set of chains of hashes.
 *
 * The chains form a tree, kept in runs: consecutive blocks that the same requests use. A run's key is
 * the run before it and its own first key, and two chains share a block only if all their keys up to
 * it are equal. So callers may choose keys: equal keys after different beginnings are different
 * blocks, and closing all opened chains always ends at zero. A request that ends within a run, or
 * branches off in it, splits the run: the front part becomes a run of its own, and the back part keeps
 * its number, so that the runs after it are unchanged.
 *
 * Laws: chains begin at a prompt's first block; an open chain ends at the end of a run; a run has at
 * least one user, and no fewer than the runs after it together. */
#ifndef KVROUTE_BLOCK_USERS_H
#define KVROUTE_BLOCK_USERS_H

#include <stdlib.h>
#include <string.h>

#include "xxh3.h"

#define SMALLEST_USERS 16
#define COMPARED_KEYS 32 /* compared at a time: 256 bytes */

typedef struct {
    uint64_t number; /* of this run, from 1 on; never reused */
    uint64_t before; /* number of the run before it; 0: it begins a prompt */
    uint64_t users;
    size_t length; /* at least 1 */
    uint64_t keys[];
} BlockRun;

typedef struct {
    BlockRun **places; /* open addressing, by the run before and the first key */
    uint64_t capacity, runs;
    uint64_t used;    /* blocks of all runs */
    uint64_t salt;    /* secret: callers can't choose keys that collide */
    uint64_t numbers; /* assigned so far */
} BlockUsers;

static inline uint64_t run_place(const BlockUsers *u, uint64_t before, uint64_t key) {
    return xxh_fold(key ^ u->salt, (before * XXH_P64_2) ^ XXH_P64_1 ^ (u->salt << 1)) &
           (u->capacity - 1);
}

/* The place of the run with this key, or the empty place for it. */
static inline BlockRun **run_find(const BlockUsers *u, uint64_t before, uint64_t key) {
    uint64_t at = run_place(u, before, key);
    while (u->places[at] && (u->places[at]->keys[0] != key || u->places[at]->before != before))
        at = (at + 1) & (u->capacity - 1);
    return &u->places[at];
}

/* Number of leading keys that a run shares with a chain. */
static inline size_t run_shared(const BlockRun *run, const uint64_t *keys, size_t count) {
    size_t most = run->length < count ? run->length : count, shared = 0;
    while (shared + COMPARED_KEYS <= most &&
           !memcmp(run->keys + shared, keys + shared, COMPARED_KEYS * sizeof(uint64_t)))
        shared += COMPARED_KEYS;
    while (shared < most && run->keys[shared] == keys[shared]) shared++;
    return shared;
}

static int users_resize(BlockUsers *u, uint64_t capacity) {
    BlockUsers resized = *u;
    resized.capacity = capacity;
    resized.places = (BlockRun **)calloc(capacity, sizeof(BlockRun *));
    if (!resized.places) return -1;
    for (uint64_t i = 0; i < u->capacity; i++) {
        BlockRun *run = u->places[i];
        if (run) *run_find(&resized, run->before, run->keys[0]) = run;
    }
    free(u->places);
    *u = resized;
    return 0;
}

/* Adds a run of these keys, which must be new; NULL without memory, with nothing changed. */
static BlockRun *run_add(BlockUsers *u, uint64_t before, const uint64_t *keys, size_t length) {
    if (2 * (u->runs + 1) > u->capacity &&
        users_resize(u, u->capacity ? 2 * u->capacity : SMALLEST_USERS))
        return NULL;
    BlockRun *run = (BlockRun *)malloc(sizeof(BlockRun) + length * sizeof(uint64_t));
    if (!run) return NULL;
    run->number = ++u->numbers;
    run->before = before;
    run->users = 0;
    run->length = length;
    memcpy(run->keys, keys, length * sizeof(uint64_t));
    *run_find(u, before, keys[0]) = run;
    u->runs++;
    return run;
}

static void run_drop(BlockUsers *u, BlockRun **place) {
    uint64_t mask = u->capacity - 1, gap = (uint64_t)(place - u->places);
    u->runs--;
    free(*place);
    for (uint64_t at = (gap + 1) & mask; u->places[at]; at = (at + 1) & mask) {
        uint64_t home = run_place(u, u->places[at]->before, u->places[at]->keys[0]);
        if (((at - home) & mask) < ((at - gap) & mask)) continue;
        u->places[gap] = u->places[at];
        gap = at;
    }
    u->places[gap] = NULL;
}

/* Splits a run after `shared` keys, fewer than all; returns the front part, or NULL without memory,
 * with nothing changed. */
static BlockRun *run_split(BlockUsers *u, BlockRun *run, size_t shared) {
    if (2 * (u->runs + 1) > u->capacity && users_resize(u, 2 * u->capacity)) return NULL;
    size_t rest = run->length - shared;
    BlockRun *back = (BlockRun *)malloc(sizeof(BlockRun) + rest * sizeof(uint64_t));
    if (!back) return NULL;
    memcpy(back->keys, run->keys + shared, rest * sizeof(uint64_t));
    back->number = run->number;
    back->users = run->users;
    back->length = rest;
    back->before = run->number = ++u->numbers;
    run->length = shared;
    /* Frees the memory of the keys that moved: else many splits of a long run would keep the square
     * of its length. */
    BlockRun **place = run_find(u, run->before, run->keys[0]);
    BlockRun *front = (BlockRun *)realloc(run, sizeof(BlockRun) + shared * sizeof(uint64_t));
    if (front) *place = run = front;
    *run_find(u, back->before, back->keys[0]) = back;
    u->runs++;
    return run;
}

/* Adds a user to each block of a chain. Returns 0, or -1 without memory, with no users changed. */
static int users_open(BlockUsers *u, const uint64_t *keys, size_t count) {
    uint64_t before = 0;
    for (size_t at = 0; at < count;) {
        BlockRun *run = u->runs ? *run_find(u, before, keys[at]) : NULL;
        if (run) {
            size_t shared = run_shared(run, keys + at, count - at);
            if (shared < run->length && !(run = run_split(u, run, shared))) return -1;
        } else {
            run = run_add(u, before, keys + at, count - at);
            if (!run) return -1;
            u->used += run->length;
        }
        at += run->length;
        before = run->number;
    }
    before = 0;
    for (size_t at = 0; at < count;) {
        BlockRun *run = *run_find(u, before, keys[at]);
        run->users++;
        at += run->length;
        before = run->number;
    }
    return 0;
}

/* Takes a user from each block of a chain, which must be open. */
static void users_close(BlockUsers *u, const uint64_t *keys, size_t count) {
    uint64_t before = 0;
    for (size_t at = 0; at < count && u->runs;) {
        BlockRun **place = run_find(u, before, keys[at]), *run = *place;
        if (!run) return;
        before = run->number;
        at += run->length;
        if (!--run->users) {
            u->used -= run->length;
            run_drop(u, place);
        }
    }
    if (u->capacity > SMALLEST_USERS && 16 * u->runs < u->capacity)
        users_resize(u, u->capacity / 4 > SMALLEST_USERS ? u->capacity / 4 : SMALLEST_USERS);
}

/* Leading blocks of a chain that have users. */
static uint64_t users_leading(const BlockUsers *u, const uint64_t *keys, size_t count) {
    uint64_t before = 0;
    size_t known = 0;
    while (known < count && u->runs) {
        const BlockRun *run = *run_find(u, before, keys[known]);
        if (!run) break;
        size_t shared = run_shared(run, keys + known, count - known);
        known += shared;
        if (shared < run->length) break;
        before = run->number;
    }
    return known;
}

static void users_free(BlockUsers *u) {
    for (uint64_t i = 0; i < u->capacity; i++) free(u->places[i]);
    free(u->places);
}

#endif
