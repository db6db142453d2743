/* A RouteResponse, its receipt and its rows. */
#ifndef KVROUTE_ANSWER_H
#define KVROUTE_ANSWER_H

#include "router/decide/decision/native/guard.h"
#include "router/decide/decision/native/order.h"
#include "router/decide/decision/native/policy.h"
#include "router/request/wire/native/field_numbers.h"
#include "router/request/wire/native/wire.h"

/* The fields of answers that a worker's heartbeat determines, as bytes of the messages named below. */
typedef struct {
    Span picked;      /* RouteResponse: worker_id, dp_rank, address, labels */
    Span alternative; /* Alternative: worker_id, dp_rank, address */
    Span row;         /* CandidateRow: worker_id, dp_rank, numbers of the operator's own */
} WrittenWorker;

/* The fields of a CandidateRow that come from the worker's stream and load, and from the decision. */
typedef struct {
    Span stream_state;
    int stream_complete;
    double sample_age_s;
    Span terms;    /* CandidateRow: terms, written, that no policy in C has made */
    Span excluded; /* why the row can't be picked */
} Condition;

/* Field numbers of OverlapTokens, in the order of the columns of an overlap. */
static const uint32_t OVERLAP_NUMBERS[] = {
    OVERLAP_TOKENS_RAW,  OVERLAP_TOKENS_USABLE, OVERLAP_TOKENS_DEVICE,
    OVERLAP_TOKENS_HOST, OVERLAP_TOKENS_DISK,   OVERLAP_TOKENS_PREDICTED,
};

static void put_overlap(Backward *b, uint32_t number, const Decided *d, size_t row) {
    size_t before = written(b);
    for (int field = 5; field >= 0; field--)
        put_uint(b, OVERLAP_NUMBERS[field], (uint32_t)overlap_of(&d->rows, field, row));
    put_message(b, number, before);
}

/* A CandidateRow. */
static void put_row_body(Backward *b, const Decided *d, size_t row, const WrittenWorker *worker,
                         const Condition *condition) {
    const Columns *c = d->rows.columns;
    intptr_t slot = d->rows.slots[row];
    if (!isnan(c->tpot_s[slot]))
        put_double_always(b, CANDIDATE_ROW_ESTIMATED_TPOT_MS, 1000 * c->tpot_s[slot]);
    for (size_t place = COLUMNS_COUNT; place-- > COLUMNS_NUMBERS_FROM;) {
        double number = column_at(c, place)[slot];
        if (!isnan(number)) put_term(b, CANDIDATE_ROW_NUMBERS, COLUMN_NAMES[place], number);
    }
    put_double(b, CANDIDATE_ROW_TRUST, c->trust[slot]);
    put_bytes(b, CANDIDATE_ROW_EXCLUDED, condition->excluded);
    if (d->policy) put_row_terms(b, CANDIDATE_ROW_TERMS, d, row);
    put_raw(b, condition->terms.at, condition->terms.size);
    put_double(b, CANDIDATE_ROW_COST, d->costs[row]);
    put_double(b, CANDIDATE_ROW_SAMPLE_AGE_S, condition->sample_age_s);
    put_uint(b, CANDIDATE_ROW_STREAM_COMPLETE, (uint64_t)condition->stream_complete);
    put_bytes(b, CANDIDATE_ROW_STREAM_STATE, condition->stream_state);
    put_uint(b, CANDIDATE_ROW_PREFILL_TOKENS_ACTIVE, (uint64_t)c->prefill_tokens_active[slot]);
    if (!isnan(c->total_slots[slot]))
        put_uint_always(b, CANDIDATE_ROW_TOTAL_SLOTS, (uint64_t)c->total_slots[slot]);
    put_double(b, CANDIDATE_ROW_RESERVED, c->reserved[slot]);
    put_uint(b, CANDIDATE_ROW_WAITING, (uint64_t)c->waiting[slot]);
    put_uint(b, CANDIDATE_ROW_RUNNING, (uint64_t)c->running[slot]);
    if (!isnan(c->total_blocks[slot]))
        put_uint_always(b, CANDIDATE_ROW_TOTAL_BLOCKS, (uint64_t)c->total_blocks[slot]);
    put_double(b, CANDIDATE_ROW_ACTIVE_BLOCKS, c->active_blocks[slot]);
    put_double(b, CANDIDATE_ROW_NEW_TOKENS, new_tokens_of(&d->rows, row));
    put_overlap(b, CANDIDATE_ROW_OVERLAP_TOKENS, d, row);
    put_raw(b, worker->row.at, worker->row.size);
}

