/* The block table: PrefixHash -> who holds it, on which tier.
 *
 * A *holder* is one (slot, tier), named by a small number. An entry's value is the set of its
 * holders in 8 bytes:
 *
 *     0                       empty
 *     a << 2 | b << 33 | 1    one or two holders, a < b, b = 0 for one
 *     pointer | 2             a shared, immutable, counted set of three or more
 *
 * Blocks of one chain are nearly always held by the same workers, so equal sets are kept once
 * (interned): a block that a thousand workers hold costs what a block of one does, and a match
 * looks into a set only where it differs from the block before.
 *
 * Entries live in segments found by the top bits of the mixed key (extendible hashing). A segment
 * grows by a quarter and splits in two when it is large, so no growth moves more than
 * SEGMENT_ENTRIES entries. Inside, linear probing without tombstones.
 *
 * A holder that is retired (its worker cleared or forgotten) is dead at once for every answer; its
 * number is taken out of the entries by a sweep, a segment at a time, and is used again only after
 * a whole sweep.
 *
 * Laws: a key has one entry, and only while it has a holder (a dead one until it is swept); a set
 * of three or more is interned once, and counted once for every entry and every memo that has it.
 *
 * Not thread-safe: one writer, which is also the only reader. */
#ifndef KVROUTE_BLOCK_TABLE_H
#define KVROUTE_BLOCK_TABLE_H

#include <stdlib.h>

#include "xxh3.h"

#define TIERS 3
#define SEGMENT_ENTRIES 16384
#define SMALLEST_SEGMENT 16
#define AHEAD 8 /* blocks whose entries are fetched before they are needed */
#define NO_MEMORY UINT64_MAX

typedef struct {
    uint64_t key, value;
} Entry;

typedef struct {
    Entry *entries;
    uint32_t capacity, used, depth, swept;
} Segment;

/* Slots by fastest tier, a bit each: bits[tier * words + word], from word `first` on. */
typedef struct {
    uint64_t *bits;
    uint32_t first, words;
} SlotMap;

typedef struct {
    uint64_t hash, epoch;
    SlotMap map; /* of the living, made when a match first asks; valid in one epoch of the table */
    uint32_t refs, count;
    uint32_t ids[]; /* ascending */
} HolderSet;

typedef struct {
    uint64_t count, digest;
    uint32_t slot;
    uint8_t tier, alive;
} Holder;

typedef struct {
    uint64_t salt;
    Segment **directory;
    uint32_t directory_bits;
    uint64_t entries, bytes;
    HolderSet **sets; /* interned, open addressing */
    uint64_t sets_capacity, sets_used;
    Holder *holders; /* by number; 0 is nobody */
    uint32_t holders_used, holders_capacity;
    uint32_t *slots; /* slot * TIERS + tier -> holder number, 0 for none */
    uint32_t slots_used, slots_capacity;
    uint32_t *since;   /* scratch of a match: slot -> block from which on it is not counted yet */
    uint64_t *scratch; /* and slot maps: of survivors, and of the block at hand */
    uint64_t epoch;    /* retirements so far: older slot maps may show the dead */
    uint32_t *dead, *dying, *free; /* holder numbers: retired, being swept, swept */
    uint32_t dead_used, dying_used, free_used;
    uint32_t sweep, sweep_at; /* number of the sweep, and its place in the directory */
} Table;

/* One remembered change of a set: what adding or removing `id` makes of `from`. */
typedef struct {
    uint64_t from, to;
} Memo;

/* ---- holder sets ---- */

static inline int is_set(uint64_t value) { return (value & 3) == 2; }
static inline HolderSet *as_set(uint64_t value) { return (HolderSet *)(uintptr_t)(value & ~3ull); }

static inline uint64_t inline_value(uint32_t a, uint32_t b) {
    if (b && b < a) {
        uint32_t swap = a;
        a = b;
        b = swap;
    }
    return a ? (uint64_t)a << 2 | (uint64_t)b << 33 | 1 : 0;
}

/* The holders of a value; room: two numbers, used when they are not in a set. */
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

static inline uint64_t id_hash(uint32_t id) { return xxh_fold(id + XXH_P64_1, XXH_P64_2); }

static inline size_t set_bytes(uint32_t count) { return sizeof(HolderSet) + 4 * (size_t)count; }

