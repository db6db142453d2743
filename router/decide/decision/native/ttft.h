/* ttft (router/decide/policies/ttft.py, first_token.py), the same to the last bit. */
#ifndef KVROUTE_TTFT_H
#define KVROUTE_TTFT_H

#include "columns.h"
#include "order.h"
#include "router/request/wire/native/wire.h"

#define REQUEST_TOKENS 500.0     /* as router/fleet/rates.py has it, */
#define ATTENTION_TOKENS 50000.0 /* and this */
#define FULL_TPOT_S 0.04         /* as router/decide/policies/ttft.py has it */

/* TtftParameters, in their order. */
typedef struct {
    double keep, crowding, stall, step_tokens, tokens, stay_s, host_rate, disk_rate;
} TtftNumbers;

typedef struct {
    double shortest_s; /* to the first token, of rows that can be picked */
    int tpot_known;    /* of each row */
} TtftShared;

/* Seconds, but for the rate (tokens of work a second) and the share. */
typedef struct {
    double rate, wait_s, load_s, prefill_s, room_s, evicted_share, crowded_s, stalled_s, tpot_s, total_s,
        cost;
} TtftRow;

/* Tokens' worth of a prompt of which new_tokens have to be computed. */
static inline double prefill_work(double new_tokens, double prompt_tokens) {
    double attended = prompt_tokens - new_tokens / 2;
    return REQUEST_TOKENS + new_tokens * (1 + attended / ATTENTION_TOKENS);
}

/* Until tokens are on the device, from where they come at some rate. */
static inline double loading_s(const Rows *r, size_t row, int32_t tokens, double rate) {
    if (!tokens) return 0; /* as a rule: saves a division */
    return trusted(r, row, tokens) / at_least(rate, r->prefill->rate[row]);
}

static inline TtftRow ttft_row(const TtftNumbers *n, const TtftShared *s, const Rows *r, size_t row) {
    const Columns *c = r->columns;
    const Prefill *p = r->prefill;
    intptr_t slot = r->slots[row];
    TtftRow result;
    double rate = p->rate[row], new_tokens = new_tokens_of(r, row);
    double work = prefill_work(new_tokens, r->prompt_tokens);
    double unseen = at_least(c->prefill_tokens_active[slot] - p->tokens[slot], 0.0);
    double others = p->others_waiting[slot] * p->mean_work;
    double known_s = at_least(at_least(p->ends_s[slot] - p->now_s, p->least_s[slot]), 0.0);
    result.rate = rate;
    result.wait_s = known_s + (unseen + others) / rate;
    result.load_s = loading_s(r, row, overlap_of(r, 3, row), n->host_rate) +
                   loading_s(r, row, overlap_of(r, 4, row), n->disk_rate);
    result.prefill_s = work / rate;
    result.total_s = result.wait_s + result.load_s + result.prefill_s;
    double total_blocks = c->total_blocks[slot];
    double free_blocks = isnan(total_blocks) ? INFINITY : total_blocks - c->active_blocks[slot];
    int crowds_out = r->prompt_tokens > free_blocks && blocks_of(r, row) > free_blocks &&
                     new_blocks_of(r, row) > free_blocks;
    result.room_s = crowds_out ? n->stay_s : 0.0;
    result.evicted_share = evicted_share_of(r, row, new_tokens);
    result.crowded_s = 0;
    if (result.wait_s > 0)
        result.crowded_s = work < n->step_tokens ? result.prefill_s : n->step_tokens / rate;
    result.stalled_s = at_least(c->active_slots[slot], 0.0) * result.prefill_s;
    result.tpot_s = s->tpot_known ? c->tpot_s[slot] : FULL_TPOT_S * c->load[slot];
    result.cost = result.total_s + result.room_s + n->keep * result.evicted_share * result.prefill_s +
                 n->crowding * result.crowded_s + n->stall * result.stalled_s +
                 n->tokens * result.tpot_s;
    return result;
}

/* seconds: gets the time to the first token of each row. */
static TtftShared ttft_costs(const TtftNumbers *n, const Rows *r, double *costs, double *seconds) {
    TtftShared s = {INFINITY, 1};
    for (size_t i = 0; i < r->rows && s.tpot_known; i++)
        s.tpot_known = !isnan(r->columns->tpot_s[r->slots[i]]);
    for (size_t i = 0; i < r->rows; i++) {
        TtftRow result = ttft_row(n, &s, r, i);
        costs[i] = result.cost;
        seconds[i] = result.total_s;
        if (result.total_s < s.shortest_s && isfinite(result.cost) &&
            can_take(r->columns->full, r->drained, r->slots, i))
            s.shortest_s = result.total_s;
    }
    return s;
}

static void put_ttft_terms(Backward *b, uint32_t number, const TtftNumbers *n, const TtftShared *s,
                           const Rows *r, size_t row) {
    TtftRow result = ttft_row(n, s, r, row);
    put_term(b, number, "tpot_s", result.tpot_s);
    put_term(b, number, "stalled_s", result.stalled_s);
    put_term(b, number, "crowded_s", result.crowded_s);
    put_term(b, number, "evicted_share", result.evicted_share);
    put_term(b, number, "room_s", result.room_s);
    put_term(b, number, "prefill_s", result.prefill_s);
    put_term(b, number, "load_s", result.load_s);
    put_term(b, number, "wait_s", result.wait_s);
    put_term(b, number, "prefill_rate", result.rate);
}

#endif
