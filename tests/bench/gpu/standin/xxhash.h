/* The calls of xxHash that the worker and the pool's bookkeeping make, for hosts without it (tests/bench/gpu/build.sh). Another hash under the same names: nothing that these
 * give leaves the process there. Eight lanes of multiply and fold over 64 bytes at a time. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint64_t XXH64_hash_t;
typedef struct {
    uint64_t low64, high64;
} XXH128_hash_t;
typedef struct {
    unsigned char digest[16];
} XXH128_canonical_t;

static inline uint64_t standin_fold(uint64_t a, uint64_t b)
{
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline XXH128_hash_t standin_hash(const void *data, size_t n, uint64_t seed)
{
    const uint8_t *at = data;
    uint64_t lanes[8], words[8], low = seed ^ n, high = ~seed;
    for (int i = 0; i < 8; i++)
        lanes[i] = seed + 0x9e3779b97f4a7c15u * (uint64_t)(i + 1);
    for (size_t left = n; left > 0; at += 64) {
        const size_t piece = left < 64 ? left : 64;
        memset(words, 0, sizeof(words));
        memcpy(words, at, piece);
        for (int i = 0; i < 8; i++)
            lanes[i] = (lanes[i] ^ words[i]) * 0xff51afd7ed558ccdu + (lanes[i] >> 29);
        left -= piece;
    }
    for (int i = 0; i < 8; i++) {
        low = standin_fold(low ^ lanes[i], 0xc4ceb9fe1a85ec53u + (uint64_t)i);
        high = standin_fold(high + lanes[i], 0x94d049bb133111ebu);
    }
    return (XXH128_hash_t){.low64 = low, .high64 = high};
}

static inline XXH64_hash_t XXH3_64bits_withSeed(const void *data, size_t n, uint64_t seed)
{
    return standin_hash(data, n, seed).low64;
}

static inline XXH128_hash_t XXH3_128bits(const void *data, size_t n)
{
    return standin_hash(data, n, 0);
}

static inline void XXH128_canonicalFromHash(XXH128_canonical_t *to, XXH128_hash_t hash)
{
    memcpy(to->digest, &hash, sizeof(to->digest));
}