static inline size_t map_bytes(const SlotMap *map) {
    return map->bits ? TIERS * (size_t)map->words * 8 : 0;
}

static inline uint64_t set_place(const Table *t, uint64_t hash) {
    return xxh_fold(hash, XXH_P64_3) & (t->sets_capacity - 1);
}

static int sets_grow(Table *t) {
    uint64_t capacity = t->sets_capacity ? 2 * t->sets_capacity : 64;
    HolderSet **sets = (HolderSet **)calloc(capacity, sizeof(*sets)), **old = t->sets;
    uint64_t old_capacity = t->sets_capacity;
    if (!sets) return -1;
    t->sets = sets;
    t->sets_capacity = capacity;
    for (uint64_t i = 0; i < old_capacity; i++) {
        if (!old[i]) continue;
        uint64_t at = set_place(t, old[i]->hash);
        while (sets[at]) at = (at + 1) & (capacity - 1);
        sets[at] = old[i];
    }
    free(old);
    t->bytes += (capacity - old_capacity) * sizeof(*sets);
    return 0;
}

/* The value of `count` ascending holder numbers with this hash; takes no reference.
 * NO_MEMORY when there is none. */
static uint64_t intern(Table *t, const uint32_t *ids, uint32_t count, uint64_t hash) {
    if (count < 3) return inline_value(count ? ids[0] : 0, count > 1 ? ids[1] : 0);
    if (2 * (t->sets_used + 1) > t->sets_capacity && sets_grow(t)) return NO_MEMORY;
    uint64_t at = set_place(t, hash);
    for (; t->sets[at]; at = (at + 1) & (t->sets_capacity - 1)) {
        HolderSet *set = t->sets[at];
        if (set->hash == hash && set->count == count && !memcmp(set->ids, ids, 4 * (size_t)count))
            return (uint64_t)(uintptr_t)set | 2;
    }
    HolderSet *set = (HolderSet *)malloc(set_bytes(count));
    if (!set) return NO_MEMORY;
    set->hash = hash;
    set->refs = 0;
    set->count = count;
    memcpy(set->ids, ids, 4 * (size_t)count);
    set->map = (SlotMap){NULL, 0, 0};
    t->sets[at] = set;
    t->sets_used++;
    t->bytes += set_bytes(count);
    return (uint64_t)(uintptr_t)set | 2;
}

static void set_free(Table *t, HolderSet *set) {
    uint64_t mask = t->sets_capacity - 1, at = set_place(t, set->hash);
    while (t->sets[at] != set) at = (at + 1) & mask;
    for (uint64_t next = (at + 1) & mask; t->sets[next]; next = (next + 1) & mask) {
        uint64_t home = set_place(t, t->sets[next]->hash);
        if (((next - home) & mask) >= ((next - at) & mask)) {
            t->sets[at] = t->sets[next];
            at = next;
        }
    }
    t->sets[at] = NULL;
    t->sets_used--;
    t->bytes -= set_bytes(set->count) + map_bytes(&set->map);
    free(set->map.bits);
    free(set);
}

static inline void value_ref(uint64_t value) {
    if (is_set(value)) as_set(value)->refs++;
}

static inline void value_unref(Table *t, uint64_t value) {
    if (is_set(value) && --as_set(value)->refs == 0) set_free(t, as_set(value));
}

/* Place of id among ascending ids, or where it would stand. */
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

static uint64_t ids_hash(const uint32_t *ids, uint32_t count) {
    uint64_t hash = 0;
    for (uint32_t i = 0; i < count; i++) hash += id_hash(ids[i]);
    return hash;
}

/* value with id, which it must not have; or without, which it must have. */
static uint64_t value_changed(Table *t, uint64_t value, uint32_t id, int with) {
    uint32_t room[2], few[66], *changed = few;
    const uint32_t *ids;
    uint32_t count = value_ids(value, room, &ids), at = id_place(ids, count, id);
    uint64_t hash = is_set(value) ? as_set(value)->hash : ids_hash(ids, count);
    if (count + 1 > 66 && !(changed = (uint32_t *)malloc(4 * ((size_t)count + 1)))) return NO_MEMORY;
    memcpy(changed, ids, 4 * (size_t)at);
    if (with) {
        changed[at] = id;
        memcpy(changed + at + 1, ids + at, 4 * (size_t)(count - at));
    } else {
        memcpy(changed + at, ids + at + 1, 4 * (size_t)(count - at - 1));
    }
    uint64_t result = intern(t, changed, with ? count + 1 : count - 1,
                             with ? hash + id_hash(id) : hash - id_hash(id));
    if (changed != few) free(changed);
    return result;
}

