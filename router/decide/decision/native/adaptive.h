/* dynamo-adaptive (router/decide/policies/dynamo_adaptive.py), the same to the last bit: its sums go row
 * after row, and the compiler must not fuse a product with a sum (setup.py). */
#ifndef KVROUTE_ADAPTIVE_H
#define KVROUTE_ADAPTIVE_H

#include "columns.h"
#include "router/request/wire/native/wire.h"

/* AdaptiveParameters, in their order. */
typedef struct {
    double balance_threshold, alpha_balance, alpha_cache, gamma, queue_weight, keep;
} AdaptiveNumbers;

/* The terms that all rows share. */
typedef struct {
    double mean, std, alpha;
} AdaptiveShared;

static double queue_share_of(const Rows *r, size_t row) {
    return r->columns->prefill_tokens_active[r->slots[row]] / r->prompt_tokens;
}

static double invested_share_of(const Rows *r, size_t row) {
    return invested_tokens_of(r, row) / r->prompt_tokens;
}

static AdaptiveShared adaptive_costs(const AdaptiveNumbers *n, const Rows *r, double *costs) {
    const double *load = r->columns->load;
    double sum = load[r->slots[0]], square, squares = 0;
    for (size_t i = 1; i < r->rows; i++) sum += load[r->slots[i]];
    AdaptiveShared s = {.mean = sum / (double)r->rows};
    for (size_t i = 0; i < r->rows; i++) {
        double deviation = load[r->slots[i]] - s.mean;
        square = deviation * deviation;
        squares = i ? squares + square : square;
    }
    s.std = sqrt(squares / (double)r->rows);
    s.alpha = s.mean > 0 && s.std > n->balance_threshold * s.mean ? n->alpha_balance
                                                                  : n->alpha_cache;
    double cache_share = 1 - s.alpha;
    for (size_t i = 0; i < r->rows; i++) {
        double new_tokens = new_tokens_of(r, i);
        double again = 1 + n->keep * evicted_share_of(r, i, new_tokens);
        double computed = again * (new_tokens / r->prompt_tokens) - invested_share_of(r, i);
        double work = computed + n->queue_weight * queue_share_of(r, i);
        costs[i] = s.alpha * (load[r->slots[i]] - s.mean) + cache_share * work +
                   n->gamma * r->columns->slot_ratio[r->slots[i]];
    }
    return s;
}

static void put_adaptive_terms(Backward *b, uint32_t number, const AdaptiveShared *s,
                               const Rows *r, size_t row) {
    const Columns *c = r->columns;
    intptr_t slot = r->slots[row];
    put_term(b, number, "total_blocks_unknown", c->load_unknown[slot]);
    put_term(b, number, "slot_ratio", c->slot_ratio[slot]);
    put_term(b, number, "queue_share", queue_share_of(r, row));
    put_term(b, number, "invested_share", invested_share_of(r, row));
    put_term(b, number, "evicted_share", evicted_share_of(r, row, new_tokens_of(r, row)));
    put_term(b, number, "new_share", new_tokens_of(r, row) / r->prompt_tokens);
    put_term(b, number, "load_deviation", c->load[slot] - s->mean);
    put_term(b, number, "load", c->load[slot]);
}

static void put_adaptive_shared(Backward *b, uint32_t number, const AdaptiveShared *s) {
    put_term(b, number, "load_std", s->std);
    put_term(b, number, "load_mean", s->mean);
    put_term(b, number, "alpha", s->alpha);
}

#endif
