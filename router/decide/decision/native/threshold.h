/* cache-threshold (router/decide/policies/cache_threshold.py), the same to the last bit. */
#ifndef KVROUTE_THRESHOLD_H
#define KVROUTE_THRESHOLD_H

#include "columns.h"
#include "order.h"
#include "router/request/wire/native/wire.h"

/* ThresholdParameters, in their order. */
typedef struct {
    double cache_threshold;
} ThresholdNumbers;

typedef struct {
    double best_share;
    int by_cache;
} ThresholdShared;

static inline double threshold_queue(const Rows *r, size_t row) {
    double load = r->columns->load[r->slots[row]];
    return r->columns->active_slots[r->slots[row]] + load / (1 + load);
}

static ThresholdShared threshold_costs(const ThresholdNumbers *n, const Rows *r, double *costs) {
    double best = 0;
    for (size_t i = 0; i < r->rows; i++)
        if (can_take(r->columns->full, r->drained, r->slots, i))
            best = at_least(trusted(r, i, overlap_of(r, 1, i)), best);
    ThresholdShared s = {.best_share = best / r->prompt_tokens};
    s.by_cache = s.best_share > n->cache_threshold;
    for (size_t i = 0; i < r->rows; i++) {
        double queue = threshold_queue(r, i);
        costs[i] = s.by_cache ? new_tokens_of(r, i) + queue / (1 + queue) : queue;
    }
    return s;
}

static void put_threshold_terms(Backward *b, uint32_t number, const Rows *r, size_t row) {
    put_term(b, number, "queue", threshold_queue(r, row));
    put_term(b, number, "new_tokens", new_tokens_of(r, row));
}

static void put_threshold_shared(Backward *b, uint32_t number, const ThresholdShared *s) {
    put_term(b, number, "by_cache", s->by_cache);
    put_term(b, number, "best_share", s->best_share);
}

#endif
