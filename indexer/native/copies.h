/* The copies of an engine's blocks, by the engine's names, and the prefixes that they make.
 *
 * An engine's block has a record: its name, the hash at its end, its copies by group and tier. It
 * is as long as a canonical block, or several of those (`parts`), or a part of one (a page, of
 * which `pages` make a canonical block). A tier holds the prefix of a canonical block while it has
 * a copy of the block, or of all its pages. Pages of one canonical block are a tree by their
 * `parent`: chains may branch inside it.
 *
 * Without memory `no_memory` is set, and the rest of the call is left out: the caller clears all
 * before any other call. */
#ifndef KVROUTE_COPIES_H
#define KVROUTE_COPIES_H

#include <stdlib.h>

#include "xxh3.h"

#define COPY_TIERS 3
#define COPY_GROUPS 16
#define COPY_GROUPS_FIRST 2 /* groups that records have room for until a further one comes */
#define NO_BLOCK UINT32_MAX
#define CHAIN_SEED 1337
#define SMALLEST_ROOM 16

enum {
    FREE_RECORD = 1,
    HAS_END = 2, /* `end` is a prefix: a canonical block ends in this block, or before it */
    CAPPED = 4   /* it has had more copies than are counted */
};

typedef struct {
    uint64_t low, high;
} BlockName;

typedef struct {
    BlockName name;
    uint64_t seed;
    uint64_t end;    /* prefix of the last canonical block that ends in or before this block */
    uint32_t parent; /* page before it in its canonical block; of a free record: the next one */
    uint32_t child;  /* first of the pages after it in its canonical block */
    uint32_t left, right; /* the pages beside it with the same parent; the first's left is the last */
    uint32_t place;       /* pages before it in its canonical block */
    uint8_t whole;        /* a bit a tier: it is there, and all pages before it are */
    uint8_t flags;
    uint8_t tail[]; /* a count for each group and tier, then tokens of a page, or prefixes of parts */
} Block;

typedef struct {
    uint64_t prefix;
    uint32_t holders[COPY_TIERS]; /* blocks by which each tier holds it; all 0: an empty place */
} HeldPrefix;

typedef struct {
    uint64_t parent;
    size_t begin; /* of its hashes; they end where the next change begins */
    uint8_t is_placed, tier, has_parent;
} CopyChange;

typedef struct {
    uint8_t *records;
    uint32_t records_room, records_used, free_record, blocks, groups;
    size_t stride, content_bytes;
    uint32_t *names; /* open addressing: 1 + number of the record */
    uint64_t names_room;
    HeldPrefix *held; /* open addressing */
    uint64_t held_room, held_used;
    uint64_t held_on[COPY_TIERS], xor_on[COPY_TIERS];
    CopyChange *changes;
    size_t changes_room, changes_used;
    uint64_t *hashes; /* of the changes */
    size_t hashes_room, hashes_used;
    size_t block_bytes, canonical_bytes; /* of tokens; 0: not known yet */
    uint32_t pages, parts;
    uint8_t *scratch;
    size_t scratch_room;
    uint8_t secret[XXH_SECRET_BYTES];
    uint64_t secret_seed;
    uint64_t salt; /* secret: callers can't choose hashes that collide */
    uint64_t capped;
    uint32_t copies_max;
    int may_miss, no_memory;
} Copies;

static inline Block *copies_block(const Copies *c, uint32_t number) {
    return (Block *)(c->records + (size_t)number * c->stride);
}

static inline uint8_t *copies_count(Block *block, uint32_t group, int tier) {
    return &block->tail[COPY_TIERS * group + tier];
}

static inline uint8_t *copies_content(const Copies *c, Block *block) {
    return block->tail + COPY_TIERS * c->groups;
}

static inline int copies_is_on(const Copies *c, Block *block, int tier) {
    for (uint32_t group = 0; group < c->groups; group++)
        if (*copies_count(block, group, tier)) return 1;
    return 0;
}

static inline int copies_is_anywhere(const Copies *c, const Block *block) {
    for (uint32_t i = 0; i < COPY_TIERS * c->groups; i++)
        if (block->tail[i]) return 1;
    return 0;
}

