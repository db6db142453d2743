/* BlockHashes of blocks that images, sounds and the like cover. */
#ifndef KVROUTE_ITEM_HASHES_H
#define KVROUTE_ITEM_HASHES_H

#include <stdlib.h>

#include "xxh3.h"

/* An item: its content hash, and the first and last block with a token that it covers. */
typedef struct {
    uint64_t content, first, last;
} ItemSpan;

/* Hashes every covered block again, followed by the content hashes of its items, ascending.
 * items: in that order; blocks beyond the count are left out. Returns 0, or -1 without memory. */
static int item_hashes(const uint8_t *tokens, size_t count, size_t block_bytes, uint64_t seed,
                       const ItemSpan *items, size_t item_count, uint64_t *hashes) {
    uint8_t secret[XXH_SECRET_BYTES];
    xxh3_secret(seed, secret);
    /* End of each block's content hashes; while they are filled in, the next hash's place. */
    size_t *ends = (size_t *)calloc(count + 1, sizeof(size_t)), total = 0, most = 0;
    if (!ends) return -1;
    for (size_t n = 0; n < item_count; n++)
        for (uint64_t i = items[n].first; i <= items[n].last && i < count; i++) ends[i]++;
    for (size_t i = 0; i < count; i++) {
        size_t own = ends[i];
        if (own > most) most = own;
        ends[i] = total;
        total += own;
    }
    uint64_t *contents = (uint64_t *)malloc(8 * total + 8);
    uint8_t *block = (uint8_t *)malloc(block_bytes + 8 * most);
    if (contents && block) {
        for (size_t n = 0; n < item_count; n++)
            for (uint64_t i = items[n].first; i <= items[n].last && i < count; i++)
                contents[ends[i]++] = items[n].content;
        for (size_t i = 0, at = 0; i < count; at = ends[i++]) {
            size_t own = 8 * (ends[i] - at);
            if (!own) continue;
            memcpy(block, tokens + i * block_bytes, block_bytes);
            memcpy(block + block_bytes, contents + at, own);
            hashes[i] = xxh3_64(block, block_bytes + own, seed, secret);
        }
    }
    int failed = contents && block ? 0 : -1;
    free(ends);
    free(contents);
    free(block);
    return failed;
}

#endif
