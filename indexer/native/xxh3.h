/* XXH3, 64 bits, seeded, for inputs of any length: written after the public specification
 * (xxHash repository, doc/xxhash_spec.md). tests/indexer/test_kernel.py compares it with the
 * `xxhash` package. Little-endian hosts only, which setup refuses otherwise. */
#ifndef KVROUTE_XXH3_H
#define KVROUTE_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kvroute's kernel reads hashes and tokens in place, as little-endian"
#endif

#define XXH_SECRET_BYTES 192
#define XXH_STRIPE_BYTES 64
#define XXH_BLOCK_BYTES 1024 /* 16 stripes: (secret - stripe) / 8 */

static const uint64_t XXH_P32_1 = 0x9E3779B1u, XXH_P32_2 = 0x85EBCA77u, XXH_P32_3 = 0xC2B2AE3Du;
static const uint64_t XXH_P64_1 = 0x9E3779B185EBCA87u, XXH_P64_2 = 0xC2B2AE3D27D4EB4Fu,
                      XXH_P64_3 = 0x165667B19E3779F9u, XXH_P64_4 = 0x85EBCA77C2B2AE63u,
                      XXH_P64_5 = 0x27D4EB2F165667C5u;

static const uint8_t XXH_SECRET[XXH_SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t xxh_read64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

static inline uint32_t xxh_read32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static inline uint64_t xxh_rotl(uint64_t v, int bits) { return (v << bits) | (v >> (64 - bits)); }

static inline uint64_t xxh_fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t xxh_avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= 0x165667919E3779F9u;
    return h ^ (h >> 32);
}

static inline uint64_t xxh64_avalanche(uint64_t h) {
    h ^= h >> 33;
    h *= XXH_P64_2;
    h ^= h >> 29;
    h *= XXH_P64_3;
    return h ^ (h >> 32);
}

static inline uint64_t xxh_mix16(const uint8_t *in, const uint8_t *secret, uint64_t seed) {
    return xxh_fold(xxh_read64(in) ^ (xxh_read64(secret) + seed),
                    xxh_read64(in + 8) ^ (xxh_read64(secret + 8) - seed));
}

static inline uint64_t xxh3_up_to_16(const uint8_t *in, size_t len, uint64_t seed) {
    const uint8_t *s = XXH_SECRET;
    if (len > 8) {
        uint64_t lo = xxh_read64(in) ^ ((xxh_read64(s + 24) ^ xxh_read64(s + 32)) + seed);
        uint64_t hi = xxh_read64(in + len - 8) ^ ((xxh_read64(s + 40) ^ xxh_read64(s + 48)) - seed);
        return xxh_avalanche(len + __builtin_bswap64(lo) + hi + xxh_fold(lo, hi));
    }
    if (len >= 4) {
        seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t flip = (xxh_read64(s + 8) ^ xxh_read64(s + 16)) - seed;
        uint64_t h = (xxh_read32(in + len - 4) + ((uint64_t)xxh_read32(in) << 32)) ^ flip;
        h ^= xxh_rotl(h, 49) ^ xxh_rotl(h, 24);
        h *= 0x9FB21C651E98DF25u;
        h ^= (h >> 35) + len;
        h *= 0x9FB21C651E98DF25u;
        return h ^ (h >> 28);
    }
    if (len) {
        uint32_t combined = ((uint32_t)in[0] << 16) | ((uint32_t)in[len >> 1] << 24) |
                            in[len - 1] | ((uint32_t)len << 8);
        return xxh64_avalanche(combined ^ ((uint64_t)(xxh_read32(s) ^ xxh_read32(s + 4)) + seed));
    }
    return xxh64_avalanche(seed ^ (xxh_read64(s + 56) ^ xxh_read64(s + 64)));
}

static inline uint64_t xxh3_17_to_128(const uint8_t *in, size_t len, uint64_t seed) {
    const uint8_t *s = XXH_SECRET;
    uint64_t acc = len * XXH_P64_1;
    for (int i = (int)((len - 1) / 32); i >= 0; i--) {
        acc += xxh_mix16(in + 16 * i, s + 32 * i, seed);
        acc += xxh_mix16(in + len - 16 * (i + 1), s + 32 * i + 16, seed);
    }
    return xxh_avalanche(acc);
}

