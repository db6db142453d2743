/* The block table: PrefixHash -> its holders, by tier.
 *
 * Entries (key and holders: holder_sets.h) are in a pool in the order of their arrival
 * (entry_pool.h). Buckets map keys to entries: a bucket is a cache line of twelve tags and places,
 * addressed by the top bits of the mixed key through a directory of small segments (extendible
 * hashing), so that growth never moves more than a segment. A walk along a chain tries the next
 * place in the pool first, and looks into the buckets only where a chain was not stored at once.
 *
 * A holder is one (slot, level). Levels are the tiers, and two generations of predictions. A match
 * counts a block by its fastest level; both generations are one row. A placement of a block ends its
 * predictions.
 *
 * A retired holder (its worker cleared or forgotten) is dead at once for every answer; a sweep takes
 * its number out of the entries, some extents at a time, and the number is used again only after a
 * whole sweep.
 *
 * Over the limit of bytes, the clock's hand forgets extents that no match has used; over its share,
 * a worker loses placements of its own. A holder's digest and `told` include forgotten
 * placements, so that they are comparable with its relay's.
 *
 * Laws: a key has one entry, and only while it has a holder (a dead holder until it is swept); a
 * slot holds a key on tiers or predicts it in one generation, never both; digest and told change
 * only by stores, removals and retirements.
 *
 * Not thread-safe: one writer, which is also the only reader. */
#ifndef KVROUTE_BLOCK_TABLE_H
#define KVROUTE_BLOCK_TABLE_H

#include "entry_pool.h"
#include "holder_sets.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define TIERS 3
#define GENERATIONS 2
#define LEVELS (TIERS + GENERATIONS)
#define ROWS (TIERS + 1)
#define AHEAD 8 /* keys whose buckets are fetched before they are needed */
#define BUCKET_PLACES 12
#define SEGMENT_BUCKETS 64
#define SEGMENT_USED_MAX (SEGMENT_BUCKETS * BUCKET_PLACES * 5 / 6)
#define SEGMENT_USED_SPREAD 128
#define ENTRY_BYTES 32 /* entry, its share of a bucket, and the space they leave, at most */
#define SWEEP_STEPS 2    /* cost of checking an extent, in changes of an entry */
#define CLOCK_LOOKS 4096 /* extents that the hand passes before it takes an extent that was used */
#define SHARE_LOOKS 8    /* extents looked at for a placement of a worker that is over its share */

/* A cache line. overflowed: keys of this bucket that are in later buckets; 255: many, for ever. */
typedef struct {
    uint8_t tags[BUCKET_PLACES];
    uint8_t overflowed, unused[3];
    uint32_t places[BUCKET_PLACES];
} Bucket;

typedef struct {
    uint32_t used, depth;
    uint32_t used_max; /* then it splits; different values, or all would split at the same time */
    uint8_t padding[52];
    Bucket buckets[SEGMENT_BUCKETS];
} Segment;

typedef struct {
    uint64_t held, told, digest; /* told and digest: forgotten placements included */
    uint32_t slot;
    uint8_t level, alive;
} Holder;

typedef struct {
    uint64_t salt;
    Segment **directory;
    uint32_t directory_bits;
    uint64_t segments; /* number of segments */
    Pool pool;
    HolderSets sets;
    Holder *holders; /* by number; 0 is no holder */
    uint32_t holders_used, holders_capacity;
    uint32_t *slots; /* slot * LEVELS + level -> holder number, 0 for none */
    uint32_t slots_used, slots_capacity;
    uint32_t *since;   /* scratch of a match: slot -> first block that is not counted yet */
    uint64_t *scratch; /* and slot maps: of survivors, and of the current block */
    uint64_t epoch;    /* retirements so far: older slot maps may have dead holders */
    uint32_t *dead, *dying, *free; /* holder numbers: retired, being swept, swept */
    uint32_t dead_used, dying_used, free_used;
    uint32_t sweep_at; /* extent at which the sweep continues */
    uint32_t hand;     /* extent at which the clock's hand continues */
    uint64_t bytes;    /* of all but pool and sets */
    uint64_t bytes_max, share_max; /* of the table; placements of a worker. UINT64_MAX: no limit */
    uint64_t forgotten; /* placements, for lack of space */
} Table;

/* ---- the place of a key ---- */

/* The salt is secret, so that callers can't choose keys that collide. */
static inline uint64_t mixed(const Table *t, uint64_t key) {
    return xxh_fold(key ^ t->salt, XXH_P64_1 ^ (t->salt << 1));
}

static inline Segment *segment_of(const Table *t, uint64_t mix) {
    return t->directory[t->directory_bits ? mix >> (64 - t->directory_bits) : 0];
}

