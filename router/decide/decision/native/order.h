/* The order of a decision (Ranking.in_order): the cheapest row, and those that come next. */
#ifndef KVROUTE_ORDER_H
#define KVROUTE_ORDER_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

/* full: of slots, not 0 where there is no room; NULL: all have room. drained: a byte for each row;
 * NULL: none is. slots: of the rows. */
static inline int can_take(const double *full, const uint8_t *drained, const intptr_t *slots,
                           size_t row) {
    return (!full || full[slots[row]] == 0) && !(drained && drained[row]);
}

/* The lowest cost, and why other rows can't be picked. */
typedef struct {
    double lowest;
    size_t tied;       /* rows that share the lowest cost; 0: no row can be picked */
    size_t drained;
    size_t full;       /* other rows without room */
    size_t not_finite; /* other rows whose cost is not a number */
} Cheapest;

/* The arguments: see can_take. */
static Cheapest cheapest_of(const double *costs, const double *full, const uint8_t *drained,
                            const intptr_t *slots, size_t count) {
    Cheapest cheapest = {INFINITY, 0, 0, 0, 0};
    for (size_t i = 0; i < count; i++) {
        if (drained && drained[i]) {
            cheapest.drained++;
        } else if (full && full[slots[i]] != 0) {
            cheapest.full++;
        } else if (!isfinite(costs[i])) {
            cheapest.not_finite++;
        } else if (costs[i] < cheapest.lowest) {
            cheapest.lowest = costs[i];
            cheapest.tied = 1;
        } else if (costs[i] == cheapest.lowest) {
            cheapest.tied++;
        }
    }
    return cheapest;
}

/* Of the rows that tie, the number of the one whose worker was picked longest ago; last_picked: of
 * slots. The first of equal ones. */
static size_t longest_ago(const double *costs, const double *full, const uint8_t *drained,
                          const intptr_t *slots, size_t count, const Cheapest *cheapest,
                          const double *last_picked) {
    size_t seen = 0, first = 0;
    double least = INFINITY;
    for (size_t i = 0; i < count; i++) {
        if (costs[i] != cheapest->lowest || !can_take(full, drained, slots, i)) continue;
        if (last_picked[slots[i]] < least) {
            least = last_picked[slots[i]];
            first = seen;
        }
        seen++;
    }
    return first;
}

/* The pick and the rows next to it, `wanted` at most: the rows of the lowest cost, from
 * number `first` on and then from the start, then the others, cheapest first. Returns how many there are. */
static size_t order_of(const double *costs, const double *full, const uint8_t *drained,
                       const intptr_t *slots, size_t count, const Cheapest *cheapest, size_t first,
                       size_t wanted, uint32_t *order) {
    size_t used = 0, seen = 0, before_first = 0;
    for (size_t i = 0; i < count && used < wanted; i++)
        if (costs[i] == cheapest->lowest && can_take(full, drained, slots, i) && seen++ >= first)
            order[used++] = (uint32_t)i;
    for (size_t i = 0; i < count && used < wanted && before_first < first; i++) {
        if (costs[i] != cheapest->lowest || !can_take(full, drained, slots, i)) continue;
        order[used++] = (uint32_t)i;
        before_first++;
    }
    if (used == wanted) return used;
    size_t ties = used;
    for (size_t i = 0; i < count; i++) {
        if (!(costs[i] > cheapest->lowest) || (used == wanted && !(costs[i] < costs[order[used - 1]])))
            continue;
        if (!isfinite(costs[i]) || !can_take(full, drained, slots, i)) continue;
        if (used < wanted) used++;
        size_t at = used - 1;
        for (; at > ties && costs[order[at - 1]] > costs[i]; at--) order[at] = order[at - 1];
        order[at] = (uint32_t)i;
    }
    return used;
}

#endif
