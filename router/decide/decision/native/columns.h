/* The workers of one decision, as policies, guard and receipts read them. */
#ifndef KVROUTE_COLUMNS_H
#define KVROUTE_COLUMNS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "indexer/native/block_users.h"
#include "router/fleet/native/table.h"

/* How fast workers prefill, and for how long they are busy (router/fleet/rates.py), for policies
 * that predict the time to the first token. */
typedef struct {
    const double *ends_s, *least_s, *tokens, *others_waiting; /* of each slot */
    const double *rate; /* of each row */
    double mean_work, now_s;
} Prefill;

/* A request and its rows. Overlaps: in tokens, overlaps[field * rows + row], by field of
 * OverlapTokens. */
typedef struct {
    const Columns *columns;
    const intptr_t *slots;   /* of each row */
    const uint8_t *drained;  /* a byte for each row; NULL: no worker is drained */
    const int32_t *overlaps;
    const BlockUsers *const *users; /* of each row's worker, or NULL; only where the policy reads them */
    const uint64_t *prefixes; /* of the prompt's full blocks */
    size_t prefixes_count;
    const Prefill *prefill;  /* only where the policy reads it; and the next */
    const double *recent_blocks; /* of each row's worker (router/fleet/working_set.py) */
    const double *invested_tokens; /* of each row (router/fleet/shared_prefixes.py); NULL: 0 */
    size_t rows;             /* at least 1 */
    double prompt_tokens;
    double output_tokens;    /* as the request says, or 0; and the next: for halves.h alone */
    const double *distance;  /* of each row, to where the KV cache has to come from; NULL: nowhere */
} Rows;

static inline int32_t overlap_of(const Rows *r, int field, size_t row) {
    return r->overlaps[(size_t)field * r->rows + row];
}

/* Tokens of a field of OverlapTokens that count, by the trust in the worker's stream. */
static inline double trusted(const Rows *r, size_t row, int32_t tokens) {
    return r->columns->trust[r->slots[row]] * (double)tokens;
}

static inline double new_tokens_of(const Rows *r, size_t row) {
    return r->prompt_tokens - trusted(r, row, overlap_of(r, 1, row));
}

static inline double invested_tokens_of(const Rows *r, size_t row) {
    return r->invested_tokens ? r->invested_tokens[row] : 0.0;
}

/* As numpy.maximum: a value that is not a number stays so. */
static inline double at_least(double value, double least) {
    return value < least ? least : value;
}

/* The block size of a row's worker: a divisor, as Candidates.block_tokens. */
static inline double block_tokens_of(const Rows *r, size_t row) {
    return at_least(r->columns->block_size[r->slots[row]], 1.0);
}

/* As Candidates.evicted_share. Divisions are most of what a row costs; those here are made where
 * their result counts: a block is a token at least, so a room of as many blocks as there are tokens
 * is enough. */
static inline double evicted_share_of(const Rows *r, size_t row, double new_tokens) {
    double stored_tokens = at_least(new_tokens, 1.0);
    double room = r->columns->total_blocks[r->slots[row]] - r->recent_blocks[row];
    if (room >= stored_tokens) return 0;
    double stored_blocks = stored_tokens / block_tokens_of(r, row);
    if (!(room < stored_blocks)) return 0; /* there is room, or the total is unknown */
    double share = 1 - room / stored_blocks;
    return share > 1 ? 1 : share;
}

/* Blocks of the prompt. */
static inline double blocks_of(const Rows *r, size_t row) {
    return ceil(r->prompt_tokens / block_tokens_of(r, row));
}

/* Those that no open request on a row's worker uses, as Candidates.new_blocks. */
static inline double new_blocks_of(const Rows *r, size_t row) {
    const BlockUsers *users = r->users[row];
    if (!users || !users->used) return blocks_of(r, row);
    return blocks_of(r, row) - (double)users_leading(users, r->prefixes, r->prefixes_count);
}

#endif
