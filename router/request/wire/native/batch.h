/* A RouteBatch, read item by item where it lies. */
#ifndef KVROUTE_BATCH_H
#define KVROUTE_BATCH_H

#include "router/request/wire/native/field_numbers.h"
#include "router/request/wire/native/wire.h"

/* One item of a RouteBatch. */
typedef struct {
    uint64_t index;
    uint64_t timeout_ms;
    Span request;
    int is_request, is_cancel;
} Item;

/* The next item of a batch; what is left begins after it. 1, 0 at the end, or -1 for bytes that
 * protobuf must put in order first. */
static int read_item(Span *batch, Item *item) {
    Field outer, field;
    do {
        if (!batch->size) return 0;
        if (read_field(batch, &outer)) return -1;
    } while (outer.number != ROUTE_BATCH_ITEMS || outer.type != BYTES);
    Span message = outer.bytes;
    *item = (Item){0, 0, {NULL, 0}, 0, 0};
    while (message.size) {
        if (read_field(&message, &field)) return -1;
        if (field.number == ROUTE_ITEM_INDEX && field.type == VARINT) {
            item->index = field.value;
        } else if (field.number == ROUTE_ITEM_REQUEST && field.type == BYTES) {
            if (item->is_request) return -1; /* two that are to be merged */
            item->request = field.bytes;
            item->is_request = 1;
            item->is_cancel = 0;
        } else if (field.number == ROUTE_ITEM_CANCEL && field.type == VARINT) {
            item->is_cancel = 1;
            item->is_request = 0;
        } else if (field.number == ROUTE_ITEM_TIMEOUT_MS && field.type == VARINT) {
            item->timeout_ms = (uint32_t)field.value;
        }
    }
    return 1;
}

/* How many items a batch has; -1 for bytes that must be put in order first, -2 for more fields or
 * items than these. Looks at no request. */
static int64_t count_items(Span batch, size_t items_max, size_t fields_max) {
    Field outer, inner;
    size_t items = 0, fields = 0;
    while (batch.size) {
        if (read_field(&batch, &outer)) return -1;
        if (++fields > fields_max) return -2;
        if (outer.number != ROUTE_BATCH_ITEMS || outer.type != BYTES) continue;
        if (++items > items_max) return -2;
        int requests = 0;
        for (Span item = outer.bytes; item.size;) {
            if (read_field(&item, &inner)) return -1;
            if (++fields > fields_max) return -2;
            if (inner.number == ROUTE_ITEM_REQUEST && inner.type == BYTES && requests++) return -1;
            if (inner.number == ROUTE_ITEM_CANCEL && inner.type == VARINT) requests = 0;
        }
    }
    return (int64_t)items;
}

#endif