/* value without its dead holders. */
static uint64_t value_swept(Table *t, uint64_t value) {
    uint32_t room[2], few[64], *left = few, kept = 0;
    const uint32_t *ids;
    uint32_t count = value_ids(value, room, &ids);
    if (count > 64 && !(left = (uint32_t *)malloc(4 * (size_t)count))) return NO_MEMORY;
    for (uint32_t i = 0; i < count; i++)
        if (t->holders[ids[i]].alive) left[kept++] = ids[i];
    uint64_t result = kept == count ? value : intern(t, left, kept, ids_hash(left, kept));
    if (left != few) free(left);
    return result;
}

static inline void memo_set(Table *t, Memo *memo, uint64_t from, uint64_t to) {
    value_ref(from);
    value_ref(to);
    value_unref(t, memo->from);
    value_unref(t, memo->to);
    memo->from = from;
    memo->to = to;
}

/* ---- segments ---- */

/* The salt is our secret: nobody outside can choose keys that meet in one place. */
static inline uint64_t mixed(const Table *t, uint64_t key) {
    return xxh_fold(key ^ t->salt, XXH_P64_1 ^ (t->salt << 1));
}

static inline Segment *segment_of(const Table *t, uint64_t mix) {
    return t->directory[t->directory_bits ? mix >> (64 - t->directory_bits) : 0];
}

static inline uint32_t home_of(const Segment *s, uint64_t mix) {
    return (uint32_t)(((mix & 0xFFFFFFFFu) * s->capacity) >> 32);
}

static inline uint32_t next_place(const Segment *s, uint32_t at) {
    return at + 1 == s->capacity ? 0 : at + 1;
}

/* Place of a key in its segment, or the empty one where it would stand. */
static inline Entry *find(const Segment *s, uint64_t mix, uint64_t key) {
    uint32_t at = home_of(s, mix);
    while (s->entries[at].value && s->entries[at].key != key) at = next_place(s, at);
    return &s->entries[at];
}

static Segment *segment_new(Table *t, uint32_t capacity, uint32_t depth) {
    Segment *s = (Segment *)malloc(sizeof(*s));
    Entry *entries = (Entry *)calloc(capacity, sizeof(Entry));
    if (!s || !entries) {
        free(s);
        free(entries);
        return NULL;
    }
    *s = (Segment){entries, capacity, 0, depth, t->sweep};
    t->bytes += sizeof(*s) + capacity * sizeof(Entry);
    return s;
}

static void segment_free(Table *t, Segment *s) {
    t->bytes -= sizeof(*s) + s->capacity * sizeof(Entry);
    free(s->entries);
    free(s);
}

static void segment_fill(const Table *t, const Segment *from, Segment *to, int bit, uint64_t side) {
    for (uint32_t i = 0; i < from->capacity; i++) {
        if (!from->entries[i].value) continue;
        uint64_t mix = mixed(t, from->entries[i].key);
        if (bit >= 0 && (mix >> bit & 1) != side) continue;
        *find(to, mix, from->entries[i].key) = from->entries[i];
        to->used++;
    }
}

static int segment_grow(Table *t, Segment *s) {
    uint32_t capacity = s->capacity + s->capacity / 4 + 4;
    Segment *larger = segment_new(t, capacity, s->depth);
    if (!larger) return -1;
    segment_fill(t, s, larger, -1, 0);
    Entry *entries = s->entries;
    uint32_t old = s->capacity;
    s->entries = larger->entries;
    s->capacity = capacity;
    larger->entries = entries;
    larger->capacity = old;
    segment_free(t, larger);
    return 0;
}