static inline uint32_t home_of(uint64_t mix) { return (uint32_t)mix & (SEGMENT_BUCKETS - 1); }
static inline uint32_t next_bucket(uint32_t b) { return (b + 1) & (SEGMENT_BUCKETS - 1); }

static inline uint8_t tag_of(uint64_t mix) {
    uint8_t tag = (uint8_t)(mix >> 8);
    return tag ? tag : 1;
}

/* A bit for each place of a bucket that has this tag; tag 0: that is empty. */
static inline uint32_t tags_equal(const Bucket *b, uint8_t tag) {
#ifdef __SSE2__
    __m128i tags = _mm_loadu_si128((const __m128i *)(const void *)b);
    return (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(tags, _mm_set1_epi8((char)tag))) &
           ((1u << BUCKET_PLACES) - 1);
#else
    uint32_t equal = 0;
    for (int i = 0; i < BUCKET_PLACES; i++) equal |= (uint32_t)(b->tags[i] == tag) << i;
    return equal;
#endif
}

/* The pool's place of a key, 0 for none. */
static inline uint32_t find(const Table *t, uint64_t mix, uint64_t key) {
    const Segment *s = segment_of(t, mix);
    uint8_t tag = tag_of(mix);
    for (uint32_t b = home_of(mix), tries = 0; tries < SEGMENT_BUCKETS; b = next_bucket(b), tries++) {
        const Bucket *bucket = &s->buckets[b];
        for (uint32_t equal = tags_equal(bucket, tag); equal; equal &= equal - 1) {
            uint32_t at = bucket->places[__builtin_ctz(equal)];
            if (pool_entry(&t->pool, at)->key == key) return at;
        }
        if (!bucket->overflowed) return 0;
    }
    return 0;
}

static inline void fetch_bucket(const Table *t, uint64_t key) {
    uint64_t mix = mixed(t, key);
    __builtin_prefetch(&segment_of(t, mix)->buckets[home_of(mix)]);
}

/* Writes a key's place into its segment, which must have a free place. */
static inline void bucket_put(Segment *s, uint64_t mix, uint32_t at) {
    uint32_t b = home_of(mix);
    uint32_t empty;
    while (!(empty = tags_equal(&s->buckets[b], 0))) {
        if (s->buckets[b].overflowed < 255) s->buckets[b].overflowed++;
        b = next_bucket(b);
    }
    int place = __builtin_ctz(empty);
    s->buckets[b].tags[place] = tag_of(mix);
    s->buckets[b].places[place] = at;
    s->used++;
}

/* The bucket's place that refers to a place of the pool; there must be one. */
static inline uint32_t *bucket_place(Segment *s, uint64_t mix, uint32_t at, uint8_t **tag) {
    for (uint32_t b = home_of(mix);; b = next_bucket(b)) {
        Bucket *bucket = &s->buckets[b];
        for (uint32_t equal = tags_equal(bucket, tag_of(mix)); equal; equal &= equal - 1) {
            int place = __builtin_ctz(equal);
            if (bucket->places[place] != at) continue;
            *tag = &bucket->tags[place];
            return &bucket->places[place];
        }
    }
}

static void bucket_drop(Table *t, uint64_t key, uint32_t at) {
    uint64_t mix = mixed(t, key);
    Segment *s = segment_of(t, mix);
    uint8_t *tag;
    uint32_t *place = bucket_place(s, mix, at, &tag);
    for (uint32_t b = home_of(mix); place < s->buckets[b].places ||
                                    place >= s->buckets[b].places + BUCKET_PLACES;
         b = next_bucket(b))
        if (s->buckets[b].overflowed < 255) s->buckets[b].overflowed--;
    *tag = 0;
    s->used--;
}

static Segment *segment_new(Table *t, uint32_t depth) {
    void *memory;
    if (posix_memalign(&memory, 64, sizeof(Segment))) return NULL;
    memset(memory, 0, sizeof(Segment));
    Segment *s = (Segment *)memory;
    s->depth = depth;
    s->used_max = SEGMENT_USED_MAX - (uint32_t)(mixed(t, t->segments++) % SEGMENT_USED_SPREAD);
    t->bytes += sizeof(Segment);
    return s;
}

static int directory_double(Table *t) {
    uint64_t size = 1ull << t->directory_bits;
    Segment **directory = (Segment **)malloc(2 * size * sizeof(*directory));
    if (!directory) return -1;
    for (uint64_t i = 0; i < size; i++) directory[2 * i] = directory[2 * i + 1] = t->directory[i];
    free(t->directory);
    t->directory = directory;
    t->bytes += size * sizeof(*directory);
    t->directory_bits++;
    return 0;
}

