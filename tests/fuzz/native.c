/* The native readers on a copy of exactly the bytes given, so that AddressSanitizer sees a read of
 * one byte too many. */
#include "router/request/wire/native/batch.h"
#include "router/request/wire/native/received.h"

enum { FIELDS = 1 << 20 };
static volatile uint64_t kept; /* so that no read is optimized away */

static void touch(Span span) {
    for (size_t i = 0; i < span.size; i++) kept += span.at[i];
}

static void *exact(size_t size) { return malloc(size ? size : 1); }

static void request_all(Span message) {
    Bounds most = {FIELDS, FIELDS, FIELDS};
    Received received;
    kept += (uint64_t)text_form(message, FIELDS);
    if (look_at_request(message, &most, &received)) return;
    if (received.form == TOKEN_BYTES || is_text((uint32_t)received.form)) {
        touch(received.tokens);
    } else if (received.form && received.form != ESTIMATED_TOKENS) {
        size_t size = received.elements * (received.form == BLOCK_HASHES ? 8 : 4);
        void *elements = exact(size);
        if (!copy_elements(&received, elements)) touch((Span){elements, size});
        free(elements);
    }
}

static int64_t batch_all(Span batch) {
    Span left = batch;
    Item item;
    int more;
    int64_t items = 0;
    size_t count, fields = 0;
    while ((more = read_item(&left, FIELDS, &fields, &item)) > 0) {
        items++;
        if (!item.is_request) continue;
        uint8_t *request = exact(item.request_bytes);
        copy_request(&item, request);
        touch((Span){request, item.request_bytes});
        free(request);
    }
    Span piece;
    if (!count_fields(batch, 1, FIELDS, FIELDS, &count))
        for (left = batch; next_bytes(&left, 1, &piece);) touch(piece);
    return more ? -1 : items;
}

/* Every reader on the content; returns the items that are counted in it as a batch, or -1. */
int64_t read_all(const uint8_t *bytes, size_t size) {
    uint8_t *copy = exact(size);
    if (size) memcpy(copy, bytes, size);
    Span message = {copy, size};
    request_all(message);
    int64_t items = batch_all(message);
    free(copy);
    return items;
}
