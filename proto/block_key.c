#include "proto/block_key.h"
#include "proto/base/base_assert.h"
#include "proto/block_layout.h"
#include <sodium.h>

enum { SALT_MAX = 1024 };

static const unsigned char decoded_personal[crypto_generichash_blake2b_PERSONALBYTES] = {'t', 'i', 'd', 'e', 'p', 'o', 'o', 'l', '.', 'd', 'e', 'c', 'o', 'd', 'e', 'd'};

static void put(crypto_generichash_state *hash, const void *data, size_t n)
{
    if (n > 0)
        crypto_generichash_update(hash, data, n);
}

static void put_tokens(crypto_generichash_state *hash, const int32_t tokens[])
{
    uint8_t bytes[BLOCK_TOKENS * 4];
    for (int i = 0; i < BLOCK_TOKENS; i++) {
        uint32_t t = (uint32_t)tokens[i];
        bytes[4 * i] = (uint8_t)t;
        bytes[4 * i + 1] = (uint8_t)(t >> 8);
        bytes[4 * i + 2] = (uint8_t)(t >> 16);
        bytes[4 * i + 3] = (uint8_t)(t >> 24);
    }
    put(hash, bytes, sizeof(bytes));
}

void block_key_root(const uint8_t fingerprint[FINGERPRINT_BYTES], const void *salt, size_t n_salt, struct block_key *ret_root)
{
    ASSERT(n_salt <= SALT_MAX);
    crypto_generichash_state hash;
    crypto_generichash_init(&hash, NULL, 0, BLOCK_KEY_BYTES);
    put(&hash, fingerprint, FINGERPRINT_BYTES);
    put(&hash, salt, n_salt);
    crypto_generichash_final(&hash, ret_root->bytes, BLOCK_KEY_BYTES);
}

void block_key_next(const struct block_key *parent, const int32_t tokens[], struct block_key *ret_key)
{
    crypto_generichash_state hash;
    crypto_generichash_init(&hash, NULL, 0, BLOCK_KEY_BYTES);
    put(&hash, parent->bytes, BLOCK_KEY_BYTES);
    put_tokens(&hash, tokens);
    crypto_generichash_final(&hash, ret_key->bytes, BLOCK_KEY_BYTES);
}

void block_key_next_generated(const struct block_key *parent, const int32_t tokens[], const void *tag, size_t n_tag, struct block_key *ret_key)
{
    crypto_generichash_state hash;
    crypto_generichash_blake2b_init_salt_personal(&hash, NULL, 0, BLOCK_KEY_BYTES, NULL, decoded_personal);
    put(&hash, parent->bytes, BLOCK_KEY_BYTES);
    put_tokens(&hash, tokens);
    put(&hash, tag, n_tag);
    crypto_generichash_final(&hash, ret_key->bytes, BLOCK_KEY_BYTES);
}
