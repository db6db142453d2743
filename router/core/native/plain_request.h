/* What a RouteRequest asks, read where it lies.
 *
 * A request is plain if it names a prompt of tokens or of hashes and nothing that narrows the choice
 * of workers or changes the hashes. All others, and whatever looks odd, are read by protobuf. */
#ifndef KVROUTE_ASKED_H
#define KVROUTE_ASKED_H

#include "router/wire/native/field_numbers.h"
#include "router/wire/native/wire.h"

/* As router/desk/codec.py has them: what is over them is refused there. */
#define TEXT_MAX 1024
#define FIELDS_MAX 20480           /* of a request, beside its prompt, */
#define ASIDE_BYTES_MAX (1u << 20) /* and bytes of them */

typedef struct {
    Span request_id, model, session_id;
    Span tokens; /* little-endian u32 */
    Span hashes; /* little-endian u64: BlockHashes, when hashes_block_size is not 0 */
    uint32_t hashes_block_size;
    uint64_t prompt_tokens;
    int64_t output_tokens; /* -1: the request does not say */
    int32_t priority;
    int omit_receipt;
    int traced; /* the caller's trace is sampled */
} PlainRequest;

/* 0 for a text that may be taken as it is. */
static inline int odd_text(const Field *field) {
    return field->type != BYTES || field->bytes.size > TEXT_MAX || !is_ascii(field->bytes);
}

/* Whether a W3C traceparent has its flag `sampled`: version-trace-parent-flags, where the flags are
 * two digits from character 53 on. */
static inline int is_sampled(Span traceparent) {
    if (traceparent.size < 55) return 0;
    uint8_t digit = traceparent.at[54];
    return digit <= '9' ? digit & 1 : !(digit & 1); /* b, d and f are odd */
}

/* 0, or -1 for hashes in more than one piece, or none. */
static int read_hashes(Span message, PlainRequest *plain) {
    uint64_t block_size = 0, prompt_tokens = 0;
    Field field;
    plain->hashes = (Span){NULL, 0};
    while (message.size) {
        if (read_field(&message, &field)) return -1;
        if (field.number == BLOCK_HASHES_HASHES && field.type == BYTES && !plain->hashes.at)
            plain->hashes = field.bytes;
        else if (field.number == BLOCK_HASHES_BLOCK_SIZE && field.type == VARINT)
            block_size = field.value;
        else if (field.number == BLOCK_HASHES_PROMPT_TOKENS && field.type == VARINT)
            prompt_tokens = field.value;
        else
            return -1;
    }
    if (!block_size || block_size > INT32_MAX || !prompt_tokens || prompt_tokens > UINT32_MAX)
        return -1;
    if (plain->hashes.size % 8 || prompt_tokens / block_size != plain->hashes.size / 8) return -1;
    plain->hashes_block_size = (uint32_t)block_size;
    plain->prompt_tokens = prompt_tokens;
    return 0;
}

/* 1 if a request is plain, else 0. */
static int read_plain(Span message, PlainRequest *plain) {
    Field field;
    int prompts = 0;
    size_t fields = 0, bytes = 0;
    *plain = (PlainRequest){.output_tokens = -1};
    while (message.size) {
        size_t before = message.size;
        if (read_field(&message, &field)) return 0;
        if (field.number != ROUTE_REQUEST_TOKEN_BYTES &&
            field.number != ROUTE_REQUEST_BLOCK_HASHES) {
            bytes += before - message.size;
            if (++fields > FIELDS_MAX || bytes > ASIDE_BYTES_MAX) return 0;
        }
        switch (field.number) {
            case ROUTE_REQUEST_REQUEST_ID:
                if (odd_text(&field)) return 0;
                plain->request_id = field.bytes;
                break;
            case ROUTE_REQUEST_MODEL:
                if (odd_text(&field)) return 0;
                plain->model = field.bytes;
                break;
            case ROUTE_REQUEST_TOKEN_BYTES:
                if (field.type != BYTES || !field.bytes.size || field.bytes.size % 4) return 0;
                plain->tokens = field.bytes;
                plain->prompt_tokens = field.bytes.size / 4;
                prompts++;
                break;
            case ROUTE_REQUEST_BLOCK_HASHES:
                if (field.type != BYTES || read_hashes(field.bytes, plain)) return 0;
                prompts++;
                break;
            case ROUTE_REQUEST_EXPECTED_OUTPUT_TOKENS:
                if (field.type != VARINT || field.value > UINT32_MAX) return 0;
                plain->output_tokens = (int64_t)field.value;
                break;
            case ROUTE_REQUEST_PRIORITY: /* a negative one is a varint of 64 bits */
                if (field.type != VARINT) return 0;
                plain->priority = (int32_t)(uint32_t)field.value;
                break;
            case ROUTE_REQUEST_TENANT:
                if (odd_text(&field)) return 0;
                break;
            case ROUTE_REQUEST_SESSION_ID:
                if (odd_text(&field)) return 0;
                plain->session_id = field.bytes;
                break;
            case ROUTE_REQUEST_TTFT_SLO_MS:
            case ROUTE_REQUEST_QUEUE_TIMEOUT_MS:
                if (field.type != VARINT) return 0;
                break;
            case ROUTE_REQUEST_PHASE: /* UNSPECIFIED or AGGREGATED */
                if (field.type != VARINT || field.value > 1) return 0;
                break;
            case ROUTE_REQUEST_QUEUE_PROGRESS: /* of a request that waits, which is not answered here */
                if (field.type != VARINT) return 0;
                break;
            case ROUTE_REQUEST_TRACEPARENT:
                if (odd_text(&field)) return 0;
                plain->traced = is_sampled(field.bytes);
                break;
            case ROUTE_REQUEST_OMIT_RECEIPT:
                if (field.type != VARINT || field.value > 1) return 0;
                plain->omit_receipt = (int)field.value;
                break;
            default:
                return 0;
        }
    }
    return prompts == 1;
}

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