/* Two segments for one; 0, or -1 without memory. */
static int segment_split(Table *t, uint64_t mix) {
    Segment *s = segment_of(t, mix);
    if (s->depth == t->directory_bits && directory_double(t)) return -1;
    Segment *halves[2] = {segment_new(t, s->depth + 1), segment_new(t, s->depth + 1)};
    if (!halves[0] || !halves[1]) {
        for (int i = 0; i < 2; i++) {
            if (halves[i]) t->bytes -= sizeof(Segment);
            free(halves[i]);
        }
        return -1;
    }
    for (uint32_t b = 0; b < SEGMENT_BUCKETS; b++) {
        const Bucket *ahead = &s->buckets[(b + 2) & (SEGMENT_BUCKETS - 1)], *bucket = &s->buckets[b];
        for (int i = 0; i < BUCKET_PLACES; i++)
            if (ahead->tags[i]) __builtin_prefetch(pool_entry(&t->pool, ahead->places[i]));
        for (int i = 0; i < BUCKET_PLACES; i++) {
            if (!bucket->tags[i]) continue;
            uint64_t moved = mixed(t, pool_entry(&t->pool, bucket->places[i])->key);
            bucket_put(halves[moved >> (63 - s->depth) & 1], moved, bucket->places[i]);
        }
    }
    uint64_t span = 1ull << (t->directory_bits - s->depth);
    uint64_t first = (t->directory_bits ? mix >> (64 - t->directory_bits) : 0) & ~(span - 1);
    for (uint64_t i = 0; i < span; i++) t->directory[first + i] = halves[i >= span / 2];
    t->bytes -= sizeof(Segment);
    free(s);
    return 0;
}

/* The position of a walk along a chain, whose blocks are in ascending or descending places. */
typedef struct {
    uint32_t at;
    int32_t step;
    uint32_t strays; /* keys in a row that were not at the first place tried */
} Walk;

/* The pool's place of the next key of a walk, 0 for none. */
static inline uint32_t walk_to(const Table *t, Walk *w, uint64_t key) {
    uint32_t next = w->at + (uint32_t)w->step;
    if (w->at && pool_has(&t->pool, next)) {
        const Entry *entry = pool_entry(&t->pool, next);
        if (entry->key == key && entry->value) {
            w->strays = 0;
            return w->at = next;
        }
    }
    w->strays++;
    uint32_t at = find(t, mixed(t, key), key);
    if (!at) return 0;
    if (at == w->at - 1) w->step = -1;
    if (at == w->at + 1) w->step = 1;
    return w->at = at;
}

/* ---- holders ---- */

static uint64_t table_bytes(const Table *t) { return t->bytes + t->pool.bytes + t->sets.bytes; }

static int table_init(Table *t, uint64_t salt) {
    memset(t, 0, sizeof(*t));
    t->salt = salt;
    t->holders_used = 1;
    t->bytes_max = t->share_max = UINT64_MAX;
    t->bytes = sizeof(*t) + sizeof(*t->directory);
    t->directory = (Segment **)malloc(sizeof(*t->directory));
    if (!t->directory) return -1;
    t->directory[0] = segment_new(t, 0);
    return t->directory[0] ? 0 : -1;
}

static void table_free(Table *t) {
    uint64_t size = t->directory ? 1ull << t->directory_bits : 0;
    for (uint64_t i = 0; i < size;) {
        Segment *s = t->directory[i];
        if (!s) break;
        i += 1ull << (t->directory_bits - s->depth);
        free(s);
    }
    free(t->directory);
    pool_free(&t->pool);
    sets_free(&t->sets);
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
        uint32_t *ids = (uint32_t *)realloc(t->slots, (size_t)capacity * LEVELS * 4);
        if (ids) t->slots = ids;
        uint32_t *since = (uint32_t *)realloc(t->since, (size_t)capacity * 4);
        if (since) t->since = since;
        size_t words = (size_t)capacity / 64 + 1;
        uint64_t *scratch = (uint64_t *)realloc(t->scratch, 2 * ROWS * words * 8);
        if (scratch) t->scratch = scratch;
        if (!ids || !since || !scratch) return -1;
        t->bytes += (uint64_t)(capacity - t->slots_capacity) * (LEVELS * 4 + 4 + ROWS / 4);
        t->slots_capacity = capacity;
    }
    while (t->slots_used < slots) {
        memset(t->slots + (size_t)t->slots_used * LEVELS, 0, LEVELS * 4);
        t->slots_used++;
    }
    return 0;
}

/* The holder of a slot's level. */
static inline const Holder *table_holder(const Table *t, uint32_t slot, int level) {
    static const Holder nobody = {0, 0, 0, 0, 0, 0};
    uint32_t id = t->slots[slot * LEVELS + level];
    return id ? &t->holders[id] : &nobody;
}

