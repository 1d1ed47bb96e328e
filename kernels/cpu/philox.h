/* Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A pure function of
 * (key, counter): a request draws the same numbers on every worker, whatever was drawn before. Any thread. */
#pragma once
#include <stdint.h>

struct philox_block {
    uint32_t word[4];
};

static inline struct philox_block philox4x32_10(const uint32_t counter[4], const uint32_t key[2])
{
    struct philox_block x = {{counter[0], counter[1], counter[2], counter[3]}};
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * x.word[0], p1 = (uint64_t)0xCD9E8D57u * x.word[2];
        x = (struct philox_block){{(uint32_t)(p1 >> 32) ^ x.word[1] ^ k0, (uint32_t)p1, (uint32_t)(p0 >> 32) ^ x.word[3] ^ k1, (uint32_t)p0}};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return x;
}

/* A uniform double in [0, 1) with 53 random bits, keyed by (seed, position). */
static inline double philox_uniform(uint64_t seed, uint64_t position)
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    struct philox_block b = philox4x32_10(counter, key);
    uint64_t bits = ((uint64_t)b.word[1] << 32 | b.word[0]) >> 11;
    return (double)bits * 0x1p-53;
}
