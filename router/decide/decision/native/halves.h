/* The policies of a pair's halves (router/decide/policies/pair.py), the same to the last bit. */
#ifndef KVROUTE_HALVES_H
#define KVROUTE_HALVES_H

#include "columns.h"
#include "router/request/wire/native/wire.h"

#define DISTANCE_STEPS 4.0 /* 1 + BEYOND of router/fleet/topology.py */
#define NO_ROOM 1e3

/* prefill-queue */

static void queue_costs(const Rows *r, double *costs) {
    for (size_t i = 0; i < r->rows; i++)
        costs[i] = r->columns->prefill_tokens_active[r->slots[i]] + new_tokens_of(r, i);
}

static void put_queue_terms(Backward *b, uint32_t number, const Rows *r, size_t row) {
    put_term(b, number, "new_tokens", new_tokens_of(r, row));
    put_term(b, number, "prefill_tokens_active", r->columns->prefill_tokens_active[r->slots[row]]);
}

/* decode-room: RoomParameters, in their order. */
typedef struct {
    double way_weight, slots_unknown;
} RoomNumbers;

typedef struct {
    double need, kv_share, batch, way, distance, no_room, cost;
} RoomRow;

static inline RoomRow room_row(const RoomNumbers *n, const Rows *r, size_t row) {
    const Columns *c = r->columns;
    intptr_t slot = r->slots[row];
    double total = c->total_blocks[slot], slots = c->total_slots[slot];
    double all_blocks = ceil((r->prompt_tokens + r->output_tokens) / block_tokens_of(r, row));
    double free_blocks = isnan(total) ? INFINITY : total - c->active_blocks[slot];
    RoomRow result;
    result.need = all_blocks - blocks_of(r, row) + new_blocks_of(r, row);
    result.kv_share = total > 0 ? (c->active_blocks[slot] + result.need) / total : 0.0;
    result.batch = c->active_slots[slot] / at_least(isnan(slots) ? n->slots_unknown : slots, 1.0);
    result.distance = r->distance ? r->distance[row] : 0.0;
    result.way = (1 + result.distance) / DISTANCE_STEPS * new_tokens_of(r, row) / r->prompt_tokens;
    result.no_room = result.need > free_blocks ? 1.0 : 0.0;
    result.cost = result.kv_share + result.batch + n->way_weight * result.way +
                  NO_ROOM * result.no_room;
    return result;
}

static void room_costs(const RoomNumbers *n, const Rows *r, double *costs) {
    for (size_t i = 0; i < r->rows; i++) costs[i] = room_row(n, r, i).cost;
}

static void put_room_terms(Backward *b, uint32_t number, const RoomNumbers *n, const Rows *r,
                           size_t row) {
    RoomRow result = room_row(n, r, row);
    put_term(b, number, "no_room", result.no_room);
    put_term(b, number, "kv_distance", result.distance);
    put_term(b, number, "way", result.way);
    put_term(b, number, "batch", result.batch);
    put_term(b, number, "kv_share", result.kv_share);
    put_term(b, number, "need_blocks", result.need);
}

#endif
