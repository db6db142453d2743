/* The policies that have a kernel: which there are, and what each does. */
#ifndef KVROUTE_POLICY_H
#define KVROUTE_POLICY_H

#include "adaptive.h"
#include "blocks.h"
#include "halves.h"
#include "threshold.h"
#include "ttft.h"

/* Each has its case in the switches below: a build without one fails (-Werror=switch, setup.py). */
enum Kind { NO_POLICY, ADAPTIVE, BLOCKS, TTFT, PREFILL_QUEUE, DECODE_ROOM, THRESHOLD };
#define LAST_KIND THRESHOLD

#define NUMBERS_MAX 8

typedef struct {
    enum Kind kind;
    union {
        double numbers[NUMBERS_MAX]; /* the policy's parameters, in their order */
        AdaptiveNumbers adaptive;
        BlocksNumbers blocks;
        TtftNumbers ttft;
        RoomNumbers room;
        ThresholdNumbers threshold;
    };
} Policy;

/* One decision: its rows, and what the policy made of them. */
typedef struct {
    Rows rows;
    const Policy *policy; /* NULL: the costs were made elsewhere */
    const double *costs;
    union {
        AdaptiveShared adaptive;
        BlocksShared blocks;
        TtftShared ttft;
        ThresholdShared threshold;
    };
} Decided;

/* Scores the rows of a decision. seconds: gets each row's time to the first token, by a policy that
 * predicts it. */
static void score(Decided *d, double *costs, double *seconds) {
    const Policy *p = d->policy;
    d->costs = costs;
    switch (p->kind) {
    case NO_POLICY:
        break;
    case ADAPTIVE:
        d->adaptive = adaptive_costs(&p->adaptive, &d->rows, costs);
        break;
    case BLOCKS:
        d->blocks = blocks_costs(&p->blocks, &d->rows, costs);
        break;
    case TTFT:
        d->ttft = ttft_costs(&p->ttft, &d->rows, costs, seconds);
        break;
    case PREFILL_QUEUE:
        queue_costs(&d->rows, costs);
        break;
    case DECODE_ROOM:
        room_costs(&p->room, &d->rows, costs);
        break;
    case THRESHOLD:
        d->threshold = threshold_costs(&p->threshold, &d->rows, costs);
        break;
    }
}

/* What the cost of a row is made of: entries of CandidateRow.terms. */
static void put_row_terms(Backward *b, uint32_t number, const Decided *d, size_t row) {
    const Policy *p = d->policy;
    switch (p->kind) {
    case NO_POLICY:
        break;
    case ADAPTIVE:
        put_adaptive_terms(b, number, &d->adaptive, &d->rows, row);
        break;
    case BLOCKS:
        put_blocks_terms(b, number, &p->blocks, &d->blocks, &d->rows, row);
        break;
    case TTFT:
        put_ttft_terms(b, number, &p->ttft, &d->ttft, &d->rows, row);
        break;
    case PREFILL_QUEUE:
        put_queue_terms(b, number, &d->rows, row);
        break;
    case DECODE_ROOM:
        put_room_terms(b, number, &p->room, &d->rows, row);
        break;
    case THRESHOLD:
        put_threshold_terms(b, number, &d->rows, row);
        break;
    }
}

/* What all rows share: entries of Receipt.terms. */
static void put_shared_terms(Backward *b, uint32_t number, const Decided *d) {
    if (d->policy->kind == ADAPTIVE) put_adaptive_shared(b, number, &d->adaptive);
    if (d->policy->kind == THRESHOLD) put_threshold_shared(b, number, &d->threshold);
}

#endif
