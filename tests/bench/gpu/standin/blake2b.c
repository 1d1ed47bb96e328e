/* BLAKE2b, RFC 7693: sequential, without key. */
#include "proto/base/base_assert.h"
#include <sodium.h>
#include <string.h>

static const uint64_t iv[8] = {0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
                               0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u};

static const uint8_t sigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3}, {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8}, {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10}, {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static uint64_t rotate(uint64_t x, int n)
{
    return x >> n | x << (64 - n);
}

static void quarter(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y)
{
    v[a] += v[b] + x;
    v[d] = rotate(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = rotate(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 63);
}

static void compress(crypto_generichash_state *s, int last)
{
    uint64_t m[16], v[16];
    memcpy(m, s->block, sizeof(m)); /* little-endian hosts */
    for (int i = 0; i < 8; i++) {
        v[i] = s->h[i];
        v[i + 8] = iv[i];
    }
    v[12] ^= s->n_bytes;
    v[14] ^= last ? UINT64_MAX : 0;
    for (int round = 0; round < 12; round++) {
        const uint8_t *z = sigma[round % 10];
        for (int i = 0; i < 4; i++)
            quarter(v, i, i + 4, i + 8, i + 12, m[z[2 * i]], m[z[2 * i + 1]]);
        for (int i = 0; i < 4; i++)
            quarter(v, i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12, m[z[8 + 2 * i]], m[z[9 + 2 * i]]);
    }
    for (int i = 0; i < 8; i++)
        s->h[i] ^= v[i] ^ v[i + 8];
}

int sodium_init(void)
{
    return 0;
}

int crypto_generichash_blake2b_init_salt_personal(crypto_generichash_state *state, const unsigned char *key, unsigned char n_key, unsigned char n_out, const unsigned char *salt,
                                                  const unsigned char *personal)
{
    uint64_t words[4] = {0};
    ASSERT(!key && n_key == 0 && n_out >= 1 && n_out <= 64);
    *state = (crypto_generichash_state){.n_out = n_out};
    if (salt)
        memcpy(words, salt, 16);
    if (personal)
        memcpy(words + 2, personal, 16);
    memcpy(state->h, iv, sizeof(iv));
    state->h[0] ^= 0x01010000u ^ n_out;
    for (int i = 0; i < 4; i++)
        state->h[4 + i] ^= words[i];
    return 0;
}

int crypto_generichash_init(crypto_generichash_state *state, const unsigned char *key, size_t n_key, size_t n_out)
{
    return crypto_generichash_blake2b_init_salt_personal(state, key, (unsigned char)n_key, (unsigned char)n_out, NULL, NULL);
}

int crypto_generichash_update(crypto_generichash_state *state, const unsigned char *in, unsigned long long n_in)
{
    while (n_in > 0) {
        if (state->n_block == sizeof(state->block)) {
            state->n_bytes += sizeof(state->block);
            compress(state, 0);
            state->n_block = 0;
        }
        const size_t room = sizeof(state->block) - state->n_block, n = n_in < room ? (size_t)n_in : room;
        memcpy(state->block + state->n_block, in, n);
        state->n_block += n;
        in += n;
        n_in -= n;
    }
    return 0;
}

int crypto_generichash_final(crypto_generichash_state *state, unsigned char *out, size_t n_out)
{
    ASSERT(n_out == state->n_out);
    state->n_bytes += state->n_block;
    memset(state->block + state->n_block, 0, sizeof(state->block) - state->n_block);
    compress(state, 1);
    memcpy(out, state->h, n_out);
    return 0;
}

int crypto_generichash(unsigned char *out, size_t n_out, const unsigned char *in, unsigned long long n_in, const unsigned char *key, size_t n_key)
{
    crypto_generichash_state state;
    crypto_generichash_init(&state, key, n_key, n_out);
    crypto_generichash_update(&state, in, n_in);
    return crypto_generichash_final(&state, out, n_out);
}
