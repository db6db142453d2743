/* A RouteBatch, read item by item where it lies. */
#ifndef KVROUTE_BATCH_H
#define KVROUTE_BATCH_H

#include "router/request/wire/native/field_numbers.h"
#include "router/request/wire/native/wire.h"

enum { NO_BATCH = -1, TOO_MANY = -2 };

/* One item of a RouteBatch. A request in several fields is their bytes in a row, which is what
 * merging comes to. */
typedef struct {
    uint64_t index, timeout_ms;
    int is_request, is_cancel;
    Span first; /* the item from the first field of its request on */
    size_t request_bytes;
} Item;

/* Whether a message is whole fields, no more than these. */
static int is_whole(Span message, size_t fields_max) {
    Field field;
    size_t fields = 0;
    while (message.size)
        if (read_any(&message, &field, &fields) || ++fields > fields_max) return 0;
    return 1;
}

/* Reads the next item; what is left of `batch` begins after it. Returns 1; 0 at the end; NO_BATCH or
 * TOO_MANY. fields: counts all fields that were read so far, fields_max at most. */
static int read_item(Span *batch, size_t fields_max, size_t *fields, Item *item) {
    Field outer, field;
    do {
        if (!batch->size) return 0;
        if (read_any(batch, &outer, fields)) return NO_BATCH;
        if (++*fields > fields_max) return TOO_MANY;
    } while (outer.number != ROUTE_BATCH_ITEMS || outer.type != BYTES);
    Span message = outer.bytes, request = {0};
    *item = (Item){0};
    while (message.size) {
        Span before = message;
        if (read_any(&message, &field, fields)) return NO_BATCH;
        if (++*fields > fields_max) return TOO_MANY;
        if (field.number == ROUTE_ITEM_INDEX && field.type == VARINT) {
            item->index = field.value;
        } else if (field.number == ROUTE_ITEM_REQUEST && field.type == BYTES) {
            if (!item->is_request) {
                item->first = before;
                item->request_bytes = 0;
            } else if (!is_whole(request, fields_max) || !is_whole(field.bytes, fields_max)) {
                return NO_BATCH; /* each must be whole before they are put in a row */
            }
            request = field.bytes;
            item->request_bytes += field.bytes.size;
            item->is_request = 1;
            item->is_cancel = 0;
        } else if (field.number == ROUTE_ITEM_CANCEL && field.type == VARINT) {
            item->is_cancel = 1;
            item->is_request = 0;
        } else if (field.number == ROUTE_ITEM_TIMEOUT_MS && field.type == VARINT) {
            item->timeout_ms = (uint32_t)field.value;
        }
    }
    if (item->is_request) item->first.size = (size_t)(message.at - item->first.at);
    return 1;
}

/* Copies an item's request: request_bytes of it. */
static void copy_request(const Item *item, uint8_t *to) {
    Span message = item->first;
    Field field;
    size_t fields = 0;
    while (message.size && !read_any(&message, &field, &fields)) {
        if (field.number != ROUTE_ITEM_REQUEST || field.type != BYTES) continue;
        memcpy(to, field.bytes.at, field.bytes.size);
        to += field.bytes.size;
    }
}

#endif