static int segment_split(Table *t, Segment *s) {
    if (s->depth == t->directory_bits) {
        uint64_t size = 1ull << t->directory_bits;
        Segment **directory = (Segment **)malloc(2 * size * sizeof(*directory));
        if (!directory) return -1;
        for (uint64_t i = 0; i < size; i++) directory[2 * i] = directory[2 * i + 1] = t->directory[i];
        free(t->directory);
        t->directory = directory;
        t->bytes += size * sizeof(*directory);
        t->directory_bits++;
        t->sweep_at *= 2;
    }
    uint32_t depth = s->depth + 1, ones = 0;
    for (uint32_t i = 0; i < s->capacity; i++)
        ones += s->entries[i].value && mixed(t, s->entries[i].key) >> (64 - depth) & 1;
    Segment *halves[2] = {segment_new(t, (s->used - ones) / 5 * 8 + SMALLEST_SEGMENT, depth),
                          segment_new(t, ones / 5 * 8 + SMALLEST_SEGMENT, depth)};
    if (!halves[0] || !halves[1]) {
        for (int i = 0; i < 2; i++)
            if (halves[i]) segment_free(t, halves[i]);
        return -1;
    }
    uint64_t span = 1ull << (t->directory_bits - s->depth), first = 0;
    for (uint64_t side = 0; side < 2; side++) {
        segment_fill(t, s, halves[side], 64 - (int)depth, side);
        halves[side]->swept = s->swept;
    }
    while (t->directory[first] != s) first += span;
    for (uint64_t i = 0; i < span; i++) t->directory[first + i] = halves[i >= span / 2];
    segment_free(t, s);
    return 0;
}

/* Room for one more entry where a key belongs; 0, or -1 without memory. */
static int make_room(Table *t, uint64_t mix) {
    Segment *s = segment_of(t, mix);
    while (4 * ((uint64_t)s->used + 1) > 3 * (uint64_t)s->capacity) {
        int failed = s->capacity >= SEGMENT_ENTRIES ? segment_split(t, s) : segment_grow(t, s);
        if (failed) return -1;
        s = segment_of(t, mix);
    }
    return 0;
}

/* Empties a place, and closes the gap in the runs of keys around it. */
static void entry_delete(Table *t, Segment *s, Entry *entry) {
    uint32_t gap = (uint32_t)(entry - s->entries);
    for (uint32_t at = next_place(s, gap); s->entries[at].value; at = next_place(s, at)) {
        uint32_t home = home_of(s, mixed(t, s->entries[at].key));
        uint32_t from_home = at >= home ? at - home : at + s->capacity - home;
        uint32_t from_gap = at >= gap ? at - gap : at + s->capacity - gap;
        if (from_home >= from_gap) {
            s->entries[gap] = s->entries[at];
            gap = at;
        }
    }
    s->entries[gap] = (Entry){0, 0};
    s->used--;
    t->entries--;
}

static inline void fetch_ahead(const Table *t, uint64_t key) {
    uint64_t mix = mixed(t, key);
    const Segment *s = segment_of(t, mix);
    __builtin_prefetch(&s->entries[home_of(s, mix)]);
}

/* ---- slots and holders ---- */

static int table_init(Table *t, uint64_t salt) {
    memset(t, 0, sizeof(*t));
    t->salt = salt;
    t->holders_used = 1;
    t->bytes = sizeof(*t) + sizeof(*t->directory);
    t->directory = (Segment **)malloc(sizeof(*t->directory));
    if (!t->directory) return -1;
    t->directory[0] = segment_new(t, SMALLEST_SEGMENT, 0);
    return t->directory[0] ? 0 : -1;
}

static void table_free(Table *t) {
    uint64_t size = t->directory ? 1ull << t->directory_bits : 0;
    for (uint64_t i = 0; i < size;) {
        Segment *s = t->directory[i];
        if (!s) break;
        i += 1ull << (t->directory_bits - s->depth);
        segment_free(t, s);
    }
    for (uint64_t i = 0; i < t->sets_capacity; i++) {
        if (!t->sets[i]) continue;
        free(t->sets[i]->map.bits);
        free(t->sets[i]);
    }
    free(t->directory);
    free(t->sets);
    free(t->holders);
    free(t->slots);
    free(t->since);
    free(t->scratch);
    free(t->dead);
    free(t->dying);
    free(t->free);
}

