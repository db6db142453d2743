/* dynamo-blocks (router/decide/policies/dynamo_blocks.py) at temperature 0, the same to the last bit. */
#ifndef KVROUTE_BLOCKS_H
#define KVROUTE_BLOCKS_H

#include "columns.h"
#include "order.h"
#include "router/request/wire/native/wire.h"

/* BlocksParameters, in their order. */
typedef struct {
    double prefill_load_scale, overlap_credit, host_credit, disk_credit, credit_decay,
        request_weight, temperature;
} BlocksNumbers;

typedef struct {
    double least_prefill; /* tokens: the least of workers that can be picked; for credit_decay */
} BlocksShared;

typedef struct {
    double raw_prefill, credit, new_blocks, decode_blocks, cost;
} BlocksRow;

static inline BlocksRow blocks_row(const BlocksNumbers *n, const BlocksShared *s, const Rows *r,
                                   size_t row) {
    const Columns *c = r->columns;
    intptr_t slot = r->slots[row];
    BlocksRow result;
    double size = block_tokens_of(r, row), active = c->prefill_tokens_active[slot];
    double device = trusted(r, row, overlap_of(r, 2, row) + overlap_of(r, 5, row));
    double credit = n->overlap_credit * device / size;
    if (n->credit_decay != 0) {
        double backlog = at_least(active - s->least_prefill, 0.0) / r->prompt_tokens;
        credit = credit / (1 + n->credit_decay * backlog);
    }
    credit += n->host_credit * trusted(r, row, overlap_of(r, 3, row)) / size;
    credit += n->disk_credit * trusted(r, row, overlap_of(r, 4, row)) / size;
    result.raw_prefill = (active + r->prompt_tokens) / size;
    result.credit = credit;
    result.new_blocks = new_blocks_of(r, row);
    result.decode_blocks = c->active_blocks[slot] + result.new_blocks;
    result.cost = n->prefill_load_scale * at_least(result.raw_prefill - credit, 0.0) +
                 result.decode_blocks + n->request_weight * c->active_slots[slot];
    return result;
}

static BlocksShared blocks_costs(const BlocksNumbers *n, const Rows *r, double *costs) {
    BlocksShared s = {0};
    if (n->credit_decay != 0) {
        const Columns *c = r->columns;
        double least = INFINITY;
        for (size_t i = 0; i < r->rows; i++) {
            double active = c->prefill_tokens_active[r->slots[i]];
            if (can_take(c->full, r->drained, r->slots, i) && active < least) least = active;
        }
        s.least_prefill = isfinite(least) ? least : 0;
    }
    for (size_t i = 0; i < r->rows; i++) costs[i] = blocks_row(n, &s, r, i).cost;
    return s;
}

static void put_blocks_terms(Backward *b, uint32_t number, const BlocksNumbers *n,
                             const BlocksShared *s, const Rows *r, size_t row) {
    BlocksRow result = blocks_row(n, s, r, row);
    put_term(b, number, "active_slots", r->columns->active_slots[r->slots[row]]);
    put_term(b, number, "decode_blocks", result.decode_blocks);
    put_term(b, number, "new_blocks", result.new_blocks);
    put_term(b, number, "block_size", block_tokens_of(r, row));
    put_term(b, number, "credit", result.credit);
    put_term(b, number, "raw_prefill", result.raw_prefill);
}

#endif