/* Makes room for `wanted` items of `size` bytes. Returns 0, or -1 without memory. */
static int copies_reserve(Copies *c, void **items, size_t *room, size_t wanted, size_t size) {
    if (wanted <= *room) return 0;
    size_t more = *room ? *room : SMALLEST_ROOM;
    while (more < wanted) more *= 2;
    void *moved = realloc(*items, more * size);
    if (!moved) {
        c->no_memory = 1;
        return -1;
    }
    *items = moved;
    *room = more;
    return 0;
}

/* Changes of what tiers hold. */

static void copies_note(Copies *c, int is_placed, int tier, const uint64_t *parent,
                        uint64_t prefix) {
    CopyChange *last = c->changes_used ? &c->changes[c->changes_used - 1] : NULL;
    int goes_on = last && last->is_placed == is_placed && last->tier == tier;
    if (goes_on && is_placed) goes_on = parent && c->hashes[c->hashes_used - 1] == *parent;
    if (copies_reserve(c, (void **)&c->hashes, &c->hashes_room, c->hashes_used + 1,
                       sizeof(uint64_t)) ||
        copies_reserve(c, (void **)&c->changes, &c->changes_room, c->changes_used + 1,
                       sizeof(CopyChange)))
        return;
    if (!goes_on) {
        CopyChange *change = &c->changes[c->changes_used++];
        change->parent = parent ? *parent : 0;
        change->has_parent = parent != NULL;
        change->begin = c->hashes_used;
        change->is_placed = (uint8_t)is_placed;
        change->tier = (uint8_t)tier;
    }
    c->hashes[c->hashes_used++] = prefix;
}

static inline uint64_t held_home(const Copies *c, uint64_t prefix) {
    return xxh_fold(prefix ^ c->salt, xxh_rotl(c->salt, 32)) & (c->held_room - 1);
}

static inline int held_is_empty(const HeldPrefix *held) {
    return !(held->holders[0] | held->holders[1] | held->holders[2]);
}

/* The place of a prefix, or the empty place for it. */
static inline HeldPrefix *held_find(const Copies *c, uint64_t prefix) {
    uint64_t at = held_home(c, prefix);
    while (!held_is_empty(&c->held[at]) && c->held[at].prefix != prefix)
        at = (at + 1) & (c->held_room - 1);
    return &c->held[at];
}

static int held_grow(Copies *c) {
    HeldPrefix *before = c->held;
    uint64_t room = c->held_room;
    uint64_t more = room ? 2 * room : SMALLEST_ROOM;
    HeldPrefix *held = (HeldPrefix *)calloc(more, sizeof(HeldPrefix));
    if (!held) {
        c->no_memory = 1;
        return -1;
    }
    c->held = held;
    c->held_room = more;
    for (uint64_t i = 0; i < room; i++)
        if (!held_is_empty(&before[i])) *held_find(c, before[i].prefix) = before[i];
    free(before);
    return 0;
}

/* A prefix after `parent` (NULL: unknown, or none) has a further holder on a tier. */
static void copies_hold(Copies *c, int tier, const uint64_t *parent, uint64_t prefix) {
    if (4 * (c->held_used + 1) > 3 * c->held_room && held_grow(c)) return;
    HeldPrefix *held = held_find(c, prefix);
    if (held_is_empty(held)) {
        held->prefix = prefix;
        c->held_used++;
    }
    if (held->holders[tier]++) return;
    c->held_on[tier]++;
    c->xor_on[tier] ^= prefix;
    copies_note(c, 1, tier, parent, prefix);
}

/* A prefix has a holder less on a tier. */
static void copies_release(Copies *c, int tier, uint64_t prefix) {
    HeldPrefix *held = held_find(c, prefix);
    if (--held->holders[tier]) return;
    c->held_on[tier]--;
    c->xor_on[tier] ^= prefix;
    copies_note(c, 0, tier, NULL, prefix);
    if (!held_is_empty(held)) return;
    c->held_used--;
    uint64_t mask = c->held_room - 1, gap = (uint64_t)(held - c->held);
    for (uint64_t at = (gap + 1) & mask; !held_is_empty(&c->held[at]); at = (at + 1) & mask) {
        if (((at - held_home(c, c->held[at].prefix)) & mask) < ((at - gap) & mask)) continue;
        c->held[gap] = c->held[at];
        gap = at;
    }
    memset(&c->held[gap], 0, sizeof(HeldPrefix));
}

/* Names. */

static inline uint64_t name_home(const Copies *c, BlockName name) {
    return xxh_fold(name.low ^ c->salt, name.high ^ xxh_rotl(c->salt, 32)) & (c->names_room - 1);
}