/* Slots up to this one; 0, or -1 without memory. */
static int table_reserve_slots(Table *t, uint32_t slots) {
    if (slots > t->slots_capacity) {
        uint32_t capacity = t->slots_capacity ? 2 * t->slots_capacity : 16;
        while (capacity < slots) capacity *= 2;
        uint32_t *ids = (uint32_t *)realloc(t->slots, (size_t)capacity * TIERS * 4);
        if (ids) t->slots = ids;
        uint32_t *since = (uint32_t *)realloc(t->since, (size_t)capacity * 4);
        if (since) t->since = since;
        size_t words = (size_t)capacity / 64 + 1;
        uint64_t *scratch = (uint64_t *)realloc(t->scratch, 2 * TIERS * words * 8);
        if (scratch) t->scratch = scratch;
        if (!ids || !since || !scratch) return -1;
        t->bytes += (uint64_t)(capacity - t->slots_capacity) * (TIERS * 5 + 4);
        t->slots_capacity = capacity;
    }
    while (t->slots_used < slots) {
        memset(t->slots + (size_t)t->slots_used * TIERS, 0, TIERS * 4);
        t->slots_used++;
    }
    return 0;
}

/* The holder number of a slot's tier, made if there is none; 0 without memory. */
static uint32_t holder_of(Table *t, uint32_t slot, int tier) {
    uint32_t id = t->slots[slot * TIERS + tier];
    if (id) return id;
    if (t->free_used) {
        id = t->free[--t->free_used];
    } else {
        if (t->holders_used >= t->holders_capacity) {
            uint32_t capacity = t->holders_capacity ? 2 * t->holders_capacity : 64;
            Holder *holders = (Holder *)realloc(t->holders, capacity * sizeof(Holder));
            if (holders) t->holders = holders;
            uint32_t *dead = (uint32_t *)realloc(t->dead, (size_t)capacity * 4);
            if (dead) t->dead = dead;
            uint32_t *dying = (uint32_t *)realloc(t->dying, (size_t)capacity * 4);
            if (dying) t->dying = dying;
            uint32_t *free_ids = (uint32_t *)realloc(t->free, (size_t)capacity * 4);
            if (free_ids) t->free = free_ids;
            if (!holders || !dead || !dying || !free_ids) return 0;
            t->bytes += (uint64_t)(capacity - t->holders_capacity) * (sizeof(Holder) + 12);
            t->holders_capacity = capacity;
        }
        id = t->holders_used++;
    }
    t->holders[id] = (Holder){0, 0, slot, (uint8_t)tier, 1};
    return t->slots[slot * TIERS + tier] = id;
}

/* Drops all that a slot holds on a tier, at once for every answer. Returns how many it were. */
static uint64_t table_retire(Table *t, uint32_t slot, int tier) {
    uint32_t id = t->slots[slot * TIERS + tier];
    if (!id) return 0;
    uint64_t count = t->holders[id].count;
    t->slots[slot * TIERS + tier] = 0;
    t->holders[id].alive = 0;
    t->holders[id].count = 0;
    t->epoch++;
    if (count)
        t->dead[t->dead_used++] = id;
    else
        t->free[t->free_used++] = id; /* no entry names it */
    return count;
}

static inline int table_has_dead(const Table *t) { return t->dead_used || t->dying_used; }

static int segment_sweep(Table *t, Segment *s) {
    Memo memo = {0, 0};
    int failed = 0;
    for (uint32_t i = 0; i < s->capacity && !failed;) {
        Entry *entry = &s->entries[i];
        uint64_t from = entry->value, to = from;
        if (from) to = from == memo.from ? memo.to : value_swept(t, from);
        if (to == NO_MEMORY) {
            failed = -1;
        } else if (to == from) {
            i++;
        } else {
            memo_set(t, &memo, from, to);
            value_ref(to);
            value_unref(t, from);
            entry->value = to;
            if (!to) {
                entry->value = 1; /* entry_delete closes the gap by non-empty neighbours */
                entry_delete(t, s, entry); /* another entry may stand here now: look again */
            } else {
                i++;
            }
        }
    }
    memo_set(t, &memo, 0, 0);
    return failed;
}