/* The holder number of a slot's level, made if there is none; 0 without memory. */
static uint32_t holder_of(Table *t, uint32_t slot, int level) {
    uint32_t id = t->slots[slot * LEVELS + level];
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
    t->holders[id] = (Holder){0, 0, 0, slot, (uint8_t)level, 1};
    return t->slots[slot * LEVELS + level] = id;
}

/* Drops all placements of a slot on a level, at once for every answer. Returns how many. */
static uint64_t table_retire(Table *t, uint32_t slot, int level) {
    uint32_t id = t->slots[slot * LEVELS + level];
    if (!id) return 0;
    uint64_t held = t->holders[id].held;
    t->slots[slot * LEVELS + level] = 0;
    t->holders[id].alive = 0;
    t->holders[id].held = 0;
    t->epoch++;
    if (held)
        t->dead[t->dead_used++] = id;
    else
        t->free[t->free_used++] = id; /* no entry has it */
    return held;
}

/* ---- changes of an entry ---- */

/* The change of each key: adds holder `add` and drops holders `drops`, unless the entry has a
 * holder of `unless`, or lacks `need`. Holder numbers; 0: none. */
typedef struct {
    uint32_t add, need;
    uint32_t drops[LEVELS], drops_used;
    uint32_t unless[TIERS], unless_used;
} Edit;

/* A memo of an edit: its result for `from`. */
typedef struct {
    uint64_t from, to;
    uint32_t dropped; /* bits over the edit's drops */
    int added;
} Memo;

static inline void memo_set(Table *t, Memo *memo, uint64_t from, uint64_t to) {
    value_ref(from);
    value_ref(to);
    value_unref(&t->sets, memo->from);
    value_unref(&t->sets, memo->to);
    memo->from = from;
    memo->to = to;
}

/* Stores an edit's result for a value in the memo; returns 0, or -1 without memory. */
static int edit_value(Table *t, const Edit *edit, uint64_t from, Memo *memo) {
    uint32_t room[2], few[64], *ids = few, dropped = 0, kept = 0;
    const uint32_t *old;
    uint32_t count = value_ids(from, room, &old);
    int added = 0, allowed = !edit->need || value_has(from, edit->need);
    for (uint32_t i = 0; i < edit->unless_used; i++)
        if (value_has(from, edit->unless[i])) allowed = 0;
    uint64_t to = from;
    if (allowed) {
        if (count + 1 > 64 && !(ids = (uint32_t *)malloc(4 * ((size_t)count + 1)))) return -1;
        added = edit->add && !value_has(from, edit->add);
        int placed = !added;
        for (uint32_t i = 0; i < count; i++) {
            uint32_t gone = 0;
            for (uint32_t d = 0; d < edit->drops_used; d++)
                if (old[i] == edit->drops[d]) gone = 1u << d;
            dropped |= gone;
            if (gone) continue;
            if (!placed && edit->add < old[i]) {
                ids[kept++] = edit->add;
                placed = 1;
            }
            ids[kept++] = old[i];
        }
        if (!placed) ids[kept++] = edit->add;
        if (added || dropped) to = intern(&t->sets, ids, kept);
        if (ids != few) free(ids);
        if (to == NO_MEMORY) return -1;
    }
    memo_set(t, memo, from, to);
    memo->added = added;
    memo->dropped = dropped;
    return 0;
}

/* value without its dead holders. */
static uint64_t value_swept(Table *t, uint64_t value) {
    uint32_t room[2], few[64], *left = few, kept = 0;
    const uint32_t *ids;
    uint32_t count = value_ids(value, room, &ids);
    if (count > 64 && !(left = (uint32_t *)malloc(4 * (size_t)count))) return NO_MEMORY;
    for (uint32_t i = 0; i < count; i++)
        if (t->holders[ids[i]].alive) left[kept++] = ids[i];
    uint64_t result = kept == count ? value : intern(&t->sets, left, kept);
    if (left != few) free(left);
    return result;
}

/* Sets an entry's value; an entry without holders is freed. */
static inline void entry_set(Table *t, uint32_t at, Entry *entry, uint64_t to) {
    uint64_t from = entry->value;
    value_ref(to);
    entry->value = to;
    if (!to) {
        bucket_drop(t, entry->key, at);
        pool_give_back(&t->pool, at);
    }
    value_unref(&t->sets, from);
}

/* ---- space ---- */

/* Forgets an entry, for lack of space: its holders lose it. */
static void entry_forget(Table *t, uint32_t at) {
    Entry *entry = pool_entry(&t->pool, at);
    uint32_t room[2];
    const uint32_t *ids;
    uint32_t count = value_ids(entry->value, room, &ids);
    for (uint32_t i = 0; i < count; i++) {
        Holder *holder = &t->holders[ids[i]];
        if (!holder->alive) continue;
        holder->held--;
        if (holder->level < TIERS) t->forgotten++;
    }
    entry_set(t, at, entry, 0);
}