/* The place of a name, or the empty place for it. */
static inline uint32_t *name_find(const Copies *c, BlockName name) {
    uint64_t at = name_home(c, name);
    for (; c->names[at]; at = (at + 1) & (c->names_room - 1)) {
        BlockName other = copies_block(c, c->names[at] - 1)->name;
        if (other.low == name.low && other.high == name.high) break;
    }
    return &c->names[at];
}

/* Number of the block with a name; NO_BLOCK: there is none. */
static inline uint32_t copies_find(const Copies *c, BlockName name) {
    return c->blocks ? *name_find(c, name) - 1 : NO_BLOCK;
}

static int names_grow(Copies *c) {
    uint64_t more = c->names_room ? 2 * c->names_room : SMALLEST_ROOM;
    uint32_t *names = (uint32_t *)calloc(more, sizeof(uint32_t));
    if (!names) {
        c->no_memory = 1;
        return -1;
    }
    free(c->names);
    c->names = names;
    c->names_room = more;
    for (uint32_t number = 0; number < c->records_used; number++) {
        Block *block = copies_block(c, number);
        if (!(block->flags & FREE_RECORD)) *name_find(c, block->name) = number + 1;
    }
    return 0;
}

static void name_erase(Copies *c, BlockName name) {
    uint64_t mask = c->names_room - 1, gap = (uint64_t)(name_find(c, name) - c->names);
    for (uint64_t at = (gap + 1) & mask; c->names[at]; at = (at + 1) & mask) {
        uint64_t home = name_home(c, copies_block(c, c->names[at] - 1)->name);
        if (((at - home) & mask) < ((at - gap) & mask)) continue;
        c->names[gap] = c->names[at];
        gap = at;
    }
    c->names[gap] = 0;
}

/* Records. */

static inline size_t copies_stride(size_t groups, size_t content_bytes) {
    return (offsetof(Block, tail) + COPY_TIERS * groups + content_bytes + 7) & ~(size_t)7;
}

/* Sets the tokens of an engine's block and of a canonical one, of which one is a multiple of the
 * other; before the first block. */
static void copies_shape(Copies *c, size_t block_tokens, size_t canonical_tokens) {
    c->block_bytes = 4 * block_tokens;
    c->canonical_bytes = 4 * canonical_tokens;
    c->pages = block_tokens < canonical_tokens ? (uint32_t)(canonical_tokens / block_tokens) : 1;
    c->parts = block_tokens > canonical_tokens ? (uint32_t)(block_tokens / canonical_tokens) : 1;
    c->content_bytes = c->pages > 1 ? c->block_bytes : c->parts > 1 ? 8 * (size_t)c->parts : 0;
    c->stride = copies_stride(c->groups, c->content_bytes);
}

/* Makes room in each record for the counts of all groups. */
static int copies_widen(Copies *c) {
    size_t stride = copies_stride(COPY_GROUPS, c->content_bytes);
    uint8_t *records = (uint8_t *)calloc(c->records_room ? c->records_room : 1, stride);
    if (!records) {
        c->no_memory = 1;
        return -1;
    }
    for (uint32_t number = 0; number < c->records_used; number++) {
        Block *from = copies_block(c, number), *to = (Block *)(records + number * stride);
        size_t counts = COPY_TIERS * c->groups;
        memcpy(to, from, offsetof(Block, tail) + counts);
        memcpy(to->tail + COPY_TIERS * COPY_GROUPS, from->tail + counts, c->content_bytes);
    }
    free(c->records);
    c->records = records;
    c->groups = COPY_GROUPS;
    c->stride = stride;
    return 0;
}

/* An empty record with a name that is new, behind a page of its canonical block or NO_BLOCK; returns
 * NO_BLOCK without memory. */