static void put_row(Backward *b, uint32_t number, const Decided *d, size_t row, const WrittenWorker *worker,
                    const Condition *condition) {
    size_t before = written(b);
    put_row_body(b, d, row, worker, condition);
    put_message(b, number, before);
}

/* A pick that the guard moved (router/decide/decision/guard.py). */
typedef struct {
    uint32_t cheapest; /* row */
    const PickGuard *guard;
    const Waits *waits;
    const WrittenWorker *worker;
    const Condition *condition;
} Moved;

static void put_wait(Backward *b, uint32_t tokens_number, uint32_t requests_number,
                     const Decided *d, const Moved *moved, size_t row) {
    put_double(b, tokens_number, wait_tokens_at(moved->guard, &d->rows, row));
    put_double(b, requests_number, requests_at(&d->rows, row));
}

/* A Guarded. */
static void put_moved(Backward *b, uint32_t number, const Decided *d, const Moved *moved,
                      size_t picked) {
    size_t before = written(b);
    put_wait(b, GUARDED_PICKED_WAIT_TOKENS, GUARDED_PICKED_REQUESTS, d, moved, picked);
    put_wait(b, GUARDED_CHEAPEST_WAIT_TOKENS, GUARDED_CHEAPEST_REQUESTS, d, moved,
             moved->cheapest);
    put_double(b, GUARDED_LEAST_WAIT_TOKENS, moved->waits->least_tokens);
    put_double(b, GUARDED_LEAST_REQUESTS, moved->waits->least_requests);
    put_double(b, GUARDED_MARGIN_TOKENS, moved->waits->margin_tokens);
    put_double(b, GUARDED_REQUEST_TOKENS, moved->guard->request_tokens);
    put_row(b, GUARDED_CHEAPEST, d, moved->cheapest, moved->worker, moved->condition);
    put_message(b, number, before);
}

static inline int is_passed_over(const Decided *d, const Moved *moved, size_t row) {
    return moved && passes_over(moved->guard, moved->waits, &d->rows, row);
}

/* What a receipt says that isn't in its rows. */
typedef struct {
    Span policy;   /* Receipt: policy, formula, parameters, written; and terms, if no policy in C
                      has made them */
    Span replica;
    Span prefill;  /* where a pair's prompt is computed; empty: of no pair */
    Span excluded; /* Receipt: excluded, of workers that made no row, written */
    size_t not_live;
    Cheapest cheapest;
    double decided_at_s;
    int32_t best_overlap_tokens;
    const Moved *moved; /* NULL: the guard moved nothing */
} About;

static void put_count(Backward *b, uint32_t number, const char *name, size_t count) {
    if (!count) return;
    size_t before = written(b);
    put_uint_always(b, MAP_VALUE, count);
    put_bytes_always(b, MAP_KEY, name, strlen(name));
    put_message(b, number, before);
}