/* The clock: forgets the next extent that no match has used since the hand passed it. */
static void forget_extent(Table *t) {
    Pool *p = &t->pool;
    uint32_t extents = pool_extents(p);
    for (uint32_t looks = 0; looks < CLOCK_LOOKS + extents; looks++) {
        uint32_t extent = t->hand = t->hand + 1 < extents ? t->hand + 1 : 0;
        if (!*extent_live(p, extent) || extent_is_current(p, extent)) continue;
        if (*extent_seen(p, extent) && looks < CLOCK_LOOKS) {
            *extent_seen(p, extent) = 0;
            continue;
        }
        for (uint32_t at = extent * EXTENT; at < (extent + 1) * EXTENT; at++)
            if (pool_entry(p, at)->value) entry_forget(t, at);
        return;
    }
}

/* Forgets until there is space for another entry. Counts the used bytes, not the allocated bytes,
 * which grow in steps. */
static inline void make_room(Table *t) {
    while (t->pool.live * ENTRY_BYTES + t->sets.bytes + ENTRY_BYTES > t->bytes_max) {
        uint64_t before = t->pool.live;
        forget_extent(t);
        if (t->pool.live == before) return; /* all other entries are in the current extent */
    }
}

/* Takes a placement from a holder whose worker is over its share; returns whether it did. */
static int forget_of(Table *t, uint32_t id) {
    Pool *p = &t->pool;
    uint32_t extents = pool_extents(p);
    for (uint32_t looks = 0; looks < SHARE_LOOKS; looks++) {
        uint32_t extent = t->hand = t->hand + 1 < extents ? t->hand + 1 : 0;
        if (!*extent_live(p, extent) || extent_is_current(p, extent)) continue;
        for (uint32_t at = extent * EXTENT; at < (extent + 1) * EXTENT; at++) {
            Entry *entry = pool_entry(p, at);
            if (!entry->value || !value_has(entry->value, id)) continue;
            Edit edit = {.need = id, .drops = {id}, .drops_used = 1};
            Memo memo = {0, 0, 0, 0};
            if (edit_value(t, &edit, entry->value, &memo)) return 0;
            entry_set(t, at, entry, memo.to);
            memo_set(t, &memo, 0, 0);
            t->holders[id].held--;
            t->forgotten++;
            return 1;
        }
    }
    return 0;
}

static void entry_move(Table *t, uint32_t from, uint32_t to) {
    Pool *p = &t->pool;
    Entry *entry = pool_entry(p, from);
    uint64_t mix = mixed(t, entry->key);
    uint8_t *tag;
    *bucket_place(segment_of(t, mix), mix, from, &tag) = to;
    *pool_entry(p, to) = *entry;
    ++*extent_live(p, to / EXTENT);
    p->live++;
    pool_give_back(p, from);
}

/* The next extent that is in use and less than half full. */
static uint32_t next_thin(Table *t) {
    Pool *p = &t->pool;
    for (;;) {
        uint32_t extent = p->thin_at = p->thin_at + 1 < pool_extents(p) ? p->thin_at + 1 : 0;
        uint8_t live = *extent_live(p, extent);
        if (live && live < EXTENT / 2 && !extent_is_current(p, extent)) return extent;
    }
}

/* Makes an extent vacant by moving its entries into another thin extent. The pool must be less than
 * half full, so that there are thin extents. Returns 0, or -1 without memory. */
static int pool_thin(Table *t) {
    Pool *p = &t->pool;
    uint32_t into = next_thin(t), from = next_thin(t), to = into * EXTENT + (into == 0);
    if (from == into) return -1;
    if (*extent_seen(p, from)) *extent_seen(p, into) = 1;
    for (uint32_t at = from * EXTENT; at < (from + 1) * EXTENT; at++) {
        Entry *entry = pool_entry(p, at);
        if (!entry->value) continue;
        while (pool_entry(p, to)->value) to++;
        if (t->dying_used) { /* the sweep may have passed the new place */
            uint64_t swept = value_swept(t, entry->value);
            if (swept == NO_MEMORY) return -1;
            entry_set(t, at, entry, swept);
            if (!swept) continue;
        }
        entry_move(t, at, to);
    }
    return 0;
}

/* Makes sure that there is a current extent; returns 0, or -1 without memory. */
static int extent_is_current_needed(Table *t) {
    Pool *p = &t->pool;
    if (p->cursor != p->end) return 0;
    if (!p->vacant_used) {
        uint64_t room = (uint64_t)p->chunks_used * CHUNK_ENTRIES;
        int thin = p->chunks_used > 1 && 9 * p->live < 4 * room;
        if ((!thin || pool_thin(t) || !p->vacant_used) && !p->vacant_used && pool_grow(p)) return -1;
    }
    pool_next_extent(p);
    return 0;
}

