/* Sets of holders, in 8 bytes each.
 *
 * A *holder* is one (slot, level), with a small number. A value stands for the set of a block's
 * holders:
 *
 *     0                       no holder
 *     a << 2 | b << 33 | 1    one or two holders, a < b, b = 0 for a single holder
 *     pointer | 2             a shared, immutable, counted set of three or more
 *
 * Blocks of a chain are nearly always held by the same workers, so equal sets are stored once
 * (interned): a block on a thousand workers takes as much memory as a block on one.
 *
 * Law: a set of three or more is interned once, with a reference for each entry and memo that has
 * it. */
#ifndef KVROUTE_HOLDER_SETS_H
#define KVROUTE_HOLDER_SETS_H

#include <stdlib.h>
#include <string.h>

#include "xxh3.h"

#define NO_MEMORY UINT64_MAX

/* Slots by row of a match, a bit each: bits[row * words + word], from word `first` on. */
typedef struct {
    uint64_t *bits;
    uint32_t first, words;
} SlotMap;

typedef struct {
    uint64_t hash, epoch;
    SlotMap map; /* of living holders, made by the first match; valid in one epoch of the table */
    uint64_t map_bytes;
    uint32_t refs, count;
    uint32_t ids[]; /* ascending */
} HolderSet;

typedef struct {
    HolderSet **places; /* open addressing */
    uint64_t capacity, used, bytes;
} HolderSets;

static inline int is_set(uint64_t value) { return (value & 3) == 2; }
static inline HolderSet *as_set(uint64_t value) { return (HolderSet *)(uintptr_t)(value & ~3ull); }

/* The value of one or two holders; 0 is no holder. */
static inline uint64_t inline_value(uint32_t a, uint32_t b) {
    if (b && b < a) {
        uint32_t swap = a;
        a = b;
        b = swap;
    }
    return a ? (uint64_t)a << 2 | (uint64_t)b << 33 | 1 : 0;
}

/* The holders of a value; room: space for two numbers, used when they are not in a set. */
static inline uint32_t value_ids(uint64_t value, uint32_t *room, const uint32_t **ids) {
    if (is_set(value)) {
        *ids = as_set(value)->ids;
        return as_set(value)->count;
    }
    room[0] = (uint32_t)(value >> 2) & 0x7FFFFFFF;
    room[1] = (uint32_t)(value >> 33);
    *ids = room;
    return value == 0 ? 0 : room[1] ? 2 : 1;
}

/* Place of id among ascending ids, or its place if it were inserted. */
static inline uint32_t id_place(const uint32_t *ids, uint32_t count, uint32_t id) {
    uint32_t low = 0;
    while (count) {
        uint32_t half = count / 2;
        if (ids[low + half] < id) {
            low += half + 1;
            count -= half + 1;
        } else {
            count = half;
        }
    }
    return low;
}

static inline int value_has(uint64_t value, uint32_t id) {
    uint32_t room[2];
    const uint32_t *ids;
    uint32_t count = value_ids(value, room, &ids), at = id_place(ids, count, id);
    return at < count && ids[at] == id;
}

static inline size_t set_bytes(uint32_t count) { return sizeof(HolderSet) + 4 * (size_t)count; }

static inline uint64_t ids_hash(const uint32_t *ids, uint32_t count) {
    uint64_t hash = count;
    for (uint32_t i = 0; i < count; i++) hash += xxh_fold(ids[i] + XXH_P64_1, XXH_P64_2);
    return hash;
}

static inline uint64_t set_place(const HolderSets *sets, uint64_t hash) {
    return xxh_fold(hash, XXH_P64_3) & (sets->capacity - 1);
}

static int sets_grow(HolderSets *sets) {
    uint64_t capacity = sets->capacity ? 2 * sets->capacity : 64, old_capacity = sets->capacity;
    HolderSet **places = (HolderSet **)calloc(capacity, sizeof(*places)), **old = sets->places;
    if (!places) return -1;
    sets->places = places;
    sets->capacity = capacity;
    for (uint64_t i = 0; i < old_capacity; i++) {
        if (!old[i]) continue;
        uint64_t at = set_place(sets, old[i]->hash);
        while (places[at]) at = (at + 1) & (capacity - 1);
        places[at] = old[i];
    }
    free(old);
    sets->bytes += (capacity - old_capacity) * sizeof(*places);
    return 0;
}

/* The value of ascending holder numbers; takes no reference. NO_MEMORY without memory. */
static uint64_t intern(HolderSets *sets, const uint32_t *ids, uint32_t count) {
    if (count < 3) return inline_value(count ? ids[0] : 0, count > 1 ? ids[1] : 0);
    if (2 * (sets->used + 1) > sets->capacity && sets_grow(sets)) return NO_MEMORY;
    uint64_t hash = ids_hash(ids, count), at = set_place(sets, hash);
    for (; sets->places[at]; at = (at + 1) & (sets->capacity - 1)) {
        HolderSet *set = sets->places[at];
        if (set->hash == hash && set->count == count && !memcmp(set->ids, ids, 4 * (size_t)count))
            return (uint64_t)(uintptr_t)set | 2;
    }
    HolderSet *set = (HolderSet *)malloc(set_bytes(count));
    if (!set) return NO_MEMORY;
    memset(set, 0, sizeof(*set));
    set->hash = hash;
    set->count = count;
    memcpy(set->ids, ids, 4 * (size_t)count);
    sets->places[at] = set;
    sets->used++;
    sets->bytes += set_bytes(count);
    return (uint64_t)(uintptr_t)set | 2;
}

static void set_free(HolderSets *sets, HolderSet *set) {
    uint64_t mask = sets->capacity - 1, at = set_place(sets, set->hash);
    while (sets->places[at] != set) at = (at + 1) & mask;
    for (uint64_t next = (at + 1) & mask; sets->places[next]; next = (next + 1) & mask) {
        uint64_t home = set_place(sets, sets->places[next]->hash);
        if (((next - home) & mask) >= ((next - at) & mask)) {
            sets->places[at] = sets->places[next];
            at = next;
        }
    }
    sets->places[at] = NULL;
    sets->used--;
    sets->bytes -= set_bytes(set->count) + set->map_bytes;
    free(set->map.bits);
    free(set);
}

static inline void value_ref(uint64_t value) {
    if (is_set(value)) as_set(value)->refs++;
}

static inline void value_unref(HolderSets *sets, uint64_t value) {
    if (is_set(value) && --as_set(value)->refs == 0) set_free(sets, as_set(value));
}

static void sets_free(HolderSets *sets) {
    for (uint64_t i = 0; i < sets->capacity; i++) {
        if (!sets->places[i]) continue;
        free(sets->places[i]->map.bits);
        free(sets->places[i]);
    }
    free(sets->places);
}

#endif
