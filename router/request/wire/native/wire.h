/* Protobuf's wire format: what a message's bytes are made of.
 *
 * Messages are written from their end to their beginning, so that a length is known when its turn
 * comes. Fields that hold their default are left out, as proto3 does. */
#ifndef KVROUTE_WIRE_H
#define KVROUTE_WIRE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const uint8_t *at;
    size_t size;
} Span;

enum { VARINT = 0, FIXED64 = 1, BYTES = 2, GROUP = 3, END_GROUP = 4, FIXED32 = 5 };

/* ---- reading ---- */

/* A varint; what is left begins after it. 0, or -1 where there is none. As protobuf reads it: at
 * most 10 bytes, and bits beyond the 64th are left out. */
static int read_varint(Span *left, uint64_t *value) {
    uint64_t read = 0;
    for (int shift = 0; shift < 70 && left->size; shift += 7) {
        uint8_t byte = *left->at++;
        left->size--;
        read |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) {
            *value = read;
            return 0;
        }
    }
    return -1;
}

/* A tag or a length: at most 5 bytes, and no more than 32 bits. */
static int read_short(Span *left, uint64_t *value) {
    uint64_t read = 0;
    for (int shift = 0; shift < 35 && left->size; shift += 7) {
        uint8_t byte = *left->at++;
        left->size--;
        read |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) {
            *value = read;
            return read >> 32 ? -1 : 0;
        }
    }
    return -1;
}

/* One field: a varint's value, or the bytes of any other. */
typedef struct {
    uint32_t number;
    int type;
    uint64_t value;
    Span bytes;
} Field;

/* The value of a field; what is left begins after it. 0, or -1 where there is none, as of a group. */
static int read_value(Span *left, uint64_t tag, Field *field) {
    field->number = (uint32_t)(tag >> 3);
    field->type = (int)(tag & 7);
    uint64_t size;
    switch (field->type) {
        case VARINT:
            return read_varint(left, &field->value);
        case FIXED64:
            size = 8;
            break;
        case FIXED32:
            size = 4;
            break;
        case BYTES:
            if (read_short(left, &size)) return -1;
            break;
        default:
            return -1;
    }
    if (size > left->size) return -1;
    field->bytes = (Span){left->at, (size_t)size};
    left->at += size;
    left->size -= (size_t)size;
    return 0;
}

/* The next field; what is left begins after it. 0, or -1 where there is none. */
static int read_field(Span *left, Field *field) {
    uint64_t tag;
    if (read_short(left, &tag) || tag < 8) return -1;
    return read_value(left, tag, field);
}

enum { GROUPS_MAX = 90 }; /* inside of one another; protobuf takes 100 levels of all kinds */

/* As read_field, and a group is a field of type GROUP whose bytes end with its end tag. fields
 * grows by what groups hold: all of it is read. */
static int read_any(Span *left, Field *field, size_t *fields) {
    uint64_t tag;
    if (read_short(left, &tag) || tag < 8) return -1;
    if ((tag & 7) != GROUP) return read_value(left, tag, field);
    uint32_t open[GROUPS_MAX];
    int depth = 0;
    open[depth++] = (uint32_t)(tag >> 3);
    field->number = (uint32_t)(tag >> 3);
    field->type = GROUP;
    field->bytes.at = left->at;
    Field inner;
    while (depth) {
        if (read_short(left, &tag)) return -1; /* protobuf takes a number of 0 here */
        if ((tag & 7) == GROUP) {
            if (depth == GROUPS_MAX) return -1;
            open[depth++] = (uint32_t)(tag >> 3);
        } else if ((tag & 7) == END_GROUP) {
            if (open[--depth] != (uint32_t)(tag >> 3)) return -1;
        } else if (read_value(left, tag, &inner)) {
            return -1;
        }
        ++*fields;
    }
    field->bytes.size = (size_t)(left->at - field->bytes.at);
    return 0;
}

static inline int is_ascii(Span text) {
    uint8_t high = 0;
    for (size_t i = 0; i < text.size; i++) high |= text.at[i];
    return high < 0x80;
}

/* ---- writing ---- */

/* What is written lies from `at` to `capacity`. failed: there was no memory for some of it, and
 * nothing is written after that. */
typedef struct {
    uint8_t *bytes;
    size_t capacity, at;
    int failed;
} Backward;

static inline size_t written(const Backward *b) { return b->capacity - b->at; }
static inline const uint8_t *beginning(const Backward *b) { return b->bytes + b->at; }

static int backward_grow(Backward *b, size_t size) {
    size_t capacity = b->capacity ? 2 * b->capacity : 4096, used = written(b);
    while (capacity < used + size) capacity *= 2;
    uint8_t *bytes = (uint8_t *)malloc(capacity);
    if (!bytes) {
        b->failed = 1;
        return -1;
    }
    if (used) memcpy(bytes + capacity - used, b->bytes + b->at, used);
    free(b->bytes);
    b->bytes = bytes;
    b->at = capacity - used;
    b->capacity = capacity;
    return 0;
}

static inline void put_raw(Backward *b, const void *bytes, size_t size) {
    if (!size || b->failed || (b->at < size && backward_grow(b, size))) return;
    b->at -= size;
    memcpy(b->bytes + b->at, bytes, size);
}

static inline void put_varint(Backward *b, uint64_t value) {
    uint8_t bytes[10];
    size_t size = 0;
    for (; value > 0x7F; value >>= 7) bytes[size++] = (uint8_t)value | 0x80;
    bytes[size++] = (uint8_t)value;
    put_raw(b, bytes, size);
}

static inline void put_tag(Backward *b, uint32_t number, int type) {
    put_varint(b, number << 3 | (uint32_t)type);
}

static inline void put_uint_always(Backward *b, uint32_t number, uint64_t value) {
    put_varint(b, value);
    put_tag(b, number, VARINT);
}

static inline void put_uint(Backward *b, uint32_t number, uint64_t value) {
    if (value) put_uint_always(b, number, value);
}

static inline void put_double_always(Backward *b, uint32_t number, double value) {
    put_raw(b, &value, 8);
    put_tag(b, number, FIXED64);
}

/* Minus zero is no default. */
static inline void put_double(Backward *b, uint32_t number, double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    if (bits) put_double_always(b, number, value);
}

/* Closes a message whose fields are all that was written since `before` bytes were. */
static inline void put_message(Backward *b, uint32_t number, size_t before) {
    put_varint(b, written(b) - before);
    put_tag(b, number, BYTES);
}

static inline void put_bytes_always(Backward *b, uint32_t number, const void *bytes, size_t size) {
    put_raw(b, bytes, size);
    put_varint(b, size);
    put_tag(b, number, BYTES);
}

static inline void put_bytes(Backward *b, uint32_t number, Span bytes) {
    if (bytes.size) put_bytes_always(b, number, bytes.at, bytes.size);
}

enum { MAP_KEY = 1, MAP_VALUE = 2 }; /* protobuf's own, of each entry of a map */

/* An entry of a map<string, double>. */
static inline void put_term(Backward *b, uint32_t number, const char *name, double value) {
    size_t before = written(b);
    put_double_always(b, MAP_VALUE, value);
    put_bytes_always(b, MAP_KEY, name, strlen(name));
    put_message(b, number, before);
}

#endif
