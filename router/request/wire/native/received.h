/* A message as it was received: counted, then read.
 *
 * One pass counts, and stops at the first bound; the next one copies. What protobuf refuses is
 * refused here too, but for what lies inside of the fields that it is still given. */
#ifndef KVROUTE_RECEIVED_H
#define KVROUTE_RECEIVED_H

#include "field_numbers.h"
#include "wire.h"

enum { TAKEN = 0, MALFORMED = -1, MANY_FIELDS = -2, MANY_BYTES = -3, MANY_TOKENS = -4 };

enum {
    TOKEN_IDS = ROUTE_REQUEST_TOKEN_IDS,
    TOKEN_BYTES = ROUTE_REQUEST_TOKEN_BYTES,
    BLOCK_HASHES = ROUTE_REQUEST_BLOCK_HASHES,
    TEXT = ROUTE_REQUEST_TEXT, /* and the bodies after it: prompts without tokens */
    MESSAGES_BODY = ROUTE_REQUEST_MESSAGES_BODY,
    RESPONSES_BODY = ROUTE_REQUEST_RESPONSES_BODY, /* another one, added later */
    ESTIMATED_TOKENS = ROUTE_REQUEST_ESTIMATED_TOKENS
};
enum { ELEMENTS = 1 }; /* the field of a TokenIds, and of a BlockHashes */
_Static_assert(ELEMENTS == TOKEN_IDS_IDS && ELEMENTS == BLOCK_HASHES_HASHES, "one number for both");
_Static_assert(BLOCK_HASHES == TOKEN_IDS + 2 && MESSAGES_BODY == TEXT + 3, "numbers in a row");

static inline int is_text(uint32_t form) {
    return (form >= TEXT && form <= MESSAGES_BODY) || form == RESPONSES_BODY;
}

static inline int is_prompt(const Field *field) {
    uint32_t number = field->number;
    if (field->type == VARINT) return number == ESTIMATED_TOKENS;
    return field->type == BYTES &&
           ((number >= TOKEN_IDS && number <= BLOCK_HASHES) || is_text(number));
}

typedef struct {
    size_t fields;   /* beside the prompt, those of groups included */
    size_t bytes;    /* of these fields */
    size_t elements; /* token ids, or hashes, in all fields of the prompt */
} Bounds;

/* What a RouteRequest holds. */
typedef struct {
    Bounds seen;
    int form;          /* the number of the prompt's field; 0: no prompt */
    Span first;        /* the message from the first field of that prompt on */
    Span tokens;       /* of TOKEN_BYTES; or the text */
    size_t elements;   /* of that prompt */
    uint32_t block_size, prompt_tokens; /* of BLOCK_HASHES; the latter of ESTIMATED_TOKENS, too */
} Received;

/* How many varints are packed, or MALFORMED when the last one has no end. */
static int64_t packed_varints(Span packed) {
    size_t count = 0;
    for (size_t i = 0; i < packed.size; i++) count += packed.at[i] < 0x80;
    return packed.size && packed.at[packed.size - 1] >= 0x80 ? MALFORMED : (int64_t)count;
}

/* Counts the elements of a TokenIds or BlockHashes; hashes: whether it is the latter. */
static int count_elements(Span message, int hashes, const Bounds *most, Received *received) {
    Field field;
    while (message.size) {
        if (read_any(&message, &field, &received->seen.fields)) return MALFORMED;
        if (field.number == ELEMENTS && field.type == BYTES) {
            int64_t count = (int64_t)(field.bytes.size / 8);
            if (hashes && field.bytes.size % 8) return MALFORMED;
            if (!hashes && (count = packed_varints(field.bytes)) < 0) return MALFORMED;
            received->elements += (size_t)count;
        } else if (field.number == ELEMENTS && field.type == (hashes ? FIXED64 : VARINT)) {
            received->elements++;
        } else if (hashes && field.number == BLOCK_HASHES_BLOCK_SIZE && field.type == VARINT) {
            received->block_size = (uint32_t)field.value;
        } else if (hashes && field.number == BLOCK_HASHES_PROMPT_TOKENS && field.type == VARINT) {
            received->prompt_tokens = (uint32_t)field.value;
        } else if (++received->seen.fields > most->fields) {
            return MANY_FIELDS;
        }
        if (received->elements > most->elements) return MANY_TOKENS;
    }
    return TAKEN;
}

/* Whether a TokenIds in these fields has a varint of more than 10 bytes, which protobuf refuses. For
 * a prompt that another one replaces: for the last prompt, copy_elements notices it. */
static int has_long_varints(Span message) {
    Field outer, field;
    size_t fields = 0;
    while (message.size && !read_any(&message, &outer, &fields)) {
        if (outer.number != TOKEN_IDS || outer.type != BYTES) continue;
        for (Span ids = outer.bytes; ids.size && !read_any(&ids, &field, &fields);) {
            if (field.number != ELEMENTS || field.type != BYTES) continue;
            uint64_t value;
            while (field.bytes.size)
                if (read_varint(&field.bytes, &value)) return 1;
        }
    }
    return 0;
}

