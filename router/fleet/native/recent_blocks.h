/* Prefixes of blocks and when each was last used, in the order of their last use.
 *
 * Prefixes have places by their hash (open addressing) and are linked from the oldest to the newest.
 *
 * Laws: a prefix is there once; a block's time is not before that of the older one, if callers'
 * times don't go back; at most half of the places are taken. */
#ifndef KVROUTE_RECENT_BLOCKS_H
#define KVROUTE_RECENT_BLOCKS_H

#include <stdint.h>
#include <stdlib.h>

#include "indexer/native/xxh3.h"

#define SMALLEST_RECENT 16
#define NO_BLOCK 0u

typedef struct {
    uint64_t prefix;
    double at_s;
    uint32_t older, newer; /* numbers of blocks; NO_BLOCK: there is none */
} RecentBlock;

typedef struct {
    RecentBlock *blocks; /* half as many as places, and one: number 0 is NO_BLOCK */
    uint32_t *places;    /* numbers of blocks, by prefix; NO_BLOCK: free */
    uint32_t capacity;   /* places: 0 or a power of two */
    uint32_t used, oldest, newest;
    uint32_t unused;     /* a block that was dropped; those before it follow by `newer` */
    uint32_t fresh;      /* the first number that no block has had */
    uint64_t salt;       /* secret: callers can't choose prefixes that collide */
} RecentBlocks;

static inline uint32_t recent_home(const RecentBlocks *r, uint64_t prefix) {
    return (uint32_t)xxh_fold(prefix ^ r->salt, XXH_P64_1 ^ (r->salt << 1)) & (r->capacity - 1);
}

/* The place of a prefix, or the free place for it. There must be places. */
static inline uint32_t recent_place(const RecentBlocks *r, uint64_t prefix) {
    uint32_t at = recent_home(r, prefix);
    while (r->places[at] != NO_BLOCK && r->blocks[r->places[at]].prefix != prefix)
        at = (at + 1) & (r->capacity - 1);
    return at;
}

static inline void recent_unlink(RecentBlocks *r, uint32_t number) {
    RecentBlock *block = &r->blocks[number];
    if (block->older != NO_BLOCK) r->blocks[block->older].newer = block->newer;
    else r->oldest = block->newer;
    if (block->newer != NO_BLOCK) r->blocks[block->newer].older = block->older;
    else r->newest = block->older;
}

static inline void recent_link_newest(RecentBlocks *r, uint32_t number) {
    r->blocks[number].older = r->newest;
    r->blocks[number].newer = NO_BLOCK;
    if (r->newest != NO_BLOCK) r->blocks[r->newest].newer = number;
    else r->oldest = number;
    r->newest = number;
}

/* Moves all blocks to new memory. Returns 0, or -1 without memory, with nothing changed. */
static int recent_resize(RecentBlocks *r, uint32_t capacity) {
    RecentBlocks resized = {.capacity = capacity, .fresh = 1, .salt = r->salt};
    resized.blocks = (RecentBlock *)malloc((capacity / 2 + 1) * sizeof(RecentBlock));
    resized.places = (uint32_t *)calloc(capacity, sizeof(uint32_t));
    if (!resized.blocks || !resized.places) {
        free(resized.blocks);
        free(resized.places);
        return -1;
    }
    for (uint32_t i = r->oldest; i != NO_BLOCK; i = r->blocks[i].newer) {
        uint32_t number = resized.fresh++;
        resized.blocks[number] = r->blocks[i];
        resized.places[recent_place(&resized, r->blocks[i].prefix)] = number;
        recent_link_newest(&resized, number);
    }
    resized.used = r->used;
    free(r->blocks);
    free(r->places);
    *r = resized;
    return 0;
}

/* A prefix is used now. Returns 0, or -1 without memory, with nothing changed. */
static int recent_use(RecentBlocks *r, uint64_t prefix, double now_s) {
    if (2 * (r->used + 1) > r->capacity &&
        recent_resize(r, r->capacity ? 2 * r->capacity : SMALLEST_RECENT))
        return -1;
    uint32_t place = recent_place(r, prefix), number = r->places[place];
    if (number != NO_BLOCK) {
        recent_unlink(r, number);
    } else {
        number = r->unused;
        if (number != NO_BLOCK) r->unused = r->blocks[number].newer;
        else number = r->fresh++;
        r->blocks[number].prefix = prefix;
        r->places[place] = number;
        r->used++;
    }
    r->blocks[number].at_s = now_s;
    recent_link_newest(r, number);
    return 0;
}

/* The prefixes without a bit of the mask are used now, in their order. Returns 0, or -1 without
 * memory, with some of them taken. */
static int recent_use_sampled(RecentBlocks *r, const uint64_t *prefixes, size_t count,
                              uint64_t mask, double now_s) {
    for (size_t i = 0; i < count && r->capacity; i++) /* the places are far apart: all at once */
        if (!(prefixes[i] & mask)) __builtin_prefetch(&r->places[recent_home(r, prefixes[i])]);
    for (size_t i = 0; i < count; i++)
        if (!(prefixes[i] & mask) && recent_use(r, prefixes[i], now_s)) return -1;
    return 0;
}

/* Drops the block that was used longest ago, which there must be. */
static void recent_drop_oldest(RecentBlocks *r) {
    uint32_t number = r->oldest, mask = r->capacity - 1;
    uint32_t gap = recent_place(r, r->blocks[number].prefix);
    for (uint32_t at = (gap + 1) & mask; r->places[at] != NO_BLOCK; at = (at + 1) & mask) {
        uint32_t home = recent_home(r, r->blocks[r->places[at]].prefix);
        if (((at - home) & mask) < ((at - gap) & mask)) continue;
        r->places[gap] = r->places[at];
        gap = at;
    }
    r->places[gap] = NO_BLOCK;
    recent_unlink(r, number);
    r->blocks[number].newer = r->unused;
    r->unused = number;
    r->used--;
}

/* Gives back memory that few blocks use; without memory for the move, everything stays. */
static void recent_trim(RecentBlocks *r) {
    uint32_t capacity = r->capacity;
    while (capacity > SMALLEST_RECENT && 16 * r->used < capacity) capacity /= 4;
    if (capacity < SMALLEST_RECENT) capacity = SMALLEST_RECENT;
    if (capacity < r->capacity) recent_resize(r, capacity);
}

static void recent_free(RecentBlocks *r) {
    free(r->blocks);
    free(r->places);
}

#endif