/* Takes dead holders out of about `budget` entries. Returns whether there is more to do. */
static int table_sweep(Table *t, uint64_t budget) {
    while (table_has_dead(t)) {
        if (!t->dying_used) {
            uint32_t *swap = t->dying;
            t->dying = t->dead;
            t->dead = swap;
            t->dying_used = t->dead_used;
            t->dead_used = 0;
            t->sweep++;
            t->sweep_at = 0;
        }
        while (t->sweep_at < 1ull << t->directory_bits) {
            Segment *s = t->directory[t->sweep_at];
            if (s->swept != t->sweep) {
                if (s->capacity > budget) return 1;
                budget -= s->capacity;
                if (segment_sweep(t, s)) return 1;
                s->swept = t->sweep;
            }
            t->sweep_at++;
        }
        memcpy(t->free + t->free_used, t->dying, (size_t)t->dying_used * 4);
        t->free_used += t->dying_used;
        t->dying_used = 0;
    }
    return 0;
}

/* ---- the four operations ---- */

/* Adds placements. Returns how many are new, or NO_MEMORY. */
static uint64_t table_store(Table *t, uint32_t slot, int tier, const uint64_t *keys, size_t count) {
    uint32_t id = holder_of(t, slot, tier);
    if (!id) return NO_MEMORY;
    Memo memo = {0, inline_value(id, 0)};
    uint64_t added = 0, digest = 0;
    int failed = 0;
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) fetch_ahead(t, keys[i + AHEAD]);
        uint64_t mix = mixed(t, keys[i]);
        Segment *s = segment_of(t, mix);
        Entry *entry = find(s, mix, keys[i]);
        uint64_t from = entry->value, to = memo.to;
        if (from != memo.from) {
            if (from == memo.to || value_has(from, id)) continue;
            to = from ? value_changed(t, from, id, 1) : inline_value(id, 0);
            if ((failed = to == NO_MEMORY)) break;
            memo_set(t, &memo, from, to);
        }
        if (!from) {
            if (4 * ((uint64_t)s->used + 1) > 3 * (uint64_t)s->capacity) {
                if ((failed = make_room(t, mix))) break;
                s = segment_of(t, mix);
                entry = find(s, mix, keys[i]);
            }
            entry->key = keys[i];
            s->used++;
            t->entries++;
        }
        value_ref(to);
        value_unref(t, from);
        entry->value = to;
        digest ^= keys[i];
        added++;
    }
    memo_set(t, &memo, 0, 0);
    t->holders[id].count += added;
    t->holders[id].digest ^= digest;
    return failed ? NO_MEMORY : added;
}

/* Drops placements. Returns how many were there, or NO_MEMORY. */
static uint64_t table_remove(Table *t, uint32_t slot, int tier, const uint64_t *keys, size_t count) {
    uint32_t id = t->slots[slot * TIERS + tier];
    if (!id) return 0;
    Memo memo = {inline_value(id, 0), 0};
    uint64_t removed = 0, digest = 0;
    int failed = 0;
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) fetch_ahead(t, keys[i + AHEAD]);
        uint64_t mix = mixed(t, keys[i]);
        Segment *s = segment_of(t, mix);
        Entry *entry = find(s, mix, keys[i]);
        uint64_t from = entry->value, to = memo.to;
        if (!from) continue;
        if (from != memo.from) {
            if (!value_has(from, id)) continue;
            to = value_changed(t, from, id, 0);
            if ((failed = to == NO_MEMORY)) break;
            memo_set(t, &memo, from, to);
        }
        value_ref(to);
        value_unref(t, from);
        if (to)
            entry->value = to;
        else
            entry_delete(t, s, entry);
        digest ^= keys[i];
        removed++;
    }
    memo_set(t, &memo, 0, 0);
    t->holders[id].count -= removed;
    t->holders[id].digest ^= digest;
    return failed ? NO_MEMORY : removed;
}

/* Adds the living among some holders to a map whose bits are zero. */
static void map_add(const Table *t, SlotMap map, const uint32_t *ids, uint32_t count) {
    uint64_t *device = map.bits, *host = device + map.words, *disk = host + map.words;
    for (uint32_t i = 0; i < count; i++) {
        const Holder *holder = &t->holders[ids[i]];
        if (!holder->alive) continue;
        uint32_t word = holder->slot / 64 - map.first;
        map.bits[holder->tier * (size_t)map.words + word] |= 1ull << holder->slot % 64;
    }
    for (uint32_t w = 0; w < map.words; w++) {
        host[w] &= ~device[w];
        disk[w] &= ~(device[w] | host[w]);
    }
}