static uint32_t record_add(Copies *c, BlockName name, uint32_t parent) {
    if (2 * ((uint64_t)c->blocks + 1) > c->names_room && names_grow(c)) return NO_BLOCK;
    uint32_t number = c->free_record;
    if (number != NO_BLOCK) {
        c->free_record = copies_block(c, number)->parent;
    } else {
        size_t room = c->records_room;
        if (copies_reserve(c, (void **)&c->records, &room, (size_t)c->records_used + 1, c->stride))
            return NO_BLOCK;
        c->records_room = (uint32_t)room;
        number = c->records_used++;
    }
    Block *block = copies_block(c, number);
    memset(block, 0, c->stride);
    *name_find(c, name) = number + 1;
    block->name = name;
    block->child = block->right = NO_BLOCK;
    block->parent = parent;
    block->left = number;
    c->blocks++;
    if (parent == NO_BLOCK) return number;
    Block *before = copies_block(c, parent);
    block->place = before->place + 1;
    if (before->child == NO_BLOCK) {
        before->child = number;
    } else {
        Block *first = copies_block(c, before->child);
        block->left = first->left;
        copies_block(c, first->left)->right = number;
        first->left = number;
    }
    return number;
}

/* Takes a page from among those with the same parent. */
static void record_unlink(Copies *c, const Block *block, uint32_t number) {
    Block *parent = copies_block(c, block->parent), *first = copies_block(c, parent->child);
    if (parent->child == number) {
        parent->child = block->right;
        if (block->right != NO_BLOCK) copies_block(c, block->right)->left = block->left;
        return;
    }
    copies_block(c, block->left)->right = block->right;
    (block->right == NO_BLOCK ? first : copies_block(c, block->right))->left = block->left;
}

/* Forgets a block without copies and without pages that come after it; then the pages before it
 * that are so, too. */
static void record_drop(Copies *c, uint32_t number) {
    while (number != NO_BLOCK) {
        Block *block = copies_block(c, number);
        uint32_t parent = block->parent;
        if (block->child != NO_BLOCK || copies_is_anywhere(c, block)) return;
        if (parent != NO_BLOCK) record_unlink(c, block, number);
        name_erase(c, block->name);
        c->blocks--;
        block->flags = FREE_RECORD;
        block->parent = c->free_record;
        c->free_record = number;
        number = parent;
    }
}

static uint64_t copies_hash(Copies *c, const uint8_t *content, size_t bytes, uint64_t seed) {
    if (c->secret_seed != seed) {
        xxh3_secret(seed, c->secret);
        c->secret_seed = seed;
    }
    return xxh3_64(content, bytes, seed, c->secret);
}

/* The chain up to a block goes on with the content of a canonical block. */
static void copies_extend(Copies *c, Block *block, const uint8_t *content, size_t bytes) {
    uint64_t hash = copies_hash(c, content, bytes, block->seed);
    xxh3_chain(&hash, 1, block->flags & HAS_END, block->end, CHAIN_SEED, &block->end);
    block->flags |= HAS_END;
}

/* Tokens of all pages of the canonical block that ends with a page. */
static const uint8_t *copies_joined(Copies *c, Block *last) {
    if (copies_reserve(c, (void **)&c->scratch, &c->scratch_room, c->canonical_bytes, 1))
        return NULL;
    for (Block *page = last;; page = copies_block(c, page->parent)) {
        memcpy(c->scratch + page->place * c->block_bytes, copies_content(c, page), c->block_bytes);
        if (page->parent == NO_BLOCK) return c->scratch;
    }
}

/* A new block after `parent` (NO_BLOCK: it begins a chain, of this seed) with its tokens, which
 * `suffix` follows where blocks are canonical; returns NO_BLOCK without memory. */
static uint32_t copies_add(Copies *c, BlockName name, uint32_t parent, uint64_t seed,
                           const uint8_t *tokens, const uint8_t *suffix, size_t suffix_bytes) {
    int inside = parent != NO_BLOCK && copies_block(c, parent)->place + 1 < c->pages;
    uint32_t number = record_add(c, name, inside ? parent : NO_BLOCK);
    if (number == NO_BLOCK) return NO_BLOCK;
    Block *block = copies_block(c, number);
    block->seed = seed;
    if (parent != NO_BLOCK) {
        const Block *before = copies_block(c, parent);
        block->seed = before->seed;
        block->end = before->end;
        block->flags |= before->flags & HAS_END;
    }
    if (c->pages > 1) {
        memcpy(copies_content(c, block), tokens, c->block_bytes);
        if (block->place + 1 == c->pages) {
            const uint8_t *content = copies_joined(c, block);
            if (content) copies_extend(c, block, content, c->canonical_bytes);
        }
    } else if (suffix_bytes) {
        size_t bytes = c->canonical_bytes + suffix_bytes;
        if (copies_reserve(c, (void **)&c->scratch, &c->scratch_room, bytes, 1)) return NO_BLOCK;
        memcpy(c->scratch, tokens, c->canonical_bytes);
        memcpy(c->scratch + c->canonical_bytes, suffix, suffix_bytes);
        copies_extend(c, block, c->scratch, bytes);
    } else {
        for (uint32_t part = 0; part < c->parts; part++) {
            copies_extend(c, block, tokens + part * c->canonical_bytes, c->canonical_bytes);
            if (c->parts > 1) memcpy(copies_content(c, block) + 8 * part, &block->end, 8);
        }
    }
    return number;
}

