/* dynamo-adaptive (router/policies/dynamo_adaptive.py), the same to the last bit: its sums go row
 * after row, and the compiler must not fuse a product with a sum (setup.py).
 *
 * And the order of a decision (RouterCore._order): who is cheapest, and who comes next. */
#ifndef KVROUTE_ADAPTIVE_H
#define KVROUTE_ADAPTIVE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    double balance_threshold, alpha_balance, alpha_cache, gamma;
} Weights;

/* Columns of the fleet, a number for each slot. */
typedef struct {
    const double *block_size, *total_blocks, *total_slots, *trust, *running, *waiting, *reserved,
        *active_blocks, *prefill_tokens_active, *active_slots, *load, *slot_ratio, *full, *load_unknown;
} Columns;

/* What is the same for all rows. */
typedef struct {
    double mean, std, alpha;
} Shared;

static inline double new_tokens_of(double prompt_tokens, double trust, int32_t usable) {
    return prompt_tokens - trust * (double)usable;
}

/* Costs of `count` rows, at least one; row i is slots[i], which holds usable[i] tokens. */
static Shared adaptive_costs(const Weights *w, const Columns *c, const intptr_t *slots,
                             size_t count, const int32_t *usable, double prompt_tokens,
                             double *costs) {
    double sum = c->load[slots[0]], square, squares = 0;
    for (size_t i = 1; i < count; i++) sum += c->load[slots[i]];
    Shared s = {.mean = sum / (double)count};
    for (size_t i = 0; i < count; i++) {
        double deviation = c->load[slots[i]] - s.mean;
        square = deviation * deviation;
        squares = i ? squares + square : square;
    }
    s.std = sqrt(squares / (double)count);
    s.alpha = s.mean > 0 && s.std > w->balance_threshold * s.mean ? w->alpha_balance
                                                                  : w->alpha_cache;
    double cache_share = 1 - s.alpha;
    for (size_t i = 0; i < count; i++) {
        intptr_t slot = slots[i];
        double new_share =
            new_tokens_of(prompt_tokens, c->trust[slot], usable[i]) / prompt_tokens;
        costs[i] = s.alpha * (c->load[slot] - s.mean) + cache_share * new_share +
                   w->gamma * c->slot_ratio[slot];
    }
    return s;
}

/* What a look over the costs finds. */
typedef struct {
    double lowest;
    size_t tied;       /* rows that share the lowest cost; 0: nobody can be picked */
    size_t drained;
    size_t full;       /* other rows without room */
    size_t not_finite; /* other rows whose cost is not a number */
} Cheapest;

/* drained: a byte for each row; NULL: nobody is. */
static Cheapest cheapest_of(const double *costs, const double *full, const uint8_t *drained,
                            const intptr_t *slots, size_t count) {
    Cheapest found = {INFINITY, 0, 0, 0, 0};
    for (size_t i = 0; i < count; i++) {
        if (drained && drained[i]) {
            found.drained++;
        } else if (full[slots[i]] != 0) {
            found.full++;
        } else if (!isfinite(costs[i])) {
            found.not_finite++;
        } else if (costs[i] < found.lowest) {
            found.lowest = costs[i];
            found.tied = 1;
        } else if (costs[i] == found.lowest) {
            found.tied++;
        }
    }
    return found;
}

static inline int can_take(const double *full, const uint8_t *drained, const intptr_t *slots,
                           size_t row) {
    return full[slots[row]] == 0 && !(drained && drained[row]);
}

/* The pick and the rows next to it, `wanted` at most: those that tie from the `first` one on and
 * round, then the others, cheapest first. Returns how many there are. */
static size_t order_of(const double *costs, const double *full, const uint8_t *drained,
                       const intptr_t *slots, size_t count, const Cheapest *found, size_t first,
                       size_t wanted, uint32_t *order) {
    size_t used = 0, seen = 0, before_first = 0;
    for (size_t i = 0; i < count && used < wanted; i++)
        if (costs[i] == found->lowest && can_take(full, drained, slots, i) && seen++ >= first)
            order[used++] = (uint32_t)i;
    for (size_t i = 0; i < count && used < wanted && before_first < first; i++) {
        if (costs[i] != found->lowest || !can_take(full, drained, slots, i)) continue;
        order[used++] = (uint32_t)i;
        before_first++;
    }
    double after = found->lowest;
    size_t after_row = count;
    while (used < wanted) {
        size_t best = count;
        for (size_t i = 0; i < count; i++) {
            if (!can_take(full, drained, slots, i) || !isfinite(costs[i])) continue;
            if (costs[i] < after || (costs[i] == after && i <= after_row)) continue;
            if (best == count || costs[i] < costs[best]) best = i;
        }
        if (best == count) break;
        order[used++] = (uint32_t)best;
        after = costs[best];
        after_row = best;
    }
    return used;
}

/* The guard (router/decision/guard.py), the same to the last bit. */
typedef struct {
    double request_tokens, margin;
} PickGuard;

typedef struct {
    double least_requests, least_tokens, margin_tokens;
} Waits;

static inline double requests_at(const Columns *c, intptr_t slot) {
    return c->active_slots[slot] > 0 ? c->active_slots[slot] : 0.0;
}

/* Tokens until a worker has computed the prompt, of which it holds `usable`. */
static inline double wait_tokens_at(const PickGuard *g, const Columns *c, intptr_t slot,
                                    int32_t usable, double prompt_tokens) {
    double ahead =
        c->prefill_tokens_active[slot] + g->request_tokens * requests_at(c, slot);
    return ahead + new_tokens_of(prompt_tokens, c->trust[slot], usable);
}

/* The least over rows that can be picked, of which there must be one. */
static Waits waits_of(const PickGuard *g, const Columns *c, const double *costs,
                      const uint8_t *drained, const intptr_t *slots, size_t count,
                      const int32_t *usable, double prompt_tokens) {
    Waits least = {INFINITY, INFINITY, g->margin * prompt_tokens};
    for (size_t i = 0; i < count; i++) {
        if (!can_take(c->full, drained, slots, i) || !isfinite(costs[i])) continue;
        double requests = requests_at(c, slots[i]);
        double tokens = wait_tokens_at(g, c, slots[i], usable[i], prompt_tokens);
        if (requests < least.least_requests) least.least_requests = requests;
        if (tokens < least.least_tokens) least.least_tokens = tokens;
    }
    return least;
}

static inline int passes_over(const PickGuard *g, const Waits *w, const Columns *c, intptr_t slot,
                              int32_t usable, double prompt_tokens) {
    return wait_tokens_at(g, c, slot, usable, prompt_tokens) >
               w->least_tokens + w->margin_tokens &&
           requests_at(c, slot) > w->least_requests;
}

#endif