/* A new entry for a key without an entry; 0 without memory. */
static uint32_t entry_new(Table *t, uint64_t key, uint64_t value) {
    uint64_t mix = mixed(t, key);
    if (extent_is_current_needed(t)) return 0;
    while (segment_of(t, mix)->used >= segment_of(t, mix)->used_max)
        if (segment_split(t, mix)) return 0;
    uint32_t at = pool_take(&t->pool);
    *pool_entry(&t->pool, at) = (Entry){key, value};
    value_ref(value);
    bucket_put(segment_of(t, mix), mix, at);
    return at;
}

/* ---- the operations ---- */

/* Adds the holders of a slot's predictions, which a placement ends. */
static void edit_predictions(const Table *t, uint32_t slot, Edit *edit) {
    for (int level = TIERS; level < LEVELS; level++) {
        uint32_t id = t->slots[slot * LEVELS + level];
        if (id && id != edit->add && t->holders[id].held) edit->drops[edit->drops_used++] = id;
    }
}

/* Whether a worker, or a generation of its predictions, is at its bound. */
static inline int is_over_share(const Table *t, const Holder *holder) {
    uint64_t held = holder->held;
    if (holder->level < TIERS) {
        held = 0;
        for (int tier = 0; tier < TIERS; tier++) held += table_holder(t, holder->slot, tier)->held;
    }
    return held >= t->share_max;
}

static inline void count_dropped(Table *t, const Edit *edit, uint32_t dropped) {
    for (; dropped; dropped &= dropped - 1)
        t->holders[edit->drops[__builtin_ctz(dropped)]].held--;
}

/* Adds placements on a level. Returns how many are new, or NO_MEMORY. */
static uint64_t table_store(Table *t, uint32_t slot, int level, const uint64_t *keys, size_t count) {
    uint32_t id = holder_of(t, slot, level);
    if (!id) return NO_MEMORY;
    Edit edit = {.add = id};
    int known = level < TIERS;
    edit_predictions(t, slot, &edit);
    for (int tier = 0; tier < TIERS && !known; tier++) {
        uint32_t holds = t->slots[slot * LEVELS + tier];
        if (holds) edit.unless[edit.unless_used++] = holds;
    }
    Holder *holder = &t->holders[id];
    Memo memo = {0, inline_value(id, 0), 0, 1};
    Walk walk = {0, 1, 0};
    uint64_t added = 0, digest = 0;
    int failed = 0;
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count && walk.strays) fetch_bucket(t, keys[i + AHEAD]);
        make_room(t);
        uint32_t at = walk_to(t, &walk, keys[i]);
        Entry *entry = at ? pool_entry(&t->pool, at) : NULL;
        uint64_t from = entry ? entry->value : 0;
        if (from != memo.from && (failed = edit_value(t, &edit, from, &memo))) break;
        if (memo.added) {
            if (is_over_share(t, holder) && (!known || !forget_of(t, id))) {
                if (known) { /* reported, and not held */
                    digest ^= keys[i];
                    holder->told++;
                    t->forgotten++;
                    added++;
                }
                continue;
            }
            if (at && pool_entry(&t->pool, at)->value != from) { /* it was just forgotten */
                i--;
                walk.at = 0;
                continue;
            }
        }
        if (!entry) {
            if ((failed = !(at = entry_new(t, keys[i], memo.to)))) break;
            walk.at = at;
        } else if (memo.to != from) {
            entry_set(t, at, entry, memo.to);
        }
        if (memo.dropped) count_dropped(t, &edit, memo.dropped);
        if (!memo.added) continue;
        holder->held++;
        holder->told++;
        digest ^= keys[i];
        added++;
    }
    memo_set(t, &memo, 0, 0);
    holder->digest ^= digest;
    return failed ? NO_MEMORY : added;
}

/* Drops placements on a level. Returns how many were present, with those forgotten for lack of
 * space, or NO_MEMORY. */
static uint64_t table_remove(Table *t, uint32_t slot, int level, const uint64_t *keys, size_t count) {
    uint32_t id = t->slots[slot * LEVELS + level];
    if (!id) return 0;
    Edit edit = {.need = id, .drops = {id}, .drops_used = 1};
    Holder *holder = &t->holders[id];
    Memo memo = {0, 0, 0, 0};
    Walk walk = {0, 1, 0};
    uint64_t removed = 0, digest = 0;
    int failed = 0;
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) fetch_bucket(t, keys[i + AHEAD]);
        uint32_t at = walk_to(t, &walk, keys[i]);
        uint64_t from = at ? pool_entry(&t->pool, at)->value : 0;
        if (from != memo.from && (failed = edit_value(t, &edit, from, &memo))) break;
        if (at && memo.dropped) {
            entry_set(t, at, pool_entry(&t->pool, at), memo.to);
            count_dropped(t, &edit, memo.dropped);
        } else if (holder->told == holder->held || level >= TIERS) {
            continue;
        } /* else: the removed placement must be a forgotten one */
        holder->told--;
        digest ^= keys[i];
        removed++;
    }
    memo_set(t, &memo, 0, 0);
    holder->digest ^= digest;
    return failed ? NO_MEMORY : removed;
}

