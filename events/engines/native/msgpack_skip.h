/* Skips MessagePack values without decoding them.

   The only state is the number of values still to come, at any depth of nesting, so that a walk can
   stop after any header and go on later, and nesting costs no stack and no memory. A header whose
   values can't fit into the bytes after it is refused at once.

   Source: the MessagePack specification, github.com/msgpack/msgpack/blob/master/spec.md. */

#ifndef KVROUTE_MSGPACK_SKIP_H
#define KVROUTE_MSGPACK_SKIP_H

#include <stddef.h>
#include <stdint.h>

static inline uint64_t msgpack_number(const uint8_t *at, size_t bytes)
{
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++)
        value = value << 8 | at[i];
    return value;
}

/* Skips at most `steps` headers of the `*left` values that begin at `*at`. Moves both. Returns 0,
   or -1 if the bytes end too soon or begin with 0xc1, which MessagePack never uses. */
static int msgpack_skip(const uint8_t *data, size_t size, size_t *at, uint64_t *left, uint64_t steps)
{
    size_t place = *at;
    uint64_t values = *left;
    while (values && steps--) {
        if (place >= size)
            return -1;
        uint8_t first = data[place++];
        uint64_t room = size - place, bytes = 0, inside = 0;
        size_t length = 0; /* bytes of the number that follows */
        if (first < 0x80 || first >= 0xe0)
            ; /* a small number */
        else if (first < 0x90)
            inside = 2 * (uint64_t)(first & 15);
        else if (first < 0xa0)
            inside = first & 15;
        else if (first < 0xc0)
            bytes = first & 31;
        else if (first == 0xc1)
            return -1;
        else if (first < 0xc4)
            ; /* nil, false, true */
        else if (first < 0xca) { /* bin, ext */
            length = (size_t)1 << ((first - 0xc4) % 3);
            bytes = first >= 0xc7; /* the type of an ext */
        } else if (first == 0xca)
            bytes = 4;
        else if (first == 0xcb)
            bytes = 8;
        else if (first < 0xd4)
            bytes = (uint64_t)1 << (first & 3);
        else if (first < 0xd9)
            bytes = ((uint64_t)1 << (first - 0xd4)) + 1;
        else if (first < 0xdc) /* str */
            length = (size_t)1 << (first - 0xd9);
        else /* array, map */
            length = first & 1 ? 4 : 2;
        if (length) {
            if (room < length)
                return -1;
            uint64_t number = msgpack_number(data + place, length);
            if (first >= 0xdc)
                inside = first >= 0xde ? 2 * number : number;
            else
                bytes += number;
            place += length;
            room -= length;
        }
        if (bytes > room)
            return -1;
        place += bytes;
        values += inside - 1;
        if (values > room - bytes) /* each value takes a byte at least */
            return -1;
    }
    *at = place;
    *left = values;
    return 0;
}

#endif