/* A new block that ends a chain with this prefix, where blocks are canonical. */
static uint32_t copies_put(Copies *c, BlockName name, uint64_t prefix) {
    uint32_t number = record_add(c, name, NO_BLOCK);
    if (number == NO_BLOCK) return NO_BLOCK;
    copies_block(c, number)->end = prefix;
    copies_block(c, number)->flags = HAS_END;
    return number;
}

/* Arrivals and departures. */

/* The page after one in the order of a tree below `top`; into: whether to go to its children. */
static uint32_t page_next(const Copies *c, uint32_t at, uint32_t top, int into) {
    const Block *block = copies_block(c, at);
    if (into && block->child != NO_BLOCK) return block->child;
    for (; at != top; block = copies_block(c, at)) {
        if (block->right != NO_BLOCK) return block->right;
        at = block->parent;
    }
    return NO_BLOCK;
}

/* The first copy of a page on a tier, or its last one, ends or begins what lacked a page there. */
static void pages_changed(Copies *c, uint32_t top, int tier, int is_placed) {
    uint8_t bit = (uint8_t)(1 << tier);
    Block *block = copies_block(c, top);
    if (is_placed ? block->parent != NO_BLOCK && !(copies_block(c, block->parent)->whole & bit)
                  : !(block->whole & bit))
        return;
    int into;
    for (uint32_t at = top; at != NO_BLOCK; at = page_next(c, at, top, into)) {
        block = copies_block(c, at);
        into = is_placed ? copies_is_on(c, block, tier) : block->whole & bit;
        if (!into) continue;
        block->whole ^= bit;
        if (block->place + 1 < c->pages) continue;
        const Block *before = copies_block(c, block->parent);
        if (is_placed)
            copies_hold(c, tier, before->flags & HAS_END ? &before->end : NULL, block->end);
        else
            copies_release(c, tier, block->end);
    }
}

/* Prefix of a canonical block inside a block. */
static inline uint64_t block_prefix(const Copies *c, Block *block, uint32_t part) {
    return c->parts > 1 ? xxh_read64(copies_content(c, block) + 8 * part) : block->end;
}

/* A block has its first copy on a tier; parent: the prefix before it, where that is known. */
static void block_arrived(Copies *c, uint32_t number, int tier, const uint64_t *parent) {
    if (c->pages > 1) {
        pages_changed(c, number, tier, 1);
        return;
    }
    uint64_t before = parent ? *parent : 0;
    for (uint32_t part = 0; part < c->parts; part++) {
        uint64_t prefix = block_prefix(c, copies_block(c, number), part);
        copies_hold(c, tier, part || parent ? &before : NULL, prefix);
        before = prefix;
    }
}

/* The last copy of a block has left a tier. */
static void block_left(Copies *c, uint32_t number, int tier) {
    if (c->pages > 1) {
        pages_changed(c, number, tier, 0);
        return;
    }
    for (uint32_t part = c->parts; part--;)
        copies_release(c, tier, block_prefix(c, copies_block(c, number), part));
}

/* A further copy; over copies_max it is not counted. */
static void copies_copy(Copies *c, uint32_t number, uint32_t group, int tier,
                        const uint64_t *parent) {
    Block *block = copies_block(c, number);
    int is_first = !copies_is_on(c, block, tier);
    uint8_t *count = copies_count(block, group, tier);
    if (*count < c->copies_max) {
        (*count)++;
    } else {
        block->flags |= CAPPED;
        c->capped++;
    }
    if (is_first) block_arrived(c, number, tier, parent);
}