static inline int table_has_dead(const Table *t) { return t->dead_used || t->dying_used; }

/* Takes dead holders out of an extent. Returns how many entries it changed, or -1. */
static int extent_sweep(Table *t, uint32_t extent, Memo *memo) {
    int changed = 0;
    for (uint32_t at = extent * EXTENT; at < (extent + 1) * EXTENT; at++) {
        Entry *entry = pool_entry(&t->pool, at);
        if (!entry->value) continue;
        if (entry->value != memo->from) {
            uint64_t to = value_swept(t, entry->value);
            if (to == NO_MEMORY) return -1;
            memo_set(t, memo, entry->value, to);
        }
        if (memo->to == memo->from) continue;
        entry_set(t, at, entry, memo->to);
        changed++;
    }
    return changed;
}

/* Takes dead holders out of entries, for so many steps: SWEEP_STEPS an extent, one a change.
 * Returns whether any are left. */
static int table_sweep(Table *t, uint64_t steps) {
    Memo memo = {0, 0, 0, 0};
    int64_t left = (int64_t)steps;
    while (table_has_dead(t) && left > 0) {
        if (!t->dying_used) {
            uint32_t *swap = t->dying;
            t->dying = t->dead;
            t->dead = swap;
            t->dying_used = t->dead_used;
            t->dead_used = 0;
            t->sweep_at = 0;
        }
        for (; left > 0 && t->sweep_at < pool_extents(&t->pool); t->sweep_at++) {
            int live = *extent_live(&t->pool, t->sweep_at);
            int changed = live ? extent_sweep(t, t->sweep_at, &memo) : 0;
            if (changed < 0) break;
            left -= SWEEP_STEPS + changed;
        }
        if (t->sweep_at < pool_extents(&t->pool)) break;
        memcpy(t->free + t->free_used, t->dying, (size_t)t->dying_used * 4);
        t->free_used += t->dying_used;
        t->dying_used = 0;
    }
    memo_set(t, &memo, 0, 0);
    return table_has_dead(t);
}

/* ---- match ---- */

/* Adds the living of these holders to a map whose bits are zero; each slot in its fastest row. */
static void map_add(const Table *t, SlotMap map, const uint32_t *ids, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        const Holder *holder = &t->holders[ids[i]];
        if (!holder->alive) continue;
        uint32_t word = holder->slot / 64 - map.first;
        uint32_t row = holder->level < TIERS ? holder->level : TIERS;
        map.bits[row * (size_t)map.words + word] |= 1ull << holder->slot % 64;
    }
    for (uint32_t w = 0; w < map.words; w++) {
        uint64_t faster = 0;
        for (uint32_t row = 0; row < ROWS; row++) {
            uint64_t *bits = &map.bits[row * (size_t)map.words + w], here = *bits;
            *bits = here & ~faster;
            faster |= here;
        }
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
    uint64_t *bits = (uint64_t *)calloc(ROWS * (size_t)words, 8);
    if (!bits) return -1;
    free(set->map.bits);
    set->map = (SlotMap){bits, low, words};
    set->epoch = t->epoch;
    t->sets.bytes += ROWS * (uint64_t)words * 8 - set->map_bytes;
    set->map_bytes = ROWS * (uint64_t)words * 8;
    map_add(t, set->map, set->ids, set->count);
    return 0;
}

/* Counts, for each slot in `slots` (of one word), the blocks since it was last counted. */
static inline void count_run(Table *t, const uint64_t *map, uint32_t words, uint32_t word,
                             uint64_t slots, uint32_t now, int32_t *table) {
    while (slots) {
        uint64_t bit = slots & -slots;
        uint32_t slot = word * 64 + (uint32_t)__builtin_ctzll(slots), row = 0;
        while (row < ROWS - 1 && !(map[row * (size_t)words + word] & bit)) row++;
        table[(size_t)row * t->slots_used + slot] += (int32_t)(now - t->since[slot]);
        t->since[slot] = now;
        slots ^= bit;
    }
}

/* Longest run of leading keys that each slot holds, on any level, split by the fastest level of
 * each key: table[row * slots_used + slot], which must be zero. A slot is looked at when it drops
 * out or changes its row, not at every key. 0, or -1 without memory. */