/* A Receipt; `ordered` is 0 where nobody was picked. */
static void put_receipt_body(Backward *b, const Decided *d, const About *about,
                             const uint32_t *order, size_t ordered, const WrittenWorker *workers,
                             const Condition *conditions) {
    if (about->moved) put_moved(b, RECEIPT_GUARDED, d, about->moved, order[0]);
    put_bytes(b, RECEIPT_PREFILL, about->prefill);
    put_bytes(b, RECEIPT_REPLICA, about->replica);
    put_uint(b, RECEIPT_BEST_OVERLAP_TOKENS, (uint32_t)about->best_overlap_tokens);
    put_double(b, RECEIPT_DECIDED_AT_S, about->decided_at_s);
    put_uint(b, RECEIPT_TIED, about->cheapest.tied);
    put_raw(b, about->excluded.at, about->excluded.size);
    put_count(b, RECEIPT_EXCLUDED, "full", about->cheapest.full);
    put_count(b, RECEIPT_EXCLUDED, "drained", about->cheapest.drained);
    put_count(b, RECEIPT_EXCLUDED, "cost is not a number", about->cheapest.not_finite);
    put_uint(b, RECEIPT_CANDIDATES, d->rows.rows + about->not_live);
    if (ordered > 1 && !is_passed_over(d, about->moved, order[1]))
        put_row(b, RECEIPT_RUNNER_UP, d, order[1], &workers[1], &conditions[1]);
    if (ordered) {
        put_row(b, RECEIPT_PICKED, d, order[0], &workers[0], &conditions[0]);
        put_uint(b, RECEIPT_BLOCK_SIZE,
                 (uint64_t)d->rows.columns->block_size[d->rows.slots[order[0]]]);
    }
    put_uint(b, RECEIPT_PROMPT_TOKENS, (uint64_t)d->rows.prompt_tokens);
    if (d->policy) put_shared_terms(b, RECEIPT_TERMS, d);
    put_raw(b, about->policy.at, about->policy.size);
}

static void put_receipt(Backward *b, uint32_t number, const Decided *d, const About *about,
                        const uint32_t *order, size_t ordered, const WrittenWorker *workers,
                        const Condition *conditions) {
    size_t before = written(b);
    put_receipt_body(b, d, about, order, ordered, workers, conditions);
    put_message(b, number, before);
}

/* Writes a RouteResponse, but for its receipts, its prefill worker and its reservation's id: the id
 * is the first field, and so the last to be written.
 *
 * workers: of the rows in `order`. engine_priority: NULL if the engine schedules without priorities.
 * new_tokens: prompt tokens that the worker has yet to compute. hash_block_size: 0 if the caller must
 * send tokens. estimated_ttft_ms: not a number if the policy predicts none. */
static void put_answer(Backward *b, const Decided *d, const uint32_t *order, size_t ordered,
                       size_t alternatives, const WrittenWorker *workers, double lease_s,
                       const int32_t *engine_priority, uint64_t new_tokens,
                       uint32_t hash_block_size, double estimated_ttft_ms) {
    double tpot_s = d->rows.columns->tpot_s[d->rows.slots[order[0]]];
    if (!isnan(tpot_s)) put_double_always(b, ROUTE_RESPONSE_ESTIMATED_TPOT_MS, 1000 * tpot_s);
    if (!isnan(estimated_ttft_ms))
        put_double_always(b, ROUTE_RESPONSE_ESTIMATED_TTFT_MS, estimated_ttft_ms);
    put_uint(b, ROUTE_RESPONSE_HASH_BLOCK_SIZE, hash_block_size);
    put_double(b, ROUTE_RESPONSE_LEASE_S, lease_s);
    if (engine_priority)
        put_uint_always(b, ROUTE_RESPONSE_ENGINE_PRIORITY, (uint64_t)(int64_t)*engine_priority);
    put_uint(b, ROUTE_RESPONSE_NEW_TOKENS, new_tokens);
    put_overlap(b, ROUTE_RESPONSE_OVERLAP_TOKENS, d, order[0]);
    for (size_t i = ordered; i-- > 1;) {
        if (i > alternatives) continue;
        size_t before = written(b);
        put_double(b, ALTERNATIVE_COST, d->costs[order[i]]);
        put_raw(b, workers[i].alternative.at, workers[i].alternative.size);
        put_message(b, ROUTE_RESPONSE_ALTERNATIVES, before);
    }
    put_raw(b, workers[0].picked.at, workers[0].picked.size);
}

#endif