static inline uint64_t xxh3_129_to_240(const uint8_t *in, size_t len, uint64_t seed) {
    const uint8_t *s = XXH_SECRET;
    uint64_t acc = len * XXH_P64_1;
    size_t rounds = len / 16;
    for (size_t i = 0; i < 8; i++) acc += xxh_mix16(in + 16 * i, s + 16 * i, seed);
    acc = xxh_avalanche(acc);
    for (size_t i = 8; i < rounds; i++) acc += xxh_mix16(in + 16 * i, s + 16 * (i - 8) + 3, seed);
    return xxh_avalanche(acc + xxh_mix16(in + len - 16, s + 136 - 17, seed));
}

/* The secret that long inputs use for a seed; derive it once for many of them. */
static inline void xxh3_secret(uint64_t seed, uint8_t *secret) {
    for (int i = 0; i < XXH_SECRET_BYTES; i += 16) {
        uint64_t lo = xxh_read64(XXH_SECRET + i) + seed, hi = xxh_read64(XXH_SECRET + i + 8) - seed;
        memcpy(secret + i, &lo, 8);
        memcpy(secret + i + 8, &hi, 8);
    }
}

static inline void xxh3_accumulate(uint64_t *acc, const uint8_t *in, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) {
        uint64_t data = xxh_read64(in + 8 * i), key = data ^ xxh_read64(secret + 8 * i);
        acc[i ^ 1] += data;
        acc[i] += (key & 0xFFFFFFFFu) * (key >> 32);
    }
}

static inline uint64_t xxh3_long(const uint8_t *in, size_t len, const uint8_t *secret) {
    uint64_t acc[8] = {XXH_P32_3, XXH_P64_1, XXH_P64_2, XXH_P64_3,
                       XXH_P64_4, XXH_P32_2, XXH_P64_5, XXH_P32_1};
    const uint8_t *last_secret = secret + XXH_SECRET_BYTES - XXH_STRIPE_BYTES;
    size_t blocks = (len - 1) / XXH_BLOCK_BYTES;
    for (size_t b = 0; b < blocks; b++) {
        for (size_t n = 0; n < XXH_BLOCK_BYTES / XXH_STRIPE_BYTES; n++)
            xxh3_accumulate(acc, in + b * XXH_BLOCK_BYTES + n * XXH_STRIPE_BYTES, secret + 8 * n);
        for (int i = 0; i < 8; i++) {
            acc[i] ^= acc[i] >> 47;
            acc[i] = (acc[i] ^ xxh_read64(last_secret + 8 * i)) * XXH_P32_1;
        }
    }
    size_t stripes = (len - 1 - blocks * XXH_BLOCK_BYTES) / XXH_STRIPE_BYTES;
    for (size_t n = 0; n < stripes; n++)
        xxh3_accumulate(acc, in + blocks * XXH_BLOCK_BYTES + n * XXH_STRIPE_BYTES, secret + 8 * n);
    xxh3_accumulate(acc, in + len - XXH_STRIPE_BYTES, last_secret - 7);
    uint64_t result = len * XXH_P64_1;
    for (int i = 0; i < 4; i++)
        result += xxh_fold(acc[2 * i] ^ xxh_read64(secret + 11 + 16 * i),
                           acc[2 * i + 1] ^ xxh_read64(secret + 11 + 16 * i + 8));
    return xxh_avalanche(result);
}

/* secret: of xxh3_secret(seed). */
static inline uint64_t xxh3_64(const uint8_t *in, size_t len, uint64_t seed,
                               const uint8_t *secret) {
    if (len <= 16) return xxh3_up_to_16(in, len, seed);
    if (len <= 128) return xxh3_17_to_128(in, len, seed);
    if (len <= 240) return xxh3_129_to_240(in, len, seed);
    return xxh3_long(in, len, secret);
}

/* BlockHashes of `count` blocks of block_bytes each. */
static inline void xxh3_blocks(const uint8_t *tokens, size_t count, size_t block_bytes,
                               uint64_t seed, uint64_t *hashes) {
    uint8_t secret[XXH_SECRET_BYTES];
    xxh3_secret(seed, secret);
    for (size_t i = 0; i < count; i++)
        hashes[i] = xxh3_64(tokens + i * block_bytes, block_bytes, seed, secret);
}

/* PrefixHashes of a chain; may be done in place. parent is read only if has_parent. */
static inline void xxh3_chain(const uint64_t *blocks, size_t count, int has_parent,
                              uint64_t parent, uint64_t seed, uint64_t *chain) {
    for (size_t i = 0; i < count; i++) {
        uint64_t pair[2] = {parent, blocks[i]};
        parent = has_parent || i ? xxh3_up_to_16((const uint8_t *)pair, 16, seed) : blocks[i];
        chain[i] = parent;
    }
}

#endif
