/* Keys of up to 32 bytes as four words: nearly every piece of text is one, and is hashed and compared without a loop. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SHORT_KEY_MAX 32

struct short_key {
    uint64_t w[4]; /* the bytes, padded with zeros */
};

extern const uint64_t short_key_masks[SHORT_KEY_MAX + 1][4];

/* The key at p, len <= SHORT_KEY_MAX; `readable` bytes from p on may be read. */
static inline struct short_key short_key_load(const uint8_t *p, size_t len, size_t readable)
{
    struct short_key key;
    if (__builtin_expect(readable >= SHORT_KEY_MAX, 1)) {
        memcpy(key.w, p, SHORT_KEY_MAX);
        for (int i = 0; i < 4; i++)
            key.w[i] &= short_key_masks[len][i];
    } else {
        memset(key.w, 0, sizeof key.w);
        memcpy(key.w, p, len);
    }
    return key;
}

static inline uint64_t short_key_mix(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Multiply and fold, as in wyhash; the constants are odd numbers with as many ones as zeros. */
static inline uint64_t short_key_hash(const struct short_key *key, size_t len)
{
    uint64_t h = short_key_mix(key->w[0] ^ 0x9e3779b97f4a7c15ull, key->w[1] ^ 0xa0761d6478bd642full ^ len);
    if (len > 16)
        h ^= short_key_mix(key->w[2] ^ 0xe7037ed1a0b428dbull, key->w[3] ^ 0x8ebc6af09c88c6e3ull);
    return h * 0x9fb21c651e98df25ull;
}