/* The slots of a set of three or more; 0, or -1 without memory. */
static int set_map(Table *t, HolderSet *set) {
    if (set->map.bits && set->epoch == t->epoch) return 0;
    uint32_t low = UINT32_MAX, high = 0;
    for (uint32_t i = 0; i < set->count; i++) {
        uint32_t word = t->holders[set->ids[i]].slot / 64;
        if (word < low) low = word;
        if (word > high) high = word;
    }
    uint32_t words = high - low + 1;
    uint64_t *bits = (uint64_t *)calloc(TIERS * (size_t)words, 8);
    if (!bits) return -1;
    t->bytes -= map_bytes(&set->map);
    free(set->map.bits);
    set->map = (SlotMap){bits, low, words};
    set->epoch = t->epoch;
    t->bytes += map_bytes(&set->map);
    map_add(t, set->map, set->ids, set->count);
    return 0;
}

/* Counts, for each slot in `slots` (of one word), the blocks since it was last counted. */
static inline void count_run(Table *t, const uint64_t *map, uint32_t words, uint32_t word,
                             uint64_t slots, uint32_t now, int32_t *table) {
    while (slots) {
        uint64_t bit = slots & -slots;
        uint32_t slot = word * 64 + (uint32_t)__builtin_ctzll(slots);
        int tier = map[word] & bit ? 0 : map[words + word] & bit ? 1 : 2;
        table[(size_t)tier * t->slots_used + slot] += (int32_t)(now - t->since[slot]);
        t->since[slot] = now;
        slots ^= bit;
    }
}

/* Longest run of leading keys that each slot holds, on any tier, split by the fastest tier of each
 * key: table[tier * slots_used + slot], which must be zero. A slot is looked at when it drops out
 * or changes its tier, not at every key. 0, or -1 without memory. */
static int table_match(Table *t, const uint64_t *keys, size_t count, int32_t *table) {
    uint32_t words = t->slots_used / 64 + 1;
    size_t map_size = TIERS * (size_t)words * 8;
    uint64_t *alive = t->scratch, *next = alive + TIERS * (size_t)words, before = 0;
    uint32_t i = 0;
    for (; i < count; i++) {
        if (i + AHEAD < count) fetch_ahead(t, keys[i + AHEAD]);
        uint64_t mix = mixed(t, keys[i]);
        uint64_t value = find(segment_of(t, mix), mix, keys[i])->value;
        if (value == before && i) continue;
        before = value;
        memset(next, 0, map_size);
        if (is_set(value)) {
            if (set_map(t, as_set(value))) return -1;
            SlotMap map = as_set(value)->map;
            for (int tier = 0; tier < TIERS; tier++)
                memcpy(next + tier * (size_t)words + map.first,
                       map.bits + tier * (size_t)map.words, (size_t)map.words * 8);
        } else {
            uint32_t room[2];
            const uint32_t *ids;
            uint32_t few = value_ids(value, room, &ids);
            map_add(t, (SlotMap){next, 0, words}, ids, few);
        }
        uint64_t anybody = 0;
        for (uint32_t w = 0; w < words; w++) {
            uint64_t *was[TIERS] = {alive + w, alive + words + w, alive + 2 * words + w};
            uint64_t is[TIERS] = {next[w], next[words + w], next[2 * words + w]};
            uint64_t holds = is[0] | is[1] | is[2];
            if (i) {
                uint64_t had = *was[0] | *was[1] | *was[2], moved = 0;
                for (int tier = 0; tier < TIERS; tier++) moved |= *was[tier] & ~is[tier];
                if (moved) count_run(t, alive, words, w, moved, i, table);
                holds &= had;
            } else {
                for (uint64_t slots = holds; slots; slots &= slots - 1)
                    t->since[w * 64 + (uint32_t)__builtin_ctzll(slots)] = 0;
            }
            for (int tier = 0; tier < TIERS; tier++) *was[tier] = is[tier] & holds;
            anybody |= holds;
        }
        if (!anybody) return 0;
    }
    for (uint32_t w = 0; w < words && count; w++)
        count_run(t, alive, words, w, alive[w] | alive[words + w] | alive[2 * words + w], i, table);
    return 0;
}

#endif
