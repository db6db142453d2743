/* The guard (router/decide/decision/guard.py), the same to the last bit: passes over workers whose queue
 * costs more than their cache saves. */
#ifndef KVROUTE_GUARD_H
#define KVROUTE_GUARD_H

#include "columns.h"
#include "order.h"

#define GUARD_COMPUTED 2.0 /* COMPUTED, INVESTED */
#define GUARD_INVESTED 2.2

typedef struct {
    double request_tokens, margin;
} PickGuard;

typedef struct {
    double least_requests, least_tokens, margin_tokens;
} Waits;

static inline double requests_at(const Rows *r, size_t row) {
    double requests = r->columns->active_slots[r->slots[row]];
    return requests > 0 ? requests : 0.0;
}

/* Tokens until a row's worker has computed the prompt. */
static inline double wait_tokens_at(const PickGuard *g, const Rows *r, size_t row) {
    double ahead = r->columns->prefill_tokens_active[r->slots[row]] +
                   g->request_tokens * requests_at(r, row);
    return ahead + (GUARD_COMPUTED * new_tokens_of(r, row) - GUARD_INVESTED * invested_tokens_of(r, row));
}

/* The least over rows that can be picked, of which there must be one. */
static Waits waits_of(const PickGuard *g, const Rows *r, const double *costs) {
    Waits least = {INFINITY, INFINITY, g->margin * r->prompt_tokens};
    for (size_t i = 0; i < r->rows; i++) {
        if (!can_take(r->columns->full, r->drained, r->slots, i) || !isfinite(costs[i])) continue;
        double requests = requests_at(r, i), tokens = wait_tokens_at(g, r, i);
        if (requests < least.least_requests) least.least_requests = requests;
        if (tokens < least.least_tokens) least.least_tokens = tokens;
    }
    return least;
}

static inline int passes_over(const PickGuard *g, const Waits *w, const Rows *r, size_t row) {
    return wait_tokens_at(g, r, row) > w->least_tokens + w->margin_tokens &&
           requests_at(r, row) > w->least_requests;
}

#endif