static int table_match(Table *t, const uint64_t *keys, size_t count, int32_t *table) {
    uint32_t words = t->slots_used / 64 + 1, extent = UINT32_MAX;
    size_t map_size = ROWS * (size_t)words * 8;
    uint64_t *alive = t->scratch, *next = alive + ROWS * (size_t)words, before = 0;
    Walk walk = {0, 1, 0};
    uint32_t i = 0;
    for (; i < count; i++) {
        if (walk.strays > 1 && i + AHEAD < count) fetch_bucket(t, keys[i + AHEAD]);
        uint32_t at = walk_to(t, &walk, keys[i]);
        uint64_t value = at ? pool_entry(&t->pool, at)->value : 0;
        if (at / EXTENT != extent && at) {
            extent = at / EXTENT;
            *extent_seen(&t->pool, extent) = 1;
        }
        if (value == before && i) continue;
        before = value;
        memset(next, 0, map_size);
        if (is_set(value)) {
            if (set_map(t, as_set(value))) return -1;
            SlotMap map = as_set(value)->map;
            for (int row = 0; row < ROWS; row++)
                memcpy(next + row * (size_t)words + map.first,
                       map.bits + row * (size_t)map.words, (size_t)map.words * 8);
        } else {
            uint32_t room[2];
            const uint32_t *ids;
            uint32_t few = value_ids(value, room, &ids);
            map_add(t, (SlotMap){next, 0, words}, ids, few);
        }
        uint64_t anybody = 0;
        for (uint32_t w = 0; w < words; w++) {
            uint64_t had = 0, holds = 0, moved = 0;
            for (int row = 0; row < ROWS; row++) holds |= next[row * (size_t)words + w];
            if (i) {
                for (int row = 0; row < ROWS; row++) {
                    uint64_t was = alive[row * (size_t)words + w];
                    had |= was;
                    moved |= was & ~next[row * (size_t)words + w];
                }
                if (moved) count_run(t, alive, words, w, moved, i, table);
                holds &= had;
            } else {
                for (uint64_t slots = holds; slots; slots &= slots - 1)
                    t->since[w * 64 + (uint32_t)__builtin_ctzll(slots)] = 0;
            }
            for (int row = 0; row < ROWS; row++)
                alive[row * (size_t)words + w] = next[row * (size_t)words + w] & holds;
            anybody |= holds;
        }
        if (!anybody) return 0;
    }
    for (uint32_t w = 0; w < words && count; w++) {
        uint64_t left = 0;
        for (int row = 0; row < ROWS; row++) left |= alive[row * (size_t)words + w];
        count_run(t, alive, words, w, left, i, table);
    }
    return 0;
}

/* Continues the runs of the slots that hold all of the first `from` keys: runs[slot], in blocks. */
static void runs_go_on(const Table *t, const uint64_t *keys, size_t from, size_t count,
                       int32_t *runs) {
    for (size_t i = from; i < count; i++) {
        uint32_t at = find(t, mixed(t, keys[i]), keys[i]), room[2];
        const uint32_t *ids;
        uint32_t holders = value_ids(at ? pool_entry(&t->pool, at)->value : 0, room, &ids);
        int anybody = 0;
        for (uint32_t j = 0; j < holders; j++) {
            const Holder *holder = &t->holders[ids[j]];
            if (!holder->alive || runs[holder->slot] != (int32_t)i) continue;
            runs[holder->slot]++;
            anybody = 1;
        }
        if (!anybody) return;
    }
}

/* The match of these slots, and of the first `usable` keys alone: out[row * width + i], which must
 * be zero, gets the run, the usable run, and the rows of the usable match. Returns 0, or -1. */
static int table_overlap(Table *t, const uint64_t *keys, size_t count, size_t usable,
                         const intptr_t *slots, size_t width, int32_t *out) {
    size_t size = ROWS * (size_t)t->slots_used;
    int32_t *table = (int32_t *)calloc(size + t->slots_used, sizeof(*table)), *runs = table + size;
    int failed = !table || table_match(t, keys, usable, table), whole_run = 0;
    for (size_t i = 0; i < width && !failed; i++) {
        int32_t run = 0;
        for (size_t row = 0; row < ROWS; row++) {
            int32_t blocks = table[row * t->slots_used + (size_t)slots[i]];
            out[(2 + row) * width + i] = blocks;
            run += blocks;
        }
        out[i] = out[width + i] = runs[slots[i]] = run;
        whole_run |= (size_t)run == usable;
    }
    if (!failed && whole_run && usable < count) { /* runs may go on after the usable keys */
        runs_go_on(t, keys, usable, count, runs);
        for (size_t i = 0; i < width; i++) out[i] = runs[slots[i]];
    }
    free(table);
    return failed ? -1 : 0;
}

#endif