/* A copy of a block is gone. Returns whether there was one. */
static int copies_remove(Copies *c, uint32_t number, uint32_t group, int tier) {
    if (number == NO_BLOCK || group >= c->groups) return 0;
    Block *block = copies_block(c, number);
    uint8_t *count = copies_count(block, group, tier);
    if (!*count) return 0;
    (*count)--;
    if (copies_is_on(c, block, tier)) return 1;
    block_left(c, number, tier);
    if (block->flags & CAPPED) {
        c->may_miss = 1;
        if (!copies_is_anywhere(c, block)) block->flags &= (uint8_t)~CAPPED;
    }
    record_drop(c, number);
    return 1;
}

/* All at once. */

static void copies_free(Copies *c) {
    free(c->records);
    free(c->names);
    free(c->held);
    free(c->changes);
    free(c->hashes);
    free(c->scratch);
}

/* Forgets all blocks, and the changes that were not taken. */
static void copies_clear(Copies *c) {
    Copies empty = {.groups = COPY_GROUPS_FIRST,
                    .free_record = NO_BLOCK,
                    .salt = c->salt,
                    .copies_max = c->copies_max,
                    .capped = c->capped};
    copies_free(c);
    size_t block_bytes = c->block_bytes, canonical_bytes = c->canonical_bytes;
    *c = empty;
    xxh3_secret(0, c->secret);
    copies_shape(c, block_bytes / 4, canonical_bytes / 4);
}

#define SAVED_HEAD 37 /* name, seed, end, place of its parent, flags */

static inline size_t saved_bytes(const Copies *c) {
    return SAVED_HEAD + COPY_TIERS * c->groups + c->content_bytes;
}

/* Writes all blocks, saved_bytes() each, pages after those before them. Returns 0, or -1 without
 * memory. */
static int copies_save(const Copies *c, uint8_t *out) {
    uint32_t *places = (uint32_t *)malloc(4 * ((size_t)c->records_used + 1)), saved = 0;
    if (!places) return -1;
    for (uint32_t first = 0; first < c->records_used; first++) {
        const Block *begins = copies_block(c, first);
        if (begins->flags & FREE_RECORD || begins->parent != NO_BLOCK) continue;
        for (uint32_t at = first; at != NO_BLOCK; at = page_next(c, at, first, 1)) {
            const Block *block = copies_block(c, at);
            uint32_t parent = block->parent == NO_BLOCK ? NO_BLOCK : places[block->parent];
            places[at] = saved++;
            memcpy(out, block, 32);
            memcpy(out + 32, &parent, 4);
            out[36] = block->flags;
            memcpy(out + SAVED_HEAD, block->tail, saved_bytes(c) - SAVED_HEAD);
            out += saved_bytes(c);
        }
    }
    free(places);
    return 0;
}

/* Adds saved blocks, into none. Returns how many were taken: fewer than `count` where the next one
 * can't be. */
static uint32_t copies_restore(Copies *c, const uint8_t *in, uint32_t count) {
    size_t counts = COPY_TIERS * c->groups;
    for (uint32_t taken = 0; taken < count; taken++, in += saved_bytes(c)) {
        BlockName name;
        uint32_t parent;
        memcpy(&name, in, sizeof(name));
        memcpy(&parent, in + 32, 4);
        uint32_t place = 0;
        if (parent != NO_BLOCK) {
            if (parent >= taken) return taken;
            place = copies_block(c, parent)->place + 1;
        }
        if (name.high != 1 && !(name.high & 2)) return taken; /* neither a number's nor bytes' */
        uint8_t flags = in[36], needed = place + 1 == c->pages ? HAS_END : 0;
        if (place >= c->pages || flags & ~(HAS_END | CAPPED) || (flags & needed) != needed)
            return taken;
        if (copies_find(c, name) != NO_BLOCK) return taken;
        for (size_t i = 0; i < counts; i++)
            if (in[SAVED_HEAD + i] > c->copies_max) return taken;
        uint32_t number = record_add(c, name, parent);
        if (number == NO_BLOCK) return taken;
        Block *block = copies_block(c, number);
        memcpy(&block->seed, in + 16, 16);
        block->flags = flags;
        memcpy(block->tail, in + SAVED_HEAD, counts + c->content_bytes);
        for (int tier = 0; tier < COPY_TIERS; tier++)
            if (copies_is_on(c, block, tier)) block_arrived(c, number, tier, NULL);
        c->changes_used = c->hashes_used = 0;
    }
    for (uint32_t number = 0; number < count; number++) {
        const Block *block = copies_block(c, number);
        if (block->child == NO_BLOCK && !copies_is_anywhere(c, block)) return number;
    }
    return count;
}

#endif