/* Looks at a RouteRequest; a field of the prompt replaces one of another form, as in any oneof. */
static int look_at_request(Span message, const Bounds *most, Received *received) {
    *received = (Received){0};
    while (message.size) {
        Span before = message;
        Field field;
        if (read_any(&message, &field, &received->seen.fields)) return MALFORMED;
        int form = (int)field.number;
        if (is_prompt(&field)) {
            if (received->form != form) {
                Span replaced = received->first;
                if (received->form == TOKEN_IDS) {
                    replaced.size -= before.size;
                    if (has_long_varints(replaced)) return MALFORMED;
                }
                received->elements = received->block_size = received->prompt_tokens = 0;
                received->form = form;
                received->first = before;
            }
            if (form == ESTIMATED_TOKENS)
                received->prompt_tokens = (uint32_t)field.value;
            else
                received->tokens = field.bytes;
            if (form == TOKEN_IDS || form == BLOCK_HASHES) {
                int failed = count_elements(field.bytes, form == BLOCK_HASHES, most, received);
                if (failed) return failed;
            }
            /* Numbers and empty ones cost a field, too. */
            if (form == ESTIMATED_TOKENS || !field.bytes.size) received->seen.fields++;
        } else {
            received->seen.fields++;
            received->seen.bytes += before.size - message.size;
        }
        if (received->seen.fields > most->fields) return MANY_FIELDS;
        if (received->seen.bytes > most->bytes) return MANY_BYTES;
    }
    return TAKEN;
}

/* The form of a RouteRequest's prompt if it is a text or a body; 0: it has tokens or none, or is no
 * message of `most` fields at most. */
static int text_form(Span message, size_t most) {
    int form = 0;
    size_t fields = 0;
    Field field;
    while (message.size) {
        if (read_any(&message, &field, &fields) || ++fields > most) return 0;
        if (is_prompt(&field)) form = (int)field.number;
    }
    return is_text((uint32_t)form) ? form : 0;
}

/* The end of what was copied, or NULL for a varint that is too long. The last one has an end. */
static uint32_t *copy_packed(Span packed, uint32_t *to) {
    const uint8_t *at = packed.at, *end = packed.at + packed.size;
    while (at < end) {
        uint32_t value = *at & 0x7F;
        int shift = 7;
        while (*at++ >= 0x80) {
            if (shift > 63) return NULL;
            if (shift < 32) value |= (uint32_t)(*at & 0x7F) << shift;
            shift += 7;
        }
        *to++ = value;
    }
    return to;
}

/* Copies the elements of a prompt: u32 of TOKEN_IDS, u64 of BLOCK_HASHES. */
static int copy_elements(const Received *received, void *to) {
    Span message = received->first;
    Field outer, field;
    size_t fields = 0;
    uint32_t *ids = (uint32_t *)to;
    uint8_t *hashes = (uint8_t *)to;
    int of_hashes = received->form == BLOCK_HASHES;
    while (message.size) {
        if (read_any(&message, &outer, &fields)) return MALFORMED;
        if ((int)outer.number != received->form || outer.type != BYTES) continue;
        Span inner = outer.bytes;
        while (inner.size) {
            if (read_any(&inner, &field, &fields)) return MALFORMED;
            if (field.number != ELEMENTS) continue;
            if (!of_hashes && field.type == VARINT) {
                *ids++ = (uint32_t)field.value;
            } else if (!of_hashes && field.type == BYTES) {
                if (!(ids = copy_packed(field.bytes, ids))) return MALFORMED;
            } else if (of_hashes && (field.type == BYTES || field.type == FIXED64)) {
                memcpy(hashes, field.bytes.at, field.bytes.size);
                hashes += field.bytes.size;
            }
        }
    }
    return TAKEN;
}

/* Counts a message's fields, and those of one number that hold bytes. */
static int count_fields(Span message, uint32_t number, size_t most, size_t others_most,
                        size_t *count) {
    size_t others = 0;
    Field field;
    *count = 0;
    while (message.size) {
        if (read_any(&message, &field, &others)) return MALFORMED;
        if (field.number == number && field.type == BYTES)
            ++*count;
        else
            others++;
        if (*count > most || others > others_most) return MANY_FIELDS;
    }
    return TAKEN;
}

/* Takes the next field of a number that holds bytes: 1, or 0 at the end. */
static int next_bytes(Span *message, uint32_t number, Span *content) {
    size_t others = 0;
    Field field;
    while (message->size) {
        if (read_any(message, &field, &others)) return 0;
        if (field.number == number && field.type == BYTES) {
            *content = field.bytes;
            return 1;
        }
    }
    return 0;
}

#endif
